"""Follows a run's files in a process of its own: HDF5 can crash on a damaged file, or wait for ever
for one that is being written to become right.

The child answers each line that it reads with frames: a line of JSON, and as many bytes as its
``bytes`` says.  It names each file before it reads it, so that the one that it died of is left out
the next time.
"""

from __future__ import annotations

import json
import os
import pickle
import select
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from aladdin_mpi.analysis.watch import View
from aladdin_mpi.errors import RecordError

__all__ = ["GuardedWatcher", "serve"]

LIMIT_S = 20.0
"""[s] for the news of one file."""

START_S = 60.0
"""[s] for the start of the child."""


class ChildDiedError(Exception):
    """The child has ended, or says nothing for too long."""


class GuardedWatcher:
    """As :class:`~aladdin_mpi.analysis.tail.Watcher`, but no file can hurt this process.

    Parameters
    ----------
    path : path
        The run's folder.
    limit_s : float
        [s] after which a file is given up.
    """

    def __init__(self, path: str | Path, limit_s: float = LIMIT_S) -> None:
        self._path, self._limit_s = str(path), limit_s
        self._left_out: dict[str, str] = {}
        self._child: subprocess.Popen[bytes] | None = None
        self._read = b""

    def __enter__(self) -> GuardedWatcher:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def look(self) -> View:
        """What there is, with what is new.

        Raises
        ------
        RecordError
            There is no such folder, or no file in it that can be read.
        """
        while True:
            name = ""
            try:
                self._ask()
                while "bytes" not in (frame := self._line()):
                    name = frame["reading"]
                answer = pickle.loads(self._take(frame["bytes"]))
            except ChildDiedError as error:
                self._end()
                if not name:
                    raise RecordError(f"{self._path}: the process that reads {error}") from None
                self._left_out[name] = f"{name}: left out, the process that read it {error}"
                continue
            notes = tuple(self._left_out.values())
            if isinstance(answer, RecordError):
                raise RecordError(" ".join([str(answer), *notes]))
            return replace(answer, notes=(*notes, *answer.notes))

    def _ask(self) -> None:
        if self._child is None:
            self._read = b""
            self._child = subprocess.Popen(
                [sys.executable, "-c", "from aladdin_mpi.analysis.guarded import serve; serve()"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )  # fmt: skip
            first = {"path": self._path, "left_out": list(self._left_out)}
            self._tell(json.dumps(first).encode() + b"\n")
            self._line(START_S)
        self._tell(b"look\n")

    def _tell(self, line: bytes) -> None:
        stdin = self._child.stdin if self._child else None
        assert stdin is not None
        try:
            stdin.write(line)
            stdin.flush()
        except BrokenPipeError:
            raise ChildDiedError("has ended") from None

    def _line(self, limit_s: float | None = None) -> dict[str, Any]:
        until = time.monotonic() + (self._limit_s if limit_s is None else limit_s)
        while b"\n" not in self._read:
            self._more(until)
        line, _, self._read = self._read.partition(b"\n")
        frame: dict[str, Any] = json.loads(line)
        return frame

    def _take(self, size: int) -> bytes:
        until = time.monotonic() + self._limit_s
        while len(self._read) < size:
            self._more(until)
        taken, self._read = self._read[:size], self._read[size:]
        return taken

    def _more(self, until: float) -> None:
        child = self._child
        assert child is not None and child.stdout is not None
        ready, _, _ = select.select([child.stdout], [], [], max(0.0, until - time.monotonic()))
        if not ready:
            raise ChildDiedError("came to no end")
        data = os.read(child.stdout.fileno(), 1 << 16)
        if not data:
            code = child.wait()
            raise ChildDiedError(f"was ended by signal {-code}" if code < 0 else "has ended")
        self._read += data

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()  # it only reads
            child.communicate()


def serve() -> None:
    """The child."""
    from aladdin_mpi.analysis.tail import Watcher

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    out = os.fdopen(os.dup(1), "wb", 0)
    os.dup2(2, 1)  # nobody else may write between the frames
    given = json.loads(sys.stdin.readline())
    _send(out, {"ready": True})

    def announce(path: Path) -> None:
        _send(out, {"reading": path.name})

    with Watcher(given["path"], given["left_out"], announce) as watcher:
        for _ in sys.stdin:
            answer: View | RecordError
            try:
                answer = watcher.look()
            except RecordError as error:
                answer = error
            data = pickle.dumps(answer)
            _send(out, {"bytes": len(data)}, data)
    os._exit(0)


def _send(out: IO[bytes], frame: dict[str, Any], payload: bytes = b"") -> None:
    data = memoryview(json.dumps(frame).encode() + b"\n" + payload)
    while data:
        data = data[out.write(data) :]
