"""Try out on an output folder's file system what the log needs; for ``aladdin-mpi doctor``.

``python -m aladdin_mpi.record.filesystem FOLDER`` prints a JSON object; ``… --rows FILE`` the
number of rows that another process sees in a file that is being written.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from aladdin_mpi.errors import RecordError
from aladdin_mpi.record import layout, schema
from aladdin_mpi.record.hdf5 import RankFile
from aladdin_mpi.record.reading import open_rank_file

__all__ = ["try_folder"]

READER_LIMIT_S = 30


def try_folder(folder: Path) -> dict[str, Any]:
    """What this file system is and what works there.  Leaves nothing behind.

    A folder that does not exist yet is tried in the nearest one above it.

    Returns
    -------
    dict
        ``folder``, ``type``, ``free_bytes``; ``problem`` (empty: a log can be written); ``locking``
        (the system's locks work), ``mode`` (how a log would be written: swmr or flush) and
        ``read_while_written`` (another process sees rows at once).
    """
    place = folder.resolve()
    while not place.is_dir() and place != place.parent:
        place = place.parent
    path = place / f".aladdin-doctor-{socket.gethostname()}-{os.getpid()}.h5"
    found: dict[str, Any] = {
        "folder": str(place),
        "type": layout.filesystem(path) or "unknown",
        "free_bytes": shutil.disk_usage(place).free,
        "problem": "",
    }
    try:
        with RankFile(path, {"rank": 0}) as file:
            found["mode"] = file.mode
            found["locking"] = file.locking and _locks(path.with_suffix(".lock"))
            file.append("steps", np.zeros(3, schema.STEPS.dtype))
            file.flush()
            found["read_while_written"] = _rows_seen(path) == 3
    except RecordError as error:
        found["problem"] = layout.one_line(error.__cause__ or error)
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
    return found


def _locks(path: Path) -> bool:
    """Whether a second lock of a file is refused while the first one is held."""
    try:
        with path.open("w") as first, path.open("w") as second:
            fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            return False
    except OSError:
        return False
    finally:
        path.unlink(missing_ok=True)


def _rows_seen(path: Path) -> int:
    argv = [sys.executable, "-m", "aladdin_mpi.record.filesystem", "--rows", str(path)]
    try:
        shown = subprocess.run(argv, capture_output=True, text=True, timeout=READER_LIMIT_S)
        return int(shown.stdout)
    except (subprocess.TimeoutExpired, ValueError):
        return -1


if __name__ == "__main__":
    if sys.argv[1] == "--rows":
        with open_rank_file(sys.argv[2]) as opened:
            print(len(opened["steps"]))
    else:
        print(json.dumps(try_folder(Path(sys.argv[1]))), flush=True)
