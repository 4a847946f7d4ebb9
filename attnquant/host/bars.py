"""NNCF's progress bars: drawing one takes a tenth of a second and a thread, so they are for terminals only."""

import sys
from collections.abc import Callable
from typing import Any

from attnquant.host.plan import current_plan


def on_terminals(original: Callable[..., Any]) -> Callable[..., Any]:
    """The replacement of nncf's `track`: the sequence as it is where no terminal shows the bar."""

    def replacement(sequence: Any = None, *arguments: Any, **keywords: Any) -> Any:
        if current_plan() is not None and not sys.stderr.isatty():
            return sequence
        return original(sequence, *arguments, **keywords)

    return replacement
