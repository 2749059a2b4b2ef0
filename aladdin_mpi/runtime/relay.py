"""A relay's loop: merge what the workers of its node have pushed, send it on; never wait for one.

While a message is on its way, pushes gather; what is there when the way is free goes next, as one
message that says whose pushes are in it.  It is held back only for workers that are about to push,
too, for about as long as a message takes (:mod:`~aladdin_mpi.runtime.expecting`): where messages
are short, pushes go at once; where they are long, more of them share one.  Only where the server
itself waits for everybody in every round (*rounds*), the relay waits for all of its workers, too,
and adds up those that lie below one node of the tree of all workers
(:mod:`~aladdin_mpi.core.pairwise`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from aladdin_mpi.core import kernels
from aladdin_mpi.core.encoding import PLAIN
from aladdin_mpi.core.pairwise import add_pairwise, subtrees
from aladdin_mpi.core.vector import aligned_zeros
from aladdin_mpi.core.wire import Frame
from aladdin_mpi.messages import Push, RequestKind
from aladdin_mpi.runtime.expecting import Answered, Expecting, GoingOn
from aladdin_mpi.runtime.globals import PIECE
from aladdin_mpi.runtime.links import Recording, RelayEnd, RelayLinkLike

__all__ = ["Gathering", "RelayLoop", "Waiting"]

_BUSY_S, _ACTIVE_S, _IDLE_S = 0.0002, 0.001, 0.005
_BURST_S = 0.005


class Waiting(NamedTuple):
    """A push in its slot, which has not been sent on; ``good``: its payload is finite."""

    frame: Frame
    push: Push
    good: bool


class Gathering:
    """The pushes that wait at a relay, and which of them go together.

    Those that do have one weight at the server, one set of learning rates, and belong to the same
    checkpoint.

    Parameters
    ----------
    workers : sequence of int
        The relay's.
    num_workers : int
        Of the run.
    rounds : bool
        The server waits for all workers in every round.
    applies : bool
        The server steps with the pushes' learning rates.
    expecting : Expecting
        When the workers push again.
    """

    def __init__(
        self, workers: Sequence[int], num_workers: int, rounds: bool, applies: bool,
        expecting: Expecting,
    ) -> None:  # fmt: skip
        self._num_workers, self._rounds, self._applies = num_workers, rounds, applies
        self._workers = list(workers)
        self._training = set(workers)
        self._answered: set[int] = set()  # in this round
        self._waiting: list[Waiting] = []
        self._whole: list[list[Waiting]] = []  # messages that can go
        self.expecting = expecting

    def add(self, one: Waiting, now: float) -> None:
        """A push has arrived."""
        self.expecting.pushed(one.push.worker, now)
        if one.push.last:
            self._training.discard(one.push.worker)
        if not self._rounds:
            self._waiting.append(one)
            return
        if one.push.iterations:
            self._waiting.append(one)
        else:  # nothing to add up, and the server does not hold it
            self._whole.append([one])
        self._answered.add(one.push.worker)
        if self._training <= self._answered:
            by_worker = {w.push.worker: w for w in self._waiting}
            for group in subtrees(self._workers, self._num_workers):
                members = [by_worker[worker] for worker in group if worker in by_worker]
                if members:
                    self._whole.append(members)
            self._waiting, self._answered = [], set()

    def take(self, now: float) -> list[Waiting]:
        """What the next message is made of, oldest first; nothing where none is to be sent yet."""
        if self._rounds:
            return self._whole.pop(0) if self._whole else []
        if not self._waiting or self._holds_back(now):
            return []
        return self._alike(
            lambda w: (w.push.cut, w.push.active, w.push.rates if self._applies else ())
        )

    def _holds_back(self, now: float) -> bool:
        """Somebody who has nothing here is about to push."""
        absent = self._training - {one.push.worker for one in self._waiting}
        return any(self.expecting.soon(worker, now) for worker in absent)

    def _alike(self, key: Callable[[Waiting], Any]) -> list[Waiting]:
        """The oldest push and those like it, each worker's in order."""
        found: list[Waiting] = []
        left: list[Waiting] = []
        behind: set[int] = set()  # a push of theirs stays
        for one in self._waiting:
            if one.push.worker in behind or (found and key(one) != key(found[0])):
                left.append(one)
                behind.add(one.push.worker)
            else:
                found.append(one)
        self._waiting = left
        return found


class _Channel:
    """What waits on one channel, and what narrow messages have left out so far."""

    def __init__(self, end: RelayEnd, gathering: Gathering, feedback: bool) -> None:
        self.end, self.gathering = end, gathering
        self.num_rates = 1 + max(group for _, _, group in end.spec.ranges)
        keeps = feedback and end.push_layout.encoding != PLAIN
        self.sent_at = 0.0  # [s] when the message that is on its way was begun
        self.members: list[Waiting] = []  # its pushes
        self.given = aligned_zeros(end.size) if keeps else None  # Σ of all pushes
        self.sent = aligned_zeros(end.size) if keeps else None  # what of it has been sent


