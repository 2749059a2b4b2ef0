"""What the algorithms share in which workers exchange messages with one another."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import numpy as np

from aladdin_mpi.algorithms.base import Stateful
from aladdin_mpi.core import kernels
from aladdin_mpi.core.flat import FlatParams
from aladdin_mpi.core.port import PeerIncoming, PeerPort

__all__ = ["GossipWorker"]


class GossipWorker(Stateful):
    """Takes messages in, and ends only when all others have ended and nothing is under way.

    Attributes
    ----------
    made : int
        Iterations made.
    """

    STATE: ClassVar[tuple[str, ...]] = ("made",)

    def __init__(self, params: FlatParams) -> None:
        self.made = 0
        self.vector = params.new_vector()

    def absorb(self, params: FlatParams, port: PeerPort, message: PeerIncoming) -> float:
        """Mix a finite message in; returns the weight that it got."""
        raise NotImplementedError

    def total(self, params: FlatParams) -> float:
        """Fill ``vector`` with this worker's weighted parameters; returns the weight."""
        params.read(self.vector)
        return 1.0

    def absorb_all(self, params: FlatParams, port: PeerPort) -> None:
        """Take in what has arrived."""
        while (message := port.take()) is not None:
            header, weight = message.header, 0.0
            if message.finite:
                with port.span("mix_s"):
                    weight = self.absorb(params, port, message)
            else:
                port.lost("nonfinite_reply")
            port.absorbed(
                header, weight, self.made - header.iteration, discarded=not message.finite
            )
            message.release()

    def wait_until(self, condition: Callable[[], bool], params: FlatParams, port: PeerPort) -> None:
        """Wait, taking messages in, so that nobody waits for a buffer of this worker."""
        self.absorb_all(params, port)
        while not condition():
            port.wait()
            self.absorb_all(params, port)

    def finish(self, params: FlatParams, port: PeerPort) -> None:
        """End together; everybody then has the weighted mean of all workers' parameters."""
        port.leave(self.made)
        self.wait_until(port.all_ended, params, port)
        self.absorb_all(params, port)
        self.settle(params, port)

    def settle(self, params: FlatParams, port: PeerPort) -> None:
        """``x`` becomes the weighted mean of all workers'.  Collective."""
        (total,) = port.sum(self.vector, self.total(params))
        self.vector /= total
        params.assign(self.vector)

    def undo_bad_step(self, params: FlatParams, r: np.ndarray, port: PeerPort) -> None:
        """After a local step: back to ``r`` if it made a NaN or an infinity."""
        if kernels.count_nonfinite(params.gathered()):
            params.assign(r)
            port.lost("nonfinite_push")
