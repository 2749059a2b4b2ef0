"""Copies between a GPU and the host that neither the training thread nor the compute stream waits
for.

The compute stream copies parameters aside within the GPU's memory, which is quick, and goes on.  A
stream of its own brings them to page-locked memory of the host, and the communication thread, which
asks now and then whether they are there, goes on with them.  What comes in goes the other way, and
is used at the first step that finds it on the GPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from aladdin_mpi.core import kernels

__all__ = [
    "STREAMS",
    "CudaStream",
    "HostStream",
    "Losses",
    "Mix",
    "Reading",
    "Segment",
    "Stage",
    "Staging",
]


@dataclass(frozen=True)
class Segment:
    """A run of parameters with one dtype on one device; ``start:stop`` of the flat vector."""

    flat: torch.Tensor
    start: int
    stop: int


class Stream(Protocol):
    """Copies one after the other, beside the stream that computes."""

    def follow(self) -> None:
        """What is copied from now on is copied after all that the calling thread's current stream
        has been given so far.
        """

    def copy(self, out: torch.Tensor, source: torch.Tensor) -> None:
        """Begin ``out ← source``; does not wait."""

    def done(self) -> bool:
        """All that was begun is there."""


class HostStream:
    """The CPU's: a copy is made at once."""

    def follow(self) -> None:
        """There is nothing to wait for."""

    def copy(self, out: torch.Tensor, source: torch.Tensor) -> None:
        out.copy_(source)

    def done(self) -> bool:
        return True


