"""Follows the files of a run while they are written: only what is new is read.

A file that is written for readers (SWMR) stays open, and its tables are refreshed.  Another one is
opened anew each time; what cannot be read then is read the next time.
"""

from __future__ import annotations

import math
import os
import platform
import re
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from aladdin_mpi.analysis.load import DAMAGE, RankLog, Run, log_files
from aladdin_mpi.analysis.watch import Memory, News, View, view
from aladdin_mpi.errors import RecordError
from aladdin_mpi.record import schema
from aladdin_mpi.record.reading import open_rank_file
from aladdin_mpi.record.schema import Column

__all__ = ["Watcher"]

TABLES = ("steps", "polls", "merges", "evals", "events")
BLOCK_ROWS = 100_000
"""Rows read at once of a run that has been going on for long."""

BROKEN = (*DAMAGE, AttributeError, LookupError, ArithmeticError)
"""What reading a damaged file raises."""

LOST_S = 60.0
"""[s] after which a file on another host, into which nothing is written, is taken for given up."""

POSSIBLE_S = 3.2e7
"""[s] that the clock of a row may be away from that at the start; others are damaged."""


class Tail:
    """One rank's file.

    Attributes
    ----------
    problem : str
        Why it could not be read the last time; empty where it could.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: h5py.File | None = None
        self._read_rows = dict.fromkeys(TABLES, 0)
        self._log: RankLog | None = None
        self._over = False
        self.problem = ""

    def read(self) -> list[News]:
        """What is new, in pieces; empty where the file cannot be read now."""
        if self._over:
            return []
        found: list[News] = []
        try:
            file = self._open()
            log = self._describe(file)
            # The state first: when it says that the rank has ended, all rows are there.
            names = [name for name in TABLES if log.attributes["role"] in schema.TABLES[name].roles]
            more = True
            while more:
                rows = self._rows(log, file, names)
                found.append(News(log, _now_s(log), rows))
                more = any(len(table) == BLOCK_ROWS for table in rows.values())
            self._over = log.state != "running"
            self.problem = ""
        except BROKEN as error:
            self.problem = f"{self._path.name}: cannot be read now ({_why(error)})"
            self.close()
        if self._file is not None and (self._over or not self._file.swmr_mode):
            self.close()
        return found

    def close(self) -> None:
        """Close the file."""
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except BROKEN as error:
                self.problem = f"{self._path.name}: {_why(error)}"

    def _open(self) -> h5py.File:
        if self._file is None:
            self._file = open_rank_file(self._path)
        elif "run" in self._file:
            for column in schema.END_VALUES:
                if column.name in self._file["run"]:
                    self._file["run"][column.name].refresh()
        return self._file

    def _describe(self, file: h5py.File) -> RankLog:
        if self._log is None:
            for name in ("rank", "worker", "num_workers", "world_size", "role"):
                if name not in file.attrs:
                    raise RecordError(f"attribute {name} is not there: no log of this package")
            known = {c.name: _value(c, file.attrs.get(c.name)) for c in schema.ATTRIBUTES}
            self._log = RankLog(self._path, known, {}, {}, "")
        run = file.get("run", {})
        self._log.end = {
            c.name: _value(c, run[c.name][()] if c.name in run else None) for c in schema.END_VALUES
        }
        self._log.state = _state(self._log)
        return self._log

    def _rows(self, log: RankLog, file: h5py.File, names: list[str]) -> dict[str, np.ndarray]:
        """New rows of each table, at most ``BLOCK_ROWS`` of it."""
        found = {}
        for name in names:
            first = self._read_rows[name]
            if name not in file:  # of an older schema
                continue
            dataset = file[name]
            if file.swmr_mode:
                dataset.refresh()
            stored = dataset[first : first + BLOCK_ROWS]
            if len(stored):
                found[name] = _usable(log, schema.TABLES[name], stored)
                self._read_rows[name] = first + len(stored)
        return found


class Watcher:
    """All files of a run's folder.

    Parameters
    ----------
    path : path
        The run's folder.
    left_out : collection of str
        Names of files that are not read.
    announce : callable
        Called with a file's path before it is read.
    """

    def __init__(
        self,
        path: str | Path,
        left_out: Collection[str] = (),
        announce: Callable[[Path], None] = lambda path: None,
    ) -> None:
        self._path, self._left_out, self._announce = path, left_out, announce
        self._tails: dict[Path, Tail] = {}
        self._memories: dict[Path, Memory] = {}
        self._run: Run | None = None

    def __enter__(self) -> Watcher:
        return self

    def __exit__(self, *_: object) -> None:
        for tail in self._tails.values():
            tail.close()

    def look(self) -> View:
        """Read what is new.

        Raises
        ------
        RecordError
            There is no such folder, or no file in it that could ever be read.
        """
        files = [p for p in _newest(log_files(self._path)) if p.name not in self._left_out]
        for path in files:
            self._announce(path)
            tail = self._tails.setdefault(path, Tail(path))
            for news in tail.read():
                if path in self._memories:
                    self._memories[path].take(news)
                else:
                    self._memories[path] = Memory(news)
        problems = [self._tails[path].problem for path in files if self._tails[path].problem]
        memories = [self._memories[path] for path in files if path in self._memories]
        if not memories:
            first = problems[0] if problems else "no file can be read"
            raise RecordError(f"{self._path}: {first}; aladdin-mpi salvage may help")
        logs = [memory.log for memory in memories]
        if self._run is None or self._run.logs != logs:
            self._run = Run(files[0].parent, logs)
        size = max(int(memory.log.attributes["world_size"]) for memory in memories)
        if size > len(memories):
            problems.append(f"of {size} ranks, {size - len(memories)} have no readable file here")
        return view(memories, self._run, problems)


def _now_s(log: RankLog) -> float:
    """[s] the rank's monotonic clock; one host's is the same in all of its processes."""
    if log.attributes["host"] == platform.node():
        return time.monotonic()
    since_start = time.time() - log.attributes["start_unix_s"]
    return float(log.attributes["start_clock_s"] + since_start)


def _newest(files: list[Path]) -> list[Path]:
    """Of each rank the file of the last start: ``rank0003.2.h5`` rather than ``rank0003.h5``."""
    found: dict[str, tuple[int, Path]] = {}
    for path in files:
        name = re.fullmatch(r"(rank\d+)(?:\.(\d+))?\.h5", path.name)
        rank, part = (name.group(1), int(name.group(2) or 0)) if name else (path.name, 0)
        found[rank] = max(found.get(rank, (-1, path)), (part, path))
    return [path for _, path in found.values()]


def _state(log: RankLog) -> str:
    """``ended``, ``running`` or ``stopped``, by its end values, its process, its file's age."""
    if log.end["clean_end"] == 1:
        return "ended"
    if math.isfinite(log.end["end_unix_s"]):
        return "stopped"
    if log.attributes["host"] == platform.node():
        try:
            os.kill(int(log.attributes["pid"]), 0)
        except ProcessLookupError:
            return "stopped"
        except (OSError, OverflowError):
            pass
        return "running"
    return "running" if time.time() - log.path.stat().st_mtime < LOST_S else "stopped"


def _usable(log: RankLog, table: schema.Table, stored: np.ndarray) -> np.ndarray:
    """Rows with this schema's columns, without those whose clock is impossible."""
    rows = stored
    if stored.dtype != table.dtype:
        rows = np.empty(len(stored), table.dtype)
        for column in table.columns:
            known = column.name in (stored.dtype.names or ())
            rows[column.name] = stored[column.name] if known else column.unknown
    good = np.ones(len(rows), bool)
    start_s = float(log.attributes["start_clock_s"])
    for name in schema.CLOCK_COLUMNS:
        if name in table.names and math.isfinite(start_s):
            good &= np.abs(rows[name] - start_s) < POSSIBLE_S
    return rows[good]


def _value(column: Column, value: Any) -> Any:
    """A stored value as Python's; "unknown" where there is none."""
    if value is None:
        value = b"" if column.dtype.startswith("S") else column.unknown
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if column.dtype.startswith("S"):
        return str(value)
    return float(value) if column.dtype.startswith("f") else int(value)


def _why(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text.rpartition(": ")[2][:120] or type(error).__name__
