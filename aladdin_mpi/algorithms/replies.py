"""A worker's account of its replies: when to ask, which push one refers to, what was handled."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from aladdin_mpi.algorithms.base import Stateful
from aladdin_mpi.algorithms.pending import Pending
from aladdin_mpi.core.flat import FlatParams
from aladdin_mpi.core.port import Port
from aladdin_mpi.core.snapshots import Snapshots
from aladdin_mpi.messages import Reply

__all__ = ["Replies"]

ALLOWED_LAG = 4
"""Iterations beside the period before a reply counts as old."""


class _Late(NamedTuple):
    """A reply that is still to be mixed in, by a call that tells whether it was; and the iteration
    of the push that it names.
    """

    header: Reply
    made_at: int
    apply: Callable[[], bool]


class Replies(Stateful):
    """Asks once per ``period`` iterations.

    Parameters
    ----------
    one_outstanding : bool
        Ask for nothing while a reply is due, so that no correction is applied twice.
    keep : bool
        Keep the parameters at the pushes that a reply may name.
    aware : bool
        Make smaller steps while the last reply is old.

    Attributes
    ----------
    handled, version : int
        Number of the last reply mixed in or thrown away; version of the last one mixed in.
    age : int
        Iterations since the push that the last reply mixed in names; before that, of all.
    """

    STATE = ("since_ask", "age", "version")

    def __init__(
        self, params: FlatParams, period: int, one_outstanding: bool, keep: bool, aware: bool
    ) -> None:
        self.period, self.one_outstanding, self.keep = period, one_outstanding, keep
        self.aware = aware
        self.snapshots = Snapshots(params, 3 if keep else 0)
        self.since_ask = self.age = 0  # iterations since the push that asked last; see above
        self.asked = self.sequence = 0  # that push; the last push of all
        self.due = False  # its reply was not handled yet
        self.handled = self.version = 0
        self._late: _Late | None = None

    def count(self) -> float:
        """One iteration more; returns by what to multiply its step.

        Workers that hear nothing of each other move apart, the faster the larger their steps are.
        As in Zhang et al., Staleness-aware Async-SGD, IJCAI 2016, a step is divided by the age;
        here by what of it the period does not explain, and by each worker for itself.
        """
        self.since_ask += 1
        self.age += 1
        return min(1.0, (self.period + ALLOWED_LAG) / self.age) if self.aware else 1.0

    def wanted(self) -> bool:
        """The next push should ask."""
        return self.since_ask >= self.period and not (self.one_outstanding and self.due)

    def snapshot(self, asks: bool, beyond: int) -> np.ndarray | None:
        """Where the next push should leave a copy of the parameters, if a reply may name it.

        A reply names the push that asked for it, or one of the ``beyond`` next.
        """
        may_be_named = asks or (self.due and self.sequence < self.asked + beyond)
        return self.snapshots.lend() if self.keep and may_be_named else None

    def pushed(self, sequence: int, asks: bool, snapshot: bool, iteration: int) -> None:
        """Push ``sequence`` is on its way, made at ``iteration``."""
        self.sequence = sequence
        if snapshot:
            self.snapshots.keep(sequence, iteration)
        if asks:
            self.since_ask, self.asked, self.due = 0, sequence, True

    def mix_all(self, params: FlatParams, pending: Pending, port: Port, iteration: int) -> None:
        """Mix in what has arrived: ``x ← x + α (x̃ − s)``; ``s`` is the snapshot, or else ``x``.

        Where x lies on a GPU, what has arrived there, one reply at a time.
        """
        if not self._mix_late(port, iteration):
            return
        while (reply := port.take_reply()) is not None:
            header = reply.header
            s, made_at = self.snapshots.take(header.sequence) or (None, iteration)
            if not reply.finite:
                port.lost("nonfinite_reply")
                reply.release()
                self._handle(header, port, iteration - made_at, discarded=True)
                continue
            with port.span("mix_s"):
                apply = pending.mix(params, port, header.alpha, reply, s)
            if apply is None:
                self._handle(header, port, iteration - made_at, discarded=False)
            else:
                self._late = _Late(header, made_at, apply)
                if not self._mix_late(port, iteration):
                    return

    def _mix_late(self, port: Port, iteration: int) -> bool:
        """Mix in the reply that is still to be; False if that cannot be yet."""
        late = self._late
        if late is not None:
            with port.span("mix_s"):
                if not late.apply():
                    return False
            self._late = None
            self._handle(late.header, port, iteration - late.made_at, discarded=False)
        return True

    def _handle(self, header: Reply, port: Port, lag: int, *, discarded: bool) -> None:
        """A reply was mixed in, or thrown away."""
        if not discarded:
            self.version, self.age = header.version, lag
        port.mixed(header, lag, discarded=discarded)
        self.handled = header.number
        self.due = not self.one_outstanding and header.sequence < self.asked
        if not self.due:
            self.snapshots.clear()
