"""Who is who: launching, ranks and roles, cores and devices, clocks, and how a job is ended."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI

from aladdin_mpi.comm.routes import Routes
from aladdin_mpi.core.shards import spread_over
from aladdin_mpi.errors import AladdinError, LaunchError, launch_rank

__all__ = [
    "Roles",
    "abort",
    "agree",
    "clock_offset",
    "find_roles",
    "leave_together",
    "library",
    "one_per_node_first",
    "open_world",
    "server_groups",
    "shared_cores",
]

_SIZE_VARIABLES = (
    ("OMPI_COMM_WORLD_SIZE", "Open MPI's mpirun"),
    ("PMI_SIZE", "MPICH's mpiexec or srun --mpi=pmi2"),
    ("SLURM_STEP_NUM_TASKS", "srun"),
)


@dataclass(frozen=True)
class Roles:
    """This process's place in the job.

    Attributes
    ----------
    rank, size : int
        In the world.
    servers : tuple of int
        Ranks of the servers, in order; rank 0 is the first one.
    server : int
        Index among the servers; −1 on another rank.
    worker : int
        Index among the workers; −1 on another rank.
    workers : tuple of int
        Ranks of the workers, in order.
    local_rank : int
        Index among the workers of this node; −1 on another rank.
    relays : tuple of int
        Ranks that merge the pushes of their node's workers, in order.
    relay : int
        Index among the relays; −1 on another rank.
    routes : Routes
        Which worker has which relay.
    """

    rank: int
    size: int
    servers: tuple[int, ...]
    server: int
    worker: int
    workers: tuple[int, ...]
    local_rank: int
    relays: tuple[int, ...]
    relay: int
    routes: Routes

    @property
    def role(self) -> str:
        """``worker``, ``server`` or ``relay``."""
        return "worker" if self.worker >= 0 else "server" if self.server >= 0 else "relay"

    @property
    def who(self) -> str:
        """How a message of this rank begins."""
        role = f"worker {self.worker}" if self.worker >= 0 else self.role
        if len(self.servers) > 1 and self.server >= 0:
            role += f" {self.server}"
        return f"rank {self.rank} ({role}):"

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks that have a part in a checkpoint: all but the relays."""
        return tuple(rank for rank in range(self.size) if rank not in self.relays)


def library() -> str:
    """Name and version of the MPI library, one line."""
    return MPI.Get_library_version().split("\n")[0].split(",")[0].strip()


def open_world(need: int = 2) -> MPI.Intracomm:
    """A communicator of our own over all ranks.  Collective.

    Stops where the job cannot work: singletons of a wrong launcher, too few ranks, no threads.

    Raises
    ------
    LaunchError
    """
    size = MPI.COMM_WORLD.size
    if size == 1:
        for variable, launcher in _SIZE_VARIABLES:
            meant = int(os.environ.get(variable, "1"))
            if meant > 1:
                raise _everywhere(
                    f"{launcher} started {meant} processes ({variable}={meant}), but this MPI "
                    f"library ({library()}) sees one: the launcher belongs to another MPI; use the "
                    "mpiexec of this one, or under Slurm the right --mpi type (srun --mpi=list); "
                    "'aladdin-mpi doctor' shows both"
                )
    if size < need:
        servers = "a server" if need == 2 else f"{need - 1} servers"
        raise _everywhere(
            f"{size} rank(s), but {servers} and at least one worker are needed: start with "
            f"mpiexec -n {need + 3} for 4 workers"
        )
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        raise _everywhere(
            "MPI was initialized without thread support (MPI_THREAD_SERIALIZED at least): let "
            "mpi4py initialize it, or request MPI_THREAD_MULTIPLE"
        )
    return MPI.COMM_WORLD.Dup()


def _everywhere(message: str) -> LaunchError:
    error = LaunchError(message)
    error.silent = (MPI.COMM_WORLD.rank or launch_rank()) != 0
    return error


def agree(comm: MPI.Comm, error: AladdinError | None) -> None:
    """Raise the error of the lowest rank that has one, on every rank.  Collective."""
    found = comm.allgather(None if error is None else (type(error), str(error)))
    for rank, entry in enumerate(found):
        if entry is not None:
            shared: AladdinError = entry[0](entry[1])
            shared.silent = comm.rank != rank
            raise shared


