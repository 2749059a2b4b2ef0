"""How far the workers' parameters are apart, measured exactly and without waiting.

Every so many of its iterations worker 0 calls a round.  Each worker hears of it by a broadcast
whose receive was posted long before, copies its parameters after the step at hand, and goes on; its
communication thread then takes part in two non-blocking sums: of the parameters, which gives the
mean, and of the squared distances to it.  So all parameters belong to about the same time, each to
the end of a step, and no training thread waits for anything but its own copy.  A worker that has
ended takes part with weight 0.  The next round is called when this one is over.
"""

from __future__ import annotations

import time

import numpy as np

from aladdin_mpi.core.flat import FlatParams
from aladdin_mpi.runtime.links import Recording, WorkerLinkLike

__all__ = ["SpreadLog"]

_OVER = -1
_CHUNK = 1 << 16


class SpreadLog:
    """Fills the table ``spreads``.

    Parameters
    ----------
    link : WorkerLinkLike
        With a communicator beside it ``spread`` (``link.beside``).
    params : FlatParams
    recorder : Recording
    every : int
        Iterations of worker 0 between two rounds.
    """

    def __init__(
        self, link: WorkerLinkLike, params: FlatParams, recorder: Recording, every: int
    ) -> None:
        self._link, self._params, self._recorder, self._every = link, params, recorder, every
        self._elements = sum(entry.size for entry in params.entries)
        self._x = params.new_vector()
        self._sum = np.zeros(params.size + 1)  # the last element counts the workers
        self._parts = np.zeros(1)
        self._call = np.zeros(1, np.int64)
        self._weight = 0.0
        self._mean_square = 0.0
        self._due = False  # a round was called that this worker has not answered
        self._calls = link.worker == 0
        self._idle = self._calls
        self._ended = False
        if not self._calls:
            link.broadcast_later("spread", self._call, self._called)

    # -- training thread --------------------------------------------------------------------------

    def after_step(self, iteration: int) -> None:
        """Call a round, or answer one; ``iteration`` counts from 0."""
        if self._idle and (iteration + 1) % self._every == 0:
            self._idle = False
            self._due = True
            self._call[0] = iteration
            self._link.broadcast_later("spread", self._call, lambda: None)
        if self._due:
            self._due = False
            self._params.read(self._x)
            self._link.post(self._begin, 1.0)

    def finish(self) -> None:
        """This worker makes no step any more."""
        self._link.post(self._end)

    # -- communication thread ---------------------------------------------------------------------

    def _called(self) -> None:
        if self._call[0] == _OVER:
            return
        if self._ended:
            self._begin(0.0)
        else:
            self._due = True

    def _end(self) -> None:
        self._ended = True
        if self._calls:
            if self._idle:
                self._over()
        elif self._due:
            self._due = False
            self._begin(0.0)

    def _over(self) -> None:
        self._idle = False
        self._call[0] = _OVER
        self._link.broadcast_later("spread", self._call, lambda: None)

    def _begin(self, weight: float) -> None:
        self._weight = weight
        np.copyto(self._sum[:-1], self._x if weight else 0.0)
        self._sum[-1] = weight
        self._link.sum_later("spread", self._sum, self._have_sum)

    def _have_sum(self) -> None:
        count, distance, square = self._sum[-1], 0.0, 0.0
        for begin in range(0, self._x.size, _CHUNK):
            mean = self._sum[begin : min(begin + _CHUNK, self._x.size)] / count
            d = self._x[begin : begin + _CHUNK] - mean
            distance += float(d @ d)
            square += float(mean @ mean)
        self._parts[0] = self._weight * distance
        self._mean_square = square
        self._link.sum_later("spread", self._parts, self._have_parts)

    def _have_parts(self) -> None:
        if not self._calls:
            self._link.broadcast_later("spread", self._call, self._called)
            return
        count, iteration = int(self._sum[-1]), int(self._call[0])
        variance = self._parts[0] / (count * self._elements)
        square = self._mean_square / self._elements
        row = (time.monotonic(), iteration, count, float(variance), square)
        self._recorder.add("spreads", row)
        if self._ended:
            self._over()
        else:
            self._idle = True
