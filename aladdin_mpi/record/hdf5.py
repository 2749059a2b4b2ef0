"""One HDF5 file per rank, readable while it is written and after the process was killed.

All tables, attributes and end values exist before the first row is written, because a file that
others may read meanwhile (SWMR, "single writer, multiple readers") cannot get new objects.  Where
SWMR does not work the file is written in the plain way and flushed after each batch; the attribute
``mode`` says which.

Notes
-----
HDF5 does not survive a failed write: the file may no longer open, and the library crashes at the
end of the process because it cannot write what it still holds.  So the space for a batch is
reserved in the file system *before* HDF5 sees the batch.  A full disk or quota then fails in our
own call, and the file stays whole and can be closed.  Should a write fail all the same, the library
is cut off from the file, which keeps what it had at that moment.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NoReturn

import h5py
import numpy as np

from aladdin_mpi.errors import RecordError
from aladdin_mpi.record import layout, schema
from aladdin_mpi.record.schema import Value

__all__ = ["RankFile"]

RESERVE_BYTES = 64 * 1024  # for HDF5's own bookkeeping of one batch, and for closing
RESERVE_STEP_BYTES = 256 * 1024  # reserved at once, so that few batches need the system call
NETWORK_FILESYSTEMS = ("nfs", "cifs", "smb", "9p", "fuse.sshfs")  # SWMR is not reliable there
CANNOT_RESERVE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class RankFile:
    """The log file of one rank.

    Parameters
    ----------
    path : path
        Must not exist; its folder is made if needed.
    attributes : mapping, optional
        Values of :data:`~aladdin_mpi.record.schema.ATTRIBUTES`.  Those of this process (host, pid,
        times, schema version) are filled in, others that are not given are "unknown".
    swmr : bool, optional
        Write so that others can read meanwhile.  By default where that works.

    Attributes
    ----------
    path : Path
    mode : str
        ``"swmr"`` or ``"flush"``.
    locking : bool
        Whether the file is locked while it is opened.

    Raises
    ------
    RecordError
        The folder or the file cannot be written, or the file exists.
    ValueError
        An attribute is not in the schema.

    Notes
    -----
    Any thread may call any method; they exclude one another.  A forked child must not use the
    object, and cannot harm the file.
    """

    def __init__(
        self,
        path: str | Path,
        attributes: Mapping[str, Value] | None = None,
        *,
        swmr: bool | None = None,
    ) -> None:
        self.path = Path(path)
        values = layout.complete(attributes or {})
        self._who = f"rank {values['rank']!s}"
        self._who += f" (worker {values['worker']!s})" if values["worker"] != -1 else ""
        self._lock = threading.RLock()
        self._stopped: str | None = None  # why nothing more is written
        self._detached = False
        self._closed = False
        self._claim()
        self._file, self.mode, self.locking = self._open(values, swmr)
        self._descriptor: int = self._file.id.get_vfd_handle()
        self._ids = {name: self._file[name].id for name in schema.TABLES}
        self._types = {name: h5py.h5t.py_create(t.dtype) for name, t in schema.TABLES.items()}
        self._counts = dict.fromkeys(schema.TABLES, 0)
        _OPEN.add(self)

    def append(self, table: str, rows: np.ndarray) -> None:
        """Append ``rows`` (one-dimensional, of the table's dtype); lasting after :meth:`flush`.

        Raises
        ------
        RecordError
            The rows cannot be written, or an earlier call failed.  What was flushed before stays.
        """
        rows = np.ascontiguousarray(rows, dtype=schema.TABLES[table].dtype)
        with self._lock:
            if self._closed or self._stopped is not None:
                reason = self._stopped or "the run has ended"
                raise RecordError(f"{self._who}: {self.path} is closed: {reason}")
            if not rows.size:
                return
            self._reserve(rows.nbytes)
            begin = self._counts[table]
            with self._abandon_on_error():
                identifier = self._ids[table]
                identifier.set_extent((begin + rows.size,))
                place = identifier.get_space()
                place.select_hyperslab((begin,), (rows.size,))
                memory = h5py.h5s.create_simple((rows.size,))
                identifier.write(memory, place, rows, self._types[table])
            self._counts[table] = begin + rows.size

    def flush(self) -> None:
        """Hand everything to the operating system: from now on it survives this process.

        Raises
        ------
        RecordError
            The write failed.
        """
        with self._lock:
            if self._closed or self._detached:
                return
            with self._abandon_on_error():
                self._file.flush()

    def set_end(self, name: str, value: Value) -> None:
        """Set one of :data:`~aladdin_mpi.record.schema.END_VALUES`; needs no space on the disk.

        Raises
        ------
        KeyError
            No such value.
        RecordError
            The write failed.
        """
        columns = {column.name: column for column in schema.END_VALUES}
        if name not in columns:
            raise KeyError(f"no end value {name!r}; there are {list(columns)}")
        with self._lock:
            if self._closed or self._detached:
                return
            with self._abandon_on_error():
                self._file["run"][name][()] = layout.scalar(columns[name], value)

    def close(self, clean: bool = True) -> None:
        """Note how the rank ended, and close.  Does nothing when called again.

        Raises
        ------
        RecordError
            The write failed.
        """
        with self._lock:
            if self._closed:
                return
            self.set_end("clean_end", int(clean))
            self.set_end("end_unix_s", time.time())
            self.set_end("end_clock_s", time.monotonic())
            self.flush()
            self._closed = True
            _OPEN.discard(self)
            if self._detached:
                return
            with self._abandon_on_error():
                if self._stopped is None:  # return what is reserved; a full disk needs it to close
                    os.ftruncate(self._descriptor, self._file.id.get_filesize())
                self._file.close()

    def __enter__(self) -> RankFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(clean=kind is None)

    # ---- opening

    def _claim(self) -> None:
        """Create the file, so that no other run takes the name; HDF5's errors would be vaguer."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666))
        except OSError as error:
            if isinstance(error, FileExistsError) and self.path.exists():
                raise RecordError(
                    f"{self._who}: {self.path} exists already; choose another folder for this run, "
                    "or remove it"
                ) from error
            raise RecordError(
                f"{self._who}: cannot write the log file {self.path}: {error.strerror}; choose a "
                "folder that this user can write to on every node"
            ) from error

    def _open(
        self, attributes: Mapping[str, Value], swmr: bool | None
    ) -> tuple[h5py.File, str, bool]:
        modes = [True, False] if swmr is None else [swmr]
        if swmr is None and layout.filesystem(self.path).startswith(NETWORK_FILESYSTEMS):
            modes = [False]
        last: Exception | None = None
        for mode in modes:
            for locking in (True, False):
                try:
                    file = layout.create(self.path, attributes, mode, locking)
                except (OSError, RuntimeError, ValueError) as error:
                    last = error
                else:
                    return file, "swmr" if mode else "flush", locking
        self.path.unlink(missing_ok=True)
        raise RecordError(
            f"{self._who}: cannot create {self.path}: {layout.one_line(last)}"
        ) from last

    # ---- failures

    def _reserve(self, num_bytes: int) -> None:
        """Make sure that the disk has room for a batch of ``num_bytes`` and for closing."""
        end = self._file.id.get_filesize()
        need = num_bytes + 2 * layout.CHUNK_BYTES + RESERVE_BYTES
        try:
            if os.fstat(self._descriptor).st_size >= end + need:
                return
            try:
                os.posix_fallocate(self._descriptor, end, need + RESERVE_STEP_BYTES)
            except OSError as error:
                if error.errno not in CANNOT_RESERVE:
                    raise
                free = os.fstatvfs(self._descriptor)
                if free.f_bavail * free.f_frsize < need:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from None
        except OSError as error:
            self._fail(error)

    @contextlib.contextmanager
    def _abandon_on_error(self) -> Iterator[None]:
        """After a failed write leave the file as it is on the disk now."""
        try:
            yield
        except (OSError, RuntimeError) as error:
            self._detach()
            with contextlib.suppress(OSError, RuntimeError):
                self._file.close()
            self._fail(error)

    def _fail(self, error: Exception) -> NoReturn:
        self._stopped = layout.one_line(error)
        raise RecordError(
            f"{self._who}: cannot write {self.path}: {self._stopped}; what was written before is "
            "kept"
        ) from error

    def _detach(self) -> None:
        """Let HDF5 write the rest of what it holds into memory instead of the file."""
        if self._detached:
            return
        self._detached = True
        if hasattr(os, "memfd_create"):
            spare = os.memfd_create("aladdin_mpi")
            os.dup2(spare, self._descriptor, inheritable=False)
            os.close(spare)
        else:
            with tempfile.TemporaryFile() as file:
                os.dup2(file.fileno(), self._descriptor, inheritable=False)


_OPEN: weakref.WeakSet[RankFile] = weakref.WeakSet()


def _detach_after_fork() -> None:
    # A forked child that ends in the usual way makes its copy of HDF5 write to the parent's file.
    for file in list(_OPEN):
        file._lock = threading.RLock()  # another thread may have held it
        file._closed = True
        file._detach()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_detach_after_fork)
