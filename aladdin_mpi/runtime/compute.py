"""Forward and backward pass of our own training loop, timed apart, and evaluation."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

__all__ = ["Compute", "EmulatedCompute", "Evaluation", "Gradients", "Placement", "evaluate"]

EMULATED_GRADIENT = 1e-4


class Gradients(NamedTuple):
    """What the passes since the last step cost and gave; NaN: unknown.

    ``loss`` is the mean over the batches, ``forward_s`` and ``backward_s`` [s] are sums.
    """

    loss: float
    forward_s: float
    backward_s: float


class Evaluation(NamedTuple):
    """Mean loss, share of correct answers (0 to 1), and how long it took [s]."""

    loss: float
    accuracy: float
    duration_s: float


@dataclass(frozen=True)
class Placement:
    """Where and in which form a batch is computed."""

    device: torch.device
    bf16: bool = False
    channels_last: bool = False

    def put(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The batch on the device."""
        x = x.to(self.device, non_blocking=True)
        if self.channels_last and x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        return x, y.to(self.device, non_blocking=True)

    def autocast(self) -> AbstractContextManager[object]:
        """The precision of a forward pass."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.bf16)


class _Clock(Protocol):
    def mark(self) -> None: ...

    def take(self) -> list[float]:
        """[s] between the marks since the last call."""


class _HostClock:
    def __init__(self) -> None:
        self._marks: list[float] = []

    def mark(self) -> None:
        self._marks.append(time.perf_counter())

    def take(self) -> list[float]:
        marks, self._marks = self._marks, []
        return [b - a for a, b in pairwise(marks)]


class _CudaClock:
    """Events in the stream: the host's clock would time the launching of kernels."""

    def __init__(self) -> None:
        self._marks: list[torch.cuda.Event] = []

    def mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def take(self) -> list[float]:
        marks, self._marks = self._marks, []
        marks[-1].synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in pairwise(marks)]


class Compute:
    """Forward and backward passes with the cross-entropy loss.

    Parameters
    ----------
    model : Module
    place : Placement
    accumulate : int
        Batches whose gradients are averaged into one step.
    """

    def __init__(self, model: nn.Module, place: Placement, accumulate: int = 1) -> None:
        self._model = model
        self._place = place
        self._accumulate = accumulate
        self._clock: _Clock = _CudaClock() if place.device.type == "cuda" else _HostClock()
        self._losses: list[Tensor] = []

    def __call__(self, x: Tensor, y: Tensor) -> None:
        """Add the gradients of a batch, divided by the number of accumulated batches."""
        x, y = self._place.put(x, y)
        self._clock.mark()
        with self._place.autocast():
            loss = cross_entropy(self._model(x), y)
        self._clock.mark()
        (loss / self._accumulate).backward()
        self._clock.mark()
        self._losses.append(loss.detach())

    def take(self) -> Gradients:
        """Loss and times since the last call."""
        losses, self._losses = self._losses, []
        spans = self._clock.take()  # forward, backward, between two batches, forward, …
        return Gradients(
            float(torch.stack(losses).mean()), sum(spans[0::3]), sum(spans[1::3])
        )  # fmt: skip


class EmulatedCompute:
    """A sleep in place of both passes; gradients are small constants, nothing is learned."""

    def __init__(self, model: nn.Module, sleep_s: float) -> None:
        self._sleep_s = sleep_s
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.full_like(parameter, EMULATED_GRADIENT)

    def __call__(self, x: Tensor, y: Tensor) -> None:
        """Sleep."""
        time.sleep(self._sleep_s)

    def take(self) -> Gradients:
        """Nothing is known."""
        nan = float("nan")
        return Gradients(nan, nan, nan)


@torch.no_grad()
def evaluate(
    model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], place: Placement
) -> Evaluation:
    """Mean cross-entropy and accuracy of ``model``, which is left in the mode it was in."""
    start = time.perf_counter()
    was_training = model.training
    model.eval()
    loss = torch.zeros((), dtype=torch.float64)
    correct = count = 0
    for x, y in batches:
        x, y = place.put(x, y)
        with place.autocast():
            scores = model(x)
        loss += cross_entropy(scores.float(), y, reduction="sum").double().cpu()
        correct += int((scores.argmax(dim=1) == y).sum())
        count += len(y)
    model.train(was_training)
    duration_s = time.perf_counter() - start
    return Evaluation(float(loss) / max(count, 1), correct / max(count, 1), duration_s)
