"""A run's folder as tables: one frame per table of the log, all ranks together, on one clock.

Nothing is read before it is asked for.  What cannot be read is said in :attr:`Run.notes`, and the
rest is there: a killed run, one whose ranks are on other disks, a damaged file, an older schema.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
import yaml

from aladdin_mpi.errors import RecordError
from aladdin_mpi.record import schema
from aladdin_mpi.record.reading import open_rank_file
from aladdin_mpi.record.schema import Column

__all__ = ["DAMAGE", "RankLog", "Run", "load_run", "log_files", "read_rows"]

FRESH_S = 10.0
"""[s] how long ago a file on another host was written at most if its rank still runs."""

YEAR_S = 3.2e7

DAMAGE = (RecordError, OSError, RuntimeError, KeyError, ValueError, TypeError, MemoryError)
"""What reading a damaged file raises, here and inside h5py."""

MAX_ROWS = 2_000_000_000


@dataclass
class RankLog:
    """What is known of one rank's file.

    Attributes
    ----------
    path : Path
    attributes, end : dict
        By the names of :data:`~aladdin_mpi.record.schema.ATTRIBUTES` and ``END_VALUES``; "unknown"
        where the file does not have one.
    counts : dict of str to int
        Rows by table.
    state : str
        ``ended``, ``running``, or ``stopped``: killed, or ended by an error.
    """

    path: Path
    attributes: dict[str, Any]
    end: dict[str, Any]
    counts: dict[str, int]
    state: str

    @property
    def rank(self) -> int:
        return int(self.attributes["rank"])

    @property
    def worker(self) -> int:
        return int(self.attributes["worker"])

    def to_clock_of_rank_0(self, times: np.ndarray) -> np.ndarray:
        """This rank's monotonic times as rank 0's.

        The offset was measured at the start and at the end; between, clocks drift evenly.
        """
        first, last = self.attributes["clock_offset_s"], self.end["clock_offset_s"]
        begin, end = self.attributes["start_clock_s"], self.end["end_clock_s"]
        first = 0.0 if math.isnan(first) else first
        if not math.isfinite(last + begin + end) or end <= begin:
            return times + first
        return times + first + (last - first) * np.clip((times - begin) / (end - begin), 0.0, 1.0)


@dataclass
class Run:
    """One run.  Made by :func:`load_run`.

    Attributes
    ----------
    path : Path
    logs : list of RankLog
        By rank.
    notes : list of str
        What is missing, damaged or unusual, a line each; grows as tables are read.

    Notes
    -----
    The frames have an index with the levels ``rank`` and ``row`` and the columns of
    :mod:`aladdin_mpi.record.schema`.  Times (``time_s``, ``start_s``, ``queued_s``) are on rank 0's
    clock, in seconds since the run started.  Columns that the file does not have are "unknown"
    (NaN, −1 or empty).
    """

    path: Path
    logs: list[RankLog]
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.path.name

    def log(self, rank: int) -> RankLog:
        """Of one rank."""
        return next(log for log in self.logs if log.rank == rank)

    @cached_property
    def start_s(self) -> float:
        """[s] when the run started, on rank 0's clock."""
        starts = [
            float(log.to_clock_of_rank_0(np.array([log.attributes["start_clock_s"]]))[0])
            for log in self.logs
        ]
        return min((s for s in starts if math.isfinite(s)), default=0.0)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The options of the run; empty where they were not logged."""
        for log in self.logs:
            with contextlib.suppress(yaml.YAMLError):
                values = yaml.safe_load(log.attributes["config"])
                if isinstance(values, dict):
                    return values
        return {}

    @cached_property
    def versions(self) -> dict[str, str]:
        """Versions of the software."""
        for log in self.logs:
            with contextlib.suppress(ValueError):
                values = json.loads(log.attributes["versions"])
                if isinstance(values, dict):
                    return values
        return {}

    @property
    def algorithm(self) -> str:
        """Name of the algorithm; ``?`` where it was not logged."""
        return str(self.config.get("algorithm", "?"))

    @property
    def workers(self) -> list[RankLog]:
        return [log for log in self.logs if log.worker >= 0]

    @property
    def servers(self) -> list[RankLog]:
        return [log for log in self.logs if log.attributes["role"] == "server"]

    @property
    def num_workers(self) -> int:
        """Workers of the run, also those whose files are missing."""
        return max((int(log.attributes["num_workers"]) for log in self.logs), default=0)

    @cached_property
    def ranks(self) -> pd.DataFrame:
        """One row per rank: role, worker, host, device, state, rows, and the end values."""
        rows = {
            log.rank: {
                "role": log.attributes["role"], "worker": log.worker,
                "host": log.attributes["host"], "device": log.attributes["device"],
                "pid": log.attributes["pid"], "state": log.state,
                "rows": sum(log.counts.values()), **log.end,
            }
            for log in self.logs
        }  # fmt: skip
        return pd.DataFrame.from_dict(rows, orient="index").rename_axis("rank")

    steps = cached_property(lambda self: self.table("steps"))
    sends = cached_property(lambda self: self.table("sends"))
    mixes = cached_property(lambda self: self.table("mixes"))
    polls = cached_property(lambda self: self.table("polls"))
    arrivals = cached_property(lambda self: self.table("arrivals"))
    merges = cached_property(lambda self: self.table("merges"))
    replies = cached_property(lambda self: self.table("replies"))
    evals = cached_property(lambda self: self.table("evals"))
    spreads = cached_property(lambda self: self.table("spreads"))
    events = cached_property(lambda self: self.table("events"))
    user = cached_property(lambda self: self.table("user"))

    def table(self, name: str) -> pd.DataFrame:
        """One table of all ranks, read anew."""
        parts: list[np.ndarray] = []
        ranks: list[int] = []
        for log in self.logs:
            rows, problems = read_rows(log, name)
            self._note(problems)
            parts.append(rows)
            ranks.append(log.rank)
        return self._frame(name, parts, ranks)

    def _frame(self, name: str, parts: list[np.ndarray], ranks: list[int]) -> pd.DataFrame:
        lengths = [len(part) for part in parts]
        logs = [self.log(rank) for rank in ranks]
        columns: dict[str, Any] = {}
        for column in schema.TABLES[name].columns:
            pieces = [part[column.name] for part in parts]
            if column.name in schema.CLOCK_COLUMNS:
                pieces = [
                    log.to_clock_of_rank_0(piece) - self.start_s
                    for log, piece in zip(logs, pieces, strict=True)
                ]
            values = np.concatenate([np.empty(0, column.dtype), *pieces])
            if values.dtype.kind == "S":
                columns[column.name] = [text.decode(errors="replace") for text in values.tolist()]
            else:
                columns[column.name] = values
        index = pd.MultiIndex(
            levels=[ranks, np.arange(max(lengths, default=0))],
            codes=[
                np.repeat(np.arange(len(ranks)), lengths),
                np.concatenate([np.arange(0), *(np.arange(length) for length in lengths)]),
            ],
            names=["rank", "row"],
        )
        return pd.DataFrame(columns, index=index, copy=False)

    def _note(self, lines: Sequence[str]) -> None:
        self.notes += [line for line in lines if line not in self.notes]


def log_files(path: str | Path) -> list[Path]:
    """The ranks' files of a run's folder.

    Raises
    ------
    RecordError
        There is no such folder, or none in it.
    """
    folder = Path(path)
    if folder.is_file():
        folder = folder.parent
    if not folder.is_dir():
        raise RecordError(f"{path}: no such folder; give the folder of a run (--out)")
    files = sorted(folder.glob("rank*.h5"))
    if not files:
        raise RecordError(
            f"{path}: no rank*.h5 in it; give the folder of a run that was logged (--out)"
        )
    return files


def load_run(path: str | Path) -> Run:
    """Open a run: finished, in progress, killed, or with files missing or damaged.

    Parameters
    ----------
    path : path
        The run's folder.

    Raises
    ------
    RecordError
        There is no such folder, or none of its files can be read.
    """
    files = log_files(path)
    run = Run(files[0].parent, [])
    for file in files:
        try:
            run.logs.append(_open(file))
        except DAMAGE as error:
            run._note(
                [f"{file.name}: cannot be read ({_why(error)}); aladdin-mpi salvage may help"]
            )
    if not run.logs:
        raise RecordError(f"{path}: {run.notes[0]}")
    run.logs.sort(key=lambda log: log.rank)
    size = max(int(log.attributes["world_size"]) for log in run.logs)
    there = {log.rank for log in run.logs}
    if missing := [rank for rank in range(min(size, 100_000)) if rank not in there]:
        run._note([f"of {size} ranks, these are missing: {_ranges(missing)}"])
    for log in run.logs:
        if log.state == "running" and log.attributes["mode"] == "flush":
            run._note([
                f"{log.path.name} is being written on a file system on which readers may come at a "
                "bad moment: the latest rows can be missing"
            ])  # fmt: skip
        elif log.state == "stopped":
            run._note([f"rank {log.rank} did not end in order (killed, or an error)"])
    newer = {int(log.attributes["schema_version"]) for log in run.logs} - {schema.SCHEMA_VERSION}
    if any(version > schema.SCHEMA_VERSION for version in newer):
        run._note([
            f"written with schema version {max(newer)}, newer than this package's "
            f"({schema.SCHEMA_VERSION}): columns may be missing or mean something else"
        ])  # fmt: skip
    return run


def read_rows(log: RankLog, name: str, first: int = 0) -> tuple[np.ndarray, list[str]]:
    """Rows of a table from ``first`` on, and what was wrong with them.

    Rows whose clock is impossible are damaged and left out.
    """
    table = schema.TABLES[name]
    empty = np.empty(0, table.dtype)
    try:
        with open_rank_file(log.path) as file:
            if name not in file:  # of an older schema
                return empty, []
            stored = _read(file[name], first)
    except DAMAGE as error:
        return empty, [f"{log.path.name}: table {name} cannot be read ({_why(error)})"]
    if stored.dtype == table.dtype:
        rows = stored
    else:
        rows = np.empty(len(stored), table.dtype)
        for column in table.columns:
            old = stored.dtype.names or ()
            rows[column.name] = stored[column.name] if column.name in old else column.unknown
    good = _plausible(log, rows)
    if good.all():
        return rows, []
    note = f"{log.path.name}: {np.count_nonzero(~good)} row(s) of {name} are damaged and left out"
    return rows[good], [note]


def _read(dataset: h5py.Dataset, first: int) -> np.ndarray:
    if dataset.ndim != 1 or dataset.shape[0] > MAX_ROWS or dataset.dtype.names is None:
        raise ValueError("not a table")
    rows: np.ndarray = dataset[first:]
    return rows


def _plausible(log: RankLog, rows: np.ndarray) -> np.ndarray:
    good = np.ones(len(rows), bool)
    start = float(log.attributes["start_clock_s"])
    for name in schema.CLOCK_COLUMNS:
        if name in (rows.dtype.names or ()) and math.isfinite(start):
            times = rows[name]
            good &= (times > start - YEAR_S) & (times < start + YEAR_S)
    return good


def _open(path: Path) -> RankLog:
    with open_rank_file(path) as file:
        attributes = {c.name: _value(c, file.attrs.get(c.name)) for c in schema.ATTRIBUTES}
        for name in ("rank", "worker", "num_workers", "world_size", "role"):
            if name not in file.attrs:
                raise RecordError(f"attribute {name} is not there: no log of this package")
        run = file.get("run", {})
        end = {
            c.name: _value(c, run[c.name][()] if c.name in run else None) for c in schema.END_VALUES
        }
        counts = {name: len(file[name]) for name in schema.TABLES if name in file}
    log = RankLog(path, attributes, end, counts, "")
    log.state = _state(log)
    return log


def _state(log: RankLog) -> str:
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
    return "running" if time.time() - log.path.stat().st_mtime < FRESH_S else "stopped"


def _value(column: Column, value: Any) -> Any:
    """A stored value as Python's; "unknown" where there is none."""
    if value is None:
        value = b"" if column.dtype == "S" else column.unknown
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if column.dtype.startswith("S"):
        return str(value)
    return float(value) if column.dtype.startswith("f") else int(value)


def _why(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text.rpartition(": ")[2][:120] or type(error).__name__


def _ranges(numbers: Sequence[int]) -> str:
    """``0, 2 to 5``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{a} to {b}" if a < b else str(a) for a, b in runs)
