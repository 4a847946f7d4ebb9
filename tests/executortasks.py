"""Tasks for workers, which import them by name."""

import os
import signal
from pathlib import Path

from attnquant.errors import DataError
from attnquant.verification.attribution import Chunk, measured


def square(number: int) -> int:
    return number * number


def where(_: int) -> int:
    return os.getpid()


def talk(text: str) -> str:
    os.write(1, text.encode())
    print(text, flush=True)
    return text


def fragile(task: tuple[int, str, str]) -> int:
    """The square of a number; its worker is killed the first time ("once") or every time ("always") that it tries."""
    number, how, folder = task
    tried = Path(folder) / f"tried-{number}"
    if how == "always" or (how == "once" and not tried.exists()):
        with tried.open("a", encoding="ascii") as file:
            file.write("x")
        os.kill(os.getpid(), signal.SIGKILL)
    return number * number


def picky(number: int) -> int:
    if number == 2:
        msg = f"task {number}: expected another number"
        raise DataError(msg)
    return number


def measured_but_one(chunk: Chunk) -> list[dict[str, float]]:
    """As `measured`; the worker that gets the third layer's attention is killed each time."""
    if any("layer2" in site for site in chunk.sites):
        os.kill(os.getpid(), signal.SIGKILL)
    return measured(chunk)
