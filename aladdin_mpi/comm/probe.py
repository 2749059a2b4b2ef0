"""What ``aladdin-mpi doctor`` tries out with MPI, in a process of its own or in a job.

A broken MPI can hang in any of these: the caller has a time limit.

``python -m aladdin_mpi.comm.probe alone`` and ``… horovod`` print JSON objects, each with all that
is known by then: after a crash the last one says how far it got.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import io
import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["describe", "progress_waits", "start", "stop", "window_problem"]

BUSY_S = 1.0
PUT_BYTES = 64 * 1024
_LIBRARY = re.compile(r"/lib(mpi|mpich|pmpi|mpi_\w+)\.so[.\d]*$")
_THREADS = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")


def _mpi() -> Any:
    """mpi4py's MPI, not initialized: so that a caller knows where it hangs."""
    import mpi4py

    if "mpi4py.MPI" not in sys.modules:
        mpi4py.rc.initialize = mpi4py.rc.finalize = False
    from mpi4py import MPI

    return MPI


def describe() -> dict[str, Any]:
    """Which mpi4py and which MPI library, and from where; does not initialize MPI."""
    mpi = _mpi()
    import mpi4py

    library = mpi.Get_library_version().strip("\0 \n")
    return {"mpi4py": mpi4py.__version__, "library": library, "path": library_path()}


def library_path() -> str:
    """The file of the MPI library that this process has loaded; empty if it is not known."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
            path = line.split(maxsplit=5)[-1]
            if _LIBRARY.search(path):
                return path
    return ""


def start() -> tuple[MPI.Intracomm, dict[str, Any]]:
    """Initialize MPI: the world; its size, thread level, and what it says of GPUs.  Collective."""
    mpi = _mpi()
    level = mpi.Init_thread(mpi.THREAD_MULTIPLE) if not mpi.Is_initialized() else mpi.Query_thread()
    levels = [getattr(mpi, f"THREAD_{name}") for name in _THREADS]
    found = {
        "threads": level >= mpi.THREAD_MULTIPLE,
        "thread_level": _THREADS[levels.index(level)],
        "size": mpi.COMM_WORLD.size,
        "cuda": reads_cuda(library_path()),
    }
    return mpi.COMM_WORLD, found


def stop() -> None:
    """The end of MPI.  Collective."""
    mpi = _mpi()
    if mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()


def reads_cuda(path: str) -> bool | None:
    """Whether the library says that it reads CUDA memory; None where it does not say."""
    try:
        query = ctypes.CDLL(path or None).MPIX_Query_cuda_support
    except (OSError, AttributeError):
        return None
    query.restype = ctypes.c_int
    return bool(query())


def _silent(text: str) -> None:
    pass


def window_problem(
    comm: MPI.Intracomm, stage: Callable[[str], None] = _silent
) -> tuple[bool, list[int]]:
    """Every rank puts a word into a window of rank 0, which reads them; ``stage`` is told where
    this rank is.  Collective.

    Returns
    -------
    unified : bool
        The window has one copy of its memory.
    lost : list of int
        On rank 0, the ranks whose word was not there after their Flush.
    """
    mpi = _mpi()
    import numpy as np

    stage("waiting for all ranks to make a window")
    window = mpi.Win.Allocate(8 * comm.size if comm.rank == 0 else 0, 8, comm=comm)
    unified = window.Get_attr(mpi.WIN_MODEL) == mpi.WIN_UNIFIED
    words = np.frombuffer(window.tomemory(), np.int64)
    window.Lock_all()
    if comm.rank == 0:
        words[:] = 0
        window.Sync()
    comm.Barrier()
    word = np.array([comm.rank + 1], np.int64)
    stage("the window test: Put and Flush to rank 0")
    window.Put(word, 0, comm.rank)
    window.Flush(0)
    stage("waiting for the other ranks after Put and Flush")
    comm.Barrier()
    window.Sync()
    lost = [rank for rank, value in enumerate(words) if value != rank + 1]
    window.Unlock_all()
    del words
    window.Free()
    return unified, lost


def progress_waits(
    comm: MPI.Intracomm, busy_s: float = BUSY_S, stage: Callable[[str], None] = _silent
) -> list[float]:
    """[s] how long each rank's Put and Flush took while rank 0 computed for ``busy_s`` without a
    call of MPI; 0 for rank 0 itself.  Collective.
    """
    mpi = _mpi()
    import numpy as np

    window = mpi.Win.Allocate(PUT_BYTES * comm.size if comm.rank == 0 else 0, 1, comm=comm)
    data = np.ones(PUT_BYTES, np.uint8)
    window.Lock_all()
    for _ in range(2):  # the first one only connects
        comm.Barrier()
        begin = time.perf_counter()
        if comm.rank == 0:
            while time.perf_counter() - begin < busy_s:
                pass
        else:
            time.sleep(busy_s / 10)  # rank 0 has left the barrier
            begin = time.perf_counter()
            stage("the progress test: Put and Flush while rank 0 computes")
            window.Put(data, 0, comm.rank * PUT_BYTES)
            window.Flush(0)
            stage("waiting for the other ranks after the progress test")
        took = time.perf_counter() - begin if comm.rank else 0.0
    comm.Barrier()
    window.Unlock_all()
    window.Free()
    return comm.allgather(took)


def horovod() -> dict[str, Any]:
    """Why Horovod cannot be used, or its version and what it was built with."""
    from aladdin_mpi.comm.libraries import horovod_problem

    problem = horovod_problem()
    if problem:
        return {"problem": problem}
    with contextlib.redirect_stdout(io.StringIO()):
        module = importlib.import_module("horovod.torch")
        version = importlib.import_module("horovod").__version__
    backends = []
    for name in ("mpi", "gloo", "nccl", "ccl"):
        with contextlib.suppress(Exception):  # each version has other questions
            if getattr(module, f"{name}_built")():
                backends.append(name)
    return {"problem": "", "version": version, "backends": backends}


def _alone() -> None:
    found = describe()
    print(json.dumps(found), flush=True)
    comm, more = start()
    found |= more
    found["unified"], lost = window_problem(comm)
    found["lost"] = bool(lost)
    print(json.dumps(found), flush=True)
    stop()


if __name__ == "__main__":
    if sys.argv[1:] == ["horovod"]:
        print(json.dumps(horovod()), flush=True)
    else:
        _alone()
