"""How a message lies in memory: the frame.

A frame is one contiguous stretch of bytes, the same in a worker's staging buffer, in a slot of the
server's window and in a reply: header, parameters (float32, or as an :mod:`encoding
<aladdin_mpi.core.encoding>` has them), float32 and int64 buffers, headers of the parts, trailer.
Every part begins on a 64-byte border.  The trailer repeats the sequence number; a reader that
finds another number there than in the header has read a torn message.  It also says how many
elements of the payload are NaN or infinite: whoever makes a payload counts them on the way, so that
nobody who merges it has to look.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from aladdin_mpi.core.encoding import PLAIN, Encoding
from aladdin_mpi.core.vector import ALIGN, aligned_zeros
from aladdin_mpi.messages import (
    FRAME_HEADER,
    FRAME_HEADER_BYTES,
    MAX_GROUPS,
    PeerHeader,
    Push,
    Reply,
)

__all__ = ["Arrival", "Frame", "FrameLayout"]

_NO_RATES = np.zeros(MAX_GROUPS)
_NOTHING = np.zeros(0, np.float32)
_TURNS = count()
_NEAR = 4096
"""[bytes] of a gap that travels rather than make two parts."""


def _up(offset: int) -> int:
    return -(-offset // ALIGN) * ALIGN


@dataclass(frozen=True)
class FrameLayout:
    """Sizes of the parts, in elements; the offsets follow from them."""

    size: int
    floats: int = 0
    counts: int = 0
    encoding: Encoding = PLAIN
    parts: int = 0

    @property
    def floats_at(self) -> int:
        return FRAME_HEADER_BYTES + self.encoding.nbytes(self.size)

    @property
    def counts_at(self) -> int:
        return self.floats_at + _up(4 * self.floats)

    @property
    def parts_at(self) -> int:
        return self.counts_at + _up(8 * self.counts)

    @property
    def trailer_at(self) -> int:
        return self.parts_at + FRAME_HEADER_BYTES * self.parts

    @property
    def frame_bytes(self) -> int:
        """[bytes] of a whole frame, a multiple of 64."""
        return self.trailer_at + ALIGN

    def new_frame(self) -> Frame:
        """A frame of zeros in memory of its own, with room to stage parameters in float32."""
        frame = Frame(self, aligned_zeros(self.frame_bytes, np.uint8))
        if frame.params is not frame.payload:
            frame.params = aligned_zeros(self.size)
        return frame


class Frame:
    """Views of one frame's memory; nothing is copied.

    Attributes
    ----------
    raw : ndarray of uint8, shape (frame_bytes,)
    header : ndarray of FRAME_HEADER, shape (1,)
    payload : object
        The parameters as they travel (see :meth:`Encoding.view
        <aladdin_mpi.core.encoding.Encoding.view>`).
    params : ndarray of float32, shape (size,)
        The payload itself, or, in a frame of one's own, where it is staged; else empty.
    floats : ndarray of float32, shape (layout.floats,)
    counts : ndarray of int64, shape (layout.counts,)
    parts : ndarray of FRAME_HEADER, shape (layout.parts,)
        Of the workers whose pushes were merged into this one, or whom a reply is for.
    encoding : Encoding
        Of the payload.
    """

    __slots__ = (
        "_tail", "_trailer", "counts", "encoding", "floats", "header", "params", "parts",
        "payload", "raw",
    )  # fmt: skip

    def __init__(self, layout: FrameLayout, raw: np.ndarray) -> None:
        self.raw = raw
        self.header = raw[:FRAME_HEADER_BYTES].view(FRAME_HEADER)
        self.encoding = layout.encoding
        self.payload = layout.encoding.view(raw[FRAME_HEADER_BYTES : layout.floats_at], layout.size)
        plain = layout.encoding == PLAIN
        self.params: np.ndarray = self.payload if plain else _NOTHING
        self._tail = at = layout.floats_at
        self.floats = raw[at : at + 4 * layout.floats].view(np.float32)
        at = layout.counts_at
        self.counts = raw[at : at + 8 * layout.counts].view(np.int64)
        self.parts = raw[layout.parts_at : layout.trailer_at].view(FRAME_HEADER)
        at = layout.trailer_at
        self._trailer = raw[at : at + 16].view(np.int64)

    @property
    def nonfinite(self) -> int:
        """How many elements of the payload are NaN or infinite, as who made it says."""
        return int(self._trailer[1])

    @nonfinite.setter
    def nonfinite(self, count: int) -> None:
        self._trailer[1] = count

    def take_difference(self, r: np.ndarray) -> None:
        """The payload becomes :attr:`params` − r, which moves by what the payload says."""
        self.nonfinite = self.encoding.take(self.params, r, self.payload, next(_TURNS))

    def encode(self) -> None:
        """The payload becomes :attr:`params`, which are finite, rounded."""
        self.nonfinite = self.encoding.encode(self.params, self.payload)

    def stretches(self) -> list[tuple[int, int]]:
        """[bytes] ``(start, stop)`` of what has to travel, once the payload is there: all but the
        unused room of a sparse payload.
        """
        found = [(0, FRAME_HEADER_BYTES)]
        inside = [
            (FRAME_HEADER_BYTES + a, FRAME_HEADER_BYTES + b)
            for a, b in self.encoding.used(self.payload)
        ]
        for a, b in (*inside, (self._tail, self.raw.size)):
            if a - found[-1][1] < _NEAR:
                found[-1] = (found[-1][0], b)
            else:
                found.append((a, b))
        return found

    def intact(self, sequence: int) -> bool:
        """Header and trailer both carry ``sequence``."""
        return int(self.header["sequence"][0]) == sequence == int(self._trailer[0])

    def write_push(self, push: Push) -> None:
        """Fill in header and trailer."""
        rates = _NO_RATES
        if push.rates:
            rates = np.zeros(MAX_GROUPS)
            rates[: len(push.rates)] = push.rates
        self.header[0] = (
            push.sequence, push.worker, push.iterations, push.samples, push.handled,
            push.wants_reply, push.version, push.last, push.active, 0, push.made, push.cut, 0,
            0.0, push.iteration_s, push.loss, rates,
        )  # fmt: skip
        self._trailer[0] = push.sequence

    def write_merged(self, relay: int, sequence: int, count: int) -> None:
        """Fill in header and trailer of a relay's message with ``count`` parts."""
        header = self.header[0]
        header["sequence"], header["worker"], header["parts"] = sequence, relay, count
        header["cut"] = self.parts["cut"][0]
        self._trailer[0] = sequence

    def read_push(self, num_rates: int) -> Push:
        """The header of a push that carries ``num_rates`` learning rates."""
        return _push(self.header[0].item(), num_rates)

    def read_pushes(self, num_rates: int) -> list[Push]:
        """Those that a relay has merged into this one, or the only one."""
        count = int(self.header["parts"][0])
        if not count:
            return [self.read_push(num_rates)]
        rows = self.parts[:count].tolist()
        return [_push(h, num_rates)._replace(left_out=not h[12]) for h in rows]

    def write_reply(self, reply: Reply) -> None:
        """Fill in header and trailer."""
        _write_reply(self.header[0], reply)
        self._trailer[0] = reply.sequence

    def write_replies(self, replies: Sequence[tuple[int, Reply]]) -> None:
        """The same for some workers, whose relay it goes to."""
        for (worker, reply), part in zip(replies, self.parts, strict=False):
            part["worker"] = worker
            _write_reply(part, reply)
        self.write_reply(replies[0][1])
        self.header["parts"][0] = len(replies)

    def write_peer(self, peer: PeerHeader) -> None:
        """Fill in header and trailer."""
        header = self.header[0]
        header["sequence"] = peer.sequence
        header["worker"] = peer.worker
        header["iterations"] = peer.iteration
        header["alpha"] = peer.weight
        header["wants_reply"] = not peer.answer
        self._trailer[0] = peer.sequence

    def read_peer(self) -> PeerHeader:
        """The header of a message from worker to worker."""
        h = self.header[0]
        return PeerHeader(
            int(h["worker"]), int(h["iterations"]), float(h["alpha"]), not h["wants_reply"],
            int(h["sequence"]),
        )  # fmt: skip

    def read_reply(self, worker: int = -1) -> Reply:
        """The header of a reply; where it has parts, ``worker``'s."""
        h = self.header[0]
        count = int(h["parts"])
        if count and worker >= 0:
            h = self.parts[self.parts["worker"][:count].tolist().index(worker)]
        return Reply(
            int(h["number"]), int(h["version"]), int(h["sequence"]), float(h["alpha"]),
            int(h["clock"]),
        )  # fmt: skip


def _push(h: Sequence[Any], num_rates: int) -> Push:
    """A header's fields as a push."""
    return Push(
        sequence=h[0], worker=h[1], iterations=h[2], samples=h[3], handled=h[4],
        wants_reply=bool(h[5]), version=h[6], last=bool(h[7]), active=h[8], made=h[10],
        cut=h[11], iteration_s=h[14], loss=h[15], rates=tuple(h[16][:num_rates].tolist()),
    )  # fmt: skip


def _write_reply(header: Any, reply: Reply) -> None:
    header["sequence"] = reply.sequence
    header["number"] = reply.number
    header["version"] = reply.version
    header["alpha"] = reply.alpha
    header["clock"] = reply.clock


class Arrival(NamedTuple):
    """A message that lies in a slot, valid until it is acknowledged."""

    origin: int
    sequence: int
    frame: Frame
