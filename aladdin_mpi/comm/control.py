"""Small two-sided messages: requests of workers, notices of servers, and posted receives for both.

Nothing here waits.  A send keeps its buffer until ``Test`` says that it is done; a receive is
posted before the message comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from aladdin_mpi.messages import Notice, Request, RequestKind

__all__ = ["NOTICE", "REQUEST", "SmallReceiver", "SmallSender", "pack_notice", "pack_request"]

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


def unpack_request(record: np.void) -> Request:
    """Read a request from a record."""
    fields: Any = record.item()
    return Request._make((RequestKind(fields[0]), *fields[1:-1], tuple(fields[-1].tolist())))


def pack_notice(out: np.ndarray, notice: Notice) -> None:
    """Write a notice into a record."""
    out[0] = tuple(notice)


def unpack_notice(record: np.void) -> Notice:
    """Read a notice from a record."""
    fields: Any = record.item()
    return Notice._make((*fields[:-1], bool(fields[-1])))


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


class SmallReceiver:
    """Keeps a few receives posted for every source."""

    DEPTH = 4

    def __init__(self, comm: MPI.Comm, tag: int, dtype: np.dtype, sources: Sequence[int]) -> None:
        self._comm, self._tag = comm, tag
        self._slots = [
            (source, np.zeros(1, dtype)) for source in sources for _ in range(self.DEPTH)
        ]
        self._requests = [self._post(source, record) for source, record in self._slots]
        # receives of one source complete in the order in which they were posted
        self._turn = {source: 0 for source in sources}
        self._index = {source: i * self.DEPTH for i, source in enumerate(sources)}

    def _post(self, source: int, record: np.ndarray) -> MPI.Request:
        raw = record.view(np.uint8)
        return self._comm.Irecv((raw, raw.size, MPI.BYTE), source, self._tag)

    def poll(self) -> list[np.void]:
        """Copies of the records that have arrived, each source's in order."""
        found = []
        for source, first in self._index.items():
            while True:
                at = first + self._turn[source]
                if not self._requests[at].Test():
                    break
                record = self._slots[at][1]
                found.append(record[0].copy())
                self._requests[at] = self._post(source, record)
                self._turn[source] = (self._turn[source] + 1) % self.DEPTH
        return found

    def cancel(self) -> None:
        """Withdraw the posted receives."""
        for request in self._requests:
            request.Cancel()
            request.Wait()
