"""What travels between workers and servers, and the instructions a server algorithm gives.

Everything here is frozen data: no arrays are owned, no behaviour beyond packing into a fixed
record.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np

__all__ = [
    "FRAME_HEADER",
    "FRAME_HEADER_BYTES",
    "MAX_GROUPS",
    "Action",
    "Apply",
    "ChannelSpec",
    "Hold",
    "Merge",
    "MergeHeld",
    "Notice",
    "PeerHeader",
    "Phase",
    "Push",
    "Reply",
    "Request",
    "RequestKind",
    "Send",
    "SendTimes",
    "Stop",
]

MAX_GROUPS = 16
"""Parameter groups whose learning rates fit into the header of a pushed gradient."""

FRAME_HEADER_BYTES = 256
FRAME_HEADER = np.dtype(
    {
        "names": [
            "sequence", "worker", "iterations", "samples", "handled", "wants_reply", "version",
            "last", "active", "number", "clock", "cut", "parts", "alpha", "iteration_s", "loss",
            "rates",
        ],
        "formats": ["i8"] * 13 + ["f8"] * 3 + [("f8", (MAX_GROUPS,))],
        "itemsize": FRAME_HEADER_BYTES,
    }
)  # fmt: skip
"""The header in front of a payload, both ways; 256 bytes, so that the payload keeps its
alignment.

``parts`` counts the headers behind the payload, of the workers whose pushes a relay has merged into
it, or whom a reply is for; 0: this header is the only one.  In a part of a push it is 1 where its
payload is in the sum, else 0.
"""


class Push(NamedTuple):
    """One message of a worker to a server.

    Attributes
    ----------
    worker : int
        Index of the worker, 0 … n−1.
    sequence : int
        Number of this push among the pushes of its worker, from 1.
    iterations, samples : int
        Iterations and training samples whose result it carries (more than one after coalescing).
    handled : int
        Number of the last reply that the worker mixed in or threw away.
    wants_reply : bool
        The worker asks for the global parameters.
    version : int
        Version of the global parameters that the worker mixed in last.
    last : bool
        The worker leaves after this push.
    rates : tuple of float
        Learning rate of each parameter group, where gradients are pushed; else empty.
    iteration_s : float
        [s] duration of the worker's last iteration.
    loss : float
        The worker's last training loss, NaN when unknown.
    active : int
        Workers that were training when its steps were begun, as far as the worker knew.
    made : int
        The worker's iterations in the whole run, those before a restart included.
    cut : int
        Number of the checkpoint that the worker made last: its state does not contain this push.
    left_out : bool
        Its relay did not merge its payload, which is not finite.
    """

    worker: int
    sequence: int
    iterations: int = 1
    samples: int = 0
    handled: int = 0
    wants_reply: bool = False
    version: int = 0
    last: bool = False
    rates: tuple[float, ...] = ()
    iteration_s: float = 0.0
    loss: float = float("nan")
    active: int = 1
    made: int = 0
    cut: int = 0
    left_out: bool = False


class Reply(NamedTuple):
    """The header of a server's message with global parameters.

    Attributes
    ----------
    number : int
        Number of this reply among the replies to its worker, from 1; 0 for a fetched copy.
    version : int
        Merges that the carried parameters contain.
    sequence : int
        The worker's last push that they contain.
    alpha : float
        Mixing weight.
    clock : int
        Iterations that every worker's pushes in them reach at least, where the algorithm counts so.
    """

    number: int
    version: int
    sequence: int
    alpha: float
    clock: int = 0


class PeerHeader(NamedTuple):
    """The header of a message from worker to worker.

    Attributes
    ----------
    worker : int
        Who sent it.
    iteration : int
        At which of its iterations, from 0.
    weight : float
        What goes with the parameters: a push-sum weight, say.
    answer : bool
        It answers a message of the receiver's.
    sequence : int
        Its number among those to this worker, from 1; set when it is sent.
    """

    worker: int
    iteration: int
    weight: float = 1.0
    answer: bool = False
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class Merge:
    """``target ← target + weight · payload`` of the push being handled.

    ``target`` is ``"global"`` (the global parameters) or ``"sum"`` (the accumulated gradients).
    Pushes that a relay has merged have one payload, and one weight.
    """

    target: str
    weight: float


@dataclass(frozen=True, slots=True)
class Hold:
    """Keep the push being handled in its slot, not acknowledged, until a :class:`MergeHeld` names
    its worker.
    """


@dataclass(frozen=True, slots=True)
class MergeHeld:
    """``target ← target + Σ`` of these workers' held payloads.

    They are added pairwise in the order of the workers' numbers
    (:mod:`~aladdin_mpi.core.pairwise`), so that the sum has the same bits whoever adds them up.
    """

    target: str
    workers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Apply:
    """One step of the server's momentum SGD with the accumulated gradients, which it then clears;
    for pushes that a relay has merged, the last one's.

    ``rates`` holds a learning rate per parameter group, ``scale`` multiplies the sum (1/c̃ for a
    mean).  Momentum and weight decay are the workers' own where None.
    """

    rates: tuple[float, ...]
    scale: float
    momentum: float | None = None
    weight_decay: float | None = None


@dataclass(frozen=True, slots=True)
class Send:
    """Send the global parameters, as they are after all merges at hand, to ``worker`` with
    ``alpha`` and ``clock``.
    """

    worker: int
    alpha: float
    clock: int = 0


Action = Merge | Hold | MergeHeld | Apply | Send


class RequestKind(IntEnum):
    """What a small two-sided message of a worker is."""

    BEAT = 1
    REGISTER = 2
    FETCH = 3
    EVALUATION = 4
    STOP = 5
    BYE = 6
    PREEMPT = 7
    LENGTH = 8


class Stop(IntEnum):
    """Why everybody should end."""

    ASKED = 1
    PREEMPTED = 2


class Phase(IntEnum):
    """What a rank is doing, as its heartbeat tells the others."""

    START = 0
    DATA = 1
    COMPUTE = 2
    STEP = 3
    WAIT = 4
    EVALUATE = 5
    FINISH = 6
    SERVE = 7


class ChannelSpec(NamedTuple):
    """What all ranks must agree on before an optimizer's channel opens.

    ``entries`` and ``buffers`` hold name and kind of every parameter and buffer, ``ranges`` the
    stretches ``(start, stop, group)`` of the flat vector, ``options`` the algorithm and its
    options as text; ``momentum`` and ``weight_decay`` are those of the server's steps where the
    algorithm does not say: the local optimizer's; ``wire`` is how pushes are encoded.
    """

    entries: tuple[tuple[str, str], ...]
    buffers: tuple[tuple[str, str], ...]
    ranges: tuple[tuple[int, int, int], ...]
    size: int
    floats: int
    counts: int
    options: str
    momentum: float = 0.0
    weight_decay: float = 0.0
    wire: str = "float32"


class SendTimes(NamedTuple):
    """How a push travelled: times in [s], ``queued_at`` on the worker's monotonic clock."""

    queued_at: float
    queue_s: float
    put_s: float
    ack_s: float
    nbytes: int


