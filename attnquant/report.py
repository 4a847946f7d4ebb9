"""One account, several renderings: rich for people at a terminal, markdown for pull requests, JSON for programs.

Names of nodes and tensors come from the model, which may be anyone's: no control character or markup of theirs gets through.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from attnquant.account import (
    UNKNOWN,
    Account,
    Accounts,
    SiteRow,
    account_of_recognition,
    account_of_setup,
    as_json,
    installed_versions,
    quantization_notes,
)
from attnquant.markup import code, escaped, plain
from attnquant.markup import row as markdown_row
from attnquant.pace import COLUMNS as GATE_COLUMNS
from attnquant.pace import RULE as GATE_RULE
from attnquant.pace import GateReport
from attnquant.roles import PortRole
from attnquant.site import AttentionSite, NearMiss, Recognition
from attnquant.terminal import Terminal

if TYPE_CHECKING:
    from rich.console import RenderableType

    from attnquant.check import CheckReport
    from attnquant.conformance import ConformanceReport
    from attnquant.quantization import Plan, QuantizationResult
    from attnquant.rewrite.pages import RewriteReport
    from attnquant.seq2seq import Seq2SeqResult
    from attnquant.suite import SuiteReport
    from attnquant.verification import VerificationReport

OfModel: TypeAlias = "Account | Recognition | Plan | QuantizationResult | CheckReport"
OfModels: TypeAlias = "Accounts | Seq2SeqResult"
Report: TypeAlias = "OfModel | OfModels | ConformanceReport | RewriteReport | SuiteReport | VerificationReport"
Format = Literal["rich", "json", "markdown", "html"]
Writers: TypeAlias = Mapping[str, Callable[[Terminal], str]]
"""What writes a report, by format."""

_COLOURS = {"found": "cyan", "quantized": "green", "skipped": "yellow", "violates": "bold red"}
_VERDICTS = {"ok": "green", "suspect": "bold red"}
_ROLE_COLUMNS = {PortRole.QUERY: "Q", PortRole.KEY: "K", PortRole.VALUE: "V", PortRole.PROBABILITIES: "P"}
_NARROW = 84  # columns; a table would break every id below that


def render(report: Report, format: Format = "rich", *, terminal: Terminal | None = None) -> str:
    """Text of a report, ending in a newline.

    :param terminal: Where rich text goes; the default is a file without colour or limit of width.
    :raises ValueError: `format` is none of "rich", "json", "markdown"; a VerificationReport can be "html" too.
    """
    writers = _WRITERS.get(type(report).__name__, _account)(report)
    if format not in writers:
        msg = f"expected a format among 'rich', 'json', 'markdown', got {format!r}"
        raise ValueError(msg)
    return writers[format](terminal or Terminal())


def _account(report: OfModel) -> Writers:
    account = account_of(report)
    return {
        "json": lambda _: _dumped(as_json(account)),
        "markdown": lambda _: _markdown(account),
        "rich": partial(_rich, account),
    }


def _conformance(report: "ConformanceReport") -> Writers:
    from attnquant.conformance import pages

    return {
        "json": lambda _: _dumped({**report.as_json(), "versions": dict(installed_versions())}),
        "markdown": lambda _: pages.markdown(report),
        "rich": partial(_rich_conformance, report),
    }


def _rewrite(report: "RewriteReport") -> Writers:
    from attnquant.rewrite import pages

    return {
        "json": lambda _: _dumped(pages.as_json(report, installed_versions())),
        "markdown": lambda _: pages.markdown(report, installed_versions()),
        "rich": partial(_rich_rewrite, report),
    }


def accounts_of(report: "Seq2SeqResult") -> Accounts:
    """The accounts of the three models."""
    return Accounts(parts={name: account_of(part, model=name) for name, part in report.parts.items()})


def _accounts(report: Accounts) -> Writers:
    """One account after the other; as JSON by the name of the part."""
    accounts = report.parts
    return {
        "json": lambda _: _dumped({name: as_json(account) for name, account in accounts.items()}),
        "markdown": lambda _: "\n".join(map(_markdown, accounts.values())),
        "rich": lambda terminal: "\n".join(_rich(account, terminal) for account in accounts.values()),
    }


def _suite(report: "SuiteReport") -> Writers:
    from attnquant.suite import pages

    return {
        "json": lambda _: _dumped(report.as_json()),
        "markdown": lambda _: pages.markdown(report),
        "rich": partial(_rich_suite, report),
    }


def _verification(report: "VerificationReport") -> Writers:
    from attnquant.verification import htmlpage, pages

    return {
        "json": lambda _: _dumped(report.to_json()),
        "markdown": lambda _: pages.markdown(report),
        "html": lambda _: htmlpage.page(report),
        "rich": partial(_rich_verification, report),
    }


_WRITERS: dict[str, Callable[[Any], Writers]] = {
    "ConformanceReport": _conformance,
    "RewriteReport": _rewrite,
    "Accounts": _accounts,
    "Seq2SeqResult": lambda report: _accounts(accounts_of(report)),
    "SuiteReport": _suite,
    "VerificationReport": _verification,
}
"""By the name of the report's class, so that none is imported to be told from the others; the rest have an account."""


