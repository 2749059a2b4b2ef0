"""What the runtime needs of a link: implemented over MPI and by threads in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from aladdin_mpi.core.port import Incoming, PeerIncoming
from aladdin_mpi.core.wire import Frame, FrameLayout
from aladdin_mpi.messages import (
    ChannelSpec,
    Notice,
    PeerHeader,
    Phase,
    Push,
    Reply,
    Request,
    RequestKind,
    SendTimes,
)
from aladdin_mpi.record.schema import Row

__all__ = [
    "ArrivalLike",
    "PeerEnd",
    "Recording",
    "RelayEnd",
    "RelayLinkLike",
    "ServerEnd",
    "ServerLinkLike",
    "SumLike",
    "WorkerEnd",
    "WorkerLinkLike",
]


class Recording(Protocol):
    """Takes rows of the log; never waits."""

    def add(self, table: str, row: Row) -> None: ...


class ArrivalLike(Protocol):
    """A push in a slot; the frame is valid until the push is acknowledged."""

    @property
    def origin(self) -> int: ...
    @property
    def sequence(self) -> int: ...
    @property
    def frame(self) -> Frame: ...


class ServerEnd(Protocol):
    """A channel at the server (see ``comm.receiver.ServerChannel``)."""

    index: int
    slots: int
    spec: ChannelSpec
    layout: FrameLayout
    push_layout: FrameLayout
    initial: Frame

    relayed: int

    @property
    def sender_of(self) -> Sequence[int]: ...
    def arrivals(self) -> Sequence[ArrivalLike]: ...
    def reply_frame(self, sender: int) -> Frame | None: ...
    def copy_frame(self, worker: int) -> Frame | None: ...
    def send_replies(self, sender: int, replies: Sequence[tuple[int, Reply]]) -> None: ...
    def send_copy(self, worker: int, reply: Reply) -> None: ...
    def send_to_all(self, frame: Frame, reply: Reply) -> None: ...
    def reply_done(self, worker: int) -> bool: ...


class ServerLinkLike(Protocol):
    """A server's link (see ``comm.receiver.ServerLink``)."""

    def progress(self) -> bool: ...
    def requests(self) -> list[Request]: ...
    def notify(self, worker: int, notice: Notice) -> None: ...
    def notify_relay(self, relay: int, notice: Notice) -> None: ...
    def may_beat(self, worker: int) -> bool: ...
    def open_channel(self, index: int) -> ServerEnd: ...
    def close(self) -> None: ...


class RelayEnd(Protocol):
    """A channel at a relay (see ``comm.relay.RelayChannel``)."""

    index: int
    spec: ChannelSpec
    push_layout: FrameLayout
    size: int
    on_answer: Callable[[int], None]

    def arrivals(self) -> Sequence[ArrivalLike]: ...
    def in_flight(self) -> int: ...
    def next_frame(self) -> Frame | None: ...
    def submit(self, frame: Frame, count: int) -> int: ...


class RelayLinkLike(Protocol):
    """A relay's link (see ``comm.relay.RelayLink``)."""

    workers: list[int]
    stop: int

    @property
    def over(self) -> bool: ...
    @property
    def channels(self) -> Sequence[RelayEnd]: ...
    def progress(self) -> bool: ...
    def tell(self, kind: RequestKind) -> None: ...
    def close(self) -> None: ...


class WorkerEnd(Protocol):
    """A channel at a worker (see ``comm.sender.WorkerChannel``)."""

    index: int
    slots: int
    beyond: int
    layout: FrameLayout
    acknowledged: int
    last_notice: Notice | None
    send_time_s: float
    on_sent: Callable[[SendTimes, Notice], None]

    def in_flight(self) -> int: ...
    def next_frame(self) -> Frame: ...
    @property
    def next_sequence(self) -> int: ...
    def submit(self, push: Push) -> None: ...
    def send_range(self, start: int, stop: int) -> None: ...
    def abandon(self) -> None: ...
    def take_reply(self) -> Incoming | None: ...
    def wait_change(self, timeout_s: float) -> None: ...
    def ask_copy(self, lend: bool = False) -> None: ...
    def wait_copy(self) -> Frame: ...
    def fetch(self, lend: bool = False) -> Frame: ...


class SumLike(Protocol):
    """A sum over all workers under way (see ``comm.peers.Sum``)."""

    def wait(self) -> None: ...


class PeerEnd(Protocol):
    """A channel without a server (see ``comm.peers.PeerChannel``)."""

    index: int
    ended: dict[int, int]
    sent: dict[int, int]
    on_message: Callable[[PeerIncoming], bool] | None
    on_sent: Callable[[PeerHeader, int, float, float, int], None] | None

    def use_messages(self) -> None: ...
    def try_send(
        self, to: int, write: Callable[[np.ndarray], None], header: PeerHeader
    ) -> bool: ...
    def take(self) -> PeerIncoming | None: ...
    def wait_change(self, timeout_s: float) -> None: ...
    def start_sum(self, array: np.ndarray) -> SumLike: ...
    def largest(self, array: np.ndarray) -> None: ...
    def leave(self, iterations: int) -> None: ...
    def all_ended(self) -> bool: ...


class WorkerLinkLike(Protocol):
    """A worker's link (see ``comm.sender.WorkerLink``)."""

    worker: int
    notice: Notice
    phase: Phase
    phase_since: float
    steps: int
    own_samples: int

    def open_channel(
        self, spec: ChannelSpec, initial: Callable[[Frame], None]
    ) -> tuple[Any, Frame]: ...
    def post(self, call: Callable[..., Any], *args: Any) -> None: ...

    def wait_posted(self) -> None: ...
    def exchange(self, mine: bytes) -> list[bytes]: ...
    def broadcast_later(self, what: str, array: np.ndarray, then: Callable[[], None]) -> None: ...
    def sum_later(self, what: str, array: np.ndarray, then: Callable[[], None]) -> None: ...
    def tell(self, kind: RequestKind, values: tuple[float, ...] = ()) -> None: ...
    def close(self, at_end: Callable[[], None]) -> list[Frame]: ...
