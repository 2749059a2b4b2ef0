"""Train over the public API with integer steps, so that the right global model is known exactly.

Every optimizer step adds integers, multiples of the number of workers and different on each worker,
to the parameters and counts what it has added.  Since mixes are not pushed, the final global model
must be the start plus the mean of what the workers have added.  Forward and backward run on a small
batch; the time that a real model would need is emulated by a sleep (and logged as emulated).

Files in ``--control``: the script writes ``ready-<worker>`` when training begins; while there is
``slow-<worker>`` it computes as many times slower as that says; it ends when there is ``end``, and
then saves ``start``, ``added-<worker>`` and ``final-<worker>``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import aladdin_mpi as am

HIDDEN, CLASSES, BATCH = 500, 10, 8


class IntegerSteps(torch.optim.Optimizer):
    """Adds integers in place of a descent; :meth:`added` tells what."""

    def __init__(self, model: torch.nn.Module, workers: int, worker: int) -> None:
        parameters = list(model.parameters())
        super().__init__(parameters, {"lr": 1.0})
        values = torch.tensor([1.0, -1.0, 2.0, -2.0, 3.0]).roll(worker)
        self._patterns = [
            workers * values.repeat(p.numel() // 5 + 1)[: p.numel()].view_as(p) for p in parameters
        ]
        self._count = worker
        self._sum = 0  # of the patterns' factors

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        factor = 1 + self._count % 2
        self._count += 1
        self._sum += factor
        for p, pattern in zip(self.param_groups[0]["params"], self._patterns, strict=True):
            p.add_(pattern, alpha=factor)

    def added(self) -> np.ndarray:
        """Return the sum of all steps, as one vector."""
        return flat(self._patterns).astype(np.int64) * self._sum


def flat(arrays: list[Any]) -> np.ndarray:
    """Return arrays or tensors as one vector."""
    return np.concatenate([np.asarray(array).ravel() for array in arrays])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    parser.add_argument("--control", type=Path, required=True, help="folder for files, see above")
    parser.add_argument("--parameters", type=int, default=250_000, help="about how many")
    parser.add_argument("--compute-ms", type=float, default=100.0, help="emulated compute")
    parser.add_argument("--period", type=int, default=4)
    parser.add_argument("--no-coalesce", action="store_true", help="wait in place of coalescing")
    options = parser.parse_args()

    am.init(
        "aladdin", out=options.out, period=options.period, coalesce=not options.no_coalesce,
        count_leavers=False, staleness_aware=False, progress="off", threads=1,
    )  # fmt: skip
    worker = am.rank()
    inputs = max(1, round((options.parameters - CLASSES * (HIDDEN + 1)) / HIDDEN) - 1)
    model = torch.nn.Sequential(
        torch.nn.Linear(inputs, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, CLASSES)
    )
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.arange(p.numel()).remainder(7).view_as(p))
    start = flat([p.detach() for p in model.parameters()])
    optimizer = IntegerSteps(model, am.size(), worker)
    am.DistributedOptimizer(optimizer, model)
    torch.manual_seed(worker)
    x, y = torch.randn(BATCH, inputs), torch.randint(CLASSES, (BATCH,))

    control: Path = options.control
    slow, end = control / f"slow-{worker}", control / "end"
    (control / f"ready-{worker}").touch()
    while not end.exists():
        begin = time.monotonic()
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        forward_s = time.monotonic() - begin
        loss.backward()
        factor = float(slow.read_text() or 1) if slow.exists() else 1.0
        target = begin + options.compute_ms / 1e3 * factor
        time.sleep(max(0.0, target - time.monotonic()))
        am.split(forward_s, time.monotonic() - begin - forward_s, emulated=True)
        am.log(loss=loss)
        optimizer.step()
    am.finish(model)

    if worker == 0:
        np.save(control / "start.npy", start)
    np.save(control / f"added-{worker}.npy", optimizer.added())
    np.save(control / f"final-{worker}.npy", flat([p.detach() for p in model.parameters()]))


if __name__ == "__main__":
    main()
