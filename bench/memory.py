"""Peak memory of a worker and of a server against what is printed at the start.

    python bench/memory.py --megabytes 400 --workers 1

ALADDIN with plain SGD, so that a worker has parameters, gradients and what the package adds, and
nothing else.  Every rank notes the most anonymous memory that it had, 20 times a second; the same
with hardly any parameters is what Python and torch need, and is taken off.  The server's window is
shared memory, and shown beside it.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from launching import mpirun

KINDS = ("RssAnon", "RssShmem")


def watch(path: Path) -> None:
    """Keep the largest values of this process in a file."""
    most = dict.fromkeys(KINDS, 0)
    while True:
        with open("/proc/self/status", encoding="ascii") as file:
            found = dict(line.split(":", 1) for line in file)
        now = {kind: int(found[kind].split()[0]) * 1024 for kind in KINDS}
        if any(now[kind] > most[kind] for kind in KINDS):
            most = {kind: max(most[kind], now[kind]) for kind in KINDS}
            beside = path.with_suffix(".new")
            beside.write_text(json.dumps(most))
            beside.replace(path)
        time.sleep(0.05)


def job(out: str, megabytes: float, wire: str) -> None:
    """A few steps, an evaluation, the end."""
    import os

    import torch

    import aladdin_mpi as am

    folder = Path(out)
    target = folder / f"{os.getpid()}.json"
    threading.Thread(target=watch, args=(target,), daemon=True).start()
    am.init("aladdin", out=folder / "run", progress="off", wire=wire)
    x = torch.nn.Parameter(torch.zeros(int(megabytes * 1e6 / 4)))
    x.grad = torch.full_like(x, 1e-6)
    model = torch.nn.Module()
    model.x = x
    optimizer = am.DistributedOptimizer(torch.optim.SGD([x], lr=0.1), model)
    for _ in range(30):
        time.sleep(0.05)
        optimizer.step()
    if am.rank() == 0:
        with am.global_parameters(model):
            time.sleep(0.1)
    am.finish(model)


def measure(workers: int, megabytes: float, wire: str) -> dict[str, dict[str, int]]:
    """Largest values of the server, and of the worker that needed most [bytes]."""
    from aladdin_mpi.record.reading import open_rank_file, rank_path

    with tempfile.TemporaryDirectory() as folder:
        argv = [sys.executable, __file__, "job", folder, str(megabytes), wire]
        mpirun(workers + 1, argv, timeout=600)
        seen = []
        for rank in range(workers + 1):
            with open_rank_file(rank_path(Path(folder) / "run", rank)) as file:
                pid = int(file.attrs["pid"])
            seen.append(json.loads((Path(folder) / f"{pid}.json").read_text()))
    return {"server": seen[0], "worker": max(seen[1:], key=lambda one: one["RssAnon"])}


@click.group(invoke_without_command=True, help=__doc__)
@click.option("--megabytes", default=400.0, show_default=True)
@click.option("--workers", default=1, show_default=True)
@click.option("--wire", default="float32", show_default=True)
@click.pass_context
def main(context: click.Context, megabytes: float, workers: int, wire: str) -> None:
    if context.invoked_subcommand:
        return
    from aladdin_mpi.comm.channel import ONE_SLOT_BYTES
    from aladdin_mpi.core.encoding import find
    from aladdin_mpi.core.memory import needs
    from aladdin_mpi.core.wire import FrameLayout

    empty, full = measure(workers, 0.001, wire), measure(workers, megabytes, wire)
    size = int(megabytes * 1e6 / 4) // 16 * 16
    plain, pushed = FrameLayout(size), FrameLayout(size, encoding=find(wire))
    slots = 1 if pushed.frame_bytes > ONE_SLOT_BYTES else 2
    taken = needs(pushed.frame_bytes, plain.frame_bytes, slots, workers)
    server, worker, window = taken.server, taken.worker, taken.server_window
    own = 2 * 4 * size  # parameters and gradients, the user's own
    for name, formula, kind in (
        ("worker", worker + own, "RssAnon"),
        ("server, without its window", server - window, "RssAnon"),
        ("server's window", window, "RssShmem"),
    ):
        role = name.split(",")[0].split("'")[0]
        taken = full[role][kind] - empty[role][kind]
        click.echo(
            f"{name}: {taken / 1e6:.0f} MB, formula {formula / 1e6:.0f} MB, ratio "
            f"{taken / formula:.3f} ({megabytes:g} MB, {workers} worker(s), {wire})"
        )


@main.command("job", hidden=True)
@click.argument("out")
@click.argument("megabytes", type=float)
@click.argument("wire")
def run_job(out: str, megabytes: float, wire: str) -> None:
    job(out, megabytes, wire)


if __name__ == "__main__":
    main()
