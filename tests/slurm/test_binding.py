"""Where the scripts put their tasks, and what these may use: as Slurm and the kernel see it.

A program that only tells takes ``aladdin-mpi``'s place.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import require
from cluster import SlurmCluster
from scripts import said, write

pytestmark = pytest.mark.timeout(120)

LAUNCHERS = ("srun", "mpirun")


def run(
    slurm: SlurmCluster,
    folder: Path,
    stand_in: Path,
    name: str,
    options: dict[str, Any],
    variables: dict[str, str],
) -> list[dict[str, Any]]:
    script = write(folder, name, options, variables, stand_in)
    slurm.settle()
    job = slurm.submit(script)
    ended = slurm.wait(job, 60)
    output = (folder / f"{name}.out").read_text()
    assert ended.state == "COMPLETED", output
    tasks = said(stand_in, job)
    assert [task["rank"] for task in tasks] == list(range(len(tasks))), output
    return tasks


def layout(tasks: list[dict[str, Any]]) -> list[int]:
    """How many tasks each node has, in the order of the ranks; a node's ranks are neighbours."""
    counts = [(node, len(list(group))) for node, group in groupby(task["node"] for task in tasks)]
    assert len({node for node, _ in counts}) == len(counts), tasks
    return [count for _, count in counts]


def check_cpus(tasks: list[dict[str, Any]], each: int) -> None:
    """As many CPUs as asked for, which no other task of the node has."""
    taken = defaultdict(set)
    for task in tasks:
        assert len(task["cpus"]) == each, tasks
        assert not taken[task["node"]] & set(task["cpus"]), tasks
        taken[task["node"]] |= set(task["cpus"])


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_tasks_of_cpu_nodes(
    slurm: SlurmCluster, tmp_path: Path, stand_in: Path, launcher: str
) -> None:
    require.cores(2)
    tasks = run(
        slurm, tmp_path, stand_in, "train_cpu",
        {"nodes": 2, "ntasks-per-node": 2, "cpus-per-task": 1}, {"LAUNCHER": launcher},
    )  # fmt: skip
    assert layout(tasks) == [2, 2]
    check_cpus(tasks, 1)
    assert tasks[0]["arguments"][0] == "train"
    assert {"--resume", "--checkpoint-minutes"} <= set(tasks[0]["arguments"])


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_worker_for_every_gpu_and_the_server(
    slurm: SlurmCluster, tmp_path: Path, stand_in: Path, launcher: str
) -> None:
    require.cores(2)
    tasks = run(
        slurm, tmp_path, stand_in, "train_gpu_ib",
        {"nodes": 3, "ntasks-per-node": 2, "cpus-per-task": 1, "gpus-per-node": 1},
        {"LAUNCHER": launcher, "UCX_TLS": "all"},
    )  # fmt: skip
    assert layout(tasks) == [2, 1, 1]
    check_cpus(tasks, 1)
    assert [task["gpus"] for task in tasks] == ["0"] * 4


def test_workers_of_a_node_see_one_gpu_each(
    slurm: SlurmCluster, tmp_path: Path, stand_in: Path
) -> None:
    """Needs no cores of its own: nodes say that they have more than there are."""
    tasks = run(
        slurm, tmp_path, stand_in, "train_gpu_ib",
        {"nodes": 2, "ntasks-per-node": 3, "cpus-per-task": 1, "gpus-per-node": 2},
        {"CPU_BIND": "none", "UCX_TLS": "all"},
    )  # fmt: skip
    assert layout(tasks) == [3, 2]
    for node in {task["node"] for task in tasks}:
        workers = [task for task in tasks[1:] if task["node"] == node]
        assert sorted(worker["gpus"] for worker in workers) == ["0", "1"], tasks


def test_without_a_server_all_are_workers(
    slurm: SlurmCluster, tmp_path: Path, stand_in: Path
) -> None:
    tasks = run(
        slurm, tmp_path, stand_in, "train_gpu_ib",
        {"nodes": 2, "ntasks-per-node": 2, "cpus-per-task": 1, "gpus-per-node": 2},
        {"SERVERS": "0", "CPU_BIND": "none", "UCX_TLS": "all"},
    )  # fmt: skip
    assert layout(tasks) == [2, 2]
    assert [task["gpus"] for task in tasks] == ["0", "1", "0", "1"]


def test_the_server_of_a_heterogeneous_job_is_on_the_cpu_node(
    slurm: SlurmCluster, tmp_path: Path, stand_in: Path
) -> None:
    require.cores(2)
    tasks = run(
        slurm, tmp_path, stand_in, "train_hetjob",
        {
            "partition": ("cpu", "gpu"), "nodes": (1, 2), "ntasks-per-node": (1, 2),
            "cpus-per-task": (1, 1), "gpus-per-node": 2,
        },
        {"UCX_TLS": "all"},
    )  # fmt: skip
    assert layout(tasks) == [1, 2, 2] and tasks[0]["node"] == "h1"
    check_cpus(tasks, 1)
    assert [task["gpus"] for task in tasks] == ["", "0", "1", "0", "1"]
