"""The checks of ``aladdin-mpi doctor``.

Whatever could hang or crash, MPI above all, runs in a process of its own with a time limit.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

__all__ = ["Finding", "Level", "all_checks", "judge_mpi", "stale_files"]

SHARED_MEMORY = Path("/dev/shm")
LITTLE_BYTES = 256 * 2**20
MPI_FILES = ("mpich_sh", "ucx_shm_", "sm_segment.", "vader_segment.", "osc_sm.", "psm2_shm", "cma_")
"""Beginnings of the names of MPI libraries' files in shared memory."""

STALE_S = 60.0
LAUNCHER_VARIABLES = (
    "PMI_",
    "PMIX_",
    "OMPI_COMM_",
    "OMPI_UNIVERSE",
    "MPI_LOCAL",
    "SLURM_",
    "HYDI_",
)

_IMPORT = "import importlib; m = importlib.import_module({!r}); print({})"
_MPI_PROBE = """
import json, sys, mpi4py
mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI
found = {"mpi4py": mpi4py.__version__, "library": MPI.Get_library_version().strip("\\0 \\n")}
print(json.dumps(found), flush=True)
found["threads"] = MPI.Init_thread(MPI.THREAD_MULTIPLE) >= MPI.THREAD_MULTIPLE
win = MPI.Win.Allocate(4096, comm=MPI.COMM_SELF)
found["unified"] = win.Get_attr(MPI.WIN_MODEL) == MPI.WIN_UNIFIED
win.Free()
print(json.dumps(found), flush=True)
MPI.Finalize()
"""


class Level(IntEnum):
    """How serious a finding is."""

    OK = 0
    WARNING = 1
    ERROR = 2


class Finding(NamedTuple):
    """One line: what was looked at, what was found, and what to do about it, if anything."""

    level: Level
    what: str
    found: str
    advice: str = ""


def all_checks(timeout_s: float) -> Iterator[Finding]:
    """Run all checks, one after the other."""
    yield _python()
    torch = "m.__version__ + (', CUDA' if m.cuda.is_available() else ', no GPU')"
    for name, show in (("torch", torch), ("numba", "m.__version__"), ("h5py", "m.__version__")):
        yield _package(name, show, timeout_s)
    yield from _mpi(timeout_s)
    yield from _shared_memory()
    yield _cores()


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    return Finding(Level.OK, "Python", f"{version} ({sys.executable})")


def _package(name: str, show: str, timeout_s: float) -> Finding:
    lines, problem = _run([sys.executable, "-c", _IMPORT.format(name, show)], timeout_s)
    if problem:
        return Finding(Level.ERROR, name, problem, f"pip install {name}")
    return Finding(Level.OK, name, lines[-1])


def _mpi(timeout_s: float) -> Iterator[Finding]:
    lines, problem = _run([sys.executable, "-c", _MPI_PROBE], timeout_s)
    probed = [json.loads(line) for line in lines if line.startswith("{")]
    if not probed:
        advice = (
            "pip install mpi4py and, where there is no MPI, mpich (or load the cluster's module)"
        )
        yield Finding(Level.ERROR, "MPI", problem or "nothing found", advice)
        return
    yield Finding(Level.OK, "mpi4py", probed[-1]["mpi4py"])
    yield from judge_mpi(probed[-1], problem)
    yield _launcher(probed[-1]["library"], timeout_s)


def judge_mpi(probed: dict[str, object], problem: str) -> Iterator[Finding]:
    """What the probe of the MPI library means; ``problem`` is empty where it ran to its end."""
    library = " ".join(str(probed["library"]).split())
    short = _family_and_version(library)
    if re.search(r"Open MPI v4\.1\.4\b", library):
        yield Finding(
            Level.WARNING, "MPI library", short,
            "this version fails on one-sided communication with threads (Debian 12 ships it): "
            "use a newer one, or pip install mpich",
        )  # fmt: skip
    else:
        yield Finding(Level.OK, "MPI library", short)
    if problem:
        advice = (
            "try it alone: python -c 'from mpi4py import MPI'; a broken network setting can hang it"
        )
        yield Finding(Level.ERROR, "MPI start", problem, advice)
        return
    if not probed.get("threads"):
        yield Finding(
            Level.WARNING, "MPI threads", "no THREAD_MULTIPLE", "use an MPI that was built with it"
        )
    if not probed.get("unified"):
        advice = "use another MPI: memory windows must be unified"
        yield Finding(Level.ERROR, "MPI windows", "separate memory model", advice)


