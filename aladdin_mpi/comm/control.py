"""Small two-sided messages: requests of workers, notices of servers, and posted receives for both.

Nothing here waits.  A send keeps its buffer until ``Test`` says that it is done; a receive is
posted before the message comes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
from mpi4py import MPI

from aladdin_mpi.messages import Notice, Request, RequestKind

__all__ = [
    "NOTICE",
    "REQUEST",
    "SmallReceiver",
    "SmallSender",
    "pack_notice",
    "pack_request",
    "unpack_notice",
    "unpack_request",
]

T = TypeVar("T")

TAG_REQUEST, TAG_NOTICE = 1, 2

_VALUES = 6
REQUEST = np.dtype(
    [("kind", "i8"), ("worker", "i8"), ("phase", "i8"), ("phase_s", "f8"), ("steps", "i8"),
     ("channel", "i8"), ("values", "f8", (_VALUES,))]
)  # fmt: skip
NOTICE = np.dtype([(name, "i8") for name in Notice._fields])


def pack_request(out: np.ndarray, request: Request) -> None:
    """Write a request into a record."""
    values = np.full(_VALUES, np.nan)
    values[: len(request.values)] = request.values
    out[0] = (*request[:-1], values)


def unpack_request(record: np.ndarray) -> Request:
    """Read a request from a record."""
    fields: Any = record.item()
    return Request._make((RequestKind(fields[0]), *fields[1:-1], tuple(fields[-1].tolist())))


def pack_notice(out: np.ndarray, notice: Notice) -> None:
    """Write a notice into a record."""
    out[0] = notice


def unpack_notice(record: np.ndarray) -> Notice:
    """Read a notice from a record."""
    fields: Any = record.item()
    return Notice._make(fields)


class SmallSender:
    """Sends records of one dtype; buffers are used again once their send is done."""

    def __init__(self, comm: MPI.Comm, tag: int, dtype: np.dtype) -> None:
        self._comm, self._tag, self._dtype = comm, tag, dtype
        self._free: list[np.ndarray] = []
        self._pending: list[tuple[MPI.Request, np.ndarray, int]] = []

    def record(self) -> np.ndarray:
        """A buffer of one record to fill and pass to :meth:`send`."""
        return self._free.pop() if self._free else np.zeros(1, self._dtype)

    def send(self, record: np.ndarray, destination: int) -> None:
        """Start sending."""
        raw = record.view(np.uint8)
        request = self._comm.Isend((raw, raw.size, MPI.BYTE), destination, self._tag)
        self._pending.append((request, record, destination))

    def test(self) -> None:
        """Take back the buffers of sends that are done."""
        still = []
        for entry in self._pending:
            if entry[0].Test():
                self._free.append(entry[1])
            else:
                still.append(entry)
        self._pending = still

    def pending_to(self, destination: int) -> bool:
        """A send to ``destination`` is not done."""
        return any(to == destination for _, _, to in self._pending)

    @property
    def idle(self) -> bool:
        """Every send is done."""
        return not self._pending


class SmallReceiver(Generic[T]):
    """Keeps a few receives posted for every source.

    Parameters
    ----------
    sources : sequence of int
        Ranks of ``comm``.
    unpack : callable
        Makes a message of a record, which is used again afterwards.
    """

    DEPTH = 4

    def __init__(
        self,
        comm: MPI.Comm,
        tag: int,
        dtype: np.dtype,
        sources: Sequence[int],
        unpack: Callable[[np.ndarray], T],
    ) -> None:
        self._unpack = unpack
        self._rings: list[list[tuple[MPI.Prequest, np.ndarray]]] = []
        # receives of one source complete in the order in which they were posted
        self._turns = [0] * len(sources)
        for source in sources:
            records = [np.zeros(1, dtype) for _ in range(self.DEPTH)]
            raws = [record.view(np.uint8) for record in records]
            requests = [comm.Recv_init((raw, raw.size, MPI.BYTE), source, tag) for raw in raws]
            for request in requests:
                request.Start()
            self._rings.append(list(zip(requests, records, strict=True)))

    def poll(self) -> list[T]:
        """The messages that have arrived, each source's in order."""
        found = []
        turns = self._turns
        for source, ring in enumerate(self._rings):
            request, record = ring[turns[source]]
            while request.Test():
                found.append(self._unpack(record))
                request.Start()
                turns[source] = (turns[source] + 1) % self.DEPTH
                request, record = ring[turns[source]]
        return found

    def cancel(self) -> None:
        """Withdraw the posted receives."""
        for ring in self._rings:
            for request, _ in ring:
                request.Cancel()
                request.Wait()
                request.Free()
