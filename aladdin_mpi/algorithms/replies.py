"""A worker's account of its replies: when to ask, which push one refers to, what was handled."""

from __future__ import annotations

import numpy as np

from aladdin_mpi.algorithms.base import Stateful
from aladdin_mpi.algorithms.pending import Pending
from aladdin_mpi.core.flat import FlatParams
from aladdin_mpi.core.port import Port
from aladdin_mpi.core.snapshots import Snapshots

__all__ = ["Replies"]


class Replies(Stateful):
    """Asks once per ``period`` iterations.

    Parameters
    ----------
    one_outstanding : bool
        Ask for nothing while a reply is due, so that no correction is applied twice.
    keep : bool
        Keep the parameters at the pushes that a reply may name.

    Attributes
    ----------
    handled, version : int
        Number of the last reply mixed in or thrown away; version of the last one mixed in.
    """

    STATE = ("since_ask", "version")

    def __init__(self, params: FlatParams, period: int, one_outstanding: bool, keep: bool):
        self.period, self.one_outstanding, self.keep = period, one_outstanding, keep
        self.snapshots = Snapshots(params, 2 if keep else 0)
        self.since_ask = 0  # iterations since the push that asked last
        self.asked = self.sequence = 0  # that push; the last push of all
        self.due = False  # its reply was not handled yet
        self.handled = self.version = 0

    def wanted(self) -> bool:
        """The next push should ask."""
        return self.since_ask >= self.period and not (self.one_outstanding and self.due)

    def snapshot(self, asks: bool, slots: int) -> np.ndarray | None:
        """Where the next push should leave a copy of the parameters, if a reply may name it.

        A reply names the push that asked for it, or, where there are several ``slots``, one that
        was merged together with that.
        """
        may_be_named = asks or (slots > 1 and self.due and self.sequence == self.asked)
        return self.snapshots.lend() if self.keep and may_be_named else None

    def pushed(self, sequence: int, asks: bool, snapshot: bool, iteration: int) -> None:
        """Push ``sequence`` is on its way, made at ``iteration``."""
        self.sequence = sequence
        if snapshot:
            self.snapshots.keep(sequence, iteration)
        if asks:
            self.since_ask, self.asked, self.due = 0, sequence, True

    def mix_all(self, params: FlatParams, pending: Pending, port: Port, iteration: int) -> None:
        """Mix in what has arrived: ``x ← x + α (x̃ − s)``; ``s`` is the snapshot, or else ``x``."""
        while (reply := port.take_reply()) is not None:
            header, finite = reply.header, reply.finite
            s, made_at = self.snapshots.take(header.sequence) or (None, iteration)
            if finite:
                with port.span("mix_s"):
                    pending.mix(params, port, header.alpha, reply, s)
                self.version = header.version
            else:
                port.lost("nonfinite_reply")
                reply.release()
            port.mixed(header, iteration - made_at, discarded=not finite)
            self.handled = header.number
            self.due = not self.one_outstanding and header.sequence < self.asked
            if not self.due:
                self.snapshots.clear()
