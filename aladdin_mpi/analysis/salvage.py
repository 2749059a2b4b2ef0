"""Save what can be read of damaged logs into a new folder; the damaged ones are not touched.

First HDF5 reads, in another process; what it cannot give is looked for among the raw bytes
(:mod:`~aladdin_mpi.analysis.scan`).  Attributes that are lost come from the file's name and from
the other ranks' files where that is certain.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from aladdin_mpi.analysis.load import DAMAGE, MAX_RANKS, SALVAGED, file_rank, log_files, plausible
from aladdin_mpi.analysis.scan import CLOCK, possible, scan_attributes, scan_rows
from aladdin_mpi.errors import RecordError
from aladdin_mpi.record import layout, schema
from aladdin_mpi.record.reader import READER, Facts
from aladdin_mpi.record.schema import Value

__all__ = ["SavedLog", "salvage"]

SHARED = ("schema_version", "package", "world_size", "num_workers", "run", "config", "versions")
"""Attributes that are the same on all ranks."""

CLOCKED = [n for n, t in schema.TABLES.items() if set(t.names) & set(schema.CLOCK_COLUMNS)]
SERVED = ("arrivals", "merges", "polls", "replies")
"""Tables that only a server fills."""


@dataclass
class SavedLog:
    """What became of one rank's file.

    Attributes
    ----------
    path : Path
    facts : Facts or None
        None: HDF5 cannot open it.
    saved, totals : dict of str to int
        Rows by table; a total of −1 is not known.
    lines : list of str
        What was lost; empty: nothing.
    copied, written : bool
        There is a new file of this rank: the same, or with the rows that could be read.
    """

    path: Path
    facts: Facts | None = None
    saved: dict[str, int] = field(default_factory=dict)
    totals: dict[str, int] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    copied: bool = False
    written: bool = False

    @property
    def rank(self) -> int:
        return file_rank(self.path)

    @property
    def name(self) -> str:
        part = f" (part {self.part})" if self.part else ""
        return f"rank {self.rank}{part}" if self.rank >= 0 else self.path.name

    @property
    def part(self) -> int:
        """Of a run that was started again: how often it had been started before."""
        number = self.path.name.split(".")[1]
        return int(number) if number.isdecimal() else 0

    @property
    def num_rows(self) -> int:
        return sum(self.saved.values())

    @property
    def trusted(self) -> bool:
        """Attributes and end values are there and do not contradict one another."""
        if self.facts is None or self.facts.lost:
            return False
        known = self.facts.attributes
        workers, size = known.get("num_workers", -1), known.get("world_size", -1)
        return (
            known.get("rank") == self.rank < size <= MAX_RANKS
            and 0 < workers <= size
            and -1 <= known.get("worker", size) < workers
            and (known.get("role") == "worker") == (known["worker"] >= 0)
            and known.get("role") in ("worker", "server", "relay")
        )

    def say(self, line: str) -> None:
        self.lines.append(f"{self.name}: {line}")


def salvage(path: str | Path, out: str | Path | None = None) -> tuple[Path, list[SavedLog]]:
    """Save what can be read of a run.

    Parameters
    ----------
    path : path
        The run's folder.
    out : path, optional
        A folder that does not exist; by default the name of the run's and ``-salvaged``.

    Returns
    -------
    folder : Path
        The new folder.
    logs : list of SavedLog

    Raises
    ------
    RecordError
        There is no such run, ``out`` exists or cannot be written, or nothing can be saved.
    """
    files = log_files(path)
    source = files[0].parent.resolve()
    folder = source.with_name(f"{source.name}-salvaged") if out is None else Path(out)
    if os.path.lexists(folder):
        raise RecordError(f"{folder} exists already; choose another folder with -o, or remove it")
    logs = [SavedLog(file) for file in files]
    for log in logs:
        try:
            log.facts = READER.facts(log.path)
        except DAMAGE as error:
            log.say(f"HDF5 cannot open it ({error})")
    shared = _agreed(log.facts.attributes for log in logs if log.facts and log.trusted)
    try:
        for log in logs:
            _save(log, shared, folder)
        if not any(log.written or log.copied for log in logs):
            raise RecordError(f"{path}: nothing could be saved; {logs[0].lines[0]}")
        with contextlib.suppress(FileNotFoundError):
            shutil.copy2(source / "config.yaml", folder)
        if lines := [line for log in logs for line in log.lines]:
            text = "\n".join([f"From {source}:", *lines, ""])
            (folder / SALVAGED).write_text(text, encoding="utf-8")
    except RecordError:
        raise
    except (OSError, RuntimeError) as error:
        raise RecordError(f"cannot write {folder}: {layout.one_line(error)}") from error
    return folder, logs


def _save(log: SavedLog, shared: Mapping[str, Value], folder: Path) -> None:
    """Copy one rank's file, or write what can be read of it."""
    if log.rank < 0:
        log.say("left out, its name does not say a rank")
        return
    start, rows, sound = _read(log)
    target = folder / log.path.name
    if sound and log.trusted:
        assert log.facts is not None
        folder.mkdir(parents=True, exist_ok=True)
        if log.facts.plain and math.isfinite(log.facts.end.get("end_unix_s", math.nan)):
            shutil.copy2(log.path, target)
            log.copied = True
            return
        _write(target, log, log.facts.attributes, rows)
    elif log.num_rows:
        attributes, doubtful = _attributes(log, shared, start)
        folder.mkdir(parents=True, exist_ok=True)
        _write(target, log, attributes, rows)
        _say_what_is_lost(log, doubtful)
    else:
        log.say("nothing could be saved")
        return
    log.written = True


