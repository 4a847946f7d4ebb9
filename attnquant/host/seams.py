"""Seams: the places where NNCF is changed, each with its reason, guarded by the signature it expects, and reversible.

A seam replaces one attribute. It is applied only if the attribute exists and a function there takes exactly the parameters
that the replacement was written for; otherwise nothing at all is changed and the error names the seam.
"""

import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from attnquant.errors import HostError
from attnquant.host.versions import require_supported


@dataclass(frozen=True, slots=True, kw_only=True)
class Seam:
    """One change of NNCF."""

    name: str
    why: str
    module: str
    """Module that holds the attribute."""
    attribute: str
    """Dotted path inside the module; the last part is replaced."""
    parameters: tuple[str, ...] | None
    """Parameter names of the function found there; None for an attribute that is no function."""
    replace: Callable[[Any], Any]
    """Makes the replacement from the original."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Applied:
    owner: Any
    attribute: str
    original: Any
    own: bool


def _locate(seam: Seam) -> tuple[Any, str, Any]:
    """(owner, last attribute name, raw original) with staticmethod wrappers kept.

    :raises HostError: the attribute is missing or has other parameters.
    """
    version = require_supported()
    remedy = "Install nncf 3.3 or 3.4, or report this version."
    try:
        owner: Any = importlib.import_module(seam.module)
        *parents, last = seam.attribute.split(".")
        for part in parents:
            owner = getattr(owner, part)
        original = inspect.getattr_static(owner, last)
    except (ImportError, AttributeError) as error:
        msg = f"Seam {seam.name!r} does not fit NNCF {version}: {seam.module}.{seam.attribute} was not found. {remedy}"
        raise HostError(msg) from error
    if seam.parameters is not None:
        function = original.__func__ if isinstance(original, staticmethod | classmethod) else original
        found = tuple(inspect.signature(function).parameters) if callable(function) else None
        if found != seam.parameters:
            msg = (
                f"Seam {seam.name!r} does not fit NNCF {version}: {seam.module}.{seam.attribute} takes {found!r}, "
                f"expected {seam.parameters!r}. {remedy}"
            )
            raise HostError(msg)
    return owner, last, original


def _apply(seams: Sequence[Seam]) -> list[_Applied]:
    """Apply all seams, or none: every one is located before the first is changed."""
    located = [(seam, *_locate(seam)) for seam in seams]
    applied = []
    for seam, owner, last, original in located:
        own = last in vars(owner)
        setattr(owner, last, seam.replace(original))
        applied.append(_Applied(owner=owner, attribute=last, original=original, own=own))
    return applied


def _revert(applied: list[_Applied]) -> None:
    for change in reversed(applied):
        if change.own:
            setattr(change.owner, change.attribute, change.original)
        else:
            delattr(change.owner, change.attribute)


@contextmanager
def applied(seams: Sequence[Seam]) -> Iterator[None]:
    """NNCF with these seams inside the block, exactly as before after it."""
    changes = _apply(seams)
    try:
        yield
    finally:
        _revert(changes)


class SeamSwitch:
    """Seams that are switched on and off by hand; switching on twice is the same as once."""

    def __init__(self) -> None:
        self._applied: list[_Applied] | None = None

    @property
    def on(self) -> bool:
        """Whether the seams are applied."""
        return self._applied is not None

    def switch_on(self, seams: Sequence[Seam]) -> None:
        """Apply the seams unless they are applied already."""
        if self._applied is None:
            self._applied = _apply(seams)

    def switch_off(self) -> None:
        """Undo what `switch_on` did."""
        if self._applied is not None:
            _revert(self._applied)
            self._applied = None
