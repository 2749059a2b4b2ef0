"""Check and measure GPU workers, on one GPU that several ranks share, in less than six minutes.

    python bench/gpu_check.py

First the tests marked ``gpu``.  Then the copies between the GPU and the host by size, through
page-locked memory and a stream of their own, and beside them a plain copy that is waited for.  Then
a server and some workers in one job: blocks of steps of the plain optimizer and of the distributed
one in turn, without waiting for the GPU inside a block.  Last, in the same job, a profiler's trace
of one worker: how long copies took, and how much of that time the GPU was computing.

Without a GPU it says so and ends with status 2.  ``--device cpu`` goes through the same calls with
the CPU as a stand-in, whose copies are made at once, to try this program: it measures no GPU.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from launching import RunFailed, mpirun  # noqa: E402

LIMIT_S = 150
"""[s] for the tests, and for the job."""

SKIP, BLOCK, TRACED = 5, 20, 20
"""Steps of a block that do not count, and that do; steps that are traced."""

WIDTH = 1024
SIZES_MB = (1, 10, 100)


def run_tests() -> int:
    """Run the tests marked ``gpu``; returns pytest's status, or 1 where they took too long."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", str(ROOT / "tests" / "unit")]
    try:
        return subprocess.run(command, cwd=ROOT, timeout=LIMIT_S, check=False).returncode
    except subprocess.TimeoutExpired:
        click.echo(f"the tests were stopped after {LIMIT_S} s", err=True)
        return 1


class Copies(NamedTuple):
    """Copies of one direction in a trace."""

    count: int
    megabytes: float
    total_ms: float
    overlapped: float
    """Share of their time in which a kernel ran."""


def overlap(events: Iterable[dict[str, Any]]) -> dict[str, Copies]:
    """What a trace of ``torch.profiler`` says of the copies between host and GPU.

    Parameters
    ----------
    events : iterable of dict
        ``traceEvents`` of the exported trace.

    Returns
    -------
    dict of str to Copies
        By direction, ``DtoH`` and ``HtoD``; none where nothing was copied.
    """
    kernels: list[tuple[float, float]] = []
    copies: dict[str, list[tuple[float, float, int]]] = {}
    for event in events:
        if event.get("ph") != "X":
            continue
        start, stop = float(event["ts"]), float(event["ts"]) + float(event["dur"])
        if event.get("cat") == "kernel":
            kernels.append((start, stop))
        elif event.get("cat") == "gpu_memcpy":
            direction = event["name"].split()[1]
            if direction in ("DtoH", "HtoD"):
                nbytes = int(event.get("args", {}).get("bytes", 0))
                copies.setdefault(direction, []).append((start, stop, nbytes))
    busy = joined(kernels)
    found = {}
    for direction, rows in copies.items():
        total = sum(stop - start for start, stop, _ in rows)
        shared = sum(
            max(0.0, min(stop, b) - max(start, a)) for start, stop, _ in rows for a, b in busy
        )
        megabytes = sum(nbytes for *_, nbytes in rows) / 1e6
        share = shared / total if total else 0.0
        found[direction] = Copies(len(rows), megabytes, total / 1e3, share)
    return found


