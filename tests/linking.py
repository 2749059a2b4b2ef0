"""A little server for the tests of links, and what a worker of them does."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from aladdin_mpi.comm.receiver import ServerChannel, ServerLink
from aladdin_mpi.comm.sender import WorkerChannel
from aladdin_mpi.core.wire import Frame
from aladdin_mpi.errors import ModelError
from aladdin_mpi.messages import ChannelSpec, Notice, Push, Reply, Request, RequestKind

PUSHES, REPLY_PERIOD = 6, 2
FULL = RequestKind.EVALUATION
"""What a worker of these tests says when it has no room left."""


def a_spec(size: int = 1001, **changes: object) -> ChannelSpec:
    spec = ChannelSpec(
        entries=(("conv.weight", "(8, 3) float32"), ("conv.bias", "(8,) float32")),
        buffers=(("norm.mean", "(8,) float32"),),
        ranges=((0, size, 0),),
        size=size,
        floats=8,
        counts=1,
        options="aladdin period=4",
    )
    return spec._replace(**changes)


class Loop:
    """A little server: adds what is pushed, replies with the sum when asked.

    With ``hold``, nothing is acknowledged before every worker has said that it is full.
    """

    def __init__(self, link: ServerLink, hold: bool = False) -> None:
        self.link, self.hold = link, hold
        self.num_workers = len(link.workers)
        self.sums: list[np.ndarray] = []
        self.merged: list[list[int]] = []
        self.requests: list[Request] = []
        self.errors: list[ModelError] = []
        self._held: list[tuple[int, Notice]] = []
        self._owed: list[tuple[ServerChannel, int, Reply]] = []
        self._copies: list[tuple[int, int]] = []

    def count(self, kind: RequestKind) -> int:
        return sum(request.kind == kind for request in self.requests)

    def run(self) -> None:
        """Serve until everyone has said goodbye; then free the link."""
        while self.count(RequestKind.BYE) < self.num_workers:
            self.turn()
        self._copies += [(c.index, w) for c in self.link.channels for w in range(self.num_workers)]
        while self._copies:
            self.turn()
        self.link.close()
        self.link.free()

    def turn(self) -> None:
        self.link.progress()
        for request in self.link.requests():
            self.requests.append(request)
            if request.kind == RequestKind.FETCH:
                self._copies.append((request.channel, request.worker))
            if request.kind == RequestKind.REGISTER:
                self.open_when_all_ask()
        for end in self.link.channels:
            for arrival in end.arrivals():
                self.merge(end, arrival.frame.read_push(0), arrival.frame)
        if not self.hold or self.count(FULL) == self.num_workers:
            for worker, notice in self._held:
                self.link.notify(worker, notice)
            self._held.clear()
        for owed in list(self._owed):
            end, worker, reply = owed
            frame = end.reply_frame(worker)
            if frame is not None:
                frame.params[:] = self.sums[end.index]
                end.send_replies(worker, [(worker, reply)])
                self._owed.remove(owed)
        for index, worker in list(self._copies):
            end = self.link.channels[index]
            frame = end.copy_frame(worker)
            if frame is not None:
                frame.params[:] = self.sums[index]
                end.send_copy(worker, Reply(0, sum(self.merged[index]), 0, 1.0))
                self._copies.remove((index, worker))

    def open_when_all_ask(self) -> None:
        if self.count(RequestKind.REGISTER) % self.num_workers:
            return
        try:
            end = self.link.open_channel(len(self.sums))
        except ModelError as error:
            self.errors.append(error)
            return
        self.sums.append(end.initial.params.copy())
        self.merged.append([0] * self.num_workers)

    def merge(self, end: ServerChannel, push: Push, frame: Frame) -> None:
        merged = self.merged[end.index]
        assert push.sequence == merged[push.worker] + 1
        self.sums[end.index] += frame.params
        merged[push.worker] += 1
        if push.wants_reply:
            number = merged[push.worker] // REPLY_PERIOD
            reply = Reply(number, sum(merged), push.sequence, 0.25)
            self._owed.append((end, push.worker, reply))
        notice = Notice(end.index, push.sequence, sum(merged), 0, 0, 0, self.num_workers, 0)
        self._held.append((push.worker, notice))


def initial(worker: int, spec: ChannelSpec) -> Callable[[Frame], None]:
    def fill(frame: Frame) -> None:
        frame.params[:] = 1000.0 * (1 + worker) + np.arange(spec.size) % 7

    return fill


def push_and_listen(end: WorkerChannel, worker: int, num_workers: int) -> list[Reply]:
    """Push 1, 2, 3, ... at this worker's own places; return the headers of the replies."""
    replies: list[Reply] = []

    def listen() -> None:
        while (reply := end.take_reply()) is not None:
            places = (
                reply.vector[worker::num_workers]
                - np.arange(reply.vector.size)[worker::num_workers] % 7
            )
            # worker 0's values at the start, and at least the pushes that were answered
            answered = 1000.0 + reply.header.sequence * (reply.header.sequence + 1) / 2
            assert (places >= answered).all()
            assert (places == places[0]).all()
            assert reply.finite
            replies.append(reply.header)
            reply.release()

    for number in range(1, PUSHES + 1):
        while end.in_flight() >= end.slots:
            end.wait_change(0.1)
            listen()
        frame = end.next_frame()
        frame.params[:] = 0
        frame.params[worker::num_workers] = number
        assert end.next_sequence == number
        end.submit(Push(worker, number, wants_reply=number % REPLY_PERIOD == 0))
    while end.in_flight() or len(replies) < PUSHES // REPLY_PERIOD:
        end.wait_change(0.1)
        listen()
    return replies
