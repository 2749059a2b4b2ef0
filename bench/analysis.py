"""What the analysis rests on and costs: the split of a step, the time to read a large run.

    python bench/analysis.py split --iterations 60
    python bench/analysis.py load --ranks 16 --rows 100000

``split`` trains two workers with every algorithm for some steps, real computing on Fashion-MNIST,
and prints the smallest and the largest share of a worker's step that the measured parts explain.
``load`` writes a log and reads its rows as frames, in a process of its own each time.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import click

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import logs
from launching import mpirun

TRAIN = ("--dataset", "fashion-mnist", "--model", "cnn", "--batch-size", "64", "--lr", "0.01")
READ = """
import sys, time
from aladdin_mpi.analysis import load_run
begin = time.monotonic()
rows = len(load_run(sys.argv[1]).steps)
print(rows, time.monotonic() - begin)
"""


@click.group(help=__doc__)
def main() -> None:
    """Nothing in common."""


@main.command("split")
@click.option("--iterations", default=60, show_default=True)
@click.option("--algorithm", "chosen", multiple=True, help="Default: all.")
def split(iterations: int, chosen: tuple[str, ...]) -> None:
    from aladdin_mpi.algorithms import REGISTRY
    from aladdin_mpi.algorithms.base import Topology
    from aladdin_mpi.analysis import load_run, metrics

    click.echo("| algorithm | step, ms | measured parts over the step | other |")
    click.echo("|---|---|---|---|")
    for name in chosen or sorted(REGISTRY):
        with tempfile.TemporaryDirectory() as folder:
            ranks = 3 if REGISTRY[name].topology is Topology.SERVER else 2
            argv = [sys.executable, "-m", "aladdin_mpi", "train", *TRAIN, "--algorithm", name]
            argv += ["--max-iterations", str(iterations), "--progress", "off"]
            mpirun(ranks, [*argv, "--out", f"{folder}/run"], timeout=600)
            table = metrics.split(load_run(f"{folder}/run"))
        other = table["other"] / table["step"]
        parts = table[[part for part in metrics.PARTS if part != "other"]].sum(axis=1)
        ratio = parts / table["step"]
        click.echo(
            f"| `{name}` | {1e3 * table['step'].mean():.1f} | {ratio.min():.4f} to "
            f"{ratio.max():.4f} | {other.min():.2%} to {other.max():.2%} |"
        )


@main.command("load")
@click.option("--ranks", default=16, show_default=True)
@click.option("--rows", default=100_000, show_default=True)
@click.option("--rounds", default=5, show_default=True)
def load(ranks: int, rows: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for rank in range(ranks):
            table = logs.rows("steps", rows, step_s=0.01, start_s=logs.CLOCK_S)
            logs.write(folder, rank, {"steps": table}, world_size=ranks, config="algorithm: none")
        took = []
        for _ in range(rounds):
            argv = [sys.executable, "-c", READ, str(folder)]
            said = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()
            assert int(said[0]) == ranks * rows, said
            took.append(float(said[1]))
    click.echo(
        f"{ranks} ranks x {rows} rows: {median(took):.2f} s ({min(took):.2f} to {max(took):.2f}), "
        f"{rounds} rounds"
    )


if __name__ == "__main__":
    main()
