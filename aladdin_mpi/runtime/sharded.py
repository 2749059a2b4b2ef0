"""A worker whose vector is cut into ranges: a mailbox and a port for each.

Ranges that go to one server share a link: where that is full, they take turns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from aladdin_mpi.core.flat import FlatBuffers, FlatParams
from aladdin_mpi.core.shards import Range, by_layer, by_memory
from aladdin_mpi.core.turns import Turns
from aladdin_mpi.core.wire import Frame, FrameLayout
from aladdin_mpi.errors import ConfigError
from aladdin_mpi.messages import ChannelSpec, Reply
from aladdin_mpi.runtime.ports import WorkerPort

__all__ = [
    "ShardedEnd",
    "ShardedPort",
    "Sharding",
    "open_channels",
    "per_optimizer",
]


@dataclass(frozen=True)
class Sharding:
    """How the vector is shared out among servers.

    Attributes
    ----------
    servers : int
    max_bytes : int
        [bytes] of a range at most; 0: no limit.
    by : {'memory', 'layer'}
    placement : {'first', 'spread'}
        Which ranks serve: the first ones, or those of nodes at equal distances.
    """

    servers: int = 1
    max_bytes: int = 0
    by: str = "memory"
    placement: str = "first"

    def ranges(self, params: FlatParams) -> list[Range]:
        """Who holds what of a model.

        Raises
        ------
        ConfigError
            The model is too small for so many servers.
        """
        if self.by == "memory":
            found = by_memory(params.size, self.servers, self.max_bytes)
            unit = "blocks of 64 bytes"
        else:
            borders = [*(entry.start for entry in params.entries), params.size]
            layers = [b - a for a, b in pairwise(borders)]
            found = by_layer(layers, self.servers)
            unit = "layers"
        if found[-1].server + 1 < self.servers:
            raise ConfigError(
                f"--servers {self.servers}: the model has only {len(found)} {unit} to share out; "
                f"use at most {len(found)}"
            )
        return found

    def advice(self, overload: float) -> str:
        """What to do where a push carries ``overload`` iterations, because links are full."""
        more = math.ceil(self.servers * overload)
        text = f"full links: a push carries {overload:.1f} iterations; --servers {more} would "
        text += "carry each, --wire bfloat16 and --merge-on-node send less"
        if not self.max_bytes and self.by == "memory":
            text += ", and --max-shard-bytes of an eighth of a push has them merged fresher"
        return text


class ShardedEnd:
    """The channels of one optimizer, one per range; the first one carries the buffers.

    Attributes
    ----------
    ends, ranges : list
        In the vector's order (see :class:`~aladdin_mpi.runtime.links.WorkerEnd`).
    index : int
        Of the first channel.
    """

    def __init__(self, ends: Sequence[Any], ranges: Sequence[Range]) -> None:
        self.ends, self.ranges, self.index = list(ends), list(ranges), ends[0].index
        sizes = [end.layout.size for end in ends]
        first = ends[0].layout
        self._whole = FrameLayout(sum(sizes), first.floats, first.counts).new_frame()

    def fetch(self, lend: bool = False) -> Frame:
        """The global parameters and buffers, until the next call; waits for all servers."""
        for end in self.ends:
            end.ask_copy(lend)
        return self.assemble([end.wait_copy() for end in self.ends])

    def assemble(self, frames: Sequence[Frame]) -> Frame:
        """Copies of all ranges as one; its version is the first range's."""
        whole, first = self._whole, frames[0]
        np.concatenate([frame.params for frame in frames], out=whole.params)
        np.copyto(whole.floats, first.floats)
        np.copyto(whole.counts, first.counts)
        reply: Reply = first.read_reply()
        whole.write_reply(reply)
        return whole


def open_channels(
    link: Any, spec: ChannelSpec, ranges: Sequence[Range], params: FlatParams, buffers: FlatBuffers
) -> tuple[Any, Frame]:
    """Open an optimizer's channels, one per range.  Collective over all workers and servers.

    Returns
    -------
    end : WorkerEnd or ShardedEnd
    start : Frame
        Worker 0's values, which all start from.
    """
    x = params.gathered()
    ends, frames = [], []
    for i, (start, stop, server) in enumerate(ranges):

        def initial(frame: Frame, first: bool = i == 0, part: slice = slice(start, stop)) -> None:
            np.copyto(frame.params, x[part])
            if first:
                np.copyto(frame.floats, buffers.floats)
                np.copyto(frame.counts, buffers.counts)

        own = tuple(
            (max(a, start) - start, min(b, stop) - start, group)
            for a, b, group in spec.ranges if a < stop and b > start
        )  # fmt: skip
        mine = spec._replace(ranges=own, size=stop - start)
        if i:
            mine = mine._replace(floats=0, counts=0)
        to = (server,) if server else ()  # links between peers know no servers
        end, frame = link.open_channel(mine, initial, *to)
        ends.append(end)
        frames.append(frame)
    if len(ends) == 1:
        return ends[0], frames[0]
    whole = ShardedEnd(ends, ranges)
    return whole, whole.assemble(frames)


