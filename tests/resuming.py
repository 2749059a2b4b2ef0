"""Kill a random rank at a random moment, resume, and again; then let the run come to its end.

PYTHONPATH=tests python tests/resuming.py 30       kills thirty times
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

from launching import Started, command, environment, mpirun

from aladdin_mpi.record.reading import next_part, open_rank_file, rank_path
from aladdin_mpi.runtime import checkpoint
from aladdin_mpi.runtime.summary import summarize

RANKS = 3
EPOCHS = 60


def arguments(folder: Path) -> list[str]:
    return [
        sys.executable, "-m", "aladdin_mpi", "train", "--dataset", "digits", "--model", "mlp",
        "--epochs", str(EPOCHS), "--batch-size", "16", "--lr", "0.05", "--momentum", "0.9",
        "--slow-worker", "0:4", "--slow-worker", "1:4", "--checkpoint-iterations", "10",
        "--progress", "off", "--resume", "auto", "--out", str(folder),
    ]  # fmt: skip


def kill_once(folder: Path, rng: random.Random) -> tuple[int, int]:
    """Start or resume, kill one rank, wait for the end; returns the rank and what is left."""
    part = next_part(folder) if folder.exists() else 0
    rank = rng.randrange(RANKS)
    with Started(command(RANKS, arguments(folder)), env=environment()) as started:
        pid, deadline = 0, time.monotonic() + 120
        while not pid:
            assert time.monotonic() < deadline, "the run does not start"
            if started.process.poll() is not None:
                raise SystemExit("the run came to its end before all kills")
            try:
                with open_rank_file(rank_path(folder, rank, part)) as file:
                    if len(file["steps"]) + len(file["arrivals"]):
                        pid = int(file.attrs["pid"])
            except (OSError, KeyError):
                time.sleep(0.05)
        time.sleep(rng.uniform(0.0, 1.0))
        os.kill(pid, signal.SIGKILL)
        assert started.wait(30) not in (0, None), "a killed rank must end the job"
    for number in checkpoint.numbers(folder):
        if checkpoint.complete(folder, number):
            for part_of in range(RANKS):
                checkpoint.read(folder, number, part_of)
    return rank, checkpoint.latest(folder)


def main(times: int) -> None:
    rng = random.Random(1)
    with tempfile.TemporaryDirectory() as base:
        folder = Path(base) / "run"
        for number in range(times):
            rank, latest = kill_once(folder, rng)
            print(f"kill {number}: rank {rank}; last complete checkpoint {latest}", flush=True)
        mpirun(RANKS, arguments(folder), timeout=300)
        whole = Path(base) / "whole"
        mpirun(RANKS, arguments(whole), timeout=300)
        for name, run in (("with kills", folder), ("without", whole)):
            print(f"{name}: test accuracy {summarize(run).accuracy:.4f}")


if __name__ == "__main__":
    main(int(sys.argv[1]))
