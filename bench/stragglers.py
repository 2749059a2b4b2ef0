"""Seven workers, 300 iterations each at most, without and with one that is ten times slower.

    python bench/stragglers.py --csv stragglers.csv

Computing is *emulated*: 5 ms of sleep, 50 ms on the slow worker.  Printed, for each algorithm and
case: whether the run ended in order on all ranks, iterations per worker, the median step and the
share of time blocked of the workers that are not slow.
"""

from __future__ import annotations

import csv
import sys
import tempfile
from pathlib import Path

import click
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from launching import mpirun

WORKERS, ITERATIONS, SLOW = 7, 300, 1
ALGORITHMS = ("aladdin", "bsp", "asp", "easgd", "sgp", "ad-psgd", "gosgd")
HEADER = ("algorithm", "slow", "ended", "fewest", "most", "step_ms", "blocked")


def measure(name: str, factor: int) -> tuple[str, int, bool, int, int, float, float]:
    """One run."""
    from aladdin_mpi.algorithms import REGISTRY
    from aladdin_mpi.algorithms.base import Topology
    from aladdin_mpi.record.reading import open_rank_file, rank_path

    served = REGISTRY[name].topology is Topology.SERVER
    slow = ["--slow-worker", f"{SLOW}:{factor}"] if factor > 1 else []
    with tempfile.TemporaryDirectory() as folder:
        mpirun(
            WORKERS + served,
            [
                sys.executable, "-m", "aladdin_mpi", "train", "--dataset", "digits", "--model",
                "mlp", "--algorithm", name, "--emulate-compute", "5", "--batch-size", "4",
                "--epochs", "100", "--max-iterations", str(ITERATIONS), "--progress", "off",
                "--out", folder, *slow,
            ],
            timeout=300,
        )  # fmt: skip
        ended, counts, steps = True, [], []
        for rank in range(WORKERS + served):
            with open_rank_file(rank_path(folder, rank)) as file:
                ended = ended and int(file["run/clean_end"][()]) == 1
                if rank >= served:
                    table = file["steps"][:]
                    counts.append(len(table))
                    if rank - served != SLOW:
                        steps.append(table[5:])
    others = np.concatenate(steps)
    total = float(np.sum(others["step_s"], dtype=np.float64))
    blocked = float(np.sum(others["blocked_s"], dtype=np.float64)) / total
    step_ms = 1e3 * float(np.median(others["step_s"]))
    return name, factor, ended, min(counts), max(counts), step_ms, blocked


@click.command(help=__doc__)
@click.option("--csv", "csv_path", type=click.Path(path_type=Path))
def main(csv_path: Path | None) -> None:
    rows = []
    click.echo("| algorithm | one worker | ended | iterations | step of the others, ms | blocked |")
    click.echo("|---|---|---|---|---|---|")
    for name in ALGORITHMS:
        for factor in (1, 10):
            row = measure(name, factor)
            rows.append(row)
            case = f"×{factor}" if factor > 1 else "like the others"
            click.echo(
                f"| {name} | {case} | {'yes' if row[2] else 'NO'} | {row[3]} to {row[4]} | "
                f"{row[5]:.1f} | {row[6]:.1%} |"
            )
    if csv_path:
        with csv_path.open("w", newline="") as file:
            csv.writer(file).writerows([HEADER, *rows])


if __name__ == "__main__":
    main()
