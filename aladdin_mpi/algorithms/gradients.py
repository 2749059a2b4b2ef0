"""What the algorithms share in which workers push gradients and the server applies them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from aladdin_mpi.algorithms.base import Stateful
from aladdin_mpi.algorithms.pending import PendingGradients
from aladdin_mpi.core.flat import FlatParams
from aladdin_mpi.core.port import Incoming, Port

__all__ = ["GradientWorker"]


class GradientWorker(Stateful):
    """Pushes every iteration's gradient; what it waits for, and what it does with a reply, is the
    algorithm's.

    A gradient with a NaN or an infinity is replaced by zeros that carry no iteration, because
    others may wait for this worker's push.
    """

    STATE: ClassVar[tuple[str, ...]] = ("clock", "version")

    def __init__(self, config: Any, params: FlatParams, num_workers: int) -> None:
        self.pending = PendingGradients(params)
        self.clock = 0  # iterations made
        self.version = self.handled = 0  # of the last reply

    def wants_reply(self) -> bool:
        """Whether to ask for the global parameters with this push, and wait for them."""
        return True

    def take(self, params: FlatParams, reply: Incoming, port: Port) -> None:
        """Use a reply: ``x ← x̃``."""
        with port.span("mix_s"):
            params.assign(reply.vector)

    def step(
        self, params: FlatParams, local_update: Callable[[], None], port: Port, iteration: int
    ) -> None:
        good = self.pending.collect(params, port)
        self.clock += 1
        asks = self.wants_reply()
        if asks or not good:
            self._push(params, port, 1 if good else 0, asks)
        else:
            self._push(params, port, 1, asks)
            local_update()
        if not good:
            port.lost("nonfinite_push")
        if asks:
            reply = port.wait_reply()
            header = reply.header
            if reply.finite:
                self.take(params, reply, port)
                self.version = header.version
            else:
                port.lost("nonfinite_reply")
            port.mixed(header, 0, discarded=not reply.finite)
            self.handled = header.number
            reply.release()

    def finish(self, params: FlatParams, port: Port) -> None:
        self._push(params, port, 0, False, last=True)
        self.pending.close()

    def _push(
        self, params: FlatParams, port: Port, iterations: int, asks: bool, last: bool = False
    ) -> None:
        port.wait_push(1 if last else port.slots)
        port.try_push(
            lambda out: self.pending.write(params, port, out, None), iterations, limit=port.slots,
            wants_reply=asks, handled=self.handled, version=self.version, last=last,
        )  # fmt: skip