def _dumped(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2, allow_nan=False) + "\n"


def account_of(report: OfModel, *, model: str = UNKNOWN) -> Account:
    """The account behind any report; `model` is what it calls the model."""
    if isinstance(report, Account):
        return report
    if isinstance(report, Recognition):
        return account_of_recognition(report, model=model)
    from attnquant.check import CheckReport
    from attnquant.quantization import Plan

    if isinstance(report, CheckReport):
        return report.account(model)
    if isinstance(report, Plan):
        return account_of_setup(report.recognition, report.setup, model=model)
    return _result_account(report, model)


def _result_account(result: "QuantizationResult", model: str) -> Account:
    """The account of a quantized model as `check` finds it in the graph, with the notes of its making."""
    from attnquant.check import check

    found = check(result.model, setup=result.setup, target=result.target).account(model)
    notes = (*result.notes, *quantization_notes(result.target.name, result.sites))
    return replace(found, near_misses=result.recognition.near_misses, notes=(*notes, *found.notes), gate=result.gate)


def headline(account: Account) -> str:
    """One line: how many attentions, what became of them, for which target."""
    count = len(account.rows)
    found = "no attention" if count == 0 else "1 attention" if count == 1 else f"{count} attentions"
    statuses = Counter(row.status for row in account.rows)
    detail = ", ".join(f"{number} {status}" for status, number in statuses.items() if status != "found")
    target = f"; target {account.target}" if account.target else ""
    return f"{found}{': ' if detail else ''}{detail}{target}"


def columns(account: Account) -> list[str]:
    """Headings of the table: those that say something about this model."""
    names = ["attention", "form", "kind", "heads", "scale"]
    if any(row.site.past != "none" for row in account.rows):
        names.append("past")
    if any(row.status != "found" for row in account.rows):
        roles = [role for role in _ROLE_COLUMNS if role is not PortRole.PROBABILITIES or _any_quantized(account, role)]
        names += [*(_ROLE_COLUMNS[role] for role in roles), "status"]
    return names


def cell(row: SiteRow, name: str) -> str:
    """Text of one column for one attention; "?" for what is unknown."""
    site = row.site
    fixed = {
        "attention": site.id,
        "form": site.form.removeprefix("ai.onnx::"),
        "kind": ", ".join((site.kind or UNKNOWN, *site.traits)),
        "heads": _heads(site),
        "scale": UNKNOWN if site.scale is None else f"{site.scale:.4g}",
        "past": site.past,
        "status": row.status,
    }
    if name in fixed:
        return plain(fixed[name])
    role = next(role for role, column in _ROLE_COLUMNS.items() if column == name)
    return row.quantized[role].dtype if role in row.quantized else "float"


def _heads(site: AttentionSite) -> str:
    q, kv = site.q_heads, site.kv_heads
    dims = (site.qk_head_dim, site.v_head_dim)
    if q is None and kv is None and dims == (None, None):
        return UNKNOWN
    count = _pair(q, kv)
    repeat = f" (KV repeated {site.kv_repeat}x)" if site.kv_repeat and site.kv_repeat > 1 else ""
    return f"{count} x {_pair(*dims)}{repeat}"


