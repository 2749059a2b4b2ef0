"""What an algorithm may call: the seam between update rules and everything that moves bytes.

A worker's algorithm sees one :class:`Port`; behind it stands the MPI mailbox, or threads in one
process for tests.  Nothing here waits unless its name says so.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np

from aladdin_mpi.messages import PeerHeader, Reply

__all__ = ["Incoming", "LocalUpdate", "PeerIncoming", "PeerPort", "Port"]


class LocalUpdate(Protocol):
    """The step of the user's optimizer."""

    def __call__(self, rate: float = 1.0) -> None:
        """Make it, with ``rate`` times the learning rates."""


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
    beyond : int
        How many pushes after the one that asked for it a reply may contain.
    """

    num_workers: int
    slots: int
    beyond: int

    def try_push(
        self, write: Callable[[np.ndarray], bool], iterations: int, *, limit: int, **header: object
    ) -> int:
        """Hand a push over unless ``limit`` pushes are on their way; never waits.

        Parameters
        ----------
        write : callable
            Fills the float32 staging vector in place; returns False to withdraw what is not finite,
            which nobody looks for after that.
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

    def early_frame(self) -> np.ndarray | None:
        """The staging vector of the next push, to be sent in ranges ahead of it by
        :meth:`send_range`; None while others are on their way.
        """

    def send_range(self, start: int, stop: int) -> None:
        """Send elements of :meth:`early_frame`, which then stay as they are; from the vector's
        end to its start, without gaps.
        """

    def abandon(self) -> None:
        """Nothing of what was sent ahead counts."""

    def post(self, call: Callable[..., bool | None], *args: object) -> None:
        """Have the communication thread make a call soon: calls and pushes keep their order, so
        that what ``write`` posts is done to the vector before it is sent.  A call that returns
        False is made again, before any later one.
        """

    def wait_posted(self) -> None:
        """Wait until all calls posted so far have been made."""

    def subtract(self, staging: np.ndarray, r: np.ndarray) -> None:
        """Have the communication thread push ``staging − r``, where ``staging`` is what ``write``
        was given, and move r by what the server will read: less may be sent (``--wire``).
        """

    def wait_push(self, limit: int) -> None:
        """Wait until fewer than ``limit`` pushes are on their way; logged as blocked."""

    def take_reply(self) -> Incoming | None:
        """The oldest reply that has arrived and was not taken yet, or None; never waits."""

    def wait_reply(self) -> Incoming:
        """Wait for a reply; logged as blocked."""

    def fetch(self) -> np.ndarray:
        """The global parameters as they are now, float32, shape (size,), until the next call.
        Waits for them, logged as blocked.
        """

    def push_limit(self, in_flight: str) -> int:
        """Pushes to allow on their way at once: ``"1"``, ``"2"``; by ``"auto"`` a second only
        while the link is not full, because a queue is nothing but staleness, and none while other
        ranges have their turn.
        """

    def span(self, column: str) -> AbstractContextManager[None]:
        """Time what happens inside into the log's ``column`` (``mix_s``, say)."""

    def lost(self, kind: str) -> int:
        """Note a NaN or infinity that is thrown away, ``nonfinite_push`` or ``nonfinite_reply``.

        Returns 0, the iterations that remain of it; raises where the policy is to stop.
        """

    def mixed(self, reply: Reply, lag_iterations: int, *, discarded: bool) -> None:
        """Log that a reply was mixed in, or thrown away."""


class PeerIncoming(Protocol):
    """Another worker's message; its vector belongs to the reader until :meth:`release`.

    Attributes
    ----------
    header : PeerHeader
    vector : ndarray of float32, shape (size,)
    finite : bool
    """

    header: PeerHeader
    vector: np.ndarray
    finite: bool

    def release(self) -> None:
        """Give the buffer back."""


class PeerPort(Protocol):
    """A worker's side where there is no server: sums over all workers, messages between two.

    Attributes
    ----------
    worker, num_workers : int
    rng : numpy.random.Generator
        This worker's, by the run's seed.
    """

    worker: int
    num_workers: int
    rng: np.random.Generator

    def sum(self, vector: np.ndarray, *weights: float) -> list[float]:
        """``vector ← Σ vector`` over all workers, in place; returns the sums of the weights, of
        which there is at least one.  Waits for all, logged as blocked.  Collective.
        """

    def largest(self, value: float) -> float:
        """The largest of all workers' values.  Waits for all.  Collective."""

    def mean_gradients(self, contribute: bool = True) -> int:
        """``g ← mean g`` over the workers that contribute; returns how many those are.  Waits for
        all, logged as blocked.  Collective; a worker that has ended takes part without
        contributing until the others have ended, too.
        """

    def try_send(self, to: int, write: Callable[[np.ndarray], None], header: PeerHeader) -> bool:
        """Send what ``write`` fills in, unless no buffer is free or the last message to this
        worker is still on its way; never waits.
        """

    def take(self) -> PeerIncoming | None:
        """The oldest message that was not taken yet, or None; never waits."""

    def wait(self) -> None:
        """Wait until a message has arrived or left, or a worker has ended; logged as blocked."""

    def on_message(self, handle: Callable[[PeerIncoming], bool]) -> None:
        """Let the communication thread give each message to ``handle``, which is short and does
        not wait; False: later again.
        """

    def post(self, call: Callable[[], None]) -> None:
        """Have the communication thread make a call soon."""

    def ended(self, worker: int) -> int | None:
        """The iterations that ``worker`` made in all, once it has ended; else None."""

    def leave(self, iterations: int) -> None:
        """Tell the others that this worker sends nothing more of its own."""

    def all_ended(self) -> bool:
        """Every other worker has ended, and all that it sent to this one was handed out."""

    def span(self, column: str) -> AbstractContextManager[None]:
        """Time what happens inside into the log's ``column`` (``mix_s``, say)."""

    def lost(self, kind: str) -> int:
        """Note a NaN or infinity that is thrown away; as :meth:`Port.lost`."""

    def absorbed(self, header: PeerHeader, weight: float, lag: int, *, discarded: bool) -> None:
        """Log that a message was mixed in with ``weight``, or thrown away."""