class RelayLoop:
    """Relay until every server says that all workers have ended.

    Parameters
    ----------
    link : RelayLinkLike
    num_workers : int
        Of the run.
    rounds, applies : bool
        See :class:`Gathering`.
    answers : bool
        A worker waits for the answer to every push.
    feedback : bool
        What is pushed are updates: what a narrow message leaves out is sent with the next one.
    recorder : Recording
    """

    def __init__(
        self, link: RelayLinkLike, num_workers: int, rounds: bool, applies: bool, answers: bool,
        feedback: bool, recorder: Recording,
    ) -> None:  # fmt: skip
        self._link, self._num_workers, self._rounds = link, num_workers, rounds
        self._applies, self._answers, self._feedback = applies, answers, feedback
        self._recorder = recorder
        self._channels: list[_Channel] = []
        self._last_active = time.monotonic()
        self._preempt = False

    def preempt(self) -> None:
        """This rank was told to stop: so is the server."""
        self._preempt = True

    def serve(self) -> None:
        """Run until the end."""
        while not self._link.over:
            self.turn()
        self._link.close()

    def turn(self) -> None:
        """Poll once and deal with what has come; sleeps a little where nothing has."""
        idle = self._link.progress()
        if self._preempt:
            self._preempt = False
            self._link.tell(RequestKind.PREEMPT)
        for end in self._link.channels[len(self._channels) :]:
            expecting = Answered() if self._answers else GoingOn()
            end.on_answer = partial(self._answered, expecting)
            gathering = Gathering(
                self._link.workers, self._num_workers, self._rounds, self._applies, expecting
            )
            self._channels.append(_Channel(end, gathering, self._feedback))
        found = False
        for channel in self._channels:
            for arrival in channel.end.arrivals():
                found = True
                frame, now = arrival.frame, time.monotonic()
                push = frame.read_push(channel.num_rates)
                channel.gathering.add(Waiting(frame, push, not frame.nonfinite), now)
            found = self._send(channel) or found
        now = time.monotonic()
        if found:
            self._last_active = now
        elif not idle or now - self._last_active < _BURST_S:
            time.sleep(_BUSY_S)
        else:
            time.sleep(_ACTIVE_S if now - self._last_active < 1.0 else _IDLE_S)

    @staticmethod
    def _answered(expecting: Expecting, worker: int) -> None:
        expecting.answered(worker, time.monotonic())

    def _send(self, channel: _Channel) -> bool:
        """Send the next message, if there is one and room for it."""
        end = channel.end
        if end.in_flight() and not self._rounds:  # a queue is nothing but staleness
            return False
        start = time.monotonic()
        if channel.members:
            pushes = [one.push for one in channel.members]
            channel.gathering.expecting.merged(pushes, start, start - channel.sent_at)
            channel.members = []
        frame = end.next_frame()
        if frame is None:
            return False
        members = channel.gathering.take(start)
        if not members:
            return False
        self._merge(channel, frame, members)
        merge_s = time.monotonic() - start
        nbytes = end.submit(frame, len(members))
        channel.sent_at, channel.members = start, members
        channel.gathering.expecting.sent([one.push.worker for one in members], start)
        self._recorder.add("merges", (start, end.index, -1, len(members), merge_s, nbytes, 1))
        return True

    def _merge(self, channel: _Channel, frame: Frame, members: Sequence[Waiting]) -> None:
        """Fill a message: the sum of the finite payloads, the mean of their buffers, the parts."""
        good = [one for one in members if one.good]
        self._add_up(channel, frame, good)
        floats, counts = frame.floats, frame.counts
        floats.fill(0.0)
        counts.fill(0)
        for one in good:
            kernels.add(floats, one.frame.floats)
            kernels.max_counters(counts, one.frame.counts)
        if len(good) > 1:
            floats /= len(good)
        for i, one in enumerate(members):
            frame.parts[i] = one.frame.header[0]
            frame.parts["parts"][i] = one.good

    def _add_up(self, channel: _Channel, frame: Frame, good: Sequence[Waiting]) -> None:
        out, given, sent = frame.params, channel.given, channel.sent
        if given is None or sent is None:
            out.fill(0.0)
            self._into(out, good)
            frame.encode()
        else:
            self._into(given, good)
            np.copyto(out, given)
            frame.take_difference(sent)

    def _into(self, target: np.ndarray, good: Sequence[Waiting]) -> None:
        """``target ← target + Σ``."""
        vectors = [one.frame.params for one in good]
        if self._rounds and vectors:
            numbers = [one.push.worker for one in good]
            add_pairwise(target, numbers, vectors, self._link.progress, PIECE)
        else:
            for a, b in _pieces(target.size):
                kernels.merge(target, vectors, [1.0] * len(vectors), a, b)
                self._link.progress()


def _pieces(size: int) -> list[tuple[int, int]]:
    return [(a, min(a + PIECE, size)) for a in range(0, size, PIECE)]
