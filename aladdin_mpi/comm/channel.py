"""Opening a channel: the collective start-up step of one optimizer, and what both ends share."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import NamedTuple

from mpi4py import MPI

from aladdin_mpi.comm.mailbox import pieces
from aladdin_mpi.core.encoding import find
from aladdin_mpi.core.wire import Frame, FrameLayout
from aladdin_mpi.errors import ModelError
from aladdin_mpi.messages import ChannelSpec

__all__ = ["ONE_SLOT_BYTES", "TAG_REPLY", "Opening", "agree", "broadcast", "tags"]

ONE_SLOT_BYTES = 256 << 20
"""[bytes] a frame above this gets one slot per worker, not two."""

TAG_REPLY = 16


def tags(channel: int) -> tuple[int, int]:
    """Message tags of replies to mix in, and of copies that were asked for."""
    return TAG_REPLY + 2 * channel, TAG_REPLY + 2 * channel + 1


class Opening(NamedTuple):
    """What came out of :func:`agree`."""

    comm: MPI.Intracomm
    spec: ChannelSpec
    layout: FrameLayout  # of parameters as they are
    push_layout: FrameLayout
    slots: int


def agree(world: MPI.Intracomm, server: int | None, spec: ChannelSpec | None) -> Opening:
    """Compare the specifications of all workers with worker 0's.  Collective over ``world``.

    ``server`` is its rank, None where there is none.

    Raises
    ------
    ModelError
        On every rank alike, naming the worker and the first parameter that differs.
    """
    comm = world.Dup()
    specs = comm.allgather(spec)
    workers = [s for rank, s in enumerate(specs) if rank != server]
    message = _difference(workers)
    if message:
        comm.Free()
        error = ModelError(message)
        error.silent = world.rank != 0
        raise error
    first = workers[0]
    layout = FrameLayout(first.size, first.floats, first.counts)
    push_layout = replace(layout, encoding=find(first.wire))
    slots = 1 if push_layout.frame_bytes > ONE_SLOT_BYTES else 2
    if server is not None:
        shortage = ""
        if comm.rank == server:
            shortage = _shortage(comm, len(workers) * slots * push_layout.frame_bytes)
        shortage = comm.bcast(shortage, server)
        if shortage:
            comm.Free()
            error = ModelError(shortage)
            error.silent = world.rank != 0
            raise error
    return Opening(comm, first, layout, push_layout, slots)


def broadcast(opening: Opening, frame: Frame, root: int) -> None:
    """``frame`` becomes that of ``root``.  Collective over the channel's communicator."""
    for a, b in pieces(opening.layout.frame_bytes):
        opening.comm.Bcast((frame.raw[a:b], b - a, MPI.BYTE), root)


def _difference(specs: list[ChannelSpec]) -> str:
    """One line that names the first difference between workers; empty where there is none."""
    first = specs[0]
    for worker, other in enumerate(specs[1:], 1):
        if other.options != first.options:
            return (
                f"worker {worker} runs '{other.options}' and worker 0 '{first.options}': start all "
                "ranks with the same options"
            )
        for what in ("entries", "buffers"):
            mine, theirs = getattr(first, what), getattr(other, what)
            kind = "parameter" if what == "entries" else "buffer"
            for a, b in zip(mine, theirs, strict=False):
                if a != b:
                    return (
                        f"worker {worker} has another model than worker 0: {kind} {b[0]} {b[1]} in "
                        f"place of {a[0]} {a[1]}; build the same model on all ranks"
                    )
            if len(mine) != len(theirs):
                longer = max(mine, theirs, key=len)
                extra = longer[min(len(mine), len(theirs))]
                return (
                    f"worker {worker} has another model than worker 0: {len(theirs)} {kind}s in "
                    f"place of {len(mine)}; the first that only one has is {extra[0]} {extra[1]}"
                )
        if other != first:
            return f"worker {worker} groups its parameters in another way than worker 0"
    return ""


def _shortage(comm: MPI.Intracomm, nbytes: int) -> str:
    """One line where /dev/shm is too small for the window; a full one would kill the job
    (SIGBUS).
    """
    shared = comm.size > 1 and os.path.isdir("/dev/shm")
    if not shared:
        return ""
    stat = os.statvfs("/dev/shm")
    free = stat.f_bavail * stat.f_frsize
    if free >= nbytes:
        return ""
    return (
        f"the server needs {nbytes / 2**20:.0f} MiB of shared memory for the workers' pushes and "
        f"/dev/shm has {free / 2**20:.0f} MiB free: enlarge it (mount -o remount,size=…, or "
        "docker run --shm-size=…), remove stale files there, or use fewer workers"
    )