class Request(NamedTuple):
    """A small message of a worker: heartbeat, registration, wish for a copy, evaluation result,
    farewell.

    ``phase`` is what the training thread is doing, ``phase_s`` [s] since when, ``steps`` how many
    iterations it has made.  ``channel`` and ``values`` depend on the kind.
    """

    kind: RequestKind
    worker: int
    phase: int = 0
    phase_s: float = 0.0
    steps: int = 0
    channel: int = 0
    values: tuple[float, ...] = ()


class Notice(NamedTuple):
    """A small message of a server: acknowledgement of a push and heartbeat in one.

    Attributes
    ----------
    channel, sequence : int
        The push that is acknowledged; sequence 0 is a pure heartbeat.
    version, staleness : int
        Version of the global parameters after the merge; merges between the version that the worker
        had and the arrival of its push.
    samples, own_samples : int
        Samples that all workers, and this worker, have consumed in merged pushes.
    active : int
        Workers still training.
    stop : int
        0, or a :class:`Stop`: everybody should end.
    cut, cut_at : int
        Number of the checkpoint that every worker should make (0: none yet), and after how many of
        its iterations (0: at the end of its step).
    """

    channel: int
    sequence: int
    version: int
    staleness: int
    samples: int
    own_samples: int
    active: int
    stop: int
    cut: int = 0
    cut_at: int = 0
