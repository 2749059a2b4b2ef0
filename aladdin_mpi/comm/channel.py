"""Opening a channel: the collective start-up step of one optimizer, and what both ends share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from mpi4py import MPI

from aladdin_mpi.comm.mailbox import pieces
from aladdin_mpi.comm.memory import shortage
from aladdin_mpi.comm.routes import Routes
from aladdin_mpi.core.encoding import find
from aladdin_mpi.core.memory import needs
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
    """What came out of :func:`agree`.

    Attributes
    ----------
    comm : MPI.Intracomm
        Everybody.
    up : MPI.Intracomm
        The server, as rank 0, and those that put into its mailbox; COMM_NULL on the others.
    node : MPI.Intracomm
        A relay, as rank 0, and its workers; COMM_NULL where there is none.
    layout, reply_layout : FrameLayout
        Of copies; of replies, which may be for several workers.
    push_layout, node_layout : FrameLayout
        Of pushes to the server, and to a relay.
    slots : int
        Pushes that may be on their way at once.
    """

    comm: MPI.Intracomm
    up: MPI.Intracomm
    node: MPI.Intracomm
    spec: ChannelSpec
    layout: FrameLayout
    reply_layout: FrameLayout
    push_layout: FrameLayout
    node_layout: FrameLayout
    slots: int

    def free(self) -> None:
        """Collective."""
        for comm in {id(c): c for c in (self.node, self.up, self.comm)}.values():
            if comm != MPI.COMM_NULL:
                comm.Free()


def agree(
    world: MPI.Intracomm, server: int | None, spec: ChannelSpec | None, routes: Routes | None = None
) -> Opening:
    """Compare the specifications of all workers with worker 0's.  Collective over ``world``.

    ``server`` is its rank, None where there is none; other ranks without a ``spec`` are relays.

    Raises
    ------
    ModelError
        On every rank alike, naming the worker and the first parameter that differs.
    """
    comm = world.Dup()
    workers = [one for one in comm.allgather(spec) if one is not None]
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
    reply_layout, up, node = layout, comm, MPI.Intracomm(MPI.COMM_NULL)
    if routes is not None and routes.relays:
        slots = max(slots, routes.most_groups())
        parts = slots * routes.largest
        reply_layout, push_layout = replace(layout, parts=parts), replace(push_layout, parts=parts)
        up, node = _ways(comm, routes)
    if server is not None:
        lacking = _shortage(comm, up, node, server, push_layout, layout, slots)
        if lacking:
            comm.Free()
            error = ModelError(lacking)
            error.silent = world.rank != 0
            raise error
    return Opening(comm, up, node, first, layout, reply_layout, push_layout, layout, slots)


def _shortage(
    comm: MPI.Intracomm, up: Any, node: Any, server: int, push: FrameLayout, plain: FrameLayout,
    slots: int,
) -> str:  # fmt: skip
    """One line where the memory of a host does not suffice.  Collective."""
    senders = up.size - 1 if comm.rank == server else 0
    relayed = node.size - 1 if node != MPI.COMM_NULL else 0
    all_of_them = needs(push.frame_bytes, plain.frame_bytes, slots, senders, relayed)
    if comm.rank == server:
        return shortage(comm, all_of_them.server, all_of_them.server_window, senders)
    if relayed and node.rank == 0:
        return shortage(comm, all_of_them.relay, all_of_them.relay_window, relayed)
    return shortage(comm, all_of_them.worker, 0, 0)


def _ways(comm: MPI.Intracomm, routes: Routes) -> tuple[Any, Any]:
    """A server's group as senders, and as nodes.  Collective."""
    rank, workers = comm.rank, len(routes.relay_of)
    sends = rank == 0 or rank in routes.senders
    up = comm.Split(0 if sends else MPI.UNDEFINED, rank)
    relay = -1
    if rank > workers:
        relay = rank - workers - 1
    elif rank > 0:
        relay = routes.relay_of[rank - 1]
    node = comm.Split(relay if relay >= 0 else MPI.UNDEFINED, 0 if rank > workers else rank)
    return up, node


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
