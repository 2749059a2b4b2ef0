"""Where the ranks' files are, and how to open one for reading.  Needs HDF5 and nothing else."""

from __future__ import annotations

from pathlib import Path

import h5py

from aladdin_mpi.errors import RecordError
from aladdin_mpi.record.layout import one_line

__all__ = ["next_part", "open_rank_file", "rank_path"]


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
    """
    last: Exception | None = None
    for locking in (None, False):  # a file system without locks, or a writer that holds one
        for swmr in (False, True):  # a file not closed by its writer opens only as SWMR reader
            try:
                return h5py.File(path, "r", swmr=swmr, locking=locking)
            except (OSError, RuntimeError, ValueError) as error:
                last = error
    raise RecordError(f"cannot read {path}: {one_line(last)}") from last
