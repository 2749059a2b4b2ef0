"""Collect rows beside the training and write them from a thread of its own.

A producer stores a row in a preallocated ring, one per table, which takes about a microsecond and
no lock.  A housekeeping thread writes and flushes what has come every ``period_s``, so that a row
older than that (plus the time of one write) survives the death of the process.

Notes
-----
The rings need no lock because each has one producer and one consumer, and because CPython's
interpreter lock orders "store the row" before "advance ``head``".  Only `events`, which is rare,
may be filled by any thread, under a lock.

A ring that is half full wakes the thread.  One that is full makes its producer write the rows
itself: no row is lost, at the price of a pause.  After a failed write the training goes on: one
line says so, later rows are counted in `rows_lost` and dropped.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np

from aladdin_mpi.record import schema
from aladdin_mpi.record.schema import EventKind, Row, Table, Value

__all__ = ["MemoryFile", "NullRecorder", "Recorder", "RowFile"]

Push = Callable[[Row], None]


class RowFile(Protocol):
    """What a recorder writes to."""

    def append(self, table: str, rows: np.ndarray) -> None: ...
    def flush(self) -> None: ...
    def set_end(self, name: str, value: Value) -> None: ...
    def close(self, clean: bool = True) -> None: ...


class MemoryFile:
    """Rows in memory, for tests."""

    def __init__(self) -> None:
        self.batches: dict[str, list[np.ndarray]] = {name: [] for name in schema.TABLES}
        self.end: dict[str, Value] = {}

    def append(self, table: str, rows: np.ndarray) -> None:
        self.batches[table].append(rows.copy())

    def flush(self) -> None:
        pass

    def set_end(self, name: str, value: Value) -> None:
        self.end[name] = value

    def close(self, clean: bool = True) -> None:
        self.end["clean_end"] = int(clean)

    def rows(self, table: str) -> np.ndarray:
        """All rows of ``table``."""
        return np.concatenate([np.empty(0, schema.TABLES[table].dtype), *self.batches[table]])


def _print_line(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class NullRecorder:
    """Keeps no rows (logging is off); its ticks run all the same, because a watchdog needs them.

    Parameters
    ----------
    period_s : float
        [s] time between two ticks.
    report : callable
        Takes a line that the user should see; by default it goes to the standard error output.

    Attributes
    ----------
    steps, sends, mixes, polls, arrivals, merges, replies, evals, spreads, events, user : callable
        Each takes one row as a tuple, in the order of the columns of the table of that name.
    rows_lost : int
        Rows dropped after a failed write.
    error : str or None
        Why nothing is written any more.
    """

    steps: Push
    sends: Push
    mixes: Push
    polls: Push
    arrivals: Push
    merges: Push
    replies: Push
    evals: Push
    spreads: Push
    events: Push
    user: Push

    def __init__(self, period_s: float = 0.5, report: Callable[[str], None] = _print_line) -> None:
        self.rows_lost = 0
        self.error: str | None = None
        self._period_s = period_s
        self._report = report
        self._ticks: list[Callable[[], None]] = []
        self._wake = threading.Event()
        self._state = threading.Lock()  # guards the start and the end of the thread
        self._thread: threading.Thread | None = None
        self._closed = False
        self._process = os.getpid()
        for name in schema.TABLES:
            setattr(self, name, self._producer(name))

    def add(self, table: str, row: Row) -> None:
        """Store one row of ``table``; the same as calling the attribute of that name."""
        getattr(self, table)(row)

    def event(
        self, kind: EventKind, worker: int = -1, value: float = math.nan, text: str = ""
    ) -> None:
        """Store a row of `events` with the time of now; any thread may call it."""
        self.events((time.monotonic(), int(kind), worker, value, text.encode()))

    def every(self, tick: Callable[[], None]) -> None:
        """Call ``tick()`` every ``period_s`` from the housekeeping thread; it must be short.

        A tick that raises is reported with one line and not called again.
        """
        self._ticks.append(tick)
        self._start()

    def set_end(self, name: str, value: Value) -> None:
        """Set one of :data:`~aladdin_mpi.record.schema.END_VALUES`."""

    def flush(self) -> None:
        """Write all rows stored so far."""

    def close(self, clean: bool = True) -> None:
        """Stop the thread, write what is left and close the file.  Does nothing when called again.

        Parameters
        ----------
        clean : bool
            The rank ended in order.
        """
        with self._state:
            if self._closed or os.getpid() != self._process:
                return
            self._closed = True
        atexit.unregister(self._close_at_exit)
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._finish(clean)

    def __enter__(self) -> NullRecorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(clean=kind is None)

    def _producer(self, table: str) -> Push:
        return _drop

    def _housekeep(self) -> None:
        """What the thread does besides the ticks."""

    def _finish(self, clean: bool) -> None:
        """What is left to do when the thread has ended."""

    def _start(self) -> None:
        with self._state:
            if self._thread is None and not self._closed:
                thread = threading.Thread(target=self._run, name="aladdin-record", daemon=True)
                atexit.register(self._close_at_exit)
                thread.start()
                self._thread = thread

    def _close_at_exit(self) -> None:
        self.close(clean=False)  # the user's program ended without saying that it had finished

    def _run(self) -> None:
        due = time.monotonic() + self._period_s
        while not self._closed:
            self._wake.wait(max(0.0, due - time.monotonic()))
            self._wake.clear()
            self._housekeep()
            if time.monotonic() >= due:
                due = time.monotonic() + self._period_s
                for tick in list(self._ticks):
                    self._call(tick)

    def _call(self, tick: Callable[[], None]) -> None:
        try:
            tick()
        except Exception as error:  # rows must go on being written, whatever a tick does
            self._ticks.remove(tick)
            text = " ".join(str(error).split())
            self._report(f"a periodic check stopped: {type(error).__name__}: {text}")


class Recorder(NullRecorder):
    """Writes rows to ``file`` from a thread of its own; see the notes of this module.

    Parameters
    ----------
    file : RowFile
        It is closed together with the recorder.
    period_s : float
        [s] time between two writes, and between two ticks.
    capacity : int
        Rows of one table that wake the thread before the period is over; twice as many have room.
    report : callable
        Takes the line that says that the recording stopped.

    Notes
    -----
    Each table except `events` must be filled by one thread only.
    """

    def __init__(
        self,
        file: RowFile,
        period_s: float = 0.5,
        capacity: int = 8192,
        report: Callable[[str], None] = _print_line,
    ) -> None:
        self._file = file
        self._io = threading.Lock()  # held by whoever takes rows out of the rings
        self._unflushed = False
        self._rings: dict[str, _Ring] = {}
        self._capacity = capacity
        super().__init__(period_s, report)
        self._start()

    def set_end(self, name: str, value: Value) -> None:
        with self._io:
            self._try(partial(self._file.set_end, name, value))

    def flush(self) -> None:
        self._housekeep()

    def _producer(self, table: str) -> Push:
        ring_type = _SharedRing if table == schema.EVENTS.name else _Ring
        self._rings[table] = ring_type(schema.TABLES[table], self._capacity, self._crowded)
        return self._rings[table].push

    def _crowded(self, ring: _Ring) -> None:
        """Called by the producer of a ring that is half full or more."""
        if ring.head - ring.tail < ring.size:
            if not self._wake.is_set():
                self._wake.set()
        elif self._closed or os.getpid() != self._process:  # nobody will write them
            ring.tail = ring.head
        else:
            with self._io:
                self._drain(ring)

    def _housekeep(self) -> None:
        with self._io:
            for ring in self._rings.values():
                self._drain(ring)
            if self._unflushed:
                self._unflushed = False
                self._try(self._file.flush)

    def _drain(self, ring: _Ring) -> None:
        head = ring.head  # rows stored from now on are left to the next call
        while ring.tail < head:
            begin = ring.tail % ring.size
            rows = ring.rows[begin : begin + head - ring.tail]  # up to the end of the ring
            if self.error is None:
                self._unflushed = True
                self._try(partial(self._file.append, ring.table.name, rows))
            if self.error is not None:
                self.rows_lost += len(rows)
            ring.tail += len(rows)

    def _finish(self, clean: bool) -> None:
        self._housekeep()
        with self._io:  # also after a failure: a file on a full disk can still be closed in order
            self._try(partial(self._file.set_end, "rows_lost", self.rows_lost))
            self._try(partial(self._file.close, clean))

    def _try(self, write: Callable[[], None]) -> None:
        try:
            write()
        except (OSError, RuntimeError) as error:
            if self.error is None:
                self.error = " ".join(str(error).split())
                self._report(f"{self.error}; the training goes on without a log of this rank")


class _Ring:
    """Rows of one table between one producer and one consumer.

    ``head`` counts the rows stored, ``tail`` those taken out; only the producer writes ``head``,
    and only the holder of the recorder's lock writes ``tail``.
    """

    __slots__ = ("capacity", "crowded", "head", "rows", "size", "table", "tail")

    def __init__(self, table: Table, capacity: int, crowded: Callable[[_Ring], None]) -> None:
        self.table = table
        self.capacity = max(1, capacity)
        self.size = 2 * self.capacity
        self.rows = np.zeros(self.size, table.dtype)  # zeros: pages are touched only when used
        self.head = 0
        self.tail = 0
        self.crowded = crowded

    def push(self, row: Row) -> None:
        head = self.head
        if head - self.tail >= self.capacity:
            self.crowded(self)
        try:
            self.rows[head % self.size] = row
        except (OverflowError, RuntimeWarning, TypeError, ValueError):
            with np.errstate(over="ignore"):
                self.rows[head % self.size] = _fitted(self.table, row)
        self.head = head + 1


class _SharedRing(_Ring):
    """A ring with several producers."""

    __slots__ = ("_lock",)

    def __init__(self, table: Table, capacity: int, crowded: Callable[[_Ring], None]) -> None:
        super().__init__(table, capacity, crowded)
        self._lock = threading.Lock()

    def push(self, row: Row) -> None:
        with self._lock:
            super().push(row)


def _fitted(table: Table, row: Row) -> Row:
    """The row with values that do not fit brought into range: a log must not end a training."""
    if len(row) != len(table.columns):
        raise ValueError(f"a row of {table.name!r} has {len(table.columns)} values, not {len(row)}")
    values: list[Value] = []
    for column, value in zip(table.columns, row, strict=True):
        kind = np.dtype(column.dtype)
        fitted = column.unknown
        if kind.kind == "S":
            fitted = value if isinstance(value, bytes) else str(value).encode()
        else:
            with contextlib.suppress(TypeError, ValueError, OverflowError):  # None, NaN in an int
                fitted = float(value) if kind.kind == "f" else int(value)
            if kind.kind == "i":
                fitted = min(max(int(fitted), np.iinfo(kind).min), np.iinfo(kind).max)
        values.append(fitted)
    return tuple(values)


def _drop(row: Row) -> None:
    pass
