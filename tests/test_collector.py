"""Garbage collection is held back inside, and as it was behind."""

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

import attnquant
from attnquant import collector
from tests import tinymodels


@pytest.fixture(autouse=True)
def _restored():
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.enable()


@pytest.mark.parametrize(
    ("own", "inside"),
    [
        pytest.param((700, 10, 10), collector.RARE, id="pythons-own"),
        pytest.param((10**6, 5, 100), (10**6, 20, 100), id="rarer-already"),
        pytest.param((0, 10, 10), (0, 20, 20), id="switched-off"),
    ],
)
def test_rare_collections(own: tuple[int, int, int], inside: tuple[int, int, int]) -> None:
    gc.set_threshold(*own)
    with collector.rare():
        assert gc.get_threshold() == inside
    assert gc.get_threshold() == own


@pytest.mark.parametrize("enabled", [True, False])
def test_paused(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    with collector.paused():
        assert not gc.isenabled()
    assert gc.isenabled() == enabled


@pytest.mark.parametrize("held", [collector.paused, collector.rare])
def test_an_error_ends_it_too(held: Callable[[], AbstractContextManager[None]]) -> None:
    before = gc.isenabled(), gc.get_threshold()
    with pytest.raises(KeyError), held():
        raise KeyError
    assert (gc.isenabled(), gc.get_threshold()) == before


def test_a_quantization_leaves_the_collector_as_it_was() -> None:
    gc.set_threshold(700, 10, 10)
    seen = []
    data = [{"x": tinymodels.weights(0, 2, 5, tinymodels.WIDTH)}]
    attnquant.quantize(tinymodels.attention(), data, progress=lambda stage: seen.append(gc.get_threshold()))
    assert seen
    assert collector.RARE in seen
    assert gc.get_threshold() == (700, 10, 10)
