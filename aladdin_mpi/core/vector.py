"""A float32 vector over the memory of parameters: what is read, moved and mixed in single passes.

What travels, and what the servers hold, is float32 whatever the parameters are: Δ/n would vanish in
bfloat16.  Float32 memory on the CPU is worked on in place.  Any other dtype or device goes through
a float32 vector in host memory, the *shadow*, that is gathered before a difference and scattered
after a mix.  What lies on a GPU can also be copied and mixed without waiting
(:mod:`~aladdin_mpi.core.staging`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from aladdin_mpi.core import kernels
from aladdin_mpi.core.staging import STREAMS, Segment, Staging

__all__ = ["ALIGN", "ELEMENTS", "FlatVector", "Segment", "aligned_zeros"]

ALIGN = 64
"""[bytes] alignment of every vector and of every parameter in it."""

ELEMENTS = ALIGN // 4


def aligned_zeros(size: int, dtype: type = np.float32) -> np.ndarray:
    """Zeros that begin on a 64-byte border."""
    itemsize = np.dtype(dtype).itemsize
    raw = np.zeros(size * itemsize + ALIGN, np.uint8)
    start = -raw.ctypes.data % ALIGN
    return raw[start : start + size * itemsize].view(dtype)


class FlatVector:
    """Parameters as one vector.

    Parameters
    ----------
    segments : sequence of Segment
        What it consists of, without gaps.
    shadow : ndarray of float32, optional
        Where it is kept if the segments are not float32 on the CPU; default: memory of its own.

    Attributes
    ----------
    segments : list of Segment
    size : int
        Elements of the vector, padding included.
    x : ndarray of float32, shape (size,)
        The parameters: their own memory, or the shadow.
    direct : bool
        All of them are float32 on the CPU: there is no shadow.
    staging : Staging or None
        Where some are on a GPU: the way to copy and to mix without waiting.
    """

    def __init__(self, segments: Sequence[Segment], shadow: np.ndarray | None = None) -> None:
        self.segments = list(segments)
        self.size = self.segments[-1].stop
        only = self.segments[0]
        waits = all(segment.flat.device.type not in STREAMS for segment in self.segments)
        self.staging = None if waits else Staging(self.segments)
        self.direct = (
            waits
            and len(self.segments) == 1
            and only.flat.dtype == torch.float32
            and only.flat.device.type == "cpu"
        )
        if self.direct:
            self.x = only.flat.numpy()
        else:
            self.x = aligned_zeros(self.size) if shadow is None else shadow
        self._before: np.ndarray | None = None
        self._gather()

    def new_vector(self) -> np.ndarray:
        """Zeros of the vector's size, float32, aligned."""
        return aligned_zeros(self.size)

    def _gather(self) -> None:
        if not self.direct:
            x = torch.from_numpy(self.x)
            for segment in self.segments:
                x[segment.start : segment.stop].copy_(segment.flat)

    def assign(self, values: np.ndarray) -> None:
        """``x ← values`` (float32, shape (size,)), in place."""
        np.copyto(self.x, values)
        if not self.direct:
            x = torch.from_numpy(self.x)
            for segment in self.segments:
                segment.flat.copy_(x[segment.start : segment.stop])

    def swap(self, values: np.ndarray) -> Callable[[], None]:
        """``x ← values``; returns what brings x back.  ``values`` may be where x is kept meanwhile,
        so that nobody else may use them until then.
        """
        if self.direct:
            kernels.swap(self.x, values)
            return partial(kernels.swap, self.x, values)
        saved = [segment.flat.clone() for segment in self.segments]
        self.assign(values)

        def back() -> None:
            for segment, copy in zip(self.segments, saved, strict=True):
                segment.flat.copy_(copy)

        return back

    def read(self, out: np.ndarray) -> None:
        """``out ← x``."""
        np.copyto(out, self.gathered())

    def gathered(self) -> np.ndarray:
        """:attr:`x`, up to date; to be read only."""
        self._gather()
        return self.x

    def read_finite(self, out: np.ndarray) -> bool:
        """``out ← x``, in one pass; returns whether there is no NaN and no infinity in it."""
        return not kernels.copy_checked(out, self.gathered())

    def difference(self, r: np.ndarray, out: np.ndarray) -> bool:
        """``out ← x − r``, ``r ← x``, in one pass.

        Where the difference is not finite, the parameters go back to ``r`` as it was, and False is
        returned: the steps since the last push are thrown away.
        """
        bad = kernels.difference(self.gathered(), r, out)
        if bad:
            kernels.restore(self.x, r, out)
            self.assign(self.x)
        return not bad

    def mix(self, alpha: float, target: np.ndarray, snapshot: np.ndarray | None) -> None:
        """``x ← x + α (target − s)``; ``s`` is the snapshot, or else ``x``.

        ``target`` becomes what x has moved by.
        """
        self._gather()
        if not self.direct:
            if self._before is None:
                self._before = aligned_zeros(self.size)
            np.copyto(self._before, self.x)
        if snapshot is None:
            kernels.mix_plain(self.x, target, alpha)
        else:
            kernels.mix_lagged(self.x, target, snapshot, alpha)
        if self._before is not None:
            self._scatter_change(self._before, target)

    def _scatter_change(self, before: np.ndarray, change: np.ndarray) -> None:
        """Add ``change`` to the parameters, and make it what their rounding leaves of it.

        Without the latter, the part of a mix that a narrow dtype rounds away would be pushed as a
        step.
        """
        x, old, moved = (torch.from_numpy(a) for a in (self.x, before, change))
        for segment in self.segments:
            part = slice(segment.start, segment.stop)
            segment.flat.add_(moved[part].to(segment.flat.device).to(segment.flat.dtype))
            x[part] = segment.flat.float().cpu()
            moved[part] = x[part] - old[part]
