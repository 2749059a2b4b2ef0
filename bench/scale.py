"""What several servers give where one server's link is the limit, on virtual hosts.

    python bench/scale.py servers --rounds 3 --csv servers.csv
    python bench/scale.py nodes --rounds 3 --csv nodes.csv
    python bench/scale.py wires --rounds 3 --csv wires.csv
    python bench/scale.py shards

``servers``: four workers push as fast as the servers' links take it (their own are faster), to one,
two and four servers in turn, every rank on a host of its own; computing is emulated by sleeping.
Printed are the bytes that all servers took in per second, and how idle the machine's cores were
meanwhile: all hosts share them.  ``nodes``: eight workers on two hosts, with and without
``--merge-on-node``; bytes are those of the server's network device.  ``wires``: the same link with
each encoding of pushes.  ``shards``: what a VGG-like model, of which two layers have nearly
everything, gives each of four servers when it is cut by memory and by layer.  As root.
"""

from __future__ import annotations

import csv
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "tests"), str(HERE / "cluster")]

import launching  # noqa: E402
from virtual_hosts import VirtualHosts  # noqa: E402

WARM_S = 3.0


def job(out: str, options: str, megabytes: float, compute_ms: float, seconds: float) -> None:
    """A worker that computes by sleeping, for some seconds; ``options`` are ``init()``'s, as
    JSON.
    """
    import torch

    import aladdin_mpi as am

    am.init(out=out, progress="off", **json.loads(options))
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
    """What a run's servers took in, [MB/s] each, and how many pushes [1/s]; the workers' median
    step [ms]; when that was.
    """

    into: list[float]
    pushes_per_s: float
    step_ms: float
    begin: float
    end: float


def load(folder: Path, ranks: int) -> Load:
    """Read it from the logs, without the start and the end."""
    from aladdin_mpi.record.reading import open_rank_file, rank_path

    steps, served = [], []
    for rank in range(ranks):
        with open_rank_file(rank_path(folder, rank)) as file:
            if file.attrs["role"] == "worker":
                steps.append(file["steps"][:])
            elif file.attrs["role"] == "server":
                served.append((file["merges"][:], file["arrivals"][:]))
    begin = max(table["start_s"][0] for table in steps) + WARM_S
    end = min(table["start_s"][-1] for table in steps)
    into, pushes = [], 0
    for merges, arrivals in served:
        inside = (merges["time_s"] >= begin) & (merges["time_s"] < end)
        into.append(float(merges["bytes"][inside].sum()) / (end - begin) / 1e6)
        pushes += int(((arrivals["time_s"] >= begin) & (arrivals["time_s"] < end)).sum())
    inside_steps = [t["step_s"][(t["start_s"] >= begin) & (t["start_s"] < end)] for t in steps]
    step_ms = 1e3 * float(np.median(np.concatenate(inside_steps)))
    return Load(into, pushes / (end - begin), step_ms, begin, end)


class Watch(threading.Thread):
    """How idle the cores are, and what a host's link has carried, twice a second, until the
    ``with`` block is left.
    """

    def __init__(self, hosts: VirtualHosts, host: str) -> None:
        super().__init__(daemon=True)
        self._hosts, self._host = hosts, host
        self._over = threading.Event()
        self._seen: list[tuple[float, float, float, int, int]] = []

    def __enter__(self) -> Watch:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        while not self._over.wait(0.5):
            with open("/proc/stat", encoding="ascii") as file:
                times = [float(word) for word in file.readline().split()[1:9]]
            carried = self._hosts.link_bytes(self._host)
            self._seen.append((time.monotonic(), times[3] + times[4], sum(times), *carried))

    def _ends(self, begin: float, end: float) -> list[tuple[float, ...]]:
        inside = [row for row in self._seen if begin <= row[0] < end]
        return [inside[0], inside[-1]]

    def idle(self, begin: float, end: float) -> float:
        """Share of the cores' time between two moments."""
        first, last = self._ends(begin, end)
        return (last[1] - first[1]) / (last[2] - first[2])

    def carried(self, begin: float, end: float) -> tuple[float, float]:
        """[MB/s] received and sent between two moments."""
        first, last = self._ends(begin, end)
        received, sent = ((last[i] - first[i]) / (last[0] - first[0]) / 1e6 for i in (3, 4))
        return received, sent


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
                Watch(hosts, "h1") as watch,
            ):
                hosts.set_rate(rate, hosts.names[:count])
                argv = [sys.executable, __file__, "job", folder + "/run"]
                argv += [json.dumps({"servers": count})]
                argv += [str(value) for value in (megabytes, compute_ms, seconds)]
                hosts.mpirun(argv, timeout=seconds + 120)
                seen = load(Path(folder) / "run", workers + count)
            idle = watch.idle(seen.begin, seen.end)
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
    write(path, [("round", "servers", "into_mb_per_s", "step_ms", "idle"), *rows])


def write(path: Path | None, rows: Sequence[Sequence[object]]) -> None:
    """Write a table, if it was asked for."""
    if path:
        with path.open("w", newline="") as file:
            csv.writer(file).writerows(rows)


class Seen(NamedTuple):
    """A run with one server on a host of its own; bytes as its network device counts them."""

    pushes_per_s: float
    in_mb_per_s: float
    out_mb_per_s: float
    step_ms: float
    idle: float

    @property
    def mb_per_push(self) -> tuple[float, float]:
        """[MB] into the server and out of it for each push that it merged."""
        return self.in_mb_per_s / self.pushes_per_s, self.out_mb_per_s / self.pushes_per_s