# ---- reading


def _read(log: SavedLog) -> tuple[float, dict[str, np.ndarray], bool]:
    """The clock at the start, the rows by table, and whether HDF5 gave them all."""
    for start in dict.fromkeys((_start(log), math.nan)):  # the start itself may be damaged
        rows = {name: _table(log, name, start) for name in schema.TABLES}
        missing = [n for n in rows if not 0 <= log.totals[n] <= len(rows[n])]
        found: dict[str, np.ndarray] = {}
        with contextlib.suppress(OSError):
            if missing and log.path.is_file():
                found = scan_rows(log.path, start)
        for name in missing:
            rows[name] = max(rows[name], found.get(name, rows[name]), key=len)
            if not len(rows[name]) and _never_was(log.facts, name):
                log.totals[name] = 0
        sound = all(log.totals[name] == 0 for name in missing)
        if any(len(rows[name]) for name in CLOCKED):
            break
    log.saved = {name: len(part) for name, part in rows.items()}
    return start, rows, sound


def _never_was(facts: Facts | None, table: str) -> bool:
    """A good file of an older version, which did not have the table."""
    return facts is not None and table not in facts.counts and not facts.lost


def _start(log: SavedLog) -> float:
    known = log.facts.attributes if log.facts else {}
    start = known.get("start_clock_s", math.nan)
    if not math.isfinite(start):
        start = _scanned_attributes(log).get("start_clock_s", math.nan)
    return start if 0 <= start < CLOCK[1] else math.nan


def _scanned_attributes(log: SavedLog) -> dict[str, Any]:
    with contextlib.suppress(OSError):
        if log.path.is_file():
            return scan_attributes(log.path)
    return {}


def _table(log: SavedLog, name: str, start: float) -> np.ndarray:
    """What HDF5 gives of a table, without impossible rows."""
    if log.facts is not None and log.facts.counts.get(name) == 0:
        log.totals[name] = 0
        return np.empty(0, schema.TABLES[name].dtype)
    log.totals[name] = -1
    try:
        found = READER.rows(log.path, name)
    except DAMAGE:
        found = None
    if found is None:
        return np.empty(0, schema.TABLES[name].dtype)
    log.totals[name] = found.total
    if name not in CLOCKED:
        return found.rows[possible(found.rows, schema.TABLES[name])]
    if math.isfinite(start):
        return found.rows[plausible(found.rows, start)]
    clock = next(c for c in schema.TABLES[name].names if c in schema.CLOCK_COLUMNS)
    times = found.rows[clock]
    return found.rows[(times > CLOCK[0]) & (times < CLOCK[1])]


