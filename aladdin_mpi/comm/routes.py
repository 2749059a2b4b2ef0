"""Which way pushes and replies take: straight, or through a relay on the worker's node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aladdin_mpi.core.pairwise import subtrees

__all__ = ["Routes"]


@dataclass(frozen=True)
class Routes:
    """The ways between the workers and each server.

    In the group of a server (:func:`~aladdin_mpi.comm.roles.server_groups`) it has rank 0, worker w
    has rank 1 + w, and relays follow.  *Senders* are those that put into the server's mailbox:
    relays, and workers without one.

    Attributes
    ----------
    relay_of : tuple of int
        By worker, the index of its relay; −1: it has none.
    rounds : bool
        The server waits for all workers in every round: relays wait for all of theirs.
    """

    relay_of: tuple[int, ...]
    rounds: bool = False

    @property
    def relays(self) -> int:
        """How many there are."""
        return max(self.relay_of, default=-1) + 1

    @property
    def senders(self) -> list[int]:
        """Their ranks in the server's group, in order."""
        workers = [1 + worker for worker, relay in enumerate(self.relay_of) if relay < 0]
        return workers + [1 + len(self.relay_of) + relay for relay in range(self.relays)]

    @property
    def sender_of(self) -> list[int]:
        """By worker, the index of its sender."""
        ranks = self.senders
        return [
            ranks.index(1 + worker if relay < 0 else 1 + len(self.relay_of) + relay)
            for worker, relay in enumerate(self.relay_of)
        ]

    def workers_of(self, relay: int) -> list[int]:
        """The workers of a relay, in order."""
        return [worker for worker, own in enumerate(self.relay_of) if own == relay]

    @property
    def largest(self) -> int:
        """The most workers that a relay has."""
        return max((len(self.workers_of(relay)) for relay in range(self.relays)), default=0)

    def most_groups(self) -> int:
        """The most messages of a relay that the server may have to hold at a time
        (:func:`~aladdin_mpi.core.pairwise.subtrees`).
        """
        if not self.rounds:
            return 1
        everybody = len(self.relay_of)
        groups: Sequence[int] = [
            len(subtrees(self.workers_of(relay), everybody)) for relay in range(self.relays)
        ]
        return max(groups, default=1)
