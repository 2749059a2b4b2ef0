"""What several servers give where one server's link is the limit, on virtual hosts.

    python bench/scale.py servers --rounds 3 --csv servers.csv
    python bench/scale.py shards

``servers``: four workers push as fast as the servers' links take it (their own are faster), to one,
two and four servers in turn, every rank on a host of its own; computing is emulated by sleeping.
Printed are the bytes that all servers took in per second, and how idle the machine's cores were
meanwhile: all hosts share them.  ``shards``: what a VGG-like model, of which two layers have nearly
everything, gives each of four servers when it is cut by memory and by layer.  As root.
"""

from __future__ import annotations

import csv
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "cluster")]

import launching  # noqa: E402
from virtual_hosts import VirtualHosts  # noqa: E402

WARM_S = 3.0


def job(out: str, servers: int, megabytes: float, compute_ms: float, seconds: float) -> None:
    """A worker that computes by sleeping, for some seconds."""
    import torch

    import aladdin_mpi as am

    am.init("aladdin", out=out, servers=servers, progress="off")
    x = torch.nn.Parameter(torch.zeros(int(megabytes * 1e6 / 4)))
    x.grad = torch.full_like(x, 1e-6)
    model = torch.nn.Module()
    model.x = x
    optimizer = am.DistributedOptimizer(torch.optim.SGD([x], lr=0.1), model)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(compute_ms / 1e3)
        optimizer.step()
    am.finish(model)


class Load(NamedTuple):
    """What a run's servers took in: [MB/s] each, the worker's median step [ms], when that was."""

    into: list[float]
    step_ms: float
    begin: float
    end: float


def load(folder: Path, servers: int, ranks: int) -> Load:
    """Read it from the logs, without the start and the end."""
    from aladdin_mpi.record.reading import open_rank_file, rank_path

    steps = []
    for rank in range(servers, ranks):
        with open_rank_file(rank_path(folder, rank)) as file:
            steps.append(file["steps"][:])
    begin = max(table["start_s"][0] for table in steps) + WARM_S
    end = min(table["start_s"][-1] for table in steps)
    into = []
    for rank in range(servers):
        with open_rank_file(rank_path(folder, rank)) as file:
            merges = file["merges"][:]
        inside = (merges["time_s"] >= begin) & (merges["time_s"] < end)
        into.append(float(merges["bytes"][inside].sum()) / (end - begin) / 1e6)
    inside_steps = [t["step_s"][(t["start_s"] >= begin) & (t["start_s"] < end)] for t in steps]
    return Load(into, 1e3 * float(np.median(np.concatenate(inside_steps))), begin, end)


class Cores(threading.Thread):
    """How idle the cores are, twice a second, until the ``with`` block is left."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._over = threading.Event()
        self._seen: list[tuple[float, float, float]] = []

    def __enter__(self) -> Cores:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        while not self._over.wait(0.5):
            with open("/proc/stat", encoding="ascii") as file:
                times = [float(word) for word in file.readline().split()[1:9]]
            self._seen.append((time.monotonic(), times[3] + times[4], sum(times)))

    def idle(self, begin: float, end: float) -> float:
        """Share of their time between two moments."""
        inside = [row for row in self._seen if begin <= row[0] < end]
        return (inside[-1][1] - inside[0][1]) / (inside[-1][2] - inside[0][2])


@click.group(help=__doc__)
def main() -> None:
    if os.geteuid() != 0:
        raise click.ClickException("needs root")


@main.command("servers")
@click.option("--rounds", default=3, show_default=True)
@click.option("--workers", default=4, show_default=True)
@click.option("--rate", default="200mbit", show_default=True, help="Of the servers' links.")
@click.option("--worker-rate", default="1gbit", show_default=True)
@click.option("--megabytes", default=8.0, show_default=True)
@click.option("--compute-ms", default=20.0, show_default=True)
@click.option("--seconds", default=15.0, show_default=True)
@click.option("--csv", "path", type=click.Path(path_type=Path))
def servers(
    rounds: int, workers: int, rate: str, worker_rate: str, megabytes: float, compute_ms: float,
    seconds: float, path: Path | None,
) -> None:  # fmt: skip
    rows = []
    click.echo(f"{launching.family()}, {workers} workers, {megabytes:g} MB, servers' links {rate}")
    for number in range(rounds):
        for count in (1, 2, 4):
            with (
                tempfile.TemporaryDirectory() as folder,
                VirtualHosts(workers + count, worker_rate) as hosts,
                Cores() as cores,
            ):
                hosts.set_rate(rate, hosts.names[:count])
                argv = [sys.executable, __file__, "job", folder + "/run", str(count)]
                argv += [str(value) for value in (megabytes, compute_ms, seconds)]
                hosts.mpirun(argv, timeout=seconds + 120)
                seen = load(Path(folder) / "run", count, workers + count)
            idle = cores.idle(seen.begin, seen.end)
            rows.append((number, count, sum(seen.into), seen.step_ms, idle))
            click.echo(
                f"round {number}, {count} server(s): {sum(seen.into):6.1f} MB/s in "
                f"({', '.join(f'{v:.1f}' for v in seen.into)}), step {seen.step_ms:.1f} ms, "
                f"cores {idle:.0%} idle"
            )
    base = [row[2] for row in rows if row[1] == 1]
    for count in (1, 2, 4):
        ratio = [row[2] / base[row[0]] for row in rows if row[1] == count]
        click.echo(
            f"{count} server(s): {statistics.median(ratio):.2f} times one server's "
            f"({min(ratio):.2f} to {max(ratio):.2f})"
        )
    if path:
        with path.open("w", newline="") as file:
            names = ("round", "servers", "into_mb_per_s", "step_ms", "idle")
            csv.writer(file).writerows([names, *rows])


@main.command("shards")
@click.option("--servers", "count", default=4, show_default=True)
def shards(count: int) -> None:
    from aladdin_mpi.record.reading import open_rank_file, rank_path

    click.echo("| cut | bytes into each server | largest over mean |\n|---|---|---|")
    for by in ("memory", "layer"):
        with tempfile.TemporaryDirectory() as folder:
            argv = [sys.executable, "-m", "aladdin_mpi", "train", "--model", "vgg-small"]
            argv += ["--dataset", "synthetic:3x32x32:10:2000", "--emulate-compute", "50"]
            argv += ["--max-iterations", "40", "--epochs", "100", "--progress", "off"]
            argv += ["--servers", str(count), "--shard-by", by, "--out", folder + "/run"]
            launching.mpirun(count + 2, argv, timeout=300)
            into = []
            for rank in range(count):
                with open_rank_file(rank_path(Path(folder) / "run", rank)) as file:
                    into.append(float(file["merges"]["bytes"].sum()))
        cells = ", ".join(f"{value / 1e6:.1f} MB" for value in into)
        click.echo(f"| by {by} | {cells} | {max(into) / statistics.mean(into):.2f} |")


@main.command("job", hidden=True)
@click.argument("out")
@click.argument("servers", type=int)
@click.argument("numbers", nargs=3, type=float)
def run_job(out: str, servers: int, numbers: tuple[float, float, float]) -> None:
    job(out, servers, *numbers)


if __name__ == "__main__":
    main()
