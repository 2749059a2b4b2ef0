"""A run's folder as tables: one frame per table of the log, all ranks together, on one clock.

Nothing is read before it is asked for.  What cannot be read is said in :attr:`Run.notes`, and the
rest is there: a killed run, one whose ranks are on other disks, a damaged file, an older schema.
Another process reads (see :mod:`~aladdin_mpi.record.reader`), so that no file can hurt this one.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import re
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from aladdin_mpi.errors import RecordError
from aladdin_mpi.record import schema
from aladdin_mpi.record.reader import DAMAGE, READER, clean
from aladdin_mpi.record.schema import Column, Value

__all__ = ["DAMAGE", "RankLog", "Run", "load_run", "log_files", "read_rows"]

FRESH_S = 10.0
"""[s] how long ago a file on another host was written at most if its rank still runs."""

EARLIER_S, LATER_S = 60.0, 3.2e7
"""[s] a row may be from before its file was created, and after."""

MAX_RANKS = 1_000_000
SALVAGED = "salvaged.txt"
"""In a folder made by ``aladdin-mpi salvage``: what was lost."""

ADVICE = "aladdin-mpi salvage may help"


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

    @property
    def part(self) -> int:
        """How often the run had been started before."""
        return max(0, int(self.attributes["part"]))

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
        By rank, and by ``part`` where the run was started again.
    notes : list of str
        What is missing, damaged or unusual, a line each; grows as tables are read.

    Notes
    -----
    The frames have an index with the levels ``rank`` and ``row`` and the columns of
    :mod:`aladdin_mpi.record.schema`.  Times (``time_s``, ``start_s``, ``queued_s``) are on rank 0's
    clock, in seconds since the run started for the first time.  Columns that the file does not have
    are "unknown" (NaN, −1 or empty).  The column ``part`` counts how often the run had been started
    before.
    """

    path: Path
    logs: list[RankLog]
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.path.name

    def log(self, rank: int) -> RankLog:
        """Of one rank, as it was started last."""
        return [log for log in self.logs if log.rank == rank][-1]

    @property
    def latest(self) -> list[RankLog]:
        """Of the last start."""
        last = self.parts[-1]
        return [log for log in self.logs if log.part == last]

    @property
    def parts(self) -> list[int]:
        """How often the run had been started before, for each time that it was."""
        return sorted({log.part for log in self.logs})

    @cached_property
    def _starts(self) -> dict[int, tuple[float, float]]:
        """When each part started: on rank 0's clock, and [s] after the first one by time of day."""
        found, unix = {}, {}
        for part in self.parts:
            logs = [log for log in self.logs if log.part == part]
            starts = [
                float(log.to_clock_of_rank_0(np.array([log.attributes["start_clock_s"]]))[0])
                for log in logs
            ]
            found[part] = min((s for s in starts if math.isfinite(s)), default=0.0)
            days = [float(log.attributes["start_unix_s"]) for log in logs]
            unix[part] = min((d for d in days if math.isfinite(d)), default=math.nan)
        first = unix[min(unix)]
        return {
            part: (start, unix[part] - first if math.isfinite(unix[part] - first) else 0.0)
            for part, start in found.items()
        }

    def seconds(self, log: RankLog, times: np.ndarray) -> np.ndarray:
        """A rank's monotonic times as [s] since the run started for the first time."""
        start, after = self._starts[log.part]
        return log.to_clock_of_rank_0(times) - start + after

    @cached_property
    def config(self) -> dict[str, Any]:
        """The options of the run; empty where they were not logged."""
        for log in self.latest:
            with contextlib.suppress(yaml.YAMLError):
                values = yaml.safe_load(log.attributes["config"])
                if isinstance(values, dict):
                    return values
        return {}

    @cached_property
    def versions(self) -> dict[str, str]:
        """Versions of the software."""
        for log in self.latest:
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
    def relays(self) -> list[RankLog]:
        return [log for log in self.logs if log.attributes["role"] == "relay"]

    @property
    def num_workers(self) -> int:
        """Workers of the run when it was started last, also those whose files are missing."""
        return _most_common(int(log.attributes["num_workers"]) for log in self.latest)

    @property
    def world_size(self) -> int:
        """Ranks of the run when it was started last, also those whose files are missing."""
        return _most_common(int(log.attributes["world_size"]) for log in self.latest)

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
        for log in self.logs:
            rows, problems = read_rows(log, name)
            self._note(problems)
            parts.append(rows)
        return self._frame(name, parts)

    def _frame(self, name: str, parts: list[np.ndarray]) -> pd.DataFrame:
        logs = self.logs
        columns: dict[str, Any] = {}
        for column in schema.TABLES[name].columns:
            pieces = [part[column.name] for part in parts]
            if column.name in schema.CLOCK_COLUMNS:
                pieces = [self.seconds(log, piece) for log, piece in zip(logs, pieces, strict=True)]
            values = np.concatenate([np.empty(0, column.dtype), *pieces])
            if values.dtype.kind == "S":
                texts = values.tolist()
                cleaned = {text: clean(text) for text in set(texts)}
                columns[column.name] = [cleaned[text] for text in texts]
            else:
                columns[column.name] = values
        lengths = [len(part) for part in parts]
        columns["part"] = np.repeat(np.array([log.part for log in logs], np.int16), lengths)
        ranks = sorted({log.rank for log in logs})
        lengths = [
            sum(length for log, length in zip(logs, lengths, strict=True) if log.rank == rank)
            for rank in ranks
        ]
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