def _pair(first: int | None, second: int | None) -> str:
    """ "12", or "9/3" where the two differ."""
    a, b = (UNKNOWN if number is None else str(number) for number in (first, second))
    return a if a == b else f"{a}/{b}"


def _any_quantized(account: Account, role: PortRole) -> bool:
    return any(role in row.quantized for row in account.rows)


def _near_miss(miss: NearMiss) -> str:
    shown = ", ".join(plain(node) for node in miss.nodes[:4]) + (", ..." if len(miss.nodes) > 4 else "")
    return f"{plain(miss.reason)} ({shown})"


def _numbered_reasons(account: Account) -> dict[str, int]:
    """Each reason once, numbered in order of appearance."""
    reasons = dict.fromkeys(reason for row in account.rows for reason in row.reasons)
    return {reason: number for number, reason in enumerate(reasons, 1)}


def _lines_below(account: Account) -> list[str]:
    """What follows the table, one paragraph each."""
    lines = []
    if account.linears is not None:
        lines.append(f"Linears: {account.linears.int8} of {account.linears.total} int8.")
        lines += [f"  float: {plain(text)}" for text in account.linears.exceptions]
    lines += [f"Not asked for: {plain(text)}" for text in account.unplanned]
    lines += [plain(text) for text in account.notes]
    misses = account.best_near_misses
    if misses:
        more = f"; {len(misses) - 1} more in --format json" if len(misses) > 1 else ""
        lines.append(f"Near miss: {_near_miss(misses[0])}{more}.")
    return lines


def _rich(account: Account, terminal: Terminal) -> str:
    from rich.console import Group
    from rich.text import Text

    reasons = _numbered_reasons(account)
    narrow = terminal.width is not None and terminal.width < _NARROW
    name = "" if account.model == UNKNOWN else f"{plain(account.model)}: "
    parts: list[RenderableType] = [Text(f"{name}{headline(account)}", style="bold")]
    if account.rows:
        parts.append(_stack(account, reasons) if narrow else _table(account, reasons, terminal))
    parts += [Text(f"{number} {plain(reason)}") for reason, number in reasons.items()]
    parts += [Text(line) for line in _lines_below(account)]
    if account.gate is not None:
        parts.append(_gate_table(account.gate, terminal))
        parts.append(Text(f"{GATE_RULE[:1].upper()}{GATE_RULE[1:]}."))
    return terminal.text(Group(*parts))


def _gate_table(gate: GateReport, terminal: Terminal) -> "RenderableType":
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD if terminal.unicode else box.ASCII, pad_edge=False, header_style="bold")
    for name in GATE_COLUMNS:
        table.add_column(name, overflow="fold", justify="left" if name in ("parts", "sizes", "decision") else "right")
    for cells in gate.cells():
        table.add_row(*(Text(plain(item)) for item in cells))
    return table


def _table(account: Account, reasons: dict[str, int], terminal: Terminal) -> "RenderableType":
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD if terminal.unicode else box.ASCII, pad_edge=False, header_style="bold")
    names = columns(account)
    for name in names:
        table.add_column(name, overflow="fold", justify="right" if name in ("heads", "scale") else "left")
    for row in account.rows:
        cells = [Text(cell(row, name), style=_COLOURS[row.status] if name == "status" else "") for name in names]
        marks = " ".join(str(reasons[reason]) for reason in row.reasons)
        if marks:
            cells[-1].append(f" {marks}", style="dim")
        table.add_row(*cells)
    return table


def _rich_rewrite(report: "RewriteReport", terminal: Terminal) -> str:
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from attnquant.rewrite import pages

    table = Table(*pages.COLUMNS, box=box.SIMPLE_HEAD if terminal.unicode else box.ASCII, pad_edge=False)
    for row in report.rows:
        table.add_row(*(Text(item) for item in pages.cells(row)))
    title = Text(f"{plain(report.model)}: {pages.headline(report)}", style="bold")
    return terminal.text(Group(title, table) if report.rows else title)


