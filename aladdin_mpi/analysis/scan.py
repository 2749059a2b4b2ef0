"""Find rows and attributes among the raw bytes of a log whose HDF5 structure is gone.

Rows lie packed in pieces of 32 KiB, in the order in which they were written.  A row is recognised
by its columns: the clock is right, durations, counts and numbers are possible, text is text; and
by its neighbour, one row's length away, being a row of the same table; an event with a text needs
no neighbour.  Attributes are recognised by their names.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np

from aladdin_mpi.analysis.load import EARLIER_S, LATER_S
from aladdin_mpi.record import schema
from aladdin_mpi.record.reading import read_bytes
from aladdin_mpi.record.schema import Table

__all__ = ["CLOCK", "possible", "scan_attributes", "scan_rows"]

WINDOW = 16 << 20
"""Bytes looked at at once."""

ATTRIBUTES_END = 1 << 20
"""[B] attributes are written first."""

CLOCK = (1e-3, 1e9)
"""[s] a machine's monotonic clock, where the file does not say when it was created."""

LARGEST = {"i1": 3, "i2": 4096, "i4": 2**31 - 1, "i8": 1 << 48}
"""Of numbers that we write; the smallest is −1."""

DURATION = (-1.0, 1e8)
SMALLEST = 1e-290
"""Not zero: text and small numbers, taken for a number of eight bytes, are smaller."""


def scan_attributes(path: Path) -> dict[str, Any]:
    """Attributes that are numbers, by name."""
    with open(path, "rb") as file:
        data = read_bytes(file.fileno(), 0, ATTRIBUTES_END)
    found: dict[str, Any] = {}
    for column in schema.ATTRIBUTES:
        if column.dtype != "S" and (value := _attribute(data, column.name, column.dtype)):
            found[column.name] = value[0]
    return found


