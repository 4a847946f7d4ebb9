"""Recognition against ground truth matched by value: the committed selection, or the folder that ATTNQUANT_CORPUS names."""

from typing import Any

import pytest
from corpora import Entry, entries

from attnquant.recognition import recognize
from attnquant.roles import PortRole
from attnquant.site import DECOMPOSED, AttentionSite

CORPUS = entries("ATTNQUANT_CORPUS", "corpus")


@pytest.mark.parametrize("entry", CORPUS, ids=str)
def test_sites_equal_the_truth(entry: Entry) -> None:
    """As many sites as attentions, and every decomposed one with the operands, facts and caches of the truth."""
    attentions = entry.truth["attentions"]
    sites = recognize(entry.path).sites
    assert len(sites) == len(attentions)
    assert sorted(site.form.partition("@")[0] for site in sites) == sorted(truth["form"] for truth in attentions)
    found = {site.node: site for site in sites if site.form == DECOMPOSED}
    for truth in attentions:
        if truth["form"] == DECOMPOSED:
            compare(found[truth["pv_node"]], truth)


def compare(site: AttentionSite, truth: dict[str, Any]) -> None:
    ports = site.ports
    for role, key in ((PortRole.QUERY, "q"), (PortRole.KEY, "k"), (PortRole.VALUE, "v"), (PortRole.PROBABILITIES, "p")):
        assert ports[role].tensor == truth[key]
    assert ports[PortRole.QUERY].node == ports[PortRole.KEY].node == truth["qk_node"]
    assert ports[PortRole.CONTEXT].tensor == truth["output"]
    assert site.kind == truth["kind"].partition("(")[0]
    assert site.q_heads == truth["q_heads"]
    assert site.kv_heads is not None
    assert site.kv_heads // (site.kv_repeat or 1) == truth["kv_heads"]
    assert (site.kv_repeat is not None) == ("Expand" in truth["k_chain"])
    assert (site.qk_head_dim, site.v_head_dim) == (truth["head_dim"], truth["v_shape"][-1])
    assert site.scale == pytest.approx(truth["scale"], abs=1e-4)
    assert truth["softmax_node"] in (None, *site.nodes)
    if "masks" in truth:
        assert (PortRole.MASK in ports) == bool(truth["masks"])
    compare_cache(site, truth)


def compare_cache(site: AttentionSite, truth: dict[str, Any]) -> None:
    """Caches by Concat or given whole, and graph outputs with the value of K or V."""
    past = "input" if "past kv as inputs" in truth["kind"] else "none"
    roles = (("k", PortRole.PAST_KEY, PortRole.PRESENT_KEY), ("v", PortRole.PAST_VALUE, PortRole.PRESENT_VALUE))
    for letter, old, new in roles:
        given = truth.get(f"{letter}_concat", {}).get("past_input")
        if given is not None:
            past = "concat"
            assert site.ports[old].tensor == given
        outputs = truth.get(f"{letter}_present")
        assert (new in site.ports) == (outputs is not None)
        if outputs is not None:
            assert site.ports[new].tensor in ([outputs] if isinstance(outputs, str) else outputs)
    assert site.past == past


@pytest.mark.parametrize("entry", [entry for entry in CORPUS if not entry.truth["attentions"]], ids=str)
def test_why_there_is_none(entry: Entry) -> None:
    """A softmax without attention around it is a near miss."""
    assert recognize(entry.path).near_misses
