"""What this machine and this environment are: files, variables and devices, nothing that hangs."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from aladdin_mpi.cli.children import run
from aladdin_mpi.cli.findings import Finding, Level
from aladdin_mpi.cli.judging import Place

__all__ = [
    "cores",
    "has_infiniband",
    "here",
    "network",
    "python",
    "settings",
    "shared_memory",
    "stale_files",
]

SHARED_MEMORY = Path("/dev/shm")
LITTLE_BYTES = 256 * 2**20
MPI_FILES = ("mpich_sh", "ucx_shm_", "sm_segment.", "vader_segment.", "osc_sm.", "psm2_shm", "cma_")
"""Beginnings of the names of MPI libraries' files in shared memory."""

STALE_S = 60.0
SETTINGS = ("UCX_", "FI_", "MPICH_", "MPIR_CVAR_", "OMPI_MCA_", "PRTE_MCA_", "I_MPI_", "PSM2_")
"""Beginnings of the names of variables that change what MPI does."""

LAUNCHERS_OWN = ("OMPI_MCA_PREFIXES", "OMPI_MCA_num_procs", "OMPI_MCA_initial_wdir",
                 "OMPI_MCA_cpu_type")  # fmt: skip
"""Open MPI's launcher sets these itself."""


def python() -> Finding:
    """Which Python this is."""
    version = ".".join(map(str, sys.version_info[:3]))
    return Finding(Level.OK, "Python", f"{version} ({sys.executable})", same=version)


def here(environ: Mapping[str, str] = os.environ) -> Place:
    """Where this process runs."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    own = tuple(sorted(usable if usable is not None else range(os.cpu_count() or 1)))
    threads = environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return Place(platform.node(), own, int(threads) if threads.isdecimal() else 0)


def cores() -> Finding:
    """How many cores this process may use, and with how many threads."""
    place = here()
    usable = len(place.cores)
    text = f"{usable} of {os.cpu_count()} usable by this process"
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()[:2]
        if quota != "max":
            text += f", limited to the time of {int(quota) / int(period):.1f}"
    except (OSError, ValueError):
        pass
    text += f", OMP_NUM_THREADS {place.omp_threads or 'not set'}"
    if usable == 1 and os.cpu_count() != 1:
        advice = "bound to one core: for more, mpiexec --bind-to none or srun --cpus-per-task"
        return Finding(Level.WARNING, "CPU cores", text, advice)
    if usable == 1:
        advice = "server and workers will share one core: the timing means little"
        return Finding(Level.WARNING, "CPU cores", text, advice)
    return Finding(Level.OK, "CPU cores", text)


def settings(environ: Mapping[str, str] = os.environ) -> Finding:
    """The variables that are set and change how MPI communicates."""
    names = sorted(n for n in environ if n.startswith(SETTINGS) and n not in LAUNCHERS_OWN)
    text = " ".join(f"{name}={environ[name]}" for name in names) or "none"
    return Finding(Level.OK, "MPI settings", text, same=text)


def network(timeout_s: float, root: Path = Path("/sys/class")) -> Finding:
    """The network devices that are up, InfiniBand devices, and what UCX can use."""
    devices = []
    for device in sorted((root / "net").glob("*")):
        if device.name != "lo" and _first(device / "operstate") in ("up", "unknown"):
            speed = _first(device / "speed")
            fast = speed.isdecimal() and int(speed) > 0
            devices.append(device.name + (f" ({int(speed) / 1000:g} Gb/s)" if fast else ""))
    devices += [device.name for device in sorted((root / "infiniband").glob("*"))]
    text = ", ".join(devices) or "none but the loopback device"
    tool = shutil.which("ucx_info")
    if tool is None:
        text += "; no ucx_info here"
    else:
        lines, problem = run([tool, "-d"], timeout_s)
        pairs = [line.split(":", 1)[1].strip() for line in lines if "Transport:" in line]
        text += f"; UCX transports: {', '.join(dict.fromkeys(pairs)) or problem or 'none'}"
    return Finding(Level.OK, "network", text)


def has_infiniband(root: Path = Path("/sys/class")) -> bool:
    """Whether there is an InfiniBand (or RoCE) device."""
    return any((root / "infiniband").glob("*"))


def _first(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # also where a device has no such property
        return ""


def shared_memory() -> Iterator[Finding]:
    """Room for the mailboxes, and what killed jobs have left there."""
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
