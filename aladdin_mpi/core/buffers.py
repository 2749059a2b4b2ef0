"""The way of a model's buffers from a GPU to the host, not waited for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from aladdin_mpi.core.staging import Stage

__all__ = ["BufferReading", "BufferStaging", "Placed"]


class Placed(NamedTuple):
    """A buffer, and where it begins in the vector of all of its kind: floats, or integers."""

    buffer: torch.Tensor
    is_float: bool
    start: int


class _Group:
    """Buffers of one kind on one device, one after the other in a stage."""

    def __init__(self, placed: Sequence[Placed]) -> None:
        self.buffers = [p.buffer for p in placed]
        self.is_float = placed[0].is_float
        self.runs: list[tuple[int, int, int]] = []  # start in the vector, in the stage, elements
        self.size = 0
        for p in placed:
            length = p.buffer.numel()
            if self.runs and sum(self.runs[-1][::2]) == p.start:
                first, at, so_far = self.runs[-1]
                self.runs[-1] = (first, at, so_far + length)
            else:
                self.runs.append((p.start, self.size, length))
            self.size += length

    def new_stage(self) -> _StageOfGroup:
        return _StageOfGroup(self)


class _StageOfGroup(Stage):
    """A stage with a view for each buffer."""

    def __init__(self, group: _Group) -> None:
        dtype = torch.float32 if group.is_float else torch.int64
        super().__init__(group.size, dtype, group.buffers[0].device)
        self._group = group
        parts = self.device.split([b.numel() for b in group.buffers])
        self._views = [p.view(b.shape) for p, b in zip(parts, group.buffers, strict=True)]

    def read(self) -> None:
        """Begin to copy the buffers to the host."""
        torch._foreach_copy_(self._views, self._group.buffers)
        self.fetch()

    def take(self, floats: np.ndarray, counts: np.ndarray) -> None:
        """Put them where they belong in the vector of their kind."""
        out, host = floats if self._group.is_float else counts, self.host.numpy()
        for start, at, length in self._group.runs:
            out[start : start + length] = host[at : at + length]


class BufferReading:
    """A copy of buffers on its way to the host."""

    def __init__(
        self, stages: list[_StageOfGroup], give_back: Callable[[list[_StageOfGroup]], None]
    ) -> None:
        self._stages, self._give_back = stages, give_back
        for stage in stages:
            stage.read()

    def take(self, floats: np.ndarray, counts: np.ndarray) -> bool:
        """Put the buffers, as they were, where they belong in the vectors of all; False where they
        are not there yet.
        """
        if not all(stage.done() for stage in self._stages):
            return False
        for stage in self._stages:
            stage.take(floats, counts)
        self._give_back(self._stages)
        return True


class BufferStaging:
    """What buffers are copied through: as many stages as copies are under way at once."""

    def __init__(self, placed: Sequence[Placed]) -> None:
        kinds: dict[tuple[torch.device, bool], list[Placed]] = {}
        for p in placed:
            kinds.setdefault((p.buffer.device, p.is_float), []).append(p)
        self._groups = [_Group(members) for members in kinds.values()]
        self._free: deque[list[_StageOfGroup]] = deque()

    def read(self) -> BufferReading:
        """Begin to copy all of them to the host."""
        stages = self._free.popleft() if self._free else [g.new_stage() for g in self._groups]
        return BufferReading(stages, self._free.append)
