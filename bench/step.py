"""What ALADDIN adds to a worker's step: pushes on and off in turn, in one run.

    python bench/step.py --rounds 5

Two kinds of computing, each with 8 MB and with 80 MB of parameters.  *Emulated*, a sleep of 100 ms,
with 4 workers: jobs with pushes off and on in turn.  *Real*, about 50 ms of matrix products, with 1
worker beside the server, so that each has a core: within one job, blocks of steps of the plain
optimizer and of the distributed one in turn, because the machine's speed changes between jobs.
Printed: the median step with pushes off and on, their ratio per round and its median, the seconds
blocked in all, the share coalesced.
"""

from __future__ import annotations

import csv
import statistics
import sys
import tempfile
import time
from pathlib import Path

import click
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from launching import mpirun

SKIP = 5
"""Steps at the start, of a job or of a block, that do not count."""

BLOCK = 10
"""Steps in a block of :func:`alternate` that count."""


def job(
    out: str, push: str, megabytes: float, emulated_ms: float, products: float, steps: int
) -> None:
    """A worker's training: constant gradients, so that a step costs what it costs and no more."""
    import torch

    import aladdin_mpi as am

    am.init("aladdin", push=push, out=out, progress="off")
    x = torch.nn.Parameter(torch.zeros(int(megabytes * 1e6 / 4)))
    x.grad = torch.full_like(x, 1e-6)
    model = torch.nn.Module()
    model.x = x
    optimizer = am.DistributedOptimizer(torch.optim.SGD([x], lr=0.1), model)
    a = torch.rand(256, 256)

    def compute() -> None:
        if emulated_ms:
            time.sleep(emulated_ms / 1e3)
        for _ in range(int(products)):
            a.mm(a)

    for _ in range(steps):
        compute()
        optimizer.step()
    am.finish(model)


def alternate(out: str, megabytes: float, products: float, steps: int) -> None:
    """The same with real computing, in blocks without and with pushes; prints both medians [s]."""
    import torch

    import aladdin_mpi as am

    am.init("aladdin", out=out, progress="off")
    x = torch.nn.Parameter(torch.zeros(int(megabytes * 1e6 / 4)))
    x.grad = torch.full_like(x, 1e-6)
    model = torch.nn.Module()
    model.x = x
    optimizer = am.DistributedOptimizer(torch.optim.SGD([x], lr=0.1), model)
    a = torch.rand(256, 256)
    plain = torch.optim.SGD.step
    times: dict[bool, list[float]] = {False: [], True: []}
    for block in range(2 * steps // BLOCK):
        on = bool(block % 2)
        for step in range(-SKIP, BLOCK):
            start = time.perf_counter()
            for _ in range(int(products)):
                a.mm(a)
            optimizer.step() if on else plain(optimizer)
            if step >= 0:  # the first ones still feel the other kind's pushes
                times[on].append(time.perf_counter() - start)
    am.finish(model)
    print("medians", statistics.median(times[False]), statistics.median(times[True]), flush=True)


def products_in(milliseconds: float) -> int:
    """Matrix products that take this long; counted once, so that on and off compute the same."""
    import torch

    torch.set_num_threads(1)
    a = torch.rand(256, 256)
    times = []
    for _ in range(2000):  # the first ones warm up
        start = time.perf_counter()
        a.mm(a)
        times.append(time.perf_counter() - start)
    return round(milliseconds / 1e3 / statistics.median(times))


def measure(
    workers: int, megabytes: float, emulated_ms: float, products: float, push: str, steps: int
) -> tuple[float, float, float, str]:
    """Median step [s], seconds blocked in all, share coalesced, over all workers of one job; and
    what it printed.
    """
    from aladdin_mpi.record.reading import open_rank_file, rank_path

    with tempfile.TemporaryDirectory() as folder:
        arguments = (folder, push, megabytes, emulated_ms, products, steps)
        run = mpirun(
            workers + 1, [sys.executable, __file__, "job", *map(str, arguments)], timeout=600
        )
        rows = []
        for rank in range(1, workers + 1):
            with open_rank_file(rank_path(folder, rank)) as file:
                rows.append(file["steps"][SKIP:])
    table = np.concatenate(rows)
    return (
        float(np.median(table["step_s"])), float(table["blocked_s"].sum()),
        float(table["coalesced"].mean()), run.stdout,
    )  # fmt: skip


@click.group(invoke_without_command=True, help=__doc__)
@click.option("--rounds", default=5, show_default=True)
@click.option("--steps", default=60, show_default=True)
@click.option("--only", type=click.Choice(["emulated", "real"]))
@click.option("--csv", "csv_path", type=click.Path(path_type=Path))
@click.pass_context
def main(
    context: click.Context, rounds: int, steps: int, only: str | None, csv_path: Path | None
) -> None:
    if context.invoked_subcommand:
        return
    lines = [("scene", "MB", "off_ms", "on_ms", "ratio", "ratio_min", "ratio_max", "blocked_s",
              "coalesced")]  # fmt: skip
    click.echo("| computing | workers | MB | off, ms | on, ms | on/off | blocked, s | coalesced |")
    click.echo("|---|---|---|---|---|---|---|---|")
    scenes = (("emulated, 100 ms", 4, 100.0, 0), ("real, 50 ms", 1, 0.0, products_in(50.0)))
    for scene, workers, emulated, real in scenes:
        if only and not scene.startswith(only):
            continue
        for megabytes in (8.0, 80.0):
            off, on, ratio, blocked, coalesced = [], [], [], 0.0, []
            for _ in range(rounds):
                if real:
                    mine = measure(workers, megabytes, emulated, real, "in turn", steps)
                    medians = [float(word) for word in mine[3].split()[1:3]]
                else:
                    base = measure(workers, megabytes, emulated, real, "none", steps)
                    mine = measure(workers, megabytes, emulated, real, "update", steps)
                    medians = [base[0], mine[0]]
                off.append(medians[0])
                on.append(medians[1])
                ratio.append(medians[1] / medians[0])
                blocked += mine[1]
                coalesced.append(mine[2])
            row = (
                scene, megabytes, 1e3 * statistics.median(off), 1e3 * statistics.median(on),
                statistics.median(ratio), min(ratio), max(ratio), blocked,
                statistics.mean(coalesced),
            )  # fmt: skip
            lines.append(row)
            click.echo(
                f"| {scene} | {workers} | {megabytes:.0f} | {row[2]:.1f} | {row[3]:.1f} | "
                f"{row[4]:.3f} ({row[5]:.3f} to {row[6]:.3f}) | {blocked:.3f} | {row[8]:.0%} |"
            )
    if csv_path:
        with csv_path.open("w", newline="") as file:
            csv.writer(file).writerows(lines)


@main.command("job", hidden=True)
@click.argument("out")
@click.argument("push")
@click.argument("numbers", nargs=4, type=float)
def run_job(out: str, push: str, numbers: tuple[float, float, float, float]) -> None:
    megabytes, emulated_ms, products, steps = numbers
    if push == "in turn":
        alternate(out, megabytes, products, int(steps))
    else:
        job(out, push, megabytes, emulated_ms, products, int(steps))


if __name__ == "__main__":
    main()
