"""Lists of independent tasks: in processes of this machine, or on a Ray cluster. A lost worker costs its task and no other.

Nothing is scheduled here: concurrent.futures and Ray hand out the tasks.
"""

import multiprocessing
import os
import queue
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar, get_args

from attnquant.errors import AttnQuantError, HostError

Executor = Literal["local", "ray"]
EXECUTORS: tuple[str, ...] = get_args(Executor)

RETRIES = 1
"""How often a task is tried again whose worker was lost."""
_CORES = 4
"""Cores for each worker by default: a session of ONNX Runtime has threads of its own."""

Task = TypeVar("Task")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Done(Generic[Result]):
    """What became of a task: its result, or why there is none."""

    value: Result | None = None
    lost: str = ""
    """Why no worker finished it; "" where one did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """Who runs tasks."""

    executor: str = "local"
    number: int | None = None
    """As `workers` of `run_tasks`."""

    def __post_init__(self) -> None:
        """Raises AttnQuantError where the executor is unknown."""
        _require_known(self.executor)


def _require_known(executor: str) -> None:
    if executor not in EXECUTORS:
        msg = f"Executor: expected one of {', '.join(EXECUTORS)}, got {executor!r}."
        raise AttnQuantError(msg)


def run_tasks(
    function: Callable[[Task], Result],
    tasks: Iterable[Task],
    *,
    executor: str = "local",
    workers: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[Done[Result]]:
    """Results in the order of the tasks, the same from every executor. Workers that are lost are replaced.

    :param function: Of a module, by name: tasks, results and errors travel between processes.
    :param executor: "local" or "ray"; Ray starts on this machine, or joins the cluster that RAY_ADDRESS names.
    :param workers: Processes at a time; default: one for every four cores. A cluster has its own number. 0 with "local": no
        other process, for a debugger; a crash is then this process's own.
    :param progress: Called with the number of tasks that are done.
    :raises AttnQuantError: the executor is unknown; and the first error that `function` raises, once all tasks are done.
    :raises HostError: Ray is not installed.
    """
    listed = list(tasks)
    _require_known(executor)
    count = max(1, min(workers or (os.cpu_count() or 1) // _CORES, len(listed)))
    tick = _Counter(progress)
    run = _on_ray if executor == "ray" else _here if workers == 0 else _in_processes
    found = run(function, listed, count, tick) if listed else []
    for item in found:
        if isinstance(item, BaseException):
            raise item
    return [item for item in found if isinstance(item, Done)]


class _Counter:
    """Counts tasks that are done."""

    def __init__(self, report: Callable[[int], None] | None) -> None:
        self._report, self._number = report, 0

    def __call__(self) -> None:
        self._number += 1
        if self._report is not None:
            self._report(self._number)


def _here(
    function: Callable[[Task], Result], tasks: Sequence[Task], workers: int, tick: Callable[[], None]
) -> list[Done[Result] | BaseException]:
    found = []
    for task in tasks:
        found.append(Done(value=function(task)))
        tick()
    return list(found)


def _in_processes(
    function: Callable[[Task], Result], tasks: Sequence[Task], workers: int, tick: Callable[[], None]
) -> list[Done[Result] | BaseException]:
    """A pool of one process for each worker: what breaks a pool was its only task."""
    free: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
    made = [_Worker() for _ in range(workers)]
    for worker in made:
        free.put(worker)

    def run(task: Task) -> Done[Result] | BaseException:
        worker = free.get()
        try:
            return worker.run(function, task)
        finally:
            free.put(worker)

    try:
        with ThreadPoolExecutor(workers) as threads:
            found = []
            for item in threads.map(run, tasks):
                found.append(item)
                tick()
            return found
    finally:
        for worker in made:
            worker.close()


class _Worker:
    """One process at a time, a new one after it was lost; started anew rather than forked, which runtimes do not survive."""

    def __init__(self) -> None:
        self._pool = self._started()

    def run(self, function: Callable[[Task], Result], task: Task) -> Done[Result] | BaseException:
        """The result, the error that the function raised, or the loss."""
        for _ in range(1 + RETRIES):
            try:
                return Done(value=self._pool.submit(function, task).result())
            except BrokenProcessPool:
                self.close()
                self._pool = self._started()
            except Exception as error:  # the function's own
                return error
        return Done(lost=f"the worker process ended before it was done, {1 + RETRIES} times")

    def close(self) -> None:
        """End the process."""
        self._pool.shutdown(cancel_futures=True)

    @staticmethod
    def _started() -> ProcessPoolExecutor:
        return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"), initializer=_prints_to_stderr)


def _prints_to_stderr() -> None:
    """What tasks and their libraries print is no result: standard output is the caller's."""
    os.dup2(2, 1)


def _on_ray(
    function: Callable[[Task], Result], tasks: Sequence[Task], workers: int, tick: Callable[[], None]
) -> list[Done[Result] | BaseException]:
    ray = _import_ray()
    own = not ray.is_initialized()
    if own:
        _start_ray(ray, workers)
    try:
        remote = ray.remote(num_cpus=1, max_retries=RETRIES, retry_exceptions=False)(function)
        found = []
        for reference in [remote.remote(task) for task in tasks]:
            found.append(_fetched(ray, reference))
            tick()
        return found
    finally:
        if own:
            ray.shutdown()


def _fetched(ray: Any, reference: Any) -> Any:
    try:
        return Done(value=ray.get(reference))
    except ray.exceptions.RayTaskError as error:
        return error.cause if isinstance(error.cause, BaseException) else error
    except ray.exceptions.RayError as error:  # the worker, its node, or its memory
        return Done(lost=f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}")


def _start_ray(ray: Any, workers: int) -> None:
    """A cluster of this process, or the one that RAY_ADDRESS names; workers find the packages that this process finds."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray would report the run to its makers
    paths = os.pathsep.join(path for path in sys.path if path)
    options: dict[str, Any] = {
        "log_to_driver": False, "logging_level": "ERROR", "runtime_env": {"env_vars": {"PYTHONPATH": paths}},
    }  # fmt: skip
    if not os.environ.get("RAY_ADDRESS"):
        options |= {"num_cpus": workers, "include_dashboard": False}
    ray.init(**options)


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        msg = "Executor ray: Ray is not installed. Run `pip install attnquant[ray]`, or take the executor local."
        raise HostError(msg) from error
    return ray
