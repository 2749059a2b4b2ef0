"""The child of :mod:`~aladdin_mpi.record.reader`: it reads, and may die of it.  Imports little."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import stat
import sys
from collections.abc import Iterator
from typing import IO, Any, NoReturn

import numpy as np

from aladdin_mpi.errors import RecordError
from aladdin_mpi.record import schema
from aladdin_mpi.record.schema import Column

__all__ = ["DAMAGE", "ITEMS", "LIMIT_S", "clean", "serve"]

DAMAGE = (
    RecordError, OSError, RuntimeError, LookupError, ValueError, TypeError, ArithmeticError,
    AttributeError, MemoryError,
)  # fmt: skip
"""What reading a damaged file raises, here and inside h5py."""

LIMIT_S = 20
"""[s] for one piece of a file: an attribute, or rows of at most ``PIECE_BYTES``."""

LIMIT_BYTES = 4 << 30
"""Of address space of the child."""

PIECE_BYTES = 2 << 20

ITEMS: tuple[tuple[str, str, Column | None], ...] = (
    *(("attribute", column.name, column) for column in schema.ATTRIBUTES),
    *(("end", column.name, column) for column in schema.END_VALUES),
    *(("count", name, None) for name in schema.TABLES),
)
"""What :meth:`Reader.facts` reads, in this order."""

Answer = Iterator[tuple[dict[str, Any], memoryview | bytes]]


def serve() -> NoReturn:
    """Answer requests until there are none."""
    import resource

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process, wherever it is
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    for limit, most in ((resource.RLIMIT_AS, LIMIT_BYTES), (resource.RLIMIT_CORE, 0)):
        hard = resource.getrlimit(limit)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(limit, (most, hard))
    out = os.fdopen(os.dup(1), "wb", 0)
    os.dup2(2, 1)  # nobody else may write between the frames
    for line in sys.stdin:
        request = json.loads(line)
        signal.alarm(LIMIT_S)
        answer = _facts if request.pop("do") == "facts" else _rows
        try:
            for frame, payload in answer(**request):
                _write(out, frame, payload)
                signal.alarm(LIMIT_S)
        except DAMAGE as error:
            _write(out, {"error": why(error)})
        _write(out, {"end": True})
        signal.alarm(0)
    os._exit(0)  # HDF5's end of the process may crash, too


def _write(out: IO[bytes], frame: dict[str, Any], payload: memoryview | bytes = b"") -> None:
    if payload:
        frame["bytes"] = len(payload)
    data = memoryview(json.dumps(frame).encode() + b"\n")
    for part in (data, memoryview(payload)):
        while part:
            signal.alarm(0)  # the parent may be slow
            part = part[out.write(part) :]


def _open(path: str) -> tuple[Any, bool]:
    """The file, and whether HDF5 opens it as it is; else it is behind a sound superblock."""
    import h5py

    from aladdin_mpi.record.reading import open_image

    if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe would never end
        raise RecordError("not a file")
    first: Exception | None = None
    for locking in (None, False):
        try:
            return h5py.File(path, "r", locking=locking), True
        except DAMAGE as error:
            first = first or error
    try:
        return open_image(path), False
    except RecordError:
        raise RecordError(why(first)) from None


def _facts(path: str, first: int) -> Answer:
    file, plain = _open(path)
    with file:
        yield {"plain": plain}, b""
        for number, (kind, name, column) in enumerate(ITEMS[first:], first):
            frame: dict[str, Any] = {"item": number}
            try:
                value = _fact(file, path, kind, name, column)
                if value is not None:
                    frame["value"] = value
            except DAMAGE as error:
                frame["error"] = why(error)
            yield frame, b""


def _fact(file: Any, path: str, kind: str, name: str, column: Column | None) -> Any:
    if kind == "attribute":
        if name not in file.attrs:
            return None
        shape = file.attrs.get_id(name).shape
        value = file.attrs[name] if shape == () else None
    elif kind == "end":
        if "run" not in file or name not in file["run"]:
            return None
        shape = file["run"][name].shape
        value = file["run"][name][()] if shape == () else None
    else:
        return _length(file, path, name) if name in file else None
    if value is None or column is None:
        raise ValueError("not a single value")
    return _plain(value, column)


def _plain(value: Any, column: Column) -> Any:
    if column.dtype.startswith("S"):
        return clean(value)
    if column.dtype.startswith("f"):
        return float(value)
    limits = np.iinfo(column.dtype)
    if not limits.min <= value <= limits.max:
        raise ValueError(f"{value} is too large")
    return int(value)


def clean(text: Any) -> str:
    """Text that a terminal and JSON bear."""
    if isinstance(text, bytes):
        text = text.decode(errors="replace")
    text = str(text).encode(errors="surrogateescape").decode(errors="replace")
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "�", text)


def _length(file: Any, path: str, name: str) -> int:
    """Rows that a table should have, also where the file has been cut off."""
    dataset = file[name]
    if dataset.shape is None or len(dataset.shape) != 1 or dataset.dtype.names is None:
        raise ValueError("not a table")
    length = int(dataset.shape[0])
    if length * schema.TABLES[name].dtype.itemsize > 16 * os.stat(path).st_size + (64 << 20):
        raise ValueError(f"{length} rows are more than the file can have had")
    return length


def _rows(path: str, table: str, first: int, careful: bool) -> Answer:
    file, _ = _open(path)
    with file:
        if table not in file:
            return
        total = _length(file, path, table)
        dataset = file[table]
        chunk = min((dataset.chunks or (512,))[0], 1 << 20)
        _check_type(dataset, table, file.attrs.get("schema_version", schema.SCHEMA_VERSION))
        yield {"total": total, "chunk": chunk}, b""
        step = chunk if careful else chunk * max(1, PIECE_BYTES // (chunk * dataset.dtype.itemsize))
        begin = first
        while begin < total:
            end = min(begin - begin % chunk + step, total)
            yield from _piece(dataset, table, begin, end, chunk)
            begin = end


def _check_type(dataset: Any, table: str, version: Any) -> None:
    """A damaged type gives wrong rows without an error."""
    from h5py import h5t

    stored = dataset.dtype
    kinds = {name: stored[name] for name in stored.names or ()}
    ours = {name: schema.TABLES[table].dtype[name] for name in schema.TABLES[table].names}
    packed = stored.itemsize == sum(kind.itemsize for kind in kinds.values())
    same = all(kinds[name] == ours[name] for name in kinds.keys() & ours.keys())
    renamed = bool(kinds.keys() - ours.keys()) and bool(ours.keys() - kinds.keys())
    known = version != schema.SCHEMA_VERSION or (same and not renamed)
    if not packed or not known or not h5t.py_create(stored).equal(dataset.id.get_type()):
        raise ValueError("the table's type is damaged")


def _piece(dataset: Any, table: str, begin: int, end: int, chunk: int) -> Answer:
    """Rows ``begin`` to ``end``; where that fails, as many chunks of them as can be read."""
    try:
        rows = as_table(dataset[begin:end], table)
    except DAMAGE as error:
        middle = (begin + end) // 2
        middle -= middle % chunk
        if begin < middle < end:
            yield from _piece(dataset, table, begin, middle, chunk)
            yield from _piece(dataset, table, middle, end, chunk)
        elif end - begin > chunk:
            yield from _piece(dataset, table, begin, begin - begin % chunk + chunk, chunk)
            yield from _piece(dataset, table, begin - begin % chunk + chunk, end, chunk)
        else:
            yield {"rows": end - begin, "error": why(error)}, b""
    else:
        yield {"rows": len(rows)}, memoryview(np.ascontiguousarray(rows).view(np.uint8))  # type: ignore[arg-type]


def as_table(stored: np.ndarray, name: str) -> np.ndarray:
    """Rows as this package's table; columns that they do not have are "unknown"."""
    table = schema.TABLES[name]
    if stored.dtype == table.dtype:
        return stored
    rows = np.empty(len(stored), table.dtype)
    old = stored.dtype.names or ()
    for column in table.columns:
        rows[column.name] = stored[column.name] if column.name in old else column.unknown
    return rows


def why(error: BaseException | None) -> str:
    """What went wrong, in a few words."""
    text = " ".join(str(error).split())
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror
    return text.rpartition(": ")[2][:120] or type(error).__name__
