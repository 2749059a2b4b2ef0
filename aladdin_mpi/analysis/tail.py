"""Follows the files of a run while they are written: only what is new is read.

A file that is written for readers (SWMR) stays open, and its tables are refreshed.  Another one is
opened anew each time; what cannot be read then is read the next time.
"""

from __future__ import annotations

import math
import platform
import time
from pathlib import Path

import h5py
import numpy as np

from aladdin_mpi.analysis.load import (
    DAMAGE,
    RankLog,
    Run,
    describe,
    end_values,
    log_files,
    state_of,
    usable_rows,
    why,
)
from aladdin_mpi.analysis.watch import Memory, News, View, view
from aladdin_mpi.errors import RecordError
from aladdin_mpi.record import schema
from aladdin_mpi.record.reading import open_rank_file

__all__ = ["Watcher"]

TABLES = ("steps", "polls", "merges", "evals", "events")
BLOCK_ROWS = 100_000
"""Rows read at once of a run that has been going on for long."""

LOST_S = 60.0
"""[s] after which a file on another host, on which nothing is written, is taken for given up."""


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
        except DAMAGE as error:
            self.problem = f"{self._path.name}: cannot be read now ({why(error)})"
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
            except DAMAGE as error:
                self.problem = f"{self._path.name}: {why(error)}"

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
            self._log = describe(self._path, file)
        log = self._log
        log.end = end_values(file)
        log.state = state_of(log)
        if log.state == "stopped" and not math.isfinite(log.end["end_unix_s"]):
            far = log.attributes["host"] != platform.node()
            if far and time.time() - self._path.stat().st_mtime < LOST_S:
                log.state = "running"
        return log

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
                found[name] = usable_rows(log, name, stored)[0]
                self._read_rows[name] = first + len(stored)
        return found


class Watcher:
    """All files of a run's folder.

    Parameters
    ----------
    path : path
        The run's folder.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = path
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
        files = log_files(self._path)
        for path in files:
            tail = self._tails.setdefault(path, Tail(path))
            for news in tail.read():
                if path in self._memories:
                    self._memories[path].take(news)
                else:
                    self._memories[path] = Memory(news)
        problems = [tail.problem for tail in self._tails.values() if tail.problem]
        if not self._memories:
            raise RecordError(f"{self._path}: {problems[0]}; aladdin-mpi salvage may help")
        memories = list(self._memories.values())
        if self._run is None or len(self._run.logs) < len(memories):
            self._run = Run(files[0].parent, [memory.log for memory in memories])
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
