"""Averaging gradients over all workers in ranges, while the backward pass still runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from aladdin_mpi.comm.libraries import DDPReducer, HorovodReducer
from aladdin_mpi.core.flat import FlatParams
from aladdin_mpi.core.ready import RANGE_BYTES, Range, ReadyRanges
from aladdin_mpi.optim.adascale import Gain
from aladdin_mpi.runtime.links import PeerEnd, SumLike, WorkerLinkLike

__all__ = ["GradientReducer", "RangeReducer", "make_reducer"]


class GradientReducer(Protocol):
    """What stands behind ``PeerPort.mean_gradients``."""

    name: str

    def mean(self, contribute: bool, port: Any) -> int:
        """Wait until the gradients hold the mean of those that contribute; how many those are."""

    def close(self) -> None:
        """Training is over."""


class RangeReducer:
    """All-reduces by MPI.  Each range starts when its gradients are there, all in one order.

    ``gain``, if there is one, gets the norms of the gradients.
    A worker that has ended adds zeros until the others have ended, too.  Where somebody's gradients
    changed after their range had left (clipping, accumulation), all ranges are reduced once more.
    """

    name = "MPI"

    def __init__(
        self,
        params: FlatParams,
        end: PeerEnd,
        gain: Gain | None = None,
        bucket_bytes: int = RANGE_BYTES,
    ) -> None:
        self._params, self._end = params, end
        self._vector = params.new_vector()
        self._gain = gain
        self._square = 0.0  # ‖g_i‖², as far as its ranges have left
        self._flags = np.zeros(3)
        self._under_way: list[SumLike] = []
        self._contribute = True
        self._ready = ReadyRanges(params, self._start, bucket_bytes)

    def _start(self, part: Range) -> None:
        if self._contribute:
            self._params.copy_gradients(self._vector, part.first, part.last)
            if self._gain is not None:
                self._square += _square_norm(self._vector[part.start : part.stop])
        else:
            self._vector[part.start : part.stop] = 0.0
        self._under_way.append(self._end.start_sum(self._vector[part.start : part.stop]))

    def mean(self, contribute: bool, port: Any) -> int:
        ready = self._ready
        early = ready.announced
        self._contribute = contribute
        changed = ready.changed or bool(early and not contribute)
        ready.complete()
        with port.waits():
            self._flags[:] = contribute, changed, self._square
            self._end.start_sum(self._flags).wait()
            self._wait()
            if self._flags[1]:
                self._square = 0.0
                for part in ready.ranges:
                    self._start(part)
                self._wait()
                self._flags[2] = self._square
                self._end.start_sum(self._flags[2:]).wait()
        ready.reset()
        count = int(self._flags[0])
        if count and contribute:
            with port.span("mix_s"):
                self._vector /= count
                self._params.set_gradients(self._vector)
                self._estimate(count)
        self._contribute, self._square = True, 0.0
        return count

    def _estimate(self, count: int) -> None:
        """Take this step's gradients into the gain, where all workers contributed finite ones."""
        gain = self._gain
        if gain is not None and count == gain.num_workers and np.isfinite(self._flags[2]):
            gain.update(self._flags[2] / count, _square_norm(self._vector))

    def _wait(self) -> None:
        for under_way in self._under_way:
            under_way.wait()
        self._under_way.clear()

    def close(self) -> None:
        self._ready.close()


def _square_norm(vector: np.ndarray) -> float:
    return float(np.dot(vector, vector))


def make_reducer(
    backend: str,
    link: WorkerLinkLike,
    comm: Any,
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module | None,
    named: Sequence[tuple[str, torch.nn.Parameter]],
    params: FlatParams,
    end: PeerEnd,
    gain: Gain | None,
    bucket_bytes: int,
) -> GradientReducer:
    """The reducer of a backend: ``mpi``, ``horovod`` or ``ddp``.  Collective over the workers.

    ``bucket_bytes`` of gradients are reduced together; 0: as many as the backend likes.
    """
    if backend == "horovod":
        return HorovodReducer(comm, optimizer, named, params.passes, bucket_bytes)
    if backend == "ddp":
        return DDPReducer(link.worker, comm.size, link.exchange, model, bucket_bytes)
    return RangeReducer(params, end, gain, bucket_bytes or RANGE_BYTES)
