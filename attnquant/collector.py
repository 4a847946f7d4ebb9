"""Python's garbage collector, held back where many small objects are made and nearly all of them kept."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

RARE = (50_000, 20, 20)
"""Thresholds of the three generations, as `gc.set_threshold` takes them; Python's own are (700, 10, 10)."""


@contextmanager
def paused() -> Iterator[None]:
    """No collection inside: for steps of seconds that leave little behind."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def rare() -> Iterator[None]:
    """Fewer collections inside: each walks all objects of several graphs. Garbage that holds memory is still found."""
    before = gc.get_threshold()
    gc.set_threshold(*(max(own, wanted) if own else own for own, wanted in zip(before, RARE, strict=True)))
    try:
        yield
    finally:
        gc.set_threshold(*before)
