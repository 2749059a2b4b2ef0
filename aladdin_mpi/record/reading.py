"""Where the ranks' files are, and how to open one for reading.  Needs HDF5 and nothing else."""

from __future__ import annotations

import io
import os
from pathlib import Path

import h5py

from aladdin_mpi.errors import RecordError
from aladdin_mpi.record.layout import one_line

__all__ = ["next_part", "open_image", "open_rank_file", "rank_path", "read_bytes"]

PAGE = 4096


def rank_path(folder: str | Path, rank: int, part: int = 0) -> Path:
    """Where ``rank`` writes: ``folder/rank0003.h5``; ``folder/rank0003.1.h5`` after the run was
    started again, and so on.
    """
    return Path(folder) / (f"rank{rank:04d}.{part}.h5" if part else f"rank{rank:04d}.h5")


def next_part(folder: str | Path) -> int:
    """The number of the files that a run writes when it is started (again) in this folder."""
    parts = [0]
    for path in Path(folder).glob("rank*.h5"):
        number = path.name.split(".")[1]
        parts.append(1 + int(number) if number.isdecimal() else 1)
    return max(parts)


def open_rank_file(path: str | Path) -> h5py.File:
    """Open a rank's file for reading: finished, still being written, or left by a killed process.

    Raises
    ------
    RecordError
        There is no such file, or it is not readable.

    Notes
    -----
    HDF5 can crash on a damaged file, or wait for ever for one that was not closed to become right.
    """
    last: Exception | None = None
    for locking in (None, False):  # a file system without locks, or a writer that holds one
        for swmr in (False, True):  # a file not closed by its writer opens only as SWMR reader
            try:
                return h5py.File(path, "r", swmr=swmr, locking=locking)
            except (OSError, RuntimeError, ValueError) as error:
                last = error
    raise RecordError(f"cannot read {path}: {one_line(last)}") from last


def open_image(path: str | Path) -> h5py.File:
    """Open a file of this package whatever its first bytes and its end look like.

    HDF5 sees the bytes of the file behind a superblock (the first bytes of an HDF5 file) that says
    that the file was closed and is long enough, and zeros where the file ends too early or cannot
    be read.  So a file that was cut off opens, and one that was not closed is read without waiting.

    Raises
    ------
    RecordError
        Not even that opens, or there is no such file.
    """
    try:
        return h5py.File(_Image(path), "r")
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        raise RecordError(f"cannot read {path}: {one_line(error)}") from error


def read_bytes(descriptor: int, begin: int, length: int) -> bytes:
    """As much as the file has; zeros for what the disk does not give."""
    try:
        return os.pread(descriptor, length, begin)
    except OSError:
        if length <= PAGE:
            return bytes(length)
        half = length // 2
        first = read_bytes(descriptor, begin, half)
        return first.ljust(half, b"\0") + read_bytes(descriptor, begin + half, length - half)


class _Image(io.RawIOBase):
    """See :func:`open_image`."""

    SIZE = 1 << 41
    SUPERBLOCKS = {  # as HDF5 writes them for our two kinds of files; they end past 1 TiB
        "v110": "894844460d0a1a0a030808000000000000000000ffffffffffffffffcf010000000100003000000000"
        "0000006fa965ad",
        "earliest": "894844460d0a1a0a000000000008080004001000000000000000000000000000ffffffffffffff"
        "ff7805000000010000ffffffffffffffff000000000000000060000000000000000100000000000000880000000000"
        "0000a802000000000000",
    }

    def __init__(self, path: str | Path) -> None:
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 (close() does it)
        self._position = 0
        root = os.pread(self._file.fileno(), 4, 48)  # a header of objects begins "OHDR" in v110
        zero = os.pread(self._file.fileno(), 8, 12)
        kind = "v110" if root == b"OHDR" or zero == bytes(8) else "earliest"
        self._head = bytes.fromhex(self.SUPERBLOCKS[kind])

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.SIZE}[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, target: memoryview) -> int:  # type: ignore[override]
        begin, length = self._position, len(target)
        data = read_bytes(self._file.fileno(), begin, length)
        head = self._head[begin : begin + length]
        target[: len(head)] = head
        target[len(head) : len(data)] = data[len(head) :]
        rest = max(len(head), len(data))
        target[rest:] = bytes(length - rest)
        self._position += length
        return length

    def close(self) -> None:
        self._file.close()
        super().close()
