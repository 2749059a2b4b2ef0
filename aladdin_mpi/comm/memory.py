"""Whether the memory of every host is enough, before it is taken."""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path

from mpi4py import MPI

__all__ = ["available_bytes", "shortage"]


def available_bytes() -> int:
    """[bytes] that may still be taken on this host, or in this process's control group; 0: unknown.

    A control group's limit counts where it is version 2; pages of files that can be dropped are
    free.
    """
    found = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        fields = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
        found.append(fields["MemAvailable"] + fields.get("SwapFree", 0))
    with contextlib.suppress(OSError, ValueError):
        path = next(
            line.partition("::")[2].strip()
            for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
            if line.startswith("0::")
        )
        group = Path("/sys/fs/cgroup") / path.lstrip("/")
        limit = int((group / "memory.max").read_text(encoding="ascii"))
        used = int((group / "memory.current").read_text(encoding="ascii"))
        stat = (group / "memory.stat").read_text(encoding="ascii").split()
        dropped = int(stat[stat.index("inactive_file") + 1])
        found.append(limit - used + dropped)
    return max(0, min(found, default=0))


def shortage(comm: MPI.Intracomm, need: int, window: int, senders: int) -> str:
    """One line where a host's memory does not suffice, the same on all ranks; else empty.
    Collective.

    Parameters
    ----------
    need, window : int
        [bytes] that this rank takes in all, and in shared memory (``/dev/shm``); a full one would
        kill the job (SIGBUS).
    senders : int
        Whose pushes the shared memory is for.
    """
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    ranks, together, windows = node.size, node.allreduce(need), node.allreduce(window)
    senders, available = node.allreduce(senders), available_bytes()
    node.Free()
    own = ""
    if windows and ranks > 1 and os.path.isdir("/dev/shm"):  # a rank alone needs no sharing
        stat = os.statvfs("/dev/shm")
        free = stat.f_bavail * stat.f_frsize
        if free < windows:
            own = (
                f"{_size(windows)} of shared memory are needed for the pushes of {senders} "
                f"worker(s) or relay(s), and /dev/shm of host {platform.node()} has {_size(free)} "
                "free: enlarge it (mount -o remount,size=…, or docker run --shm-size=…), remove "
                "stale files there, or use fewer workers"
            )
    if not own and 0 < available < together:
        own = (
            f"{_size(together)} are needed by the {ranks} rank(s) on host {platform.node()} beside "
            f"their models, and {_size(available)} are available: put fewer ranks on a host, "
            "spread the parameters (--servers, --server-placement spread), or push fewer bytes "
            "(--wire bfloat16)"
        )
    return next(filter(None, comm.allgather(own)), "")


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 1 << 30 else f"{nbytes / 2**20:.0f} MiB"
