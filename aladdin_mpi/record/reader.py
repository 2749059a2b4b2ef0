"""Read ranks' files in a process of its own, because HDF5 does not survive every damaged file.

HDF5 can crash on wrong bytes, loop for ever or ask for absurd memory; a clean-looking file says
nothing about that.  So :class:`Reader` starts a child once and lets it read; the child's time and
memory are limited.  When it dies, the next one goes on past the place, which is then lost.

Notes
-----
The child reads requests, one JSON line each, from its standard input, and answers with frames: a
JSON line, followed by as many bytes as its ``bytes`` says.  The last frame of an answer has
``end``.  It needs no pandas, and starts in a fraction of a second.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from aladdin_mpi.errors import RecordError
from aladdin_mpi.record import schema
from aladdin_mpi.record.serving import DAMAGE, ITEMS, LIMIT_S, clean

__all__ = ["DAMAGE", "READER", "Facts", "Reader", "Rows", "clean"]

MAX_DEATHS = 3
"""Of children at one table; then the rest of it is lost."""


class ChildDiedError(Exception):
    """The child ended while it read; the text says how."""


@dataclass
class Facts:
    """What a file says of itself.

    Attributes
    ----------
    attributes, end, counts : dict
        What could be read, by name; what is not in the file is not here.
    lost : dict of str to str
        Why a thing could not be read, by ``attribute NAME``, ``end value NAME``, ``table NAME``.
    plain : bool
        HDF5 opens the file as it is: it was closed, and has its first bytes and its end.
    """

    attributes: dict[str, Any] = field(default_factory=dict)
    end: dict[str, Any] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    plain: bool = False

    def add(self, number: int, frame: dict[str, Any]) -> None:
        """Item ``number`` as the child answered it."""
        kind, name, _ = ITEMS[number]
        if "error" in frame:
            what = {"attribute": "attribute", "end": "end value", "count": "table"}[kind]
            self.lost[f"{what} {name}"] = frame["error"]
        elif "value" in frame:
            {"attribute": self.attributes, "end": self.end, "count": self.counts}[kind][name] = (
                frame["value"]
            )


@dataclass
class Rows:
    """Rows of one table.

    Attributes
    ----------
    rows : array of the table's dtype
    lost : list of (int, int)
        First and last + 1 of row numbers that could not be read.
    total : int
        Rows that the table should have.
    reason : str
        Why some could not be read.
    """

    rows: np.ndarray
    lost: list[tuple[int, int]]
    total: int
    reason: str = ""

    @property
    def num_lost(self) -> int:
        return sum(end - begin for begin, end in self.lost)

    def lose(self, begin: int, end: int, reason: str) -> None:
        """Note that rows ``begin`` to ``end`` cannot be read."""
        self.lost.append((begin, end))
        self.reason = reason


class Reader:
    """The child, started when it is needed.  Any thread may call any method."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._child: subprocess.Popen[bytes] | None = None
        self._owner = -1

    def facts(self, path: str | Path) -> Facts:
        """Attributes, end values and numbers of rows.

        Raises
        ------
        RecordError
            The file cannot be opened.
        """
        found = Facts()
        item = deaths = 0
        opened = False

        def take(frame: dict[str, Any]) -> None:
            nonlocal item, opened
            opened = True
            found.plain = frame.get("plain", found.plain)
            if "item" in frame:
                item = frame["item"] + 1
                found.add(frame["item"], frame)

        while item < len(ITEMS):
            try:
                self._ask("facts", path, take, first=item)
            except ChildDiedError as death:
                deaths += 1
                if not opened:
                    raise RecordError(str(death)) from None
                last = len(ITEMS) if deaths > MAX_DEATHS else item + 1
                for number in range(item, last):
                    found.add(number, {"error": str(death)})
                item = last
        return found

    def rows(self, path: str | Path, table: str, first: int = 0) -> Rows | None:
        """Rows of ``table`` from number ``first`` on; None where the file has no such table.

        Raises
        ------
        RecordError
            None of the table can be read.
        """
        dtype = schema.TABLES[table].dtype
        parts: list[np.ndarray] = []
        found = Rows(np.empty(0, dtype), [], -1)
        place, chunk, deaths = first, 0, 0

        def take(frame: dict[str, Any]) -> None:
            nonlocal place, chunk
            if "total" in frame:
                found.total, chunk = frame["total"], frame["chunk"]
            else:
                if "error" in frame:
                    found.lose(place, place + frame["rows"], frame["error"])
                else:
                    parts.append(np.frombuffer(frame.get("payload", b""), dtype))
                place += frame["rows"]

        while found.total < 0 or place < found.total:
            try:
                self._ask("rows", path, take, table=table, first=place, careful=deaths > 0)
                if found.total < 0:
                    return None
                break  # a file that is being written may have got shorter or longer
            except ChildDiedError as death:
                deaths += 1
                if found.total < 0:
                    raise RecordError(str(death)) from None
                if deaths > 1:  # the first time, once more in smaller pieces, to lose less
                    end = found.total if deaths > MAX_DEATHS else place - place % chunk + chunk
                    found.lose(place, min(end, found.total), str(death))
                    place = min(end, found.total)
        found.rows = parts[0] if len(parts) == 1 else np.concatenate([found.rows, *parts])
        return found

    def close(self) -> None:
        """End the child; a later call starts another one."""
        with self._lock:
            child, self._child = self._child, None
            if child is None or self._owner != os.getpid():
                return
            child.kill()
            child.wait()
            for pipe in (child.stdin, child.stdout):
                assert pipe is not None
                with contextlib.suppress(OSError):
                    pipe.close()

    def _ask(
        self, do: str, path: str | Path, take: Callable[[dict[str, Any]], None], **request: Any
    ) -> None:
        """Call ``take`` with each frame of the answer.

        Raises
        ------
        ChildDiedError
        RecordError
            The answer is that it cannot be read.
        """
        line = json.dumps({"do": do, "path": os.path.abspath(path), **request}) + "\n"
        error: str | None = None
        complete = False
        with self._lock:
            try:
                if self._child is None or self._owner != os.getpid():
                    self._child, self._owner = _start(), os.getpid()
                assert self._child.stdin is not None
                with contextlib.suppress(BrokenPipeError):
                    self._child.stdin.write(line.encode())
                    self._child.stdin.flush()
                while not complete:
                    frame = _next_frame(self._child)
                    if "end" in frame:
                        complete = True
                    elif "error" in frame and len(frame) == 1:
                        error = frame["error"]
                    else:
                        take(frame)
            finally:
                if not complete:  # the child is dead, or would go on with this answer
                    self.close()
        if error is not None:
            raise RecordError(error)


READER = Reader()
"""One child is enough for a process."""

atexit.register(READER.close)


def _next_frame(child: subprocess.Popen[bytes]) -> dict[str, Any]:
    assert child.stdout is not None
    line = child.stdout.readline()
    if line.endswith(b"\n"):
        frame: dict[str, Any] = json.loads(line)
        payload = child.stdout.read(frame.get("bytes", 0))
        if "bytes" not in frame:
            return frame
        if len(payload) == frame["bytes"]:
            return {**frame, "payload": payload}
    code = child.wait()
    if code == -signal.SIGALRM:
        raise ChildDiedError(f"reading it took more than {LIMIT_S} s")
    if code < 0:
        raise ChildDiedError(f"HDF5 crashed on it, {signal.Signals(-code).name}")
    raise ChildDiedError(f"the process that reads it ended with exit code {code}")


def _start() -> subprocess.Popen[bytes]:
    root = Path(__file__).resolve().parents[2]  # a working folder that has no module of the user's
    environ = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "HDF5_PLUGIN_PRELOAD": "::"}
    return subprocess.Popen(
        [sys.executable, "-c", "from aladdin_mpi.record.serving import serve; serve()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        cwd=root, env=environ,
    )  # fmt: skip
