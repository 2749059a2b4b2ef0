"""The one thread of a worker that calls MPI, and how the training thread has it do things.

The training thread hands over and takes through plain Python objects and never calls MPI, so that
nothing that MPI does can hold it up.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from aladdin_mpi.comm.control import (
    REQUEST,
    TAG_REQUEST,
    SmallSender,
    pack_request,
)
from aladdin_mpi.messages import Notice, Phase, Request, RequestKind

__all__ = ["BUSY_S", "IDLE_S", "WAITING_S", "CommThread"]

BEAT_S = 1.0
"""[s] between two heartbeats."""

BUSY_S, WAITING_S, IDLE_S = 0.0002, 0.001, 0.005
"""[s] between two looks at MPI: while something of ours moves, is awaited, or neither."""


class CommThread:
    """A worker's end of everything that is not a channel of one optimizer.

    Parameters
    ----------
    comm : MPI.Intracomm
        Everybody; a communicator of the link's own.
    listeners : sequence of int
        Ranks of ``comm`` that heartbeats go to.
    worker, num_workers : int
    on_failure : callable
        Called with an exception that ended the thread; must end the job.
    among_workers : MPI.Intracomm
        The workers alone.

    Attributes
    ----------
    notice : Notice
        What is known of the others.
    heard_s : dict
        [s] monotonic time of the last word of each listener, by rank.
    beside : dict of str to MPI.Intracomm
        The workers, by what :meth:`broadcast_later` and :meth:`sum_later` are for.
    preempt : bool
        This rank, or another, was told to stop with a checkpoint.
    phase, phase_since, steps, own_samples
        What the training thread is doing, since when, its iterations and samples; told in
        heartbeats.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        listeners: Sequence[int],
        worker: int,
        num_workers: int,
        on_failure: Callable[[BaseException], None],
        among_workers: MPI.Intracomm,
    ) -> None:
        now = time.monotonic()
        self.comm, self.worker, self.num_workers = comm, worker, num_workers
        self.notice = Notice(0, 0, 0, 0, 0, 0, num_workers, 0)
        self.phase, self.phase_since, self.steps, self.own_samples = Phase.START, now, 0, 0
        self.heard_s = dict.fromkeys(listeners, now)
        self._listeners = listeners
        self._among_workers = among_workers
        self.beside: dict[str, MPI.Intracomm] = {}
        self.preempt = False
        self._exchanges: list[tuple[MPI.Request, Callable[[], None]]] = []
        self._on_failure = on_failure
        # No SimpleQueue: its get(timeout) can wait for ever (seen with CPython 3.11), when the
        # thread loses its core for longer than a short timeout.
        self._commands: deque[tuple[Callable[..., Any], tuple[Any, ...]]] = deque()
        self._wake = threading.Lock()  # free: there is a command
        self._wake.acquire()
        self._requests = SmallSender(comm, TAG_REQUEST, REQUEST)
        self._next_beat = 0.0
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="aladdin-sender", daemon=True)

    # -- any thread -------------------------------------------------------------------------------

    def post(self, call: Callable[..., Any], *args: Any) -> None:
        """Have the communication thread make a call soon, in the order of the calls of this method;
        one that returns False is made again, before any later one.
        """
        self._commands.append((call, args))
        with contextlib.suppress(RuntimeError):  # it is free already
            self._wake.release()

    def ask(self, call: Callable[[], Any]) -> Any:
        """Have the communication thread make a call, and wait for what it returns or raises."""
        done = threading.Event()
        result: list[Any] = []

        def run() -> None:
            try:
                result.extend((True, call()))
            except Exception as error:  # handed to the caller, who waits for it
                result.extend((False, error))
            done.set()

        self.post(run)
        done.wait()
        if result[0]:
            return result[1]
        raise result[1]

    def wait_posted(self) -> None:
        """Wait until all calls posted so far have been made."""
        self.ask(lambda: None)

    def tell(self, kind: RequestKind, values: tuple[float, ...] = ()) -> None:
        """Send a small message; does not wait."""
        self.post(lambda: self.send(kind, values=values))

    def exchange(self, mine: bytes, size: int = 512) -> list[bytes]:
        """Every worker's bytes, cut to ``size``; waits for all workers.  Collective over them."""
        out = np.zeros(size, np.uint8)
        out[: len(mine[:size])] = np.frombuffer(mine[:size], np.uint8)
        gathered = np.zeros((self._among_workers.size, size), np.uint8)
        done = threading.Event()

        def start() -> None:
            request = self._among_workers.Iallgather(out, gathered)
            self._exchanges.append((request, done.set))

        self.post(start)
        done.wait()
        return [row.tobytes().rstrip(b"\0") for row in gathered]

    def broadcast_later(self, what: str, array: np.ndarray, then: Callable[[], None]) -> None:
        """Worker 0's array to all; ``then`` runs on this thread when it is there.  Collective over
        the workers, as :meth:`sum_later` is; all make the calls of both for ``what`` in one order.
        """
        beside = self.beside[what]
        self.post(lambda: self._exchanges.append((beside.Ibcast(array, 0), then)))

    def sum_later(self, what: str, array: np.ndarray, then: Callable[[], None]) -> None:
        """The sum over all workers, in place; ``then`` runs on this thread when it is there."""
        beside = self.beside[what]
        self.post(lambda: self._exchanges.append((beside.Iallreduce(MPI.IN_PLACE, array), then)))

    # -- communication thread ---------------------------------------------------------------------

    def send(self, kind: RequestKind, channel: int = 0, values: tuple[float, ...] = ()) -> None:
        """Send a small message to all listeners now."""
        for listener in self._listeners:
            self.send_to(listener, kind, channel, values)
        self._next_beat = time.monotonic() + BEAT_S

    def send_to(
        self, listener: int, kind: RequestKind, channel: int = 0, values: tuple[float, ...] = ()
    ) -> None:
        """Send a small message to one of them."""
        record = self._requests.record()
        since = time.monotonic() - self.phase_since
        request = Request(kind, self.worker, self.phase, since, self.steps, channel, values)
        pack_request(record, request)
        self._requests.send(record, listener)

    def _end_together(self, at_end: Callable[[], None], free: Callable[[], None]) -> None:
        """Wait for everybody, polling, and end the thread.  Collective."""
        barrier = self.comm.Ibarrier()
        while not barrier.Test() or self._exchanges or self._commands:
            while self._make_call():
                pass
            self._progress()
            time.sleep(WAITING_S)
        for comm in self.beside.values():
            comm.Free()
        at_end()
        free()
        self._ended = True

    def _make_call(self) -> bool:
        """Make the oldest call that was posted; False where there is none, or it was too early."""
        if not self._commands:
            return False
        call, args = self._commands.popleft()
        if call(*args) is False:
            self._commands.appendleft((call, args))
            return False
        return True

    def _run(self) -> None:
        early = False  # a call was, and is to be made again
        try:
            while not self._ended:
                if early or not self._commands:
                    self._wake.acquire(timeout=WAITING_S if early else self._delay_s())
                early = bool(self._commands) and not self._make_call()
                if not self._ended:
                    self._progress()
        except BaseException as error:
            self._on_failure(error)

    def _delay_s(self) -> float:
        """[s] how long the thread may sleep."""
        raise NotImplementedError

    def _listen(self) -> None:
        """Deal with what has come in."""
        raise NotImplementedError

    def _beat(self) -> None:
        """What is done once a second."""
        self.send(RequestKind.BEAT, values=(float(self.own_samples),))

    def _progress(self) -> None:
        self._listen()
        for exchange in list(self._exchanges):
            if exchange[0].Test():
                self._exchanges.remove(exchange)
                exchange[1]()
        self._requests.test()
        if time.monotonic() >= self._next_beat and self._requests.idle:
            self._beat()
