"""A worker whose vector is cut into ranges: a mailbox, a port and the algorithm's state for each.

Each range decides for itself: whether it is pushed or coalesced, when it asks, what it mixes in.
The user's optimizer runs once per step for all of them.  So that all ranges are pushed before any
waits, their steps are nested: where the algorithm runs the local update of a range, or is about to
wait, the next range's step comes first, and inside the last one the update of the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from aladdin_mpi.algorithms.base import Worker
from aladdin_mpi.core.flat import FlatBuffers, FlatParams
from aladdin_mpi.core.shards import Range, Shard, by_layer, by_memory
from aladdin_mpi.core.wire import Frame, FrameLayout
from aladdin_mpi.errors import ConfigError
from aladdin_mpi.messages import ChannelSpec, Reply
from aladdin_mpi.runtime.ports import WorkerPort

__all__ = [
    "ShardedEnd",
    "ShardedPort",
    "ShardedWorker",
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


class ShardedEnd:
    """The channels of one optimizer, one per range; the first one carries the buffers.

    Attributes
    ----------
    ends : list
        In the vector's order (see :class:`~aladdin_mpi.runtime.links.WorkerEnd`).
    index : int
        Of the first channel.
    """

    def __init__(self, ends: Sequence[Any]) -> None:
        self.ends, self.index = list(ends), ends[0].index
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
    whole = ShardedEnd(ends)
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

    def start_step(self) -> None:
        """Forget the last step's times."""
        for port in self.ports:
            port.start_step()

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


class ShardedWorker:
    """The algorithm, once for each range.

    Parameters
    ----------
    make : callable
        ``make(shard) -> Worker``, the algorithm's state for a range.
    params : FlatParams
    ranges : sequence of Range
    gradients : bool
        Gradients are pushed: where one of a step's is not finite, none of them counts.
    """

    def __init__(
        self, make: Callable[[Shard], Worker], params: FlatParams,
        ranges: Sequence[Range], gradients: bool,
    ) -> None:  # fmt: skip
        self._shards: list[Any] = [Shard(params, part.start, part.stop) for part in ranges]
        self._workers = [make(shard) for shard in self._shards]
        self._gradients = gradients

    def step(
        self,
        params: FlatParams,
        local_update: Callable[[], None],
        port: ShardedPort,
        iteration: int,
    ) -> None:
        if self._gradients and not params.gradients_finite():
            for p in params.parameters:
                if p.grad is not None:
                    p.grad.fill_(float("nan"))
        updated = False

        def run(k: int, update: bool) -> None:
            nonlocal updated
            if k == len(self._workers):
                if update and not updated:
                    updated = True
                    local_update()
                return
            gone_on = False

            def go_on(wanted: bool) -> None:
                nonlocal gone_on
                first, gone_on = not gone_on, True
                run(k + 1 if first else len(self._workers), wanted)

            port.ports[k].others = lambda: go_on(update)
            self._workers[k].step(self._shards[k], lambda: go_on(True), port.ports[k], iteration)
            if not gone_on:
                go_on(update)

        run(0, False)

    def before_forward(self, params: FlatParams) -> None:
        for worker, shard in zip(self._workers, self._shards, strict=True):
            worker.before_forward(shard)

    def finish(self, params: FlatParams, port: ShardedPort) -> None:
        for worker, shard, one in zip(self._workers, self._shards, port.ports, strict=True):
            worker.finish(shard, one)

    def state_dict(self) -> dict[str, Any]:
        return {"ranges": [worker.state_dict() for worker in self._workers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for worker, own in zip(self._workers, state["ranges"], strict=True):
            worker.load_state_dict(own)
