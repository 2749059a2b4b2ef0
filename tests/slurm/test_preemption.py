"""Trainings that are stopped in the middle: their jobs are queued again and go on where they were.

What the scripts themselves do is in ``test_requeue.py``; here real trainings write checkpoints.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from cluster import Job, SlurmCluster
from scripts import write

from aladdin_mpi.errors import RecordError
from aladdin_mpi.record.reading import open_rank_file, rank_path

pytestmark = pytest.mark.timeout(240)

EPOCHS, STOP_IN, LIMIT_S = 8, 2, 150
OPTIONS = {"nodes": 2, "ntasks-per-node": 1, "cpus-per-task": 1}
TRAINING = (
    f"(--dataset digits --model mlp --algorithm aladdin --epochs {EPOCHS} --batch-size 64 "
    "--emulate-compute 50 --checkpoint-epochs 1)"
)


def last_epoch(folder: Path) -> int:
    """Return the epoch of the worker's last step, from all logs of a run; −1 before the first."""
    last = -1
    for path in folder.glob("rank0001*.h5"):
        try:
            with open_rank_file(path) as file:
                last = max([last, *np.asarray(file["steps"]["epoch"])])
        except (RecordError, OSError, KeyError):
            continue  # a file that is being made
    return last


def hosts(folder: Path) -> set[str]:
    """Return where the ranks of a run are."""
    found = set()
    for path in folder.glob("rank*.h5"):
        with open_rank_file(path) as file:
            found.add(str(file.attrs["host"]))
    return found


class Stopped(NamedTuple):
    """A job that was stopped in the middle, after its end."""

    job: Job
    folder: Path
    output: str


@pytest.fixture(scope="module")
def stopped(
    slurm: SlurmCluster, programs: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Stopped]:
    """Two jobs at a time; one gets a signal, the other one loses a node."""
    slurm.settle()
    variables = {"TRAINING": TRAINING, "OUT": "run", "CPU_BIND": "none"}
    folders = {what: tmp_path_factory.mktemp(what) for what in ("signal", "node")}
    numbers = {}
    for what, excluded in (("signal", "h3,h4"), ("node", "h1")):
        options = {**OPTIONS, "exclude": excluded}
        script = write(folders[what], "train_cpu", options, variables, programs)
        numbers[what] = slurm.submit(script)
    with contextlib.ExitStack() as stack:
        end, waiting = time.monotonic() + LIMIT_S, set(numbers)
        while waiting:
            for what in [w for w in waiting if last_epoch(folders[w] / "run") >= STOP_IN]:
                waiting.remove(what)
                if what == "signal":
                    slurm.call("scancel", "-s", "USR1", numbers[what])
                else:
                    ours = hosts(folders[what] / "run") - {"h1", "h2"}  # not the other job's
                    stack.enter_context(slurm.down_node(min(ours)))
            jobs = [slurm.job(numbers[what]) for what in waiting]
            running = all(job.state in ("PENDING", "RUNNING") for job in jobs)
            shown = "".join(job.output() + job.text for job in jobs)
            assert time.monotonic() < end and running, shown
            time.sleep(0.2)
        ended = {what: slurm.wait(number, LIMIT_S) for what, number in numbers.items()}
    return {
        what: Stopped(ended[what], folders[what] / "run", ended[what].output()) for what in ended
    }


@pytest.mark.parametrize("what", ["signal", "node"])
def test_it_goes_on_and_does_all_epochs(stopped: dict[str, Stopped], what: str) -> None:
    job, folder, output = stopped[what]
    assert (job.state, job.restarts) == ("COMPLETED", 1), output
    assert last_epoch(folder) == EPOCHS - 1, output
    assert (folder / "model.pt").exists()
    with open_rank_file(rank_path(folder, 1, 1)) as file:
        assert np.asarray(file["steps"]["epoch"])[0] >= 1, "the second part does not begin anew"
