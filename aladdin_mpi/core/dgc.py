"""Deep gradient compression: the memory of a worker whose gradients are pushed in part.

At each push of a gradient g the worker does, with the momentum m of the steps that the server
makes::

    u ← m u + g                momentum correction
    v ← v + u                  local accumulation
    send v where |v| is among the largest; there u, v ← 0      momentum factor masking

The server then steps without momentum: ``x̃ ← x̃ − η (Σ v/n + λ/(1 − m) x̃)``, where the weight
decay λ has the factor that momentum would give it in the long run.  What is sent is chosen over
the whole range of the vector that goes to a server, by a sample; the paper chooses layer by layer.
Where a push carries the gradients of several iterations, their sum is one g.

Lin, Han, Mao, Wang & Dally, Deep Gradient Compression, ICLR 2018, arXiv:1712.01887, sec. 3 and
algorithm 4.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from aladdin_mpi.core import narrow
from aladdin_mpi.core.sparse import Dgc, first_of, sampled, threshold
from aladdin_mpi.core.vector import aligned_zeros
from aladdin_mpi.core.wire import Frame

__all__ = ["GradientMemory"]


class GradientMemory:
    """u and v of a range of the vector; used by one thread at a time.

    Parameters
    ----------
    encoding : Dgc
    size : int
        Elements of the range.
    momentum : float
        m, below 1.

    Attributes
    ----------
    u, v : ndarray of float32, shape (size,)
    """

    def __init__(self, encoding: Dgc, size: int, momentum: float) -> None:
        self._encoding, self._momentum = encoding, momentum
        self.u, self.v = aligned_zeros(size), aligned_zeros(size)

    def encode(self, frame: Frame, iteration: int) -> None:
        """The payload of ``frame`` becomes the largest elements of v, after the gradient in its
        ``params`` has been taken in.

        ``iteration`` of the worker, from 0, decides how many, and which of those that are equally
        large: no random numbers are drawn.
        """
        g, u, v, payload = frame.params, self.u, self.v, frame.payload
        fraction = self._encoding.fraction_at(iteration)
        at = sampled(g.size, iteration)
        sample = np.abs(v[at] + np.float32(self._momentum) * u[at] + g[at])
        limit = min(payload.index.size, max(1, int(np.ceil(fraction * g.size))))
        payload.count[0] = narrow.take_corrected(
            g, u, v, self._momentum, threshold(sample, fraction), first_of(g.size, iteration),
            limit, payload.index, payload.value,
        )  # fmt: skip
        frame.nonfinite = payload.nonfinite()

    @staticmethod
    def send_nothing(frame: Frame) -> None:
        """The payload of ``frame`` becomes empty: it carries no gradient."""
        frame.payload.count[0] = 0

    def state_dict(self) -> dict[str, Any]:
        return {"u": self.u, "v": self.v}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        np.copyto(self.u, state["u"])
        np.copyto(self.v, state["v"])
