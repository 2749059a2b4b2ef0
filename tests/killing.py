"""Kill all ranks of a run in the middle, and look at what is left of the logs.

python tests/killing.py 10        kills ten runs, one after the other
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from launching import Started, command, environment

from aladdin_mpi.record.reading import open_rank_file, rank_path

RANKS = 3
ALLOWED_S = 1.0
"""Rows that are older than this when the ranks are killed must be there."""


def pids(folder: Path) -> list[int]:
    """Process numbers of the ranks, from their logs; empty while one of them is missing."""
    found = []
    for rank in range(RANKS):
        try:
            with open_rank_file(rank_path(folder, rank)) as file:
                if rank and not len(file["steps"]):
                    return []
                found.append(int(file.attrs["pid"]))
        except (OSError, KeyError):
            return []
    return found


def kill_one_run(folder: Path, after_s: float) -> dict[str, float]:
    """Start a training, kill -9 all of its ranks ``after_s`` after the first steps, check the logs.

    Returns
    -------
    dict
        For each rank and table, [s] how old the last row was when the rank was killed.
    """
    argv = [
        sys.executable, "-m", "aladdin_mpi", "train", "--dataset", "digits", "--model", "mlp",
        "--epochs", "100000", "--batch-size", "16", "--lr", "0.01", "--emulate-compute", "20",
        "--progress", "off", "--out", folder,
    ]  # fmt: skip
    with Started(command(RANKS, argv), env=environment()) as started:
        deadline = time.monotonic() + 120
        while not (ranks := pids(folder)):
            assert time.monotonic() < deadline, "the run does not start"
            time.sleep(0.1)
        time.sleep(after_s)
        killed = time.monotonic()
        for pid in ranks:
            os.kill(pid, signal.SIGKILL)
        started.wait(30)
    ages = {}
    for rank in range(RANKS):
        with open_rank_file(rank_path(folder, rank)) as file:
            if rank:
                steps = file["steps"][:]
                assert np.array_equal(steps["iteration"], np.arange(len(steps))), "rows are missing"
                ages[f"rank {rank} steps"] = killed - float(steps["start_s"][-1])
            else:
                ages["rank 0 arrivals"] = killed - float(file["arrivals"][-1]["time_s"])
    for name, age in ages.items():
        assert age < ALLOWED_S + 0.1, f"{name}: the last row is {age:.2f} s old"  # a step is 0.02 s
    return ages


def main(times: int) -> None:
    for number in range(times):
        with tempfile.TemporaryDirectory() as folder:
            ages = kill_one_run(Path(folder) / "run", 1.0 + 0.13 * number)
            print(number, {name: round(age, 2) for name, age in ages.items()}, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
