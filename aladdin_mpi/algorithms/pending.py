"""What a worker has not pushed yet: a change of its parameters, or a sum of gradients.

Both coalesce exactly: what a skipped push would have carried is part of the next one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from aladdin_mpi.core import kernels
from aladdin_mpi.core.flat import FlatParams
from aladdin_mpi.core.port import Incoming, Port
from aladdin_mpi.core.ready import Range, ReadyRanges
from aladdin_mpi.core.staging import Losses, Mix, Reading

__all__ = ["Pending", "PendingGradients", "PendingUpdate"]


class Pending(Protocol):
    """What is to be pushed, and how a reply is mixed in without being pushed itself."""

    def collect(self, params: FlatParams, port: Port) -> bool:
        """Take in this iteration's gradients, before the local update; False if they are not
        finite, or an earlier step's parameters were not.
        """

    def write(
        self, params: FlatParams, port: Port, out: np.ndarray, snapshot: np.ndarray | None,
        last: bool = False,
    ) -> bool:  # fmt: skip
        """Fill ``out``, and ``snapshot`` with the parameters; False withdraws what is not
        finite.  After the ``last`` push there is no step.
        """

    def mix(
        self, params: FlatParams, port: Port, alpha: float, reply: Incoming, s: np.ndarray | None
    ) -> Callable[[], bool] | None:
        """``x ← x + α (x̃ − s)``; ``s`` is the snapshot, or else ``x``.  Releases the reply.

        Where x lies on a GPU, what it returns is to be called at this step and at later ones, until
        it returns True: then x has moved.
        """

    def close(self) -> None:
        """Nothing more is pushed; the model is the user's alone."""


class PendingUpdate:
    """Δ = x − r, where r are the parameters as they have been pushed so far.

    r belongs to the communication thread, which makes Δ of the copy of x that the training thread
    leaves in the frame, and moves r along with every mix, in the order of both.

    From a GPU the copy comes later, and so does the knowledge that it is not finite: its push then
    carries Δ = 0, and x goes back to r in a later step, whose gradient is thrown away.
    """

    def __init__(self, params: FlatParams) -> None:
        self._r = params.new_vector()
        params.read(self._r)
        self._seen = 0  # losses after which x went back to r

    def collect(self, params: FlatParams, port: Port) -> bool:
        if params.staging is None or params.staging.losses.noticed <= self._seen:
            return True
        params.assign(self.pushed(port))
        self._seen = params.staging.losses.found
        return False

    def write(
        self, params: FlatParams, port: Port, out: np.ndarray, snapshot: np.ndarray | None,
        last: bool = False,
    ) -> bool:  # fmt: skip
        if params.staging is not None and not last:
            port.post(_take, params.staging.read(), out, self._r, params.staging.losses)
        elif not params.read_finite(out):
            params.assign(self.pushed(port))
            return False
        if snapshot is not None:
            port.post(np.copyto, snapshot, out)
        port.subtract(out, self._r)  # Δ = x − r, r ← x
        return True

    def pushed(self, port: Port) -> np.ndarray:
        """r, once all that was posted is done; valid until the next push, mix or restart."""
        port.wait_posted()
        return self._r

    def restart(self, params: FlatParams, port: Port, values: np.ndarray) -> None:
        """``x ← values``, ``r ← values``: the change is not pushed, and what was not pushed yet is
        given up.
        """
        params.assign(values)
        params.read(self.pushed(port))

    def mix(
        self, params: FlatParams, port: Port, alpha: float, reply: Incoming, s: np.ndarray | None
    ) -> Callable[[], bool] | None:
        if params.staging is not None:
            return _later(params.staging.mix(alpha), port, reply, s, self._r)
        params.mix(alpha, reply.vector, s)
        port.post(self._follow, reply)
        return None

    def _follow(self, reply: Incoming) -> None:
        kernels.add(self._r, reply.vector)  # what x has moved by
        reply.release()

    def close(self) -> None:
        """There are no hooks."""


class PendingGradients:
    """Σ g since the last push.

    Where nothing is on its way and nothing was left over, ranges of g travel while the backward
    pass still runs, from the second step on.
    """

    def __init__(self, params: FlatParams) -> None:
        self.total = params.new_vector()
        self._empty = True
        self._ready: ReadyRanges | None = None
        self._frame: np.ndarray | None = None  # of this step's push, begun early
        self._whole = False

    def _watch(self, params: FlatParams, port: Port) -> ReadyRanges:
        def announce(part: Range) -> None:
            if part is ready.ranges[0] and self._empty:
                self._frame = port.early_frame()
            if self._frame is not None:
                params.copy_gradients(self._frame, part.first, part.last)
                port.send_range(part.start, part.stop)

        ready = ReadyRanges(params, announce)
        return ready

    def collect(self, params: FlatParams, port: Port) -> bool:
        if self._ready is None and params.streams:
            self._ready = self._watch(params, port)
        if self._frame is not None and self._ready is not None and not self._ready.changed:
            self._ready.complete()
            self._whole = not kernels.count_nonfinite(self._frame)
            finite = self._whole
            if not finite:
                self._abandon(port)
        else:
            self._abandon(port)
            params.add_gradients(self.total)
            self._empty = False
            finite = not kernels.count_nonfinite(self.total)
            if not finite:
                self._clear()
        if self._ready is not None:
            self._ready.reset()
        return finite

    def _abandon(self, port: Port) -> None:
        if self._frame is not None:
            self._frame = None
            port.abandon()

    def _clear(self) -> None:
        self.total.fill(0.0)
        self._empty = True

    def write(
        self, params: FlatParams, port: Port, out: np.ndarray, snapshot: np.ndarray | None,
        last: bool = False,
    ) -> bool:  # fmt: skip
        if snapshot is not None and params.staging is not None:
            port.post(_take, params.staging.read(), snapshot)
        elif snapshot is not None:
            params.read(snapshot)
        if not self._whole:  # else it is there already
            self._abandon(port)
            np.copyto(out, self.total)
            self._clear()
        self._frame, self._whole = None, False
        return True

    def mix(
        self, params: FlatParams, port: Port, alpha: float, reply: Incoming, s: np.ndarray | None
    ) -> Callable[[], bool] | None:
        if params.staging is not None:
            return _later(params.staging.mix(alpha), port, reply, s, None)
        params.mix(alpha, reply.vector, s)
        reply.release()
        return None

    def close(self) -> None:
        if self._ready is not None:
            self._ready.close()


def _take(
    reading: Reading, out: np.ndarray, r: np.ndarray | None = None, losses: Losses | None = None
) -> bool:
    """``out ← x`` once it has come from the GPU, False before that; or else ``out ← r``."""
    if not reading.done():
        return False
    if not reading.take(out) and r is not None and losses is not None:
        np.copyto(out, r)
        losses.found += 1
    return True


def _later(
    mix: Mix, port: Port, reply: Incoming, s: np.ndarray | None, r: np.ndarray | None
) -> Callable[[], bool]:
    """Begin a mix on a GPU, and return what makes it when all is there; r moves as x does."""

    def prepare() -> None:
        mix.prepare(reply.vector, s)
        reply.release()

    def apply() -> bool:
        moved = mix.apply(change_wanted=r is not None)
        if moved and r is not None:
            port.post(mix.add_change, r)
        return moved

    port.post(prepare)
    return apply