class CudaStream:
    """A stream of one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._copied = torch.cuda.Event()

    def follow(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def copy(self, out: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            out.copy_(source, non_blocking=True)
        self._copied.record(self._stream)

    def done(self) -> bool:
        return self._copied.query()


STREAMS: dict[str, Callable[[torch.device], Stream]] = {"cuda": CudaStream}
"""By their type, the devices whose copies are not waited for."""


class Stage:
    """Memory of one size on a device and on the host, and the stream that copies between both.

    Attributes
    ----------
    device, host : torch.Tensor, shape (size,)
        The host's is page-locked; where the device is the CPU they are one tensor.
    """

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.device = self.host = torch.zeros(size, dtype=dtype, device=device)
        self._stream: Stream = HostStream()
        if device.type in STREAMS:
            self._stream = STREAMS[device.type](device)
            self.host = _on_host(self.device)
            self.follow()  # the zeros come first, whoever copies

    def fetch(self) -> None:
        """Begin ``host ← device``, as it will be when the current stream has come so far."""
        self.follow()
        if self.host is not self.device:
            self._stream.copy(self.host, self.device)

    def send(self) -> None:
        """Begin ``device ← host``."""
        if self.host is not self.device:
            self._stream.copy(self.device, self.host)

    def follow(self) -> None:
        """The next copy waits for what the current stream was given so far."""
        self._stream.follow()

    def done(self) -> bool:
        """What was begun is there."""
        return self._stream.done()


def _on_host(like: torch.Tensor) -> torch.Tensor:
    """Memory of the host of the same size and dtype; page-locked for a GPU, in its context."""
    if like.device.type != "cuda":
        return torch.zeros(like.shape, dtype=like.dtype)
    with torch.cuda.device(like.device):
        return torch.zeros(like.shape, dtype=like.dtype, pin_memory=True)


class Reading:
    """A copy of parameters on its way to the host."""

    def __init__(
        self,
        segments: Sequence[Segment],
        stages: list[Stage],
        give_back: Callable[[list[Stage]], None],
    ) -> None:
        self._segments, self._stages, self._give_back = segments, stages, give_back
        for segment, stage in zip(segments, stages, strict=True):
            stage.device.copy_(segment.flat)
            stage.fetch()

    def done(self) -> bool:
        """It is there."""
        return all(stage.done() for stage in self._stages)

    def take(self, out: np.ndarray) -> bool:
        """``out ← x``, as x was when this was begun; whether all of it is finite.  Once, when
        :meth:`done`.
        """
        bad = 0
        for segment, stage in zip(self._segments, self._stages, strict=True):
            bad += kernels.copy_checked(out[segment.start : segment.stop], stage.host.numpy())
        self._give_back(self._stages)
        return not bad


class Mix:
    """``x ← x + α (target − s)`` under way; ``s`` is a snapshot, or x as it is then.

    :meth:`prepare`, :meth:`apply` and, if x's change is wanted, :meth:`add_change`, each when the
    one before has been made; the next mix of the same vector after that.
    """

    def __init__(self, segments: Sequence[Segment], stages: Sequence[Stage], alpha: float) -> None:
        self._segments, self._stages, self._alpha = segments, stages, alpha
        self._lagged = self._sent = False

    def prepare(self, target: np.ndarray, snapshot: np.ndarray | None) -> None:
        """Begin to send what x is to move by, or without a snapshot the target (communication
        thread).
        """
        self._lagged = snapshot is not None
        for segment, stage in zip(self._segments, self._stages, strict=True):
            part, host = slice(segment.start, segment.stop), stage.host.numpy()
            if snapshot is None:
                np.copyto(host, target[part])
            else:
                kernels.change(host, target[part], snapshot[part], self._alpha)
            stage.send()
        self._sent = True

    def apply(self, change_wanted: bool) -> bool:
        """Move x, in the current stream; False where what it needs is not there yet (training
        thread).

        A float32 x moves by what the host has, with the CPU's bits.  Else the host gets what x has
        moved by: for a narrow dtype what rounding leaves of the mix, so that the rest is not
        pushed as a step.
        """
        if not (self._sent and all(stage.done() for stage in self._stages)):
            return False
        for segment, stage in zip(self._segments, self._stages, strict=True):
            x, d = segment.flat, stage.device
            if not self._lagged:
                d.sub_(x).mul_(self._alpha)
            if x.dtype != torch.float32:
                before = x.float()
                x.add_(d.to(x.dtype))
                d.copy_(x).sub_(before)
            else:
                x.add_(d)
            if change_wanted and not (self._lagged and x.dtype == torch.float32):
                stage.fetch()
            else:
                stage.follow()
        return True

    def add_change(self, r: np.ndarray) -> bool:
        """``r += `` what x has moved by; False where that is not there yet (communication
        thread).
        """
        if not all(stage.done() for stage in self._stages):
            return False
        for segment, stage in zip(self._segments, self._stages, strict=True):
            kernels.add(r[segment.start : segment.stop], stage.host.numpy())
        return True


class Losses:
    """How many copies of a vector, or of any range of it, were not finite.

    Attributes
    ----------
    found : int
        So far (communication thread).
    noticed : int
        When the training thread's present step began, so that all ranges act in the same step.
    """

    def __init__(self) -> None:
        self.found = self.noticed = 0

    def notice(self) -> None:
        """A step begins."""
        self.noticed = self.found


class Staging:
    """What a vector's copies and mixes go through; made when they are needed, then kept.

    As many stages for copies as copies are under way at once, and one for mixes.

    Attributes
    ----------
    losses : Losses
        A range of a vector shares them with the vector.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.losses = Losses()
        self._segments = segments
        self._free: deque[list[Stage]] = deque()
        self._for_mixes: list[Stage] | None = None

    def _new(self) -> list[Stage]:
        return [Stage(s.stop - s.start, torch.float32, s.flat.device) for s in self._segments]

    def read(self) -> Reading:
        """Begin to copy the parameters to the host."""
        stages = self._free.popleft() if self._free else self._new()
        return Reading(self._segments, stages, self._free.append)

    def mix(self, alpha: float) -> Mix:
        """A mix; the one before has been made."""
        if self._for_mixes is None:
            self._for_mixes = self._new()
        return Mix(self._segments, self._for_mixes, alpha)
