"""What adding up the pushes of a node does to the training of one of its workers: in a thread of
the same process, and in a process of its own.

    python bench/relay.py --rounds 9

Real computing (a perceptron, one thread).  Meanwhile four payloads are added up as a relay does it,
as often as a full link would ask for that.  Blocks of plain training, of training beside a thread
and beside a process take turns; printed are a step's median against plain training in the same
round, and how long the thread was busy at a stretch: for so long, a communication thread could not
acknowledge, answer or send.
"""

from __future__ import annotations

import multiprocessing
import statistics
import threading
import time
from collections.abc import Callable
from multiprocessing.synchronize import Event as ProcessEvent

import click
import numpy as np

MEMBERS = 4


class Relay:
    """Adds up payloads, until ``over``."""

    def __init__(self, megabytes: float, pause_s: float) -> None:
        size = int(megabytes * 1e6 / 4)
        self._payloads = [np.ones(size, np.float32) for _ in range(MEMBERS)]
        self._sum = np.zeros(size, np.float32)
        self._pause_s = pause_s
        self.stretches: list[float] = []

    def run(self, over: threading.Event | ProcessEvent) -> None:
        from aladdin_mpi.core import kernels

        while not over.wait(self._pause_s):
            start = time.perf_counter()
            self._sum.fill(0.0)
            kernels.merge(self._sum, self._payloads, [1.0] * MEMBERS)
            self.stretches.append(time.perf_counter() - start)


def aside(megabytes: float, pause_s: float, over: ProcessEvent) -> None:
    """A process that adds up."""
    Relay(megabytes, pause_s).run(over)


def trainer() -> Callable[[], None]:
    """A step of about 50 ms."""
    import torch

    torch.set_num_threads(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(784, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = torch.randn(1024, 784), torch.randint(10, (1024,))

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def block(step: Callable[[], None], steps: int) -> float:
    """[ms] the median step of a block."""
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


@click.command(help=__doc__)
@click.option("--rounds", default=9, show_default=True)
@click.option("--steps", default=40, show_default=True, help="Of a block.")
@click.option("--megabytes", default=8.0, show_default=True)
@click.option("--pause-ms", default=64.0, show_default=True, help="Between two messages.")
def main(rounds: int, steps: int, megabytes: float, pause_ms: float) -> None:
    from aladdin_mpi.core import kernels

    kernels.warm_up()
    step, relay = trainer(), Relay(megabytes, pause_ms / 1e3)
    spawning = multiprocessing.get_context("spawn")
    block(step, 10)
    ratios: dict[str, list[float]] = {"thread": [], "process": []}
    for _ in range(rounds):
        plain = block(step, steps)
        over = threading.Event()
        thread = threading.Thread(target=relay.run, args=(over,))
        thread.start()
        ratios["thread"].append(block(step, steps) / plain)
        over.set()
        thread.join()
        ended = spawning.Event()
        process = spawning.Process(target=aside, args=(megabytes, pause_ms / 1e3, ended))
        process.start()
        time.sleep(2.0)  # it imports
        ratios["process"].append(block(step, steps) / plain)
        ended.set()
        process.join()
    click.echo(f"{MEMBERS} payloads of {megabytes:g} MB every {pause_ms:g} ms, {rounds} rounds")
    for name, values in ratios.items():
        click.echo(
            f"step beside a {name}: {statistics.median(values):.3f} of plain training "
            f"({min(values):.3f} to {max(values):.3f})"
        )
    busy = [1e3 * value for value in relay.stretches]
    click.echo(f"busy at a stretch: {statistics.median(busy):.1f} ms, at most {max(busy):.1f} ms")


if __name__ == "__main__":
    main()
