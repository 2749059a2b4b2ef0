"""What checkpoints cost: their size, and the time that a worker loses to one.

    python bench/checkpoint.py

Two workers and a server train a vector of 8 MB and of 80 MB with momentum; computing is emulated (a
sleep of 50 ms).  One checkpoint a second is made in every second run.  Printed: size over the
model's, the time that a worker's training thread spends on its part, and the median step with and
without checkpoints, in alternating runs.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import click
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from launching import mpirun

SKIP = 20


def job(folder: str, megabytes: float, minutes: float, steps: int) -> None:
    """One rank."""
    import torch

    import aladdin_mpi as am
    from aladdin_mpi.runtime import session

    am.init("aladdin", out=folder, progress="off", checkpoint_minutes=minutes)
    x = torch.nn.Parameter(torch.zeros(int(megabytes * 1e6 / 4)))
    model = torch.nn.Module()
    model.x = x
    optimizer = am.DistributedOptimizer(torch.optim.SGD([x], lr=0.1, momentum=0.9), model)
    x.grad = torch.full_like(x, 1e-6)
    cuts = session._current().cuts
    make, times = cuts.make, []

    def timed(number: int) -> None:
        start = time.perf_counter()
        make(number)
        times.append(time.perf_counter() - start)

    cuts.make = timed
    for _ in range(steps):
        time.sleep(0.05)
        optimizer.step()
    am.finish(model)
    if am.rank() == 0 and times:
        print("lost", len(times), statistics.median(times), flush=True)


def run(megabytes: float, minutes: float, steps: int) -> tuple[float, float, int, float]:
    """Median step [s], seconds lost per part, parts, bytes of a checkpoint over the model's."""
    from aladdin_mpi.record.reading import open_rank_file, rank_path
    from aladdin_mpi.runtime import checkpoint

    with tempfile.TemporaryDirectory() as folder:
        argv = [sys.executable, __file__, "job", folder, str(megabytes), str(minutes), str(steps)]
        shown = mpirun(3, argv, timeout=600).stdout.split()
        steps_s = []
        for rank in (1, 2):
            with open_rank_file(rank_path(folder, rank)) as file:
                steps_s.append(file["steps"][SKIP:]["step_s"])
        size, count, lost = 0.0, 0, 0.0
        if number := checkpoint.latest(Path(folder)):
            whole = Path(folder) / "checkpoints" / f"{number:06d}"
            size = sum(path.stat().st_size for path in whole.iterdir()) / (megabytes * 1e6)
        if "lost" in shown:
            at = shown.index("lost")
            count, lost = int(shown[at + 1]), float(shown[at + 2])
        return float(np.median(np.concatenate(steps_s))), lost, count, size


@click.group(invoke_without_command=True, help=__doc__)
@click.option("--rounds", default=3, show_default=True)
@click.option("--steps", default=200, show_default=True)
@click.pass_context
def main(context: click.Context, rounds: int, steps: int) -> None:
    if context.invoked_subcommand:
        return
    click.echo(
        "| MB | size / model | parts | a worker loses, ms | step without, ms | with | ratio |"
    )
    click.echo("|---|---|---|---|---|---|---|")
    for megabytes in (8.0, 80.0):
        off, on, lost, parts, size = [], [], [], 0, 0.0
        for _ in range(rounds):
            off.append(run(megabytes, 0.0, steps)[0])
            step, took, count, size = run(megabytes, 1 / 60, steps)
            on.append(step)
            lost.append(took)
            parts += count
        a, b = statistics.median(off), statistics.median(on)
        click.echo(
            f"| {megabytes:.0f} | {size:.2f} | {parts} | {1e3 * statistics.median(lost):.2f} | "
            f"{1e3 * a:.2f} | {1e3 * b:.2f} | {b / a:.3f} |"
        )


@main.command("job", hidden=True)
@click.argument("folder")
@click.argument("numbers", nargs=3, type=float)
def run_job(folder: str, numbers: tuple[float, float, float]) -> None:
    job(folder, numbers[0], numbers[1], int(numbers[2]))


if __name__ == "__main__":
    main()