def one_server(
    options: dict[str, object], ranks: Sequence[int], rate: str, megabytes: float,
    compute_ms: float, seconds: float,
) -> Seen:  # fmt: skip
    """``ranks`` are those of each host; the server is the first one's."""
    with (
        tempfile.TemporaryDirectory() as folder,
        VirtualHosts(len(ranks), rate) as hosts,
        Watch(hosts, "h1") as watch,
    ):
        argv = [sys.executable, __file__, "job", folder + "/run", json.dumps(options)]
        argv += [str(value) for value in (megabytes, compute_ms, seconds)]
        hosts.mpirun(argv, timeout=seconds + 180, ranks_per_host=ranks)
        seen = load(Path(folder) / "run", sum(ranks))
    carried = watch.carried(seen.begin, seen.end)
    idle = watch.idle(seen.begin, seen.end)
    return Seen(*map(float, (seen.pushes_per_s, *carried, seen.step_ms, idle)))


@main.command("nodes")
@click.option("--rounds", default=3, show_default=True)
@click.option("--workers", default=4, show_default=True, help="On each of two hosts.")
@click.option("--rate", default="200mbit", show_default=True)
@click.option("--megabytes", default=2.0, show_default=True)
@click.option("--compute-ms", default=100.0, show_default=True)
@click.option("--seconds", default=15.0, show_default=True)
@click.option("--csv", "path", type=click.Path(path_type=Path))
def nodes(
    rounds: int, workers: int, rate: str, megabytes: float, compute_ms: float, seconds: float,
    path: Path | None,
) -> None:  # fmt: skip
    rows: list[tuple[object, ...]] = []
    found: dict[tuple[str, bool], list[Seen]] = {}
    click.echo(
        f"{launching.family()}, 2 x {workers} workers, {megabytes:g} MB, emulated compute "
        f"{compute_ms:g} ms, links {rate}"
    )
    for number in range(rounds):
        for algorithm in ("aladdin", "asp", "bsp"):
            for merge in (False, True):
                ranks = [1, *[workers + merge] * 2]
                options = {"algorithm": algorithm, "merge_on_node": merge}
                seen = one_server(options, ranks, rate, megabytes, compute_ms, seconds)
                found.setdefault((algorithm, merge), []).append(seen)
                rows.append((number, algorithm, merge, *seen))
                click.echo(f"round {number}, {algorithm}, merged {merge}: {seen}")
    click.echo(
        "| algorithm | merged | pushes/s | MB into the server per push | MB out per push "
        "| step, ms | cores idle |\n|---|---|---|---|---|---|---|"
    )
    for (algorithm, merge), runs in found.items():
        values = [statistics.median(column) for column in zip(*runs, strict=True)]
        each = [statistics.median(c) for c in zip(*(run.mb_per_push for run in runs), strict=True)]
        click.echo(
            f"| {algorithm} | {'on nodes' if merge else 'no'} | {values[0]:.1f} | {each[0]:.3f} | "
            f"{each[1]:.3f} | {values[3]:.1f} | {values[4]:.0%} |"
        )
    for algorithm in dict.fromkeys(name for name, _ in found):
        apart, merged = ([run.mb_per_push for run in found[algorithm, m]] for m in (False, True))
        ratios = [sum(a) / sum(b) for a, b in zip(apart, merged, strict=True)]
        click.echo(
            f"{algorithm}: bytes on the server's link per push divided by "
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        )
    names = ("round", "algorithm", "merged", *Seen._fields)
    write(path, [names, *rows])


@main.command("wires")
@click.option("--rounds", default=3, show_default=True)
@click.option("--workers", default=4, show_default=True)
@click.option("--rate", default="200mbit", show_default=True)
@click.option("--megabytes", default=8.0, show_default=True)
@click.option("--compute-ms", default=50.0, show_default=True)
@click.option("--seconds", default=15.0, show_default=True)
@click.option("--csv", "path", type=click.Path(path_type=Path))
def wires(
    rounds: int, workers: int, rate: str, megabytes: float, compute_ms: float, seconds: float,
    path: Path | None,
) -> None:  # fmt: skip
    from aladdin_mpi.core.encoding import find
    from aladdin_mpi.core.wire import FrameLayout

    rows: list[tuple[object, ...]] = []
    found: dict[str, list[Seen]] = {}
    click.echo(
        f"{launching.family()}, {workers} workers, {megabytes:g} MB, emulated compute "
        f"{compute_ms:g} ms, links {rate}"
    )
    for number in range(rounds):
        for wire in ("float32", "bfloat16", "float16", "topk:0.1", "topk:0.01"):
            seen = one_server(
                {"wire": wire}, [1] * (1 + workers), rate, megabytes, compute_ms, seconds
            )
            found.setdefault(wire, []).append(seen)
            rows.append((number, wire, *seen))
            click.echo(f"round {number}, {wire}: {seen}")
    click.echo(
        "| --wire | bytes of a push | pushes/s | MB/s into the server | step, ms | cores idle |\n"
        "|---|---|---|---|---|---|"
    )
    for wire, runs in found.items():
        values = [statistics.median(column) for column in zip(*runs, strict=True)]
        size = FrameLayout(int(megabytes * 1e6 / 4), encoding=find(wire)).frame_bytes
        click.echo(
            f"| {wire} | {size / 1e6:.3f} MB | {values[0]:.1f} | {values[1]:.1f} | {values[3]:.1f} "
            f"| {values[4]:.0%} |"
        )
    write(path, [("round", "wire", *Seen._fields), *rows])


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
@click.argument("options")
@click.argument("numbers", nargs=3, type=float)
def run_job(out: str, options: str, numbers: tuple[float, float, float]) -> None:
    job(out, options, *numbers)


if __name__ == "__main__":
    main()