def joined(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same times as intervals that do not overlap."""
    out: list[tuple[float, float]] = []
    for start, stop in sorted(intervals):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], stop))
        else:
            out.append((start, stop))
    return out


def stand_in() -> None:
    """From now on in this process the CPU counts as a GPU, with memory of its own."""
    from aladdin_mpi.core.staging import STREAMS, HostStream

    STREAMS["cpu"] = lambda device: HostStream()


def wait_for(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_ms(call: Callable[[], None], rounds: int = 11) -> float:
    """The median time of a call, which waits for what it began; the first two do not count."""
    times = []
    for _ in range(rounds + 2):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times[2:])


def show_copies(device: torch.device) -> None:
    """Time the copies by size."""
    from aladdin_mpi.core.staging import Stage

    click.echo("\n| MB | GPU to host, ms | host to GPU, ms | aside on the GPU, ms | plain, ms |")
    click.echo("|---|---|---|---|---|")
    for megabytes in SIZES_MB:
        size = megabytes * 250_000
        stage = Stage(size, torch.float32, device)
        x, plain = torch.zeros(size, device=device), torch.zeros(size)

        def fetch(stage: Stage = stage) -> None:
            stage.fetch()
            while not stage.done():
                pass

        def send(stage: Stage = stage) -> None:
            stage.send()
            while not stage.done():
                pass

        def aside(stage: Stage = stage, x: torch.Tensor = x) -> None:
            stage.device.copy_(x)
            wait_for(device)

        def waited(plain: torch.Tensor = plain, x: torch.Tensor = x) -> None:
            plain.copy_(x)

        cells = [f"{median_ms(call):.3f}" for call in (fetch, send, aside, waited)]
        click.echo(f"| {megabytes} | " + " | ".join(cells) + " |")


def worker(out: Path, kind: str, megabytes: float, batch: int, blocks: int) -> None:
    """One rank of the job; writes what it measured to ``worker-<index>.json``."""
    import aladdin_mpi as am

    am.init("aladdin", out=str(out / "run"), progress="off")
    if kind == "cpu":
        stand_in()
        device = torch.device("cpu")
    else:
        device = am.device()
        torch.cuda.set_device(device)
    layers = max(1, round(megabytes * 1e6 / 4 / WIDTH**2))
    torch.manual_seed(0)
    parts = [m for _ in range(layers) for m in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())]
    model = torch.nn.Sequential(*parts).to(device)
    plain = torch.optim.SGD.step
    optimizer = am.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3), model)
    x = torch.randn(batch, WIDTH, device=device)

    def step(distributed: bool) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step() if distributed else plain(optimizer)

    times: dict[bool, list[float]] = {False: [], True: []}
    for block in range(2 * blocks):
        on = bool(block % 2)
        for _ in range(SKIP):
            step(on)
        wait_for(device)
        start = time.perf_counter()
        for _ in range(BLOCK):
            step(on)
        wait_for(device)
        times[on].append((time.perf_counter() - start) / BLOCK)
    found: dict[str, Any] = {
        "without_ms": [1e3 * t for t in times[False]],
        "with_ms": [1e3 * t for t in times[True]],
    }
    if am.rank() == 0:
        with torch.profiler.profile() as profiler:
            for _ in range(TRACED):
                step(True)
            wait_for(device)
        profiler.export_chrome_trace(str(out / "trace.json"))
        events = json.loads((out / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
        found["copies"] = overlap(events)
    am.finish(model)
    (out / f"worker-{am.rank()}.json").write_text(json.dumps(found), encoding="utf-8")


def show_job(out: Path, workers: int, arguments: list[str]) -> None:
    """Run the job and print what its workers measured."""
    from aladdin_mpi.record.reading import open_rank_file, rank_path

    mpirun(workers + 1, [sys.executable, __file__, "worker", str(out), *arguments], timeout=LIMIT_S)
    rows = [json.loads((out / f"worker-{w}.json").read_text()) for w in range(workers)]
    click.echo("\n| worker | step without, ms | with, ms | with/without | blocked, s | coalesced |")
    click.echo("|---|---|---|---|---|---|")
    for index, row in enumerate(rows):
        off, on = statistics.median(row["without_ms"]), statistics.median(row["with_ms"])
        with open_rank_file(rank_path(str(out / "run"), index + 1)) as file:
            steps = file["steps"][:]
        click.echo(
            f"| {index} | {off:.2f} | {on:.2f} | {on / off:.3f} | "
            f"{steps['blocked_s'].sum():.3f} | {steps['coalesced'].mean():.0%} |"
        )
    copies = rows[0]["copies"]
    click.echo(f"\nCopies of worker 0 in {TRACED} traced steps:")
    for direction, numbers in copies.items():
        found = Copies(*numbers)
        click.echo(
            f"{direction}: {found.count} copies, {found.megabytes:.1f} MB, "
            f"{found.total_ms:.2f} ms, a kernel ran in {found.overlapped:.0%} of it"
        )
    if not copies:
        click.echo("none in the trace")


@click.group(invoke_without_command=True, help=__doc__)
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--workers", default=3, show_default=True, help="Ranks that share the GPU.")
@click.option("--megabytes", default=100.0, show_default=True, help="Parameters of the model.")
@click.option("--batch", default=4096, show_default=True)
@click.option("--blocks", default=5, show_default=True, help="Blocks of steps of each kind.")
@click.option("--tests/--no-tests", default=True, help="Run the tests marked gpu first.")
@click.option("--trace", type=click.Path(path_type=Path), help="Keep the trace in this file.")
@click.pass_context
def main(
    context: click.Context, device: str, workers: int, megabytes: float, batch: int, blocks: int,
    tests: bool, trace: Path | None,
) -> None:  # fmt: skip
    if context.invoked_subcommand:
        return
    start = time.monotonic()
    if device == "cuda" and not torch.cuda.is_available():
        click.echo(
            f"torch {torch.__version__} sees no GPU: nothing was checked or measured; run this "
            "where torch.cuda.is_available() is true",
            err=True,
        )
        sys.exit(2)
    if device == "cuda":
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        click.echo(f"torch {torch.__version__}, {len(names)} x {names[0]}")
    else:
        click.echo("the CPU stands in for a GPU: these figures say nothing about GPUs")
        stand_in()
    status = 0
    if tests:
        status = run_tests()
    show_copies(torch.device(device))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        try:
            show_job(out, workers, [device, str(megabytes), str(batch), str(blocks)])
        except RunFailed as failed:
            click.echo(str(failed), err=True)
            sys.exit(1)
        if trace is not None:
            trace.write_bytes((out / "trace.json").read_bytes())
    click.echo(f"\n{time.monotonic() - start:.0f} s in all")
    sys.exit(status)


@main.command("worker", hidden=True)
@click.argument("out", type=click.Path(path_type=Path))
@click.argument("kind")
@click.argument("megabytes", type=float)
@click.argument("batch", type=int)
@click.argument("blocks", type=int)
def run_worker(out: Path, kind: str, megabytes: float, batch: int, blocks: int) -> None:
    worker(out, kind, megabytes, batch, blocks)


if __name__ == "__main__":
    main()