def _launcher(library: str, timeout_s: float) -> Finding:
    family = _family(library)
    beside = Path(sys.executable).parent / "mpiexec"
    found = shutil.which("mpiexec")
    advice = f"put the mpiexec of {family} on PATH"
    if beside.exists():
        advice = f"use {beside}, or put its folder first on PATH"
    if found is None:
        return Finding(Level.WARNING, "mpiexec", "not on PATH", advice)
    lines, problem = _run([found, "--version"], timeout_s)
    theirs = _family(" ".join(lines))
    if problem or theirs == "unknown":
        return Finding(
            Level.WARNING, "mpiexec", f"{found}: {problem or 'of an unknown MPI'}", advice
        )
    if theirs != family:
        text = f"{found} is of {theirs}, mpi4py uses {family}: every rank would be alone"
        return Finding(Level.WARNING, "mpiexec", text, advice)
    return Finding(Level.OK, "mpiexec", f"{found} ({theirs})")


def _family(text: str) -> str:
    if re.search(r"open\s*mpi|OpenRTE|prte", text, re.IGNORECASE):
        return "Open MPI"
    if re.search(r"intel", text, re.IGNORECASE):
        return "Intel MPI"
    return "MPICH" if re.search(r"mpich|hydra", text, re.IGNORECASE) else "unknown"


def _family_and_version(library: str) -> str:
    version = re.search(r"\d+\.\d+(\.\d+)?\S*", library)
    return f"{_family(library)} {version.group().rstrip(',') if version else ''}".strip()


def _shared_memory() -> Iterator[Finding]:
    if not SHARED_MEMORY.is_dir():
        yield Finding(
            Level.WARNING, "shared memory", f"there is no {SHARED_MEMORY}", "mount a tmpfs"
        )
        return
    free = shutil.disk_usage(SHARED_MEMORY).free
    text = f"{free / 2**30:.1f} GiB free in {SHARED_MEMORY}"
    if free < LITTLE_BYTES:
        advice = (
            "the mailboxes of a host's workers live there: make room (docker run --shm-size=2g)"
        )
        yield Finding(Level.WARNING, "shared memory", text, advice)
    else:
        yield Finding(Level.OK, "shared memory", text)
    stale = stale_files(SHARED_MEMORY)
    if stale:
        size = sum(bytes_ for _, bytes_ in stale) / 2**20
        names = ", ".join(path.name for path, _ in stale[:3]) + (", …" if len(stale) > 3 else "")
        yield Finding(
            Level.WARNING, "left by killed jobs", f"{len(stale)} file(s), {size:.0f} MiB: {names}",
            f"no process uses them; remove them from {SHARED_MEMORY}",
        )  # fmt: skip


def stale_files(folder: Path, proc: Path = Path("/proc")) -> list[tuple[Path, int]]:
    """Files of MPI libraries that no visible process maps, older than a minute, with their size."""
    found = []
    for path in sorted(folder.iterdir()):
        try:
            status = path.stat()
        except OSError:
            continue
        if path.name.startswith(MPI_FILES) and time.time() - status.st_mtime > STALE_S:
            found.append((path, status.st_size))
    if not found:
        return []
    used = set()
    for maps in proc.glob("[0-9]*/maps"):
        try:
            used |= {line.split()[-1] for line in maps.read_text().splitlines() if "/" in line}
        except OSError:
            continue
    return [(path, size) for path, size in found if str(path) not in used]


def _cores() -> Finding:
    usable = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    text = f"{usable} of {os.cpu_count()} usable by this process"
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()[:2]
        if quota != "max":
            text += f", limited to the time of {int(quota) / int(period):.1f}"
    except (OSError, ValueError):
        pass
    if usable == 1:
        advice = "server and workers will share one core: the timing means little"
        return Finding(Level.WARNING, "CPU cores", text, advice)
    return Finding(Level.OK, "CPU cores", text)


def _run(argv: list[str], timeout_s: float) -> tuple[list[str], str]:
    """Lines of the standard output, and what went wrong, or an empty text."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER_VARIABLES)}
    try:
        done = subprocess.run(
            argv, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=timeout_s,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        out = error.stdout or b""
        text = out.decode(errors="replace") if isinstance(out, bytes) else out
        return text.splitlines(), f"no answer within {timeout_s:g} s"
    except OSError as error:
        return [], str(error.strerror)
    lines = done.stdout.splitlines()
    if done.returncode == 0 and lines:
        return lines, ""
    last = [line.strip() for line in done.stderr.splitlines() if line.strip()][-1:]
    return lines, last[0] if last else f"exit status {done.returncode}"
