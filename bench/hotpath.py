"""Where the time of a server and of its workers goes, and what they allocate per message.

    python bench/hotpath.py

ALADDIN with a server and 8 workers on one host, 1, 10 and 100 MB of parameters.  Computing is
*emulated*, a sleep.  Each thread's time is split exactly: the functions of the hot path are
wrapped, and what a function does not hand on to another counts as its own.  Shares are those of
the clock; times per push or step, and rates, those for which the thread had a core.  Rates count
what is read and written: a merge of k pushes k + 2 payloads, a copy 2, a search for NaN 1.  A
second job of each size traces allocations.  The first half of the steps does not count.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
import tracemalloc
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from launching import mpirun

from aladdin_mpi.core import kernels

WORKERS = 8
SIZES = {1: (20, 400), 10: (100, 160), 100: (1500, 40)}
"""[MB]: [ms] of computing, steps."""

SKIP = 0.5
"""Share of the steps, at the start, that does not count."""


OUTSIDE, LOOP = "asleep, or what is not wrapped", "the loop's own"


class Spans:
    """The time of one thread by label, exclusive: wall [s], with a core [s], calls."""

    generation = 0
    of: dict[int, Spans] = {}

    def __init__(self) -> None:
        self.name, self.stack = threading.current_thread().name, [OUTSIDE]
        self.mine = -1
        self.since = self.cpu = 0.0

    @classmethod
    def here(cls) -> Spans:
        ident = threading.get_ident()
        if ident not in cls.of:
            cls.of[ident] = Spans()
        return cls.of[ident]

    def move(self) -> None:
        """What has passed is the innermost label's."""
        now, cpu = time.perf_counter(), time.thread_time()
        if self.mine != Spans.generation:
            self.mine = Spans.generation
            self.wall: defaultdict[str, float] = defaultdict(float)
            self.core: defaultdict[str, float] = defaultdict(float)
            self.calls: Counter[str] = Counter()
        else:
            self.wall[self.stack[-1]] += now - self.since
            self.core[self.stack[-1]] += cpu - self.cpu
        self.since, self.cpu = now, cpu

    def run(self, label: str, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        self.move()
        self.calls[label] += 1
        self.stack.append(label)
        try:
            return call(*args, **options)
        finally:
            self.move()
            self.stack.pop()

    def taken(self) -> dict[str, dict[str, float]]:
        return {"wall": dict(self.wall), "core": dict(self.core), "calls": dict(self.calls)}


def wrap(owner: Any, name: str, label: str) -> None:
    """Have the calls of a method counted."""
    original = getattr(owner, name)

    def timed(*args: Any, **options: Any) -> Any:
        return Spans.here().run(label, original, *args, **options)

    setattr(owner, name, timed)


def resident() -> dict[str, int]:
    """[bytes] in memory now, and the most since :func:`begin`."""
    with open("/proc/self/status", encoding="ascii") as file:
        found = dict(line.split(":", 1) for line in file)
    return {key: int(found[key].split()[0]) * 1024 for key in ("VmRSS", "VmHWM")}


class Measured:
    """What one process measures from :meth:`begin` to :meth:`end`."""

    def __init__(self, path: Path, traced: bool) -> None:
        self.path, self.traced = path, traced
        self.begun = self.ended = False

    def begin(self) -> None:
        self.begun = True
        Spans.generation += 1
        if self.traced:
            tracemalloc.start()
        Path("/proc/self/clear_refs").write_text("5")  # the most is counted from here
        self.before = resident()["VmRSS"]
        self.start = time.perf_counter()

    def end(self, more: Callable[[], dict[str, Any]]) -> None:
        """Write what was measured, and what ``more`` then adds."""
        self.ended = True
        took = time.perf_counter() - self.start
        new = peak = blocks = 0
        if self.traced:
            new, peak = tracemalloc.get_traced_memory()
            blocks = len(tracemalloc.take_snapshot().traces)
            tracemalloc.stop()
        threads = {s.name: s.taken() for s in Spans.of.values() if s.mine == Spans.generation}
        found = {
            "took": took, "threads": threads, "new": new, "peak": peak, "blocks": blocks,
            "risen": resident()["VmHWM"] - self.before, **more(),
        }  # fmt: skip
        self.path.write_text(json.dumps(found))


def memory_copy() -> float:
    """[bytes/s] read and written by one thread where no cache helps."""
    a, b = (np.ones(16 << 20, np.float32) for _ in range(2))
    times = []
    for _ in range(5):
        start = time.thread_time()
        kernels.copy(b, a)
        times.append(time.thread_time() - start)
    return (a.nbytes + b.nbytes) / min(times)


def watch_server(measured: Measured, skip: int) -> None:
    """Instrument what a server runs; ``skip`` pushes do not count."""
    from aladdin_mpi.comm import receiver
    from aladdin_mpi.record import recorder
    from aladdin_mpi.runtime import globals as models
    from aladdin_mpi.runtime import server

    sleep = time.sleep
    server.time = SimpleNamespace(  # type: ignore[assignment]
        monotonic=time.monotonic, sleep=lambda s: Spans.here().run("idle", sleep, s)
    )
    wrap(receiver.ServerLink, "progress", "driving MPI")
    wrap(receiver.ServerLink, "requests", "driving MPI")
    wrap(receiver.ServerLink, "notify", "driving MPI")
    wrap(receiver.ServerChannel, "arrivals", "driving MPI")
    wrap(receiver.ServerChannel, "send_replies", "driving MPI")
    wrap(receiver.ServerChannel, "reply_frame", "driving MPI")
    wrap(receiver.ServerChannel, "reply_done", "driving MPI")
    wrap(models.GlobalModel, "copy_to", "copying replies")
    wrap(models.GlobalModel, "_merge", "merging")
    wrap(recorder.Recorder, "add", "logging")
    wrap(server.ServerLoop, "turn", LOOP)
    handle, seen, passes = models.GlobalModel.handle, Counter(), []

    def counted(self: Any, frames: Any) -> Any:
        found = handle(self, frames)
        handled, _, made = found
        seen["pushes"] += len(handled)
        if measured.begun and not measured.ended:
            passes.extend(one.merged for one in made)
            seen["counted"] += len(handled)
            if any(one.push.last for one in handled):
                size = 4 * self.frame.params.size
                measured.end(lambda: {
                    "passes": passes, "pushes": seen["counted"], "payload": size,
                    "copy_bytes_per_s": memory_copy(),
                })  # fmt: skip
        elif not measured.begun and seen["pushes"] >= skip:
            measured.begin()
        return found

    models.GlobalModel.handle = counted  # type: ignore[method-assign]


def watch_worker() -> None:
    """Instrument what a worker's two threads run."""
    import torch

    from aladdin_mpi.algorithms import pending
    from aladdin_mpi.comm import mailbox, sender, thread
    from aladdin_mpi.core import vector, wire
    from aladdin_mpi.record import recorder
    from aladdin_mpi.runtime import worker

    wrap(worker.Driver, "step", "the step's own")
    wrap(torch.optim.SGD, "step", "SGD")
    wrap(vector.FlatVector, "read_finite", "copy of x, searched for NaN")
    wrap(vector.FlatVector, "mix", "mixing")
    wrap(recorder.Recorder, "add", "logging")
    wrap(wire.Frame, "take_difference", "x − r, r ← x")
    wrap(pending.PendingUpdate, "_follow", "r follows a mix")
    wrap(mailbox.Outbox, "put", "putting")
    wrap(mailbox.Outbox, "advance", "putting")
    wrap(sender.Received, "__init__", "searching replies for NaN")
    wrap(thread.CommThread, "_progress", "driving MPI")
    post = thread.CommThread.post

    def labelled(self: Any, call: Any, *args: Any) -> None:
        def run() -> None:
            label = "snapshots" if call is np.copyto else "commands' own"
            Spans.here().run(label, call, *args)

        post(self, run)

    thread.CommThread.post = labelled  # type: ignore[method-assign]


def job(out: str, megabytes: float, compute_ms: float, steps: int, traced: bool) -> None:
    """What each rank runs."""
    import torch

    import aladdin_mpi as am

    folder, skip = Path(out), int(SKIP * steps)
    measured = Measured(folder / f"{os.getpid()}.json", traced)
    watch_server(measured, WORKERS * skip)
    watch_worker()
    am.init("aladdin", out=folder / "run", progress="off")
    x = torch.nn.Parameter(torch.zeros(int(megabytes * 1e6 / 4)))
    x.grad = torch.full_like(x, 1e-6)
    model = torch.nn.Module()
    model.x = x
    optimizer = am.DistributedOptimizer(torch.optim.SGD([x], lr=0.1), model)
    for step in range(steps):
        if step == skip:
            measured.begin()
        time.sleep(compute_ms / 1e3 * (0.9 + 0.2 * ((step + am.rank()) % 2)))
        optimizer.step()
    measured.end(lambda: {"steps": steps - skip})
    am.finish(model)


def measure(megabytes: float, compute_ms: float, steps: int, traced: bool) -> list[dict[str, Any]]:
    """A job; what its ranks measured, the server first."""
    from aladdin_mpi.record.reading import open_rank_file, rank_path

    with tempfile.TemporaryDirectory() as folder:
        argv = [sys.executable, __file__, "job", folder, megabytes, compute_ms, steps, traced]
        mpirun(WORKERS + 1, [str(part) for part in argv], timeout=900)
        found = []
        for rank in range(WORKERS + 1):
            with open_rank_file(rank_path(Path(folder) / "run", rank)) as file:
                pid = int(file.attrs["pid"])
            found.append(json.loads((Path(folder) / f"{pid}.json").read_text()))
    return found


def split(rows: list[dict[str, Any]], thread: str, per: str) -> dict[str, str]:
    """By label, the largest first: share of a thread's time, and time with a core for each push or
    step; means over processes.
    """
    wall: Counter[str] = Counter()
    core: Counter[str] = Counter()
    for row in rows:
        one = row["threads"][thread]
        total = sum(one["wall"].values())
        for label, took in one["wall"].items():
            wall[label] += took / total / len(rows)
            core[label] += one["core"][label] / row[per] / len(rows)
    return {
        label: f"{share:.1%}, {1e3 * core[label]:.3f} ms" for label, share in wall.most_common()
    }


def table(title: str, columns: dict[int, dict[str, str]]) -> None:
    """Print rows of labels against the sizes."""
    click.echo(f"\n| {title} | " + " | ".join(f"{size} MB" for size in columns) + " |")
    click.echo("|---" * (len(columns) + 1) + "|")
    for label in dict.fromkeys(label for column in columns.values() for label in column):
        cells = (column.get(label, "–") for column in columns.values())
        click.echo(f"| {label} | " + " | ".join(cells) + " |")


def rates(server: dict[str, Any]) -> dict[str, str]:
    """What a server's passes did, and how fast."""
    core, calls = (server["threads"]["MainThread"][key] for key in ("core", "calls"))
    payload, passes = server["payload"], server["passes"]
    copy = server["copy_bytes_per_s"]
    merge = sum(k + 2 for k in passes) * payload / core["merging"]
    reply = 2 * calls["copying replies"] * payload / core["copying replies"]
    return {
        "pushes merged per second": f"{server['pushes'] / server['took']:.1f}",
        "pushes per pass, mean (most)": f"{np.mean(passes):.2f} ({max(passes)})",
        "memory copy, alone [GB/s]": f"{copy / 1e9:.1f}",
        "merging, to that": f"{merge / copy:.2f}",
        "copying replies, to that": f"{reply / copy:.2f}",
    }


def allocations(rows: list[dict[str, Any]], timed: list[dict[str, Any]]) -> dict[str, str]:
    """What was allocated while messages were handled."""
    server, workers = rows[0], rows[1:]
    payload = server["payload"]
    peak = max(row["peak"] for row in workers)
    return {
        "payload [kB]": f"{payload / 1e3:.0f}",
        "server: pushes traced": f"{server['pushes']}",
        "server: most new memory at once [kB]": f"{server['peak'] / 1e3:.0f}",
        "server: kept per push [bytes], [objects]": (
            f"{server['new'] / server['pushes']:.0f}, {server['blocks'] / server['pushes']:.1f}"
        ),
        "worker: steps traced": f"{workers[0]['steps']}",
        "worker: most new memory at once [kB]": f"{peak / 1e3:.0f}",
        "server: resident memory risen, untraced [payloads]": f"{timed[0]['risen'] / payload:.3f}",
        "worker: the same": f"{max(row['risen'] for row in timed[1:]) / payload:.3f}",
    }


@click.group(invoke_without_command=True, help=__doc__)
@click.option("--size", "chosen", multiple=True, type=click.Choice([str(s) for s in SIZES]))
@click.pass_context
def main(context: click.Context, chosen: tuple[str, ...]) -> None:
    if context.invoked_subcommand:
        return
    sizes = [int(size) for size in chosen] or list(SIZES)
    timed, traced = ({s: measure(s, *SIZES[s], trace) for s in sizes} for trace in (False, True))
    for title, rows, thread, per in (
        ("server: share, per push", slice(1), "MainThread", "pushes"),
        ("training thread: share, per step", slice(1, None), "MainThread", "steps"),
        ("communication thread: share, per step", slice(1, None), "aladdin-sender", "steps"),
    ):
        table(title, {s: split(timed[s][rows], thread, per) for s in sizes})
    table("the server's passes", {s: rates(timed[s][0]) for s in sizes})
    table("allocation", {s: allocations(traced[s], timed[s]) for s in sizes})
    computing = ", ".join(f"{SIZES[s][0]} ms with {s} MB" for s in sizes)
    click.echo(f"\nEmulated computing: {computing}. Load at the end: {os.getloadavg()[0]:.1f}.")


@main.command("job", hidden=True)
@click.argument("out")
@click.argument("megabytes", type=float)
@click.argument("compute_ms", type=float)
@click.argument("steps", type=int)
@click.argument("traced", type=bool)
def run_job(out: str, megabytes: float, compute_ms: float, steps: int, traced: bool) -> None:
    job(out, megabytes, compute_ms, steps, traced)


if __name__ == "__main__":
    main()