def find_roles(
    comm: MPI.Comm, servers: int, spread: bool = False, merge: bool = False, rounds: bool = False,
    nodes: Sequence[Sequence[int]] | None = None,
) -> Roles:  # fmt: skip
    """Some ranks serve, all others work.  Collective.

    Servers are the first ranks, or, ``spread``, ranks of several nodes
    (:func:`~aladdin_mpi.core.shards.spread_over`).  With ``merge``, the first rank beside the
    servers is a relay on every node where at least two more are left; ``rounds`` as in
    :class:`~aladdin_mpi.comm.routes.Routes`.  ``nodes`` are the ranks of each node; found out where
    not given.

    Raises
    ------
    LaunchError
        No node has enough ranks for a relay.
    """
    rank, size = comm.rank, comm.size
    if nodes is None:
        node = comm.Split_type(MPI.COMM_TYPE_SHARED, key=rank)
        nodes = list(dict.fromkeys(tuple(n) for n in comm.allgather(node.allgather(rank))))
        node.Free()
    serving = spread_over(nodes, servers) if spread else tuple(range(servers))
    left = [[r for r in ranks if r not in serving] for ranks in nodes]
    relays = tuple(sorted(ranks[0] for ranks in left if merge and len(ranks) > 2))
    if merge and not relays:
        raise _everywhere(
            "--merge-on-node: no node has a relay and two workers, which is three ranks beside the "
            "servers; start more ranks per node, or leave it out"
        )
    workers = tuple(r for r in range(size) if r not in serving and r not in relays)
    relay_of = {r: relays.index(ranks[0]) for ranks in left if ranks[:1] and ranks[0] in relays
                for r in ranks}  # fmt: skip
    local = next([r for r in ranks if r in workers] for ranks in nodes if rank in ranks)

    def index(ranks: Sequence[int]) -> int:
        return ranks.index(rank) if rank in ranks else -1

    return Roles(
        rank, size, serving, index(serving), index(workers), workers, index(local), relays,
        index(relays), Routes(tuple(relay_of.get(worker, -1) for worker in workers), rounds),
    )  # fmt: skip


def server_groups(comm: MPI.Intracomm, roles: Roles) -> list[MPI.Intracomm]:
    """For each server a communicator of it, as rank 0, the workers, in order, and the relays, in
    order; COMM_NULL on the other servers.  Collective.
    """
    groups: list[Any] = []
    for server in roles.servers:
        inside = roles.server < 0 or roles.rank == server
        key = 1 + roles.rank + roles.size * (roles.relay >= 0)
        groups.append(
            comm.Split(0 if inside else MPI.UNDEFINED, 0 if roles.rank == server else key)
        )
    return groups


def shared_cores(comm: MPI.Comm) -> int:
    """This rank's share of the cores that it may run on, at least 1.  Collective."""
    mine = tuple(sorted(os.sched_getaffinity(0)))
    node = comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank)
    everybody = node.allgather(mine)
    node.Free()
    sharing = sum(1 for other in everybody if other == mine)
    return max(1, len(mine) // sharing)


def one_per_node_first(comm: MPI.Comm, call: object) -> None:
    """Call on one rank of each node, then on the others: caches on disk are filled once.
    Collective.
    """
    assert callable(call)
    node = comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank)
    if node.rank == 0:
        call()
    node.Barrier()
    if node.rank != 0:
        call()
    node.Free()


def clock_offset(comm: MPI.Comm, rounds: int = 10) -> tuple[float, float]:
    """[s] what to add to this rank's monotonic clock to get rank 0's, and its uncertainty.
    Collective.

    Of some ping-pongs with rank 0 the fastest counts; half its round trip is the uncertainty.
    """
    buffer = np.zeros(1)
    if comm.rank == 0:
        for other in range(1, comm.size):
            for _ in range(rounds):
                comm.Recv(buffer, other, 7)
                buffer[0] = time.monotonic()
                comm.Send(buffer, other, 7)
        return 0.0, 0.0
    best, offset = float("inf"), 0.0
    for _ in range(rounds):
        sent = time.monotonic()
        comm.Send(buffer, 0, 7)
        comm.Recv(buffer, 0, 7)
        received = time.monotonic()
        if received - sent < best:
            best = received - sent
            offset = float(buffer[0]) - (sent + received) / 2
    return offset, best / 2


def leave_together(comm: MPI.Comm, poll_s: float = 0.01) -> None:
    """Wait until all ranks are about to end, sleeping: in MPI's own end the first ones would spin
    on cores that the last one still computes on.  Collective.
    """
    if MPI.Is_finalized():
        return
    barrier = comm.Ibarrier()
    while not barrier.Test():
        time.sleep(poll_s)


def abort(code: int) -> None:
    """End the whole job; never a collective call, which a rank that has gone could not answer."""
    sys.stdout.flush()
    sys.stderr.flush()
    if MPI.Is_initialized() and not MPI.Is_finalized():
        MPI.COMM_WORLD.Abort(code)
    os._exit(code)
