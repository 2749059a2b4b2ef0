"""The ranks' program of the experiments about time: computing is slept, messages are real.

The model is a chain of equal layers.  A pass sleeps through one layer after the other, a third of
the time forward and two thirds backward, about a GPU's proportion, and the gradient of a layer is
there when its share of the backward pass is over: whoever sends gradients early can.  As on a GPU,
the passes do not stop while a hook works: each layer ends at its time, not a while after the last.

Files in ``control``: every worker writes ``ready-<worker>`` when it trains; while there is
``slow-<worker>`` it computes as many times slower as that says; it ends when there is ``end``.
On SIGUSR2 it says where its threads are.
"""

from __future__ import annotations

import faulthandler
import json
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import aladdin_mpi as am

LAYERS = 16
FORWARD = 1 / 3
GRADIENT = 1e-6


@dataclass
class Clock:
    """When a pass is over, layer by layer.

    ``end`` is when the last layer was: DDP's waiting in the backward pass is not computing.
    """

    compute_s: float
    begin: float = 0.0
    end: float = 0.0
    factor: float = 1.0

    def wait(self, share: float) -> None:
        """Sleep until a share of both passes is over."""
        left = self.begin + share * self.compute_s * self.factor - time.monotonic()
        if left > 0:
            time.sleep(left)
        self.end = time.monotonic()


class Slept(torch.autograd.Function):
    """A layer that takes its time."""

    @staticmethod
    def forward(
        ctx: Any, token: torch.Tensor, weight: torch.Tensor, layer: Layer, number: int
    ) -> torch.Tensor:
        ctx.layer, ctx.number = layer, number
        layer.clock.wait(FORWARD * (number + 1) / LAYERS)
        return token.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        done = LAYERS - ctx.number
        ctx.layer.clock.wait(FORWARD + (1 - FORWARD) * done / LAYERS)
        return gradients[0], ctx.layer.gradient, None, None


class Layer(torch.nn.Module):
    """``parameters`` numbers, and the passes through them."""

    def __init__(self, parameters: int, number: int, clock: Clock) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(parameters))
        self.gradient = torch.full((parameters,), GRADIENT)
        self.clock, self._number = clock, number

    def forward(self, token: torch.Tensor) -> torch.Tensor:
        return Slept.apply(token, self.weight, self, self._number)


def main(out: Path, control: Path, megabytes: float, compute_ms: float, options: str) -> None:
    """``options`` are those of ``init()``, as JSON."""
    faulthandler.register(signal.SIGUSR2)
    clock = Clock(compute_ms / 1e3)
    am.init(out=out, progress="off", threads=1, **json.loads(options))
    worker = am.rank()
    model = torch.nn.Sequential(
        *(Layer(round(megabytes * 1e6 / 4 / LAYERS), number, clock) for number in range(LAYERS))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = am.DistributedOptimizer(optimizer, model)
    token = torch.zeros(1, requires_grad=True)
    slow, end = control / f"slow-{worker}", control / "end"
    (control / f"ready-{worker}").touch()
    while not end.exists():
        clock.factor = float(slow.read_text() or 1) if slow.exists() else 1.0
        optimizer.zero_grad()
        clock.begin = begin = time.monotonic()
        result = model(token).sum()
        between = time.monotonic()
        result.backward()
        am.split(between - begin, clock.end - between, emulated=True)
        optimizer.step()
    am.finish(model)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]), sys.argv[5])