def _attribute(data: bytes, name: str, dtype: str) -> list[Any]:
    """The value in HDF5's message: version; sizes of name, type and space; these; the value."""
    text, kind = name.encode() + b"\0", np.dtype(dtype).newbyteorder("<")
    place = -1
    while (place := data.find(text, place + 1)) >= 0:
        for version, length, unit in ((1, 8, 8), (3, 9, 1)):  # where its parts begin
            head = data[max(place - length, 0) : place]
            sizes = [int.from_bytes(head[i : i + 2], "little") for i in (2, 4, 6)]
            padded = [-(-size // unit) * unit for size in sizes]
            size = data[place + padded[0] + 4 : place + padded[0] + 8]
            begin = place + sum(padded)
            value = data[begin : begin + kind.itemsize]
            if (
                head[:1] == bytes([version]) and sizes[0] == len(text)
                and int.from_bytes(size, "little") == len(value) == kind.itemsize
            ):  # fmt: skip
                return np.frombuffer(value, kind).tolist()
    return []


def scan_rows(path: Path, start: float = math.nan) -> dict[str, np.ndarray]:
    """Rows by table.

    Parameters
    ----------
    path : Path
    start : float
        [s] the file's clock when it was created; NaN: unknown.
    """
    low, high = (start - EARLIER_S, start + LATER_S) if math.isfinite(start) else CLOCK
    low = max(low, CLOCK[0])
    parts: dict[str, list[np.ndarray]] = {name: [] for name in schema.TABLES}
    margin = max(table.dtype.itemsize for table in schema.TABLES.values())
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        for begin in range(0, size, WINDOW):
            first = max(begin - margin, 0)
            data = read_bytes(file.fileno(), first, begin + WINDOW + 2 * margin - first)
            found = _window(np.frombuffer(data, np.uint8), low, high)
            for name, places in found.items():
                mine = places[(places >= begin - first) & (places < begin - first + WINDOW)]
                parts[name].append(_rows_at(np.frombuffer(data, np.uint8), mine, name))
    return {
        name: np.concatenate([np.empty(0, schema.TABLES[name].dtype), *rows])
        for name, rows in parts.items()
    }


def _window(data: np.ndarray, low: float, high: float) -> dict[str, np.ndarray]:
    """Where rows begin, by table."""
    clocks = _clocks(data, low, high)
    candidates: dict[str, np.ndarray] = {}
    for name, table in schema.TABLES.items():
        clock = next((c for c in schema.CLOCK_COLUMNS if c in table.names), None)
        if clock:
            places = clocks - table.dtype.fields[clock][1]  # type: ignore[index]
        else:
            places = _texts(data)
        places = places[(places >= 0) & (places <= len(data) - table.dtype.itemsize)]
        candidates[name] = places[possible(_rows_at(data, places, name), table)]
    taken = np.zeros(len(data) + 1, bool)
    found: dict[str, np.ndarray] = {}
    for name, places in candidates.items():
        size = schema.TABLES[name].dtype.itemsize
        chained = np.isin(places + size, places) | np.isin(places - size, places)
        found[name] = _free(places[chained], size, taken)
    for name, places in candidates.items():
        if name == "events":  # a long text: certain also when it is alone
            size = schema.TABLES[name].dtype.itemsize
            alone = places[~np.isin(places, found[name])]
            alone = alone[data[alone + size - 120] != 0]
            found[name] = np.sort(np.concatenate([found[name], _free(alone, size, taken)]))
    return found


def _clocks(data: np.ndarray, low: float, high: float) -> np.ndarray:
    """Places of numbers that are this clock."""
    found = []
    for shift in range(8):
        values = data[shift : shift + (len(data) - shift) // 8 * 8].view("<f8")
        with np.errstate(invalid="ignore"):
            found.append(np.flatnonzero((values > low) & (values < high)) * 8 + shift)
    return np.sort(np.concatenate(found))


def _texts(data: np.ndarray) -> np.ndarray:
    """Places of rows of `user`: a number below 2^40, then text."""
    if len(data) < 9:
        return np.empty(0, np.int64)
    end = len(data) - 8
    zero = (data[5 : end + 5] == 0) & (data[6 : end + 6] == 0) & (data[7 : end + 7] == 0)
    return np.flatnonzero(zero & (data[8:] > 32))


def _rows_at(data: np.ndarray, places: np.ndarray, name: str) -> np.ndarray:
    dtype = schema.TABLES[name].dtype
    if not len(places):
        return np.empty(0, dtype)
    windows = np.lib.stride_tricks.sliding_window_view(data, dtype.itemsize)
    return np.ascontiguousarray(windows[places]).view(dtype).reshape(-1)


def possible(rows: np.ndarray, table: Table) -> np.ndarray:
    """Which rows have possible values; the clock is not looked at."""
    good = np.ones(len(rows), bool)
    for column in table.columns:
        values = rows[column.name]
        if values.dtype.kind == "i":
            good &= (values >= -1) & (values <= LARGEST[column.dtype])
        elif values.dtype.kind == "S":
            good &= _is_text(values) & ((values != b"") | (table.name == "events"))
        elif column.unit == "s" and column.name not in schema.CLOCK_COLUMNS:
            with np.errstate(invalid="ignore"):
                good &= np.isnan(values) | ((values >= DURATION[0]) & (values <= DURATION[1]))
        elif column.dtype == "f8":
            good &= ~((np.abs(values) < SMALLEST) & (values != 0))
    return good


def _is_text(values: np.ndarray) -> np.ndarray:
    """Characters, none of them a control character, then zeros."""
    if not len(values):
        return np.ones(0, bool)
    bytes_ = np.ascontiguousarray(values).view(np.uint8).reshape(len(values), -1)
    filled = bytes_ != 0
    return np.asarray(
        ~(filled[:, 1:] & ~filled[:, :-1]).any(axis=1) & ((bytes_ >= 32) | ~filled).all(axis=1)
    )


def _free(places: np.ndarray, size: int, taken: np.ndarray) -> np.ndarray:
    """Those whose bytes are not taken yet; takes them."""
    kept = []
    for place in places.tolist():
        if not taken[place] and not taken[place + size - 1]:
            taken[place : place + size] = True
            kept.append(place)
    return np.array(kept, np.int64)
