"""Trainings that are stopped in the middle: their jobs are queued again and go on where they were.

What the scripts themselves do is in ``test_requeue.py``; here real trainings write checkpoints.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

import numpy as np
import pytest
from cluster import SlurmCluster
from scripts import write

from aladdin_mpi.errors import RecordError
from aladdin_mpi.record.hdf5 import open_rank_file

pytestmark = pytest.mark.timeout(240)

EPOCHS, STOP_AFTER, LIMIT_S = 8, 2.0, 150
OPTIONS = {"nodes": 2, "ntasks-per-node": 1, "cpus-per-task": 1}
TRAINING = (
    f"(--dataset digits --model mlp --algorithm aladdin --epochs {EPOCHS} --batch-size 64 "
    "--emulate-compute 50 --checkpoint-epochs 1)"
)


def passes(folder: Path) -> float:
    """Return how far a run was at its last evaluation [epochs], from all logs of its folder."""
    last = 0.0
    for path in folder.rglob("rank*.h5"):
        try:
            with open_rank_file(path) as file:
                last = max([last, *np.asarray(file["evals"]["epoch"])])
        except (RecordError, OSError, KeyError):
            continue  # a file that is being made
    return last


def started(slurm: SlurmCluster, folder: Path, programs: Path) -> str:
    """Submit the training and wait until it is under way."""
    slurm.settle()
    variables = {"TRAINING": TRAINING, "OUT": "run", "CPU_BIND": "none"}
    number = slurm.submit(write(folder, "train_cpu", OPTIONS, variables, programs))
    end = time.monotonic() + LIMIT_S
    while passes(folder / "run") < STOP_AFTER:
        job = slurm.job(number)
        output = folder / "train_cpu.out"
        shown = output.read_text() if output.exists() else ""
        assert time.monotonic() < end and job.state in ("PENDING", "RUNNING"), shown + job.text
        time.sleep(0.2)
    return number


def check_end(slurm: SlurmCluster, folder: Path, number: str) -> None:
    """The job was queued again once, went on, and did all its epochs, and no more."""
    ended = slurm.wait(number, LIMIT_S)
    output = (folder / "train_cpu.out").read_text()
    assert (ended.state, ended.restarts) == ("COMPLETED", 1), output
    assert EPOCHS <= passes(folder / "run") < EPOCHS + 1, output
    assert (folder / "run" / "model.pt").exists()
    assert re.search("resum", output, re.IGNORECASE), output


def test_a_signal(slurm: SlurmCluster, tmp_path: Path, programs: Path) -> None:
    number = started(slurm, tmp_path, programs)
    slurm.call("scancel", "-s", "USR1", number)
    check_end(slurm, tmp_path, number)


def test_a_node_that_goes_down(slurm: SlurmCluster, tmp_path: Path, programs: Path) -> None:
    number = started(slurm, tmp_path, programs)
    with slurm.down_node("h2"):
        check_end(slurm, tmp_path, number)
