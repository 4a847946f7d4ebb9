"""The style sheet of the HTML report: system fonts, light and dark by the reader's setting, tables that scroll."""

CSS = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #ffffff; --ink: #1b2430; --soft: #5b6675; --line: #dde2e8;
  --good: #137a4b; --good-bg: #e2f4ea; --bad: #b3261e; --bad-bg: #fbe4e2; --range: #2b6cb0; --bars: #7b8794; }
@media (prefers-color-scheme: dark) { :root { --page: #12161c; --card: #1b212a; --ink: #e6eaf0; --soft: #9aa7b6;
  --line: #313a46; --good: #6fd3a0; --good-bg: #163326; --bad: #ff9d94; --bad-bg: #43201d; --range: #79b4f2;
  --bars: #8b98a8; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 28px 20px 48px; }
h1 { font-size: 24px; margin: 0; } h2 { font-size: 18px; margin: 32px 0 10px; } h3 { font-size: 14px; margin: 0 0 4px; }
header { display: flex; flex-wrap: wrap; gap: 8px 14px; align-items: center; }
.models { flex-basis: 100%; color: var(--soft); overflow-wrap: anywhere; }
.badge { border-radius: 999px; padding: 1px 10px; font-size: 13px; font-weight: 600; white-space: nowrap;
  background: var(--line); color: var(--soft); }
.badge.ok, .badge.passed { background: var(--good-bg); color: var(--good); }
.badge.suspect, .badge.failed { background: var(--bad-bg); color: var(--bad); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin: 20px 0 0; }
.card, .box { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 12px 16px; }
.card b { display: block; font-size: 22px; line-height: 1.3; overflow-wrap: anywhere; } .card span { color: var(--soft); }
.box { overflow-x: auto; } .note + .grid, .note + svg, .box > svg + *, .box > table + ul { margin-top: 8px; }
.alarm { border-left: 4px solid var(--bad); margin-top: 16px; }
ul { margin: 0; padding-left: 20px; } li { overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 14px; }
th, td { padding: 5px 10px; text-align: right; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--soft); font-weight: 600; white-space: nowrap; } tr:last-child > td { border-bottom: 0; }
th.text, td.text { text-align: left; }
td.name, code { font-family: ui-monospace, "Cascadia Mono", Menlo, Consolas, monospace;
  font-size: 13px; overflow-wrap: anywhere; } td.name { min-width: 170px; }
tr.why td { text-align: left; color: var(--bad); border-bottom: 1px solid var(--line); padding-top: 0; }
p.note { color: var(--soft); font-size: 13px; margin: 10px 0 0; }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(330px, 1fr)); gap: 12px; }
.grid .box > ul { font-size: 13px; } summary { cursor: pointer; color: var(--soft); margin: 12px 0; }
.grid h3 { overflow-wrap: anywhere; font: 600 12px/1.5 ui-monospace, Menlo, Consolas, monospace; }
.hurt { border-color: var(--bad); }
svg { display: block; max-width: 100%; height: auto; font: 11px system-ui, "Segoe UI", Arial, sans-serif; }
svg text { fill: var(--soft); } svg .bars { fill: var(--bars); } svg .range { fill: var(--range); fill-opacity: .14; }
svg .edge { stroke: var(--range); stroke-width: 1.5; } svg .axis { stroke: var(--line); }
svg .edge-label { fill: var(--range); }
svg .worst { fill: var(--bad); }
svg text.dark { fill: #000000; } svg text.light { fill: #ffffff; }
svg text.row { font-family: ui-monospace, Menlo, monospace; }
svg .none { fill: var(--line); }
footer { color: var(--soft); font-size: 13px; margin-top: 32px; overflow-wrap: anywhere; }
@media print { body { background: #fff; } .box, .card { break-inside: avoid; } }
"""
