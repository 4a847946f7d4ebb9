"""NNCF's progress bars are drawn on terminals, and wherever attnquant has no part in the run."""

import sys

import pytest

from attnquant.host.bars import on_terminals
from attnquant.host.plan import HostPlan, planned


def shown(*arguments: object, **keywords: object) -> tuple[object, ...]:
    return ("bar", *arguments, keywords)


@pytest.mark.parametrize(("terminal", "planning", "bar"), [(False, True, False), (True, True, True), (False, False, True)])
def test_who_sees_a_bar(monkeypatch: pytest.MonkeyPatch, terminal: bool, planning: bool, bar: bool) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    track, data = on_terminals(shown), [1, 2]
    if planning:
        with planned(HostPlan(points=(), ignored=frozenset(), unsmoothable=frozenset())):
            found = track(data, total=2)
    else:
        found = track(data, total=2)
    assert found == (("bar", data, {"total": 2}) if bar else data)
