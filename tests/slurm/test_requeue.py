"""What the scripts do with signals and with exit code 75; a stand-in for the training answers.

All jobs run at once: those that are requeued wait for some seconds, as Slurm has it.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from cluster import Job, SlurmCluster
from scripts import said, write

pytestmark = pytest.mark.timeout(180)

PLAIN: dict[str, Any] = {"cpus-per-task": 1}
TWO_NODES = {**PLAIN, "nodes": 2, "ntasks-per-node": 1}


class Case(NamedTuple):
    """A script, how it is edited, and the command that Slurm is given while it runs."""

    name: str
    options: dict[str, Any]
    variables: dict[str, str]
    command: tuple[str, ...]
    tasks: int = 2


CASES = {
    "srun": Case("train_cpu", TWO_NODES, {}, ("scancel", "-s", "USR1")),
    "srun, by the batch shell": Case("train_cpu", TWO_NODES, {}, ("scancel", "-b", "-s", "USR1")),
    "mpirun": Case(
        "train_cpu", TWO_NODES, {"LAUNCHER": "mpirun"}, ("scancel", "-b", "-s", "USR1")
    ),
    "gpu": Case(
        "train_gpu_ib", {**TWO_NODES, "gpus-per-node": 1}, {"SERVERS": "0", "UCX_TLS": "all"},
        ("scancel", "-s", "USR1"),
    ),
    "hetjob": Case(
        "train_hetjob",
        {
            "partition": ("cpu", "gpu"), "nodes": (1, 1), "ntasks-per-node": (1, 1),
            "cpus-per-task": (1, 1), "gpus-per-node": 1,
        },
        {"UCX_TLS": "all"}, ("scancel", "-s", "USR1"),
    ),
    "sweep": Case(
        "sweep", {**PLAIN, "array": "2-3", "ntasks": 2}, {"TABLE": "table.txt"},
        ("scancel", "-s", "USR1"),
    ),
    "requeued by Slurm": Case("train_cpu", TWO_NODES, {}, ("scontrol", "requeue")),
    "cancelled": Case("train_cpu", TWO_NODES, {}, ("scancel",)),
}  # fmt: skip


class Seen(NamedTuple):
    number: str
    job: Job


@pytest.fixture(scope="module")
def seen(
    slurm: SlurmCluster, stand_in: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Seen]:
    folder = tmp_path_factory.mktemp("requeue")
    (folder / "table.txt").write_text("# a comment\nasp 2 0 -\nbsp 2 1 1:3\nssp 2 0 -\n")
    numbers = {}
    for label, case in CASES.items():
        variables = {"CPU_BIND": "none", **case.variables}
        word = label.replace(" ", "-").replace(",", "")
        script = write(folder, case.name, case.options, variables, stand_in, word)
        numbers[label] = slurm.submit(script, env={"STAND_IN": "wait"})
    names = {label: f"{n}_2" if label == "sweep" else n for label, n in numbers.items()}
    ids = {label: slurm.job(name).number for label, name in names.items()}
    waiting = dict(CASES)
    end = time.monotonic() + 60
    while waiting:
        assert time.monotonic() < end, f"not started: {list(waiting)}\n{slurm.logs()}"
        time.sleep(0.2)
        ids |= {label: slurm.job(names[label]).number for label in waiting}
        for label in [x for x in waiting if len(said(stand_in, ids[x])) == CASES[x].tasks]:
            slurm.call(*waiting.pop(label).command, names[label])
    ended = {label: slurm.wait(name, 90) for label, name in names.items()}
    assert slurm.job(f"{numbers['sweep']}_3").restarts == 0, "the other task of the array"
    slurm.call("scancel", numbers["sweep"], check=False)
    return {label: Seen(ids[label], ended[label]) for label in CASES}


@pytest.mark.parametrize("label", [label for label in CASES if label != "cancelled"])
def test_it_is_queued_again_and_ends(seen: dict[str, Seen], stand_in: Path, label: str) -> None:
    job = seen[label]
    assert (job.job.state, job.job.restarts) == ("COMPLETED", 1), job
    first, second = said(stand_in, job.number), said(stand_in, job.number, 1)
    assert len(first) == len(second) == CASES[label].tasks
    assert [task["arguments"] for task in first] == [task["arguments"] for task in second], (
        "the same folder, so that it goes on"
    )


def test_a_job_that_a_user_cancels_stays_so(seen: dict[str, Seen], stand_in: Path) -> None:
    job = seen["cancelled"]
    assert (job.job.state, job.job.restarts) == ("CANCELLED", 0), job
    assert said(stand_in, job.number, 1) == []


def test_a_line_of_the_table_becomes_arguments(seen: dict[str, Seen], stand_in: Path) -> None:
    words = " ".join(said(stand_in, seen["sweep"].number)[0]["arguments"])
    assert "--algorithm bsp --seed 1 --slow-worker 1:3" in words
    assert "/bsp-ranks2-seed1-slow1x3 " in words


def test_a_job_that_loses_a_node_is_queued_again(
    slurm: SlurmCluster, stand_in: Path, tmp_path: Path
) -> None:
    slurm.settle()
    script = write(tmp_path, "train_cpu", TWO_NODES, {"CPU_BIND": "none"}, stand_in)
    number = slurm.submit(script, env={"STAND_IN": "wait"})
    end = time.monotonic() + 60
    while len(said(stand_in, number)) < 2:
        assert time.monotonic() < end, slurm.job(number).text
        time.sleep(0.1)
    lost = said(stand_in, number)[1]["node"]
    with slurm.down_node(lost):
        ended = slurm.wait(number, 90)
    assert (ended.state, ended.restarts) == ("COMPLETED", 1), ended
    second = said(stand_in, number, 1)
    assert len(second) == 2 and lost not in [task["node"] for task in second]