def _rich_suite(report: "SuiteReport", terminal: Terminal) -> str:
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from attnquant.suite import pages

    table = Table(*pages.COLUMNS, box=box.SIMPLE_HEAD if terminal.unicode else box.ASCII, pad_edge=False)
    for line in pages.cells(report.rows):
        style = "bold red" if line[-1] == "WORSE" else ""
        table.add_row(*(Text(plain(cell)) for cell in line[:-1]), Text(plain(line[-1]), style=style))
    said = [Text(plain(text)) for text in pages.remarks(report)]
    return terminal.text(Group(Text(plain(pages.headline(report)), style="bold"), table, *said))


def _rich_conformance(report: "ConformanceReport", terminal: Terminal) -> str:
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from attnquant.conformance import pages

    parts: list[RenderableType] = []
    for provider in report.providers:
        parts.append(Text(pages.headline(report, provider), style="bold"))
        found = [finding.row for finding in pages.findings(report, provider)]
        tables = ((pages.COUNT_COLUMNS, pages.count_rows(report, provider)), (pages.FINDING_COLUMNS, found))
        for names, rows in tables:
            if rows:
                table = Table(*names, box=box.SIMPLE_HEAD if terminal.unicode else box.ASCII, pad_edge=False)
                for row in rows:
                    table.add_row(*(Text(plain(item)) for item in row))
                parts.append(table)
    return terminal.text(Group(*parts))


def _rich_verification(report: "VerificationReport", terminal: Terminal) -> str:
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from attnquant.verification import pages

    parts: list[RenderableType] = []
    for section in pages.sections(report):
        parts.append(Text(plain(section.title), style="bold"))
        if section.rows:
            table = Table(box=box.SIMPLE_HEAD if terminal.unicode else box.ASCII, pad_edge=False, header_style="bold")
            for index, name in enumerate(section.columns):
                table.add_column(name, overflow="fold", justify="left" if index in section.text else "right")
            for row in section.rows:
                table.add_row(*(Text(plain(cell), style=_VERDICTS.get(cell.partition(" ")[0], "")) for cell in row))
            parts.append(table)
        parts += [Text(plain(line)) for line in section.lines]
        parts.append(Text(""))
    return terminal.text(Group(*parts[:-1]))


def _stack(account: Account, reasons: dict[str, int]) -> "RenderableType":
    """A paragraph for each attention, for terminals too narrow for a table."""
    from rich.text import Text

    text = Text()
    for row in account.rows:
        text.append(f"{cell(row, 'attention')}\n", style=_COLOURS[row.status])
        items = [f"{name} {cell(row, name)}" for name in columns(account)[1:]]
        marks = " ".join(str(reasons[reason]) for reason in row.reasons)
        text.append(f"  {', '.join(items)}{f' [{marks}]' if marks else ''}\n")
    return text


def _markdown(account: Account) -> str:
    title = "Attention" if account.model == UNKNOWN else code(account.model)
    text = headline(account)
    lines = [f"### {title}", "", f"{text[:1].upper()}{text[1:]}.", ""]
    if account.rows:
        names = [*columns(account), *(["why"] if _numbered_reasons(account) else [])]
        lines += [markdown_row(names), markdown_row(["---"] * len(names))]
        lines += [markdown_row([_markdown_cell(row, name) for name in names]) for row in account.rows]
        lines.append("")
    lines += [f"- {escaped(line.strip())}" for line in _lines_below(account)]
    if account.gate is not None:
        lines += ["", markdown_row(list(GATE_COLUMNS)), markdown_row(["---"] * len(GATE_COLUMNS))]
        lines += [markdown_row([escaped(plain(item)) for item in cells]) for cells in account.gate.cells()]
        lines += ["", f"{GATE_RULE[:1].upper()}{GATE_RULE[1:]}."]
    lines += ["", f"<sub>{', '.join(f'{name} {version}' for name, version in account.versions.items())}</sub>"]
    return "\n".join(lines) + "\n"


def _markdown_cell(row: SiteRow, name: str) -> str:
    if name == "attention":
        return code(row.site.id)
    return escaped("; ".join(map(plain, row.reasons)) if name == "why" else cell(row, name))
