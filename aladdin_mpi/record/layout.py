"""An empty log file: everything that must exist in it before the first row."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

import h5py
import numpy as np

from aladdin_mpi.record import schema
from aladdin_mpi.record.schema import Column, Table, Value

__all__ = ["CHUNK_BYTES", "complete", "create", "filesystem", "one_line", "scalar"]

CHUNK_BYTES = 32 * 1024  # a flush rewrites the last chunk of a table: small ones, little traffic


def create(path: Path, attributes: Mapping[str, Value], swmr: bool, locking: bool) -> h5py.File:
    """Create the file with all tables, attributes and end values, ready for rows.

    SWMR files use the format of HDF5 1.10, so that older tools can read them.
    """
    libver = ("v110" if swmr else "earliest", "v110")
    file = h5py.File(path, "w", libver=libver, locking=None if locking else False)
    how: dict[str, Value] = {"mode": "swmr" if swmr else "flush", "locking": int(locking)}
    try:
        for column in schema.ATTRIBUTES:
            file.attrs[column.name] = scalar(column, {**attributes, **how}[column.name])
        for table in schema.TABLES.values():
            _create_table(file, table)
        run = file.create_group("run")
        for column in schema.END_VALUES:
            start = 0 if column.name == "clean_end" else column.unknown
            dataset = run.create_dataset(column.name, data=scalar(column, start))
            dataset.attrs["unit"], dataset.attrs["meaning"] = column.unit, column.meaning
        if swmr:
            file.swmr_mode = True
        file.flush()
    except BaseException:
        file.close()
        raise
    return file


def _create_table(file: h5py.File, table: Table) -> None:
    chunk = max(1, CHUNK_BYTES // table.dtype.itemsize)
    dataset = file.create_dataset(
        table.name, shape=(0,), maxshape=(None,), dtype=table.dtype, chunks=(chunk,)
    )
    dataset.attrs["meaning"] = table.meaning
    dataset.attrs["roles"] = ", ".join(table.roles)
    for column in table.columns:
        dataset.attrs[f"{column.name}.unit"] = column.unit
        dataset.attrs[f"{column.name}.meaning"] = column.meaning
    if table is schema.EVENTS:
        kinds = {int(k): [k.name.lower(), text] for k, text in schema.EVENT_MEANINGS.items()}
        dataset.attrs["kinds"] = json.dumps(kinds)


def complete(given: Mapping[str, Value]) -> dict[str, Value]:
    """All attributes: those given, those of this process, and "unknown" for the rest.

    Raises
    ------
    ValueError
        One that is given is not in the schema.
    """
    names = [column.name for column in schema.ATTRIBUTES]
    if unknown := given.keys() - set(names):
        raise ValueError(f"attributes {sorted(unknown)} are not in the schema; there are {names}")
    values: dict[str, Value] = {
        c.name: "" if c.dtype == "S" else c.unknown for c in schema.ATTRIBUTES
    }
    values |= {
        "schema_version": schema.SCHEMA_VERSION,
        "package": "aladdin_mpi",
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "start_unix_s": time.time(),
        "start_clock_s": time.monotonic(),
    }
    return values | dict(given)


def scalar(column: Column, value: Value) -> str | np.ndarray:
    """``value`` as HDF5 keeps it: text of any length (dtype ``"S"``), or a 0-dimensional array."""
    if isinstance(value, bytes):
        value = value.decode(errors="replace")
    if column.dtype == "S":
        return str(value)
    if column.dtype.startswith("S"):
        value = value.encode() if isinstance(value, str) else str(value).encode()
    return np.array(value, dtype=column.dtype)


def filesystem(path: Path) -> str:
    """Type of the file system that holds ``path``, such as ``"nfs4"``; empty if not known."""
    folder, best, kind = f"{path.parent.resolve()}/", "", ""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mounts").read_text(errors="replace").splitlines():
            mount, mount_kind = line.split(" ")[1:3]
            if folder.startswith(mount.rstrip("/") + "/") and len(mount) >= len(best):
                best, kind = mount, mount_kind
    return kind


def one_line(error: BaseException | None) -> str:
    """What went wrong, without HDF5's details."""
    if isinstance(error, OSError) and error.errno is not None:
        return os.strerror(error.errno)
    text = " ".join(str(error).split())
    for code in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG, errno.EROFS, errno.ESTALE):
        if f"errno = {code}," in text:  # HDF5 hides the system's error in its text
            return os.strerror(code)
    return text[:160] or type(error).__name__
