"""Sweeps over folders of models with ground truth, named by ATTNQUANT_CORPUS and ATTNQUANT_CASES; skipped without them.

A corpus is a folder of .onnx files with truth.json; see `attentions` there. Only files whose attentions are all operators
are compared here.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from attnquant.errors import ModelError
from attnquant.recognition import recognize
from attnquant.roles import PortRole
from attnquant.site import DECOMPOSED, AttentionSite


def entries(variable: str) -> Iterator[Any]:
    folder = os.environ.get(variable)
    if not folder:
        yield pytest.param(None, None, marks=pytest.mark.skip(reason=f"{variable} names no folder"), id="none")
        return
    for name, entry in json.loads((Path(folder) / "truth.json").read_text()).items():
        if all(truth["form"] != DECOMPOSED for truth in entry["attentions"]):
            yield pytest.param(Path(folder) / name, entry, id=name)


def operator_entries(variable: str) -> Iterator[Any]:
    for entry in entries(variable):
        if entry.values[1] is None or entry.values[1]["attentions"]:
            yield entry


def names(found: Any) -> list[str]:
    return [found] if isinstance(found, str) else list(found or [])


def compare(site: AttentionSite, truth: dict[str, Any]) -> None:
    assert site.form.partition("@")[0] == truth["form"]
    assert site.node == truth["node"]
    for role, key in ((PortRole.QUERY, "q"), (PortRole.KEY, "k"), (PortRole.VALUE, "v")):
        assert site.ports[role].tensor == truth[key]
    assert site.ports[PortRole.CONTEXT].tensor == truth["output"]
    assert site.q_heads == truth["q_heads"]
    assert site.kv_heads is not None
    assert site.kv_heads // (site.kv_repeat or 1) == truth["kv_heads"]
    assert (site.kv_repeat is not None) == bool(truth["k_repeated"]) == (PortRole.KEY in site.branch)
    assert site.qk_head_dim == site.v_head_dim == truth["head_dim"]
    assert site.scale == pytest.approx(truth["scale"], rel=1e-4)
    assert site.kind == ("cross" if truth["kind"].startswith("cross") else "self")
    assert site.causal == bool(truth["attrs"].get("is_causal", truth["attrs"].get("unidirectional", 0)))
    assert (PortRole.MASK in site.ports) == ("mask" in truth or len([name for name in truth["inputs"][3:] if name]) > 0)
    compare_cache(site, truth)


def compare_cache(site: AttentionSite, truth: dict[str, Any]) -> None:
    key, value = (PortRole.PAST_KEY, PortRole.PRESENT_KEY), (PortRole.PAST_VALUE, PortRole.PRESENT_VALUE)
    for prefix, (past, present) in (("k", key), ("v", value)):
        concat = truth.get(f"{prefix}_concat")
        if concat is not None and concat.get("past_input"):
            assert site.past == "concat"
            assert site.ports[past].tensor == concat["past_input"]
            assert site.ports[past].node == concat["node"]
        shown = names(truth.get(f"{prefix}_present"))
        assert (present in site.ports) == bool(shown)
        assert not shown or site.ports[present].tensor in shown
    if "past kv as inputs" in truth["kind"]:
        assert site.past == "input"
    elif not truth.get("k_concat"):
        assert site.past == "none"


@pytest.mark.parametrize(("path", "entry"), operator_entries("ATTNQUANT_CORPUS"))
def test_operator_sites_equal_the_truth(path: Path, entry: dict[str, Any]) -> None:
    found = {site.node: site for site in recognize(path).sites}
    assert sorted(found) == sorted(truth["node"] for truth in entry["attentions"])
    for truth in entry["attentions"]:
        compare(found[truth["node"]], truth)


@pytest.mark.parametrize(("path", "entry"), entries("ATTNQUANT_CASES"))
def test_cases_by_their_truth(path: Path, entry: dict[str, Any]) -> None:
    try:
        recognition = recognize(path)
    except ModelError:
        assert entry["expect"] == "error"
        return
    found = {site.node: site for site in recognition.sites if site.form != DECOMPOSED}
    if entry["attentions"]:
        assert sorted(found) == sorted(truth["node"] for truth in entry["attentions"])
    for truth in entry["attentions"]:
        site = found[truth["node"]]
        assert site.form.partition("@")[0] == truth["form"]
        outputs = (PortRole.CONTEXT, PortRole.PRESENT_KEY, PortRole.PRESENT_VALUE)
        read = {role: port for role, port in site.ports.items() if port.node == site.node and role not in outputs}
        assert all(truth["inputs"][port.index] == port.tensor for port in read.values())
        assert None not in (site.q_heads, site.kv_heads, site.qk_head_dim, site.v_head_dim, site.scale)
        weights_inside = truth["form"] == "com.microsoft::Attention"
        assert (site.packed == "qkv") == (not weights_inside and truth["inputs"][1] == "")
    if "inside If" in entry.get("why", ""):
        assert found
        assert all(site.path for site in found.values())
