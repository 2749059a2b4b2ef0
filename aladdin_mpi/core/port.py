"""What an algorithm may call: the seam between update rules and everything that moves bytes.

A worker's algorithm sees one :class:`Port`; behind it stands the MPI mailbox, or threads in one
process for tests.  Nothing here waits unless its name says so.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np

from aladdin_mpi.messages import Reply

__all__ = ["Incoming", "Port"]


class Incoming(Protocol):
    """A reply that has arrived; its vector belongs to the reader until :meth:`release`.

    Attributes
    ----------
    header : Reply
        What the reply says of itself.
    vector : ndarray of float32, shape (size,)
        The global parameters.
    finite : bool
        No element is NaN or infinite (checked off the training thread).
    """

    header: Reply
    vector: np.ndarray
    finite: bool

    def release(self) -> None:
        """Give the buffer back, so that another reply can be received into it."""


class Port(Protocol):
    """A worker's side of the link to the servers.

    Attributes
    ----------
    num_workers : int
        Workers the run started with.
    slots : int
        Pushes that may be on their way at once, by memory.
    """

    num_workers: int
    slots: int

    def try_push(
        self, write: Callable[[np.ndarray], bool], iterations: int, *, limit: int, **header: object
    ) -> int:
        """Hand a push over unless ``limit`` pushes are on their way; never waits.

        Parameters
        ----------
        write : callable
            Fills the float32 staging vector in place; returns False to withdraw (a NaN, say).
        iterations : int
            Iterations carried.
        limit : int
            Pushes that may be on their way, this one included.
        **header
            Further fields of :class:`~aladdin_mpi.messages.Push`.

        Returns
        -------
        int
            The push's sequence number; 0 where nothing was sent because too many are on their way,
            −1 where ``write`` withdrew it.
        """

    def wait_push(self, limit: int) -> None:
        """Wait until fewer than ``limit`` pushes are on their way; logged as blocked."""

    def take_reply(self) -> Incoming | None:
        """The oldest reply that has arrived and was not taken yet, or None; never waits."""

    def wait_reply(self) -> Incoming:
        """Wait for a reply; logged as blocked."""

    def push_limit(self, in_flight: str) -> int:
        """Pushes to allow on their way at once: ``"1"``, ``"2"``; by ``"auto"`` a second only
        while the link is not full, because a queue is nothing but staleness.
        """

    def span(self, column: str) -> AbstractContextManager[None]:
        """Time what happens inside into the log's ``column`` (``mix_s``, say)."""

    def lost(self, kind: str) -> int:
        """Note a NaN or infinity that is thrown away, ``nonfinite_push`` or ``nonfinite_reply``.

        Returns 0, the iterations that remain of it; raises where the policy is to stop.
        """

    def mixed(self, reply: Reply, lag_iterations: int, *, discarded: bool) -> None:
        """Log that a reply was mixed in, or thrown away."""
