"""A vector that is cut into ranges, in virtual time: a world for each, over the same links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from aladdin_mpi.algorithms.base import Algorithm
from aladdin_mpi.algorithms.ranges import ShardedWorker
from aladdin_mpi.core.flat import FlatBuffers
from aladdin_mpi.core.shards import Range, Shard, by_memory
from aladdin_mpi.core.turns import Turns
from aladdin_mpi.simulation.globals import SgdOptions
from aladdin_mpi.simulation.outcome import Tally
from aladdin_mpi.simulation.ports import ServedWorld, VirtualPort
from aladdin_mpi.simulation.replicas import Replica
from aladdin_mpi.simulation.setting import Setting

__all__ = ["PartedWorld", "VirtualPorts"]


class PartedWorld:
    """The worlds of the ranges; where there is one, it is a :class:`ServedWorld` in all but name.

    Parameters
    ----------
    setting : Setting
        Its ``shards`` over its ``servers`` are the ranges: a server has each one's part.
    """

    def __init__(
        self, setting: Setting, tally: Tally, algorithm: Algorithm, config: Any,
        replicas: Sequence[Replica], sgd: SgdOptions,
    ) -> None:  # fmt: skip
        size = replicas[0].params.size
        count = max(1, setting.shards // setting.servers)
        self.ranges: list[Range] = by_memory(size, 1, -(-4 * size // count))
        self._algorithm, self._config = algorithm, config
        own = replace(
            setting, shards=setting.servers, payload_bytes=setting.payload_bytes / len(self.ranges)
        )
        self.worlds: list[ServedWorld] = []
        for part in self.ranges:
            lanes = self.worlds[0].lanes if self.worlds else None
            world = ServedWorld(own, tally, lanes)
            assert algorithm.server is not None
            rules = algorithm.server(config, setting.num_workers)
            world.open(rules, self._vector(replicas[0], part), self._buffers(replicas[0]), sgd)
            self.worlds.append(world)
        self.events = self.worlds[0].events

    def _vector(self, replica: Replica, part: Range) -> Any:
        whole = len(self.ranges) == 1
        return replica.params if whole else Shard(replica.params, part.start, part.stop)

    def _buffers(self, replica: Replica) -> FlatBuffers:
        """With the first range."""
        return replica.buffers if not self.worlds else FlatBuffers(None, set())

    @property
    def carried_bytes(self) -> tuple[float, float]:
        """[B] that a server's links have carried, in and out."""
        return self.worlds[0].carried_bytes

    @property
    def params(self) -> np.ndarray:
        """A copy of the global parameters."""
        return np.concatenate([world.model.x for world in self.worlds])

    @property
    def floats(self) -> np.ndarray:
        """Of the global buffers."""
        return self.worlds[0].model.floats

    @property
    def counts(self) -> np.ndarray:
        """Of the global buffers."""
        return self.worlds[0].model.counts

    def join(self, worker: int, replica: Replica) -> tuple[VirtualPort | VirtualPorts, Any]:
        """A worker's port, and its half of the algorithm."""
        nothing = FlatBuffers(None, set())
        ports = [
            VirtualPort(
                world, worker, self._vector(replica, part), nothing if k else replica.buffers,
                replica.rates,
            )
            for k, (world, part) in enumerate(zip(self.worlds, self.ranges, strict=True))
        ]  # fmt: skip

        def make(vector: Any) -> Any:
            return self._algorithm.worker(self._config, vector, self.worlds[0].setting.num_workers)

        if len(ports) == 1:
            return ports[0], make(replica.params)
        traits = self._algorithm.traits
        gradients = "server_applies" in traits or getattr(self._config, "push", "") == "gradient"
        return VirtualPorts(ports), ShardedWorker(make, replica.params, self.ranges, gradients)


class VirtualPorts:
    """The ports of a worker's ranges, which take turns on a full link."""

    def __init__(self, ports: Sequence[VirtualPort]) -> None:
        self.ports = list(ports)
        self.worker = ports[0].worker
        self._turns = Turns(len(ports))
        for k, port in enumerate(self.ports):
            port.may_push = partial(self._turns.has, k)

    @property
    def process(self) -> Any:
        """What waits where the algorithm does."""
        return self.ports[0].process

    @process.setter
    def process(self, process: Any) -> None:
        for port in self.ports:
            port.process = process

    @property
    def lost_count(self) -> int:
        """Steps and replies thrown away."""
        return sum(port.lost_count for port in self.ports)

    def computed(self, took_s: float, samples: int, iteration: int) -> None:
        """The gradients of an iteration are there."""
        for port in self.ports:
            port.computed(took_s, samples, iteration)
        self._turns.begin([port.in_flight > 0 for port in self.ports])

    def stepped(self, took_s: float) -> None:
        """A step has ended."""
        for port in self.ports:
            port.stepped(took_s)

    def settle(self) -> None:
        """Wait until everything that was pushed has been merged."""
        for port in self.ports:
            port.settle()
