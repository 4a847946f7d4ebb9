"""Lists of tasks in processes and on a Ray cluster of two workers: the same results, and what a lost worker costs."""

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from attnquant.errors import AttnQuantError, DataError, HostError
from attnquant.executors import Done, Workers, run_tasks
from tests import executortasks

NUMBERS = [3, 1, 4, 1, 5, 9]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A cluster of two workers, each a node of its own, that runs join by RAY_ADDRESS."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed (pip install attnquant[ray])")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
        from ray.cluster_utils import Cluster

        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        made.add_node(num_cpus=1)
        patch.setenv("RAY_ADDRESS", made.address)
        try:
            yield
        finally:
            made.shutdown()


@pytest.fixture(params=["local", "ray"])
def executor(request: pytest.FixtureRequest) -> str:
    if request.param == "ray":
        request.getfixturevalue("cluster")
    return str(request.param)


def test_results_come_in_the_order_of_the_tasks(executor: str) -> None:
    seen: list[int] = []
    found = run_tasks(executortasks.square, NUMBERS, executor=executor, workers=2, progress=seen.append)
    assert found == [Done(value=number * number) for number in NUMBERS]
    assert seen == [1, 2, 3, 4, 5, 6]


def test_a_lost_worker_costs_its_task_alone(executor: str, tmp_path: Path) -> None:
    how = {1: "once", 3: "always"}
    tasks = [(number, how.get(number, "never"), str(tmp_path)) for number in range(6)]
    found = run_tasks(executortasks.fragile, tasks, executor=executor, workers=2)
    assert [item.value for item in found] == [0, 1, 4, None, 16, 25]
    assert found[3].lost
    assert not any(item.lost for item in found if item is not found[3])
    assert len((tmp_path / "tried-3").read_text()) == 2, "tried again once"


def test_errors_are_those_of_the_task(executor: str) -> None:
    with pytest.raises(DataError, match="task 2: expected another number"):
        run_tasks(executortasks.picky, range(4), executor=executor, workers=2)


def test_a_cluster_works_in_other_processes(cluster: None) -> None:
    found = run_tasks(executortasks.where, range(4), executor="ray")
    assert os.getpid() not in {item.value for item in found}


def test_processes_are_kept_between_tasks() -> None:
    found = {item.value for item in run_tasks(executortasks.where, range(6), workers=2)}
    assert os.getpid() not in found
    assert 1 <= len(found) <= 2


def test_no_worker_is_this_process() -> None:
    assert run_tasks(executortasks.where, range(2), workers=0) == [Done(value=os.getpid())] * 2


def test_what_tasks_print_is_no_result(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_tasks(executortasks.talk, ["banner"]) == [Done(value="banner")]
    assert capfd.readouterr().out == ""


def test_nothing_to_do_starts_nothing() -> None:
    assert run_tasks(executortasks.square, []) == []


def test_an_executor_of_another_name_is_refused() -> None:
    with pytest.raises(AttnQuantError, match=r"expected one of local, ray, got 'slurm'"):
        run_tasks(executortasks.square, NUMBERS, executor="slurm")
    with pytest.raises(AttnQuantError, match=r"expected one of local, ray, got 'slurm'"):
        Workers(executor="slurm")


def test_ray_that_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(HostError, match=r"pip install attnquant\[ray\]"):
        run_tasks(executortasks.square, NUMBERS, executor="ray")