def per_optimizer(ends: Sequence[Any], frames: Sequence[Frame]) -> list[Frame]:
    """The final copies of all channels as one frame for each optimizer's ``end``; none where there
    are none.
    """
    left, found = list(frames), []
    for end in ends if frames else ():
        if isinstance(end, ShardedEnd):
            found.append(end.assemble([left.pop(0) for _ in end.ends]))
        else:
            found.append(left.pop(0))
    return found


class ShardedPort:
    """What the driver of a step sees of the ranges' ports.

    Parameters
    ----------
    end : ShardedEnd
    buffers : FlatBuffers
        Pushed with the first range, as are the step's samples and its loss.
    link, clock, recorder, rates, on_lost, num_workers, momentum
        As for :class:`~aladdin_mpi.runtime.ports.WorkerPort`.
    """

    def __init__(
        self, end: ShardedEnd, link: Any, clock: Any, recorder: Any, buffers: FlatBuffers,
        rates: Callable[[], tuple[float, ...]], on_lost: Callable[[str], None], num_workers: int,
        momentum: float = 0.0,
    ) -> None:  # fmt: skip
        nothing = FlatBuffers(None, set())
        self.ports = [
            WorkerPort(
                one, link, clock, recorder, buffers if i == 0 else nothing, rates, on_lost,
                num_workers, leads=i == 0, momentum=momentum,
            )
            for i, one in enumerate(end.ends)
        ]  # fmt: skip
        self._turns: list[tuple[Turns, list[WorkerPort]]] = []
        for server in sorted({part.server for part in end.ranges}):
            pairs = zip(self.ports, end.ranges, strict=True)
            own = [port for port, part in pairs if part.server == server]
            turns = Turns(len(own))
            self._turns.append((turns, own))
            for k, port in enumerate(own):
                port.may_push = partial(turns.has, k)

    def start_step(self) -> None:
        """Forget the last step's times, and say whose turn it is."""
        for port in self.ports:
            port.start_step()
        for turns, own in self._turns:
            turns.begin([port.in_flight > 0 for port in own])

    @property
    def times(self) -> dict[str, float]:
        """[s] in this step, over all ranges, by column."""
        return {
            column: sum(port.times[column] for port in self.ports) for column in self.ports[0].times
        }

    @property
    def coalesced(self) -> bool:
        """A range was not pushed in this step."""
        return any(port.coalesced for port in self.ports)

    @property
    def sent_iterations(self) -> int:
        """The most iterations that a range's push carried."""
        return max(port.sent_iterations for port in self.ports)

    @property
    def staleness(self) -> int:
        """The largest of the ranges' last pushes."""
        return max(port.staleness for port in self.ports)

    @property
    def pushes(self) -> int:
        """Pushes that have been merged, over all ranges."""
        return sum(port.pushes for port in self.ports)

    @property
    def iteration_mean_s(self) -> float:
        """[s] an iteration takes, running mean."""
        return self.ports[0].iteration_mean_s

    @iteration_mean_s.setter
    def iteration_mean_s(self, value: float) -> None:
        for port in self.ports:
            port.iteration_mean_s = value

    @property
    def cut(self) -> int:
        """The checkpoint that this worker made its part of last."""
        return self.ports[0].cut

    @cut.setter
    def cut(self, number: int) -> None:
        for port in self.ports:
            port.cut = number

    def state_dict(self) -> dict[str, Any]:
        """As for one port, by range."""
        return {"ranges": [port.state_dict() for port in self.ports]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""
        for port, own in zip(self.ports, state["ranges"], strict=True):
            port.load_state_dict(own)

    def settle(self) -> None:
        """Wait until everything that was pushed has been merged."""
        for port in self.ports:
            port.settle()

    def close(self) -> None:
        """Everybody has finished."""