# ---- writing


def _write(
    path: Path, log: SavedLog, attributes: Mapping[str, Value], rows: Mapping[str, np.ndarray]
) -> None:
    unknown: dict[str, Value] = {
        c.name: "" if c.dtype.startswith("S") else c.unknown for c in schema.ATTRIBUTES
    }
    with layout.create(path, {**unknown, **attributes}, swmr=False, locking=True) as file:
        for column in schema.ATTRIBUTES:
            if column.name in ("mode", "locking"):  # how the original was written
                value = attributes.get(column.name, unknown[column.name])
                file.attrs[column.name] = layout.scalar(column, value)
        for name, part in rows.items():
            file[name].resize((len(part),))
            file[name][:] = part
        end = log.facts.end if log.facts else {}
        for column in schema.END_VALUES:
            if column.name in end:
                file["run"][column.name][()] = layout.scalar(column, end[column.name])
    times = log.path.stat()
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # else it looks as if it still grew


def _agreed(attributes: Iterable[Mapping[str, Value]]) -> dict[str, Value]:
    """What all trusted files say."""
    every = list(attributes)
    return {
        name: every[0][name]
        for name in SHARED
        if every and all(name in a and a[name] == every[0].get(name) for a in every)
    }


def _attributes(
    log: SavedLog, shared: Mapping[str, Value], start: float
) -> tuple[dict[str, Value], list[str]]:
    """Attributes of the new file, and names of those that are unknown or guessed."""
    values: dict[str, Any] = _scanned_attributes(log)
    values |= log.facts.attributes if log.facts else {}
    if not log.trusted:
        values |= shared
    lost = log.facts.lost if log.facts else {f"attribute {c.name}" for c in schema.ATTRIBUTES}
    doubtful = [
        c.name for c in schema.ATTRIBUTES
        if f"attribute {c.name}" in lost and c.name not in {*values, "rank", "part"}
    ]  # fmt: skip
    if not math.isfinite(start):
        doubtful += ["start_clock_s"] if "start_clock_s" not in doubtful else []
        values.pop("start_clock_s", None)
    rank, size, workers = log.rank, values.get("world_size", -1), values.get("num_workers", -1)
    if log.trusted and rank < size:
        return {**values, "rank": rank, "part": log.part}, doubtful
    if rank < size <= MAX_RANKS and workers > 0 and size - workers in (0, 1):
        doubtful = [name for name in doubtful if name not in ("worker", "role")]
    else:  # the least that the rows allow: it must load
        doubtful = sorted({*doubtful, "world_size", "num_workers", "worker"})
        serves = rank == 0 and any(log.saved[name] for name in SERVED)
        size, workers = (2, 1) if serves else (rank + 1, rank + 1)
    worker = rank - (size - workers)  # the server, if there is one, is the first rank
    role = "worker" if worker >= 0 else "server"
    return {
        **values, "rank": rank, "part": log.part, "world_size": size, "num_workers": workers,
        "worker": worker, "role": role,
    }, doubtful  # fmt: skip


def _say_what_is_lost(log: SavedLog, doubtful: list[str]) -> None:
    for name, total in log.totals.items():
        saved = log.saved[name]
        if total < 0:
            what = f"{saved} rows found" if saved else "no rows found"
            log.say(f"{name}: {what}, of an unknown number")
        elif saved < total:
            log.say(f"{name}: {saved} of {total} rows saved")
    lost = [what for what in (log.facts.lost if log.facts else ["end values"]) if what[:3] == "end"]
    if doubtful + lost:
        log.say(f"not known any more: {', '.join([*doubtful, *lost])}")