def file_rank(path: Path) -> int:
    """The rank that a file's name says; −1 where it says none."""
    name = re.fullmatch(r"rank(\d{4,6})(\.\d{1,6})?\.h5", path.name)
    return int(name.group(1)) if name else -1


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
            log, lost = open_log(file)
        except DAMAGE as error:
            run._note([f"{file.name}: cannot be read ({error}); {ADVICE}"])
            continue
        run.logs.append(log)
        run._note([f"{file.name}: {what} cannot be read ({why})" for what, why in lost.items()])
    if not run.logs:
        raise RecordError(f"{path}: {run.notes[0]}")
    tables = {name for log in run.logs for name in log.counts}
    for log in run.logs:
        for name in sorted(tables - log.counts.keys()):  # other ranks have it
            what = f"{log.path.name}: table {name} cannot be read"
            if not any(note.startswith(what) for note in run.notes):
                run._note([f"{what} (it is not there); {ADVICE}"])
    if (run.path / SALVAGED).is_file():
        run._note([f"saved from damaged files, rows can be missing: see {SALVAGED}"])
    run.logs.sort(key=lambda log: (log.rank, log.part))
    size = run.world_size
    there = {log.rank for log in run.logs}
    if missing := [rank for rank in range(size) if rank not in there]:
        run._note([f"of {size} ranks, these are missing: {_ranges(missing)}"])
    for log in run.logs:
        if log.state == "running" and log.attributes["mode"] == "flush":
            run._note([
                f"{log.path.name} is being written on a file system on which readers may come at a "
                "bad moment: the latest rows can be missing"
            ])  # fmt: skip
        elif log.state == "stopped":
            which = f"rank {log.rank}" + (f", start {log.part + 1}," if log.part else "")
            run._note([f"{which} did not end in order (killed, or an error)"])
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
    empty = np.empty(0, schema.TABLES[name].dtype)
    if log.counts.get(name) == 0 and log.state != "running":  # most tables of most ranks
        return empty, []
    try:
        found = READER.rows(log.path, name, first)
        for _ in range(3 if log.state == "running" else 0):
            if found is None or not found.lost:
                break
            time.sleep(0.05)  # it came while the file was being changed
            found = READER.rows(log.path, name, first)
    except DAMAGE as error:
        return empty, [f"{log.path.name}: table {name} cannot be read ({error}); {ADVICE}"]
    if found is None:  # of an older schema
        return empty, []
    notes = []
    if found.lost:
        notes.append(
            f"{log.path.name}: {found.num_lost} of {found.total} row(s) of {name} cannot be read "
            f"({found.reason}); {ADVICE}"
        )
    good = plausible(found.rows, log.attributes["start_clock_s"])
    if good.all():
        return found.rows, notes
    num_bad = np.count_nonzero(~good)
    notes.append(f"{log.path.name}: {num_bad} row(s) of {name} are damaged and left out")
    return found.rows[good], notes


def plausible(rows: np.ndarray, start: float) -> np.ndarray:
    """Which rows are possible in a file whose clock was ``start`` [s] when it was created.

    Their clock is possible; rows without a clock are not all zeros, which is what HDF5 gives for
    rows that are not there.
    """
    clocks = [name for name in schema.CLOCK_COLUMNS if name in (rows.dtype.names or ())]
    if not clocks or not math.isfinite(start):
        packed = np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), rows.dtype.itemsize)
        return np.asarray(packed.any(axis=1))
    good = np.ones(len(rows), bool)
    for name in clocks:
        good &= (rows[name] > max(start - EARLIER_S, 0.0)) & (rows[name] < start + LATER_S)
    return good


def open_log(path: Path) -> tuple[RankLog, dict[str, str]]:
    """A rank's file without its rows, and what of it cannot be read, with the reason.

    Raises
    ------
    RecordError
        It cannot be opened, or does not say which rank it is of.
    """
    facts = READER.facts(path)
    for name in ("rank", "worker", "num_workers", "world_size", "role"):
        if name not in facts.attributes:
            if reason := facts.lost.get(f"attribute {name}"):
                raise RecordError(f"attribute {name}: {reason}")
            raise RecordError(f"attribute {name} is not there: no log of this package")
    attributes = {c.name: facts.attributes.get(c.name, _unknown(c)) for c in schema.ATTRIBUTES}
    rank, size = attributes["rank"], attributes["world_size"]
    possible = 0 <= rank < size <= MAX_RANKS and -1 <= attributes["num_workers"] <= size
    if not possible or not -1 <= attributes["worker"] < size or file_rank(path) != rank:
        raise RecordError(f"it says that it is of rank {rank} of {size}: damaged, or renamed")
    end = {c.name: facts.end.get(c.name, _unknown(c)) for c in schema.END_VALUES}
    log = RankLog(path, attributes, end, facts.counts, "")
    log.state = _state(log)
    return log, facts.lost


def _unknown(column: Column) -> Value:
    return "" if column.dtype.startswith("S") else column.unknown


def _most_common(numbers: Iterable[int]) -> int:
    """What most files say: a damaged one does not count."""
    return max(Counter(numbers).items(), key=lambda pair: (pair[1], pair[0]), default=(0, 0))[0]


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


def _ranges(numbers: Sequence[int]) -> str:
    """``0, 2 to 5``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{a} to {b}" if a < b else str(a) for a, b in runs)
