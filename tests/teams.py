"""Workers as threads or ranks that train a toy model, over the real runtime and any links.

The model is one vector; a worker's gradient is what the test says, as a function of the worker, the
parameters and the iteration.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from aladdin_mpi.algorithms import Algorithm, find
from aladdin_mpi.algorithms.base import Topology
from aladdin_mpi.algorithms.ranges import ShardedWorker
from aladdin_mpi.comm.inprocess import InProcess
from aladdin_mpi.comm.inprocess_peers import InProcessPeers
from aladdin_mpi.core.flat import FlatBuffers, FlatParams
from aladdin_mpi.messages import ChannelSpec, RequestKind
from aladdin_mpi.record.recorder import MemoryFile, Recorder
from aladdin_mpi.runtime.clock import StepClock
from aladdin_mpi.runtime.peerport import PeerPort
from aladdin_mpi.runtime.ports import WorkerPort
from aladdin_mpi.runtime.progress import Progress
from aladdin_mpi.runtime.reducers import RangeReducer
from aladdin_mpi.runtime.server import ServerLoop
from aladdin_mpi.runtime.sharded import (
    ShardedPort,
    Sharding,
    open_channels,
    per_optimizer,
)
from aladdin_mpi.runtime.worker import Driver

Gradient = Callable[[int, np.ndarray, int], np.ndarray]

QUICK: dict[str, dict[str, Any]] = {
    "diloco": {"period": 5},
    "gosgd": {"p": 0.5},
    "arsgd": {"backend": "mpi"},
}
"""Options with which a few iterations show something."""

CLOSE = {"aladdin": 0.8, "shat": 0.8, "gosgd": 1.5, "ad-psgd": 1.5}
"""How far from the minimum the end may be, where it is not 0.15: the server follows its workers
loosely, or a message that took as long as the whole training is mixed in at its end.  Workers that
do not move are 3 away.
"""

TARGET = np.array([1.0, -2.0, 0.5, 3.0])
SHARDED_SIZE = 56
"""Elements that make four blocks of 64 bytes: not the same for each of three servers."""


def towards(worker: int, x: np.ndarray, iteration: int) -> np.ndarray:
    """The gradient of a quadratic with its minimum at TARGET, repeated to the vector's size."""
    return x - np.resize(TARGET, x.size)


def mixed(worker: int, x: np.ndarray, iteration: int) -> np.ndarray:
    """Another quadratic on each worker, and another in each iteration."""
    target = np.resize(TARGET, x.size)
    return (1 + worker / 4) * x - target * (1 + np.cos(worker + iteration))


def steady(worker: int, x: np.ndarray, iteration: int) -> np.ndarray:
    """A gradient that does not depend on the parameters."""
    return np.resize(TARGET, x.size) * (1 + worker) + iteration


@dataclass
class Training:
    """What every worker does.

    ``before_step(worker, iteration)`` is called before each step; by default it is a short sleep,
    so that the workers run side by side.
    """

    algorithm: str
    gradient: Gradient
    options: dict[str, Any] = field(default_factory=dict)
    size: int = 4
    lr: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    servers: int = 1
    max_shard_bytes: int = 0
    wire: str = "float32"
    iterations: Callable[[int], int] = lambda worker: 20
    before_step: Callable[[int, int], None] = lambda worker, iteration: time.sleep(2e-4)

    @property
    def row(self) -> Algorithm:
        return find(self.algorithm)

    def config(self) -> Any:
        return self.row.config(**self.options)


def toy(name: str, gradient: Gradient = towards, **settings: Any) -> Training:
    """A training with the options of QUICK and those given."""
    options = {**QUICK.get(name, {}), **settings.pop("options", {})}
    return Training(name, gradient, options, **settings)


@dataclass(frozen=True)
class Case:
    """An algorithm, with how many servers, and whether each has several ranges."""

    name: str
    servers: int = 1
    ranges: bool = False

    def __str__(self) -> str:
        servers = f"-{self.servers}-servers" if self.servers > 1 else ""
        return self.name + servers + ("-ranges" if self.ranges else "")

    @property
    def target(self) -> np.ndarray:
        """The quadratic's minimum."""
        whole = self.servers == 1 and not self.ranges
        return np.resize(TARGET, 4 if whole else SHARDED_SIZE)

    def toy(self, gradient: Gradient = towards, **settings: Any) -> Training:
        """A training, of a vector that can be shared out."""
        return toy(
            self.name, gradient, servers=self.servers, max_shard_bytes=64 * self.ranges,
            size=self.target.size, **settings,
        )  # fmt: skip


def cases(names: Iterable[str], servers: tuple[int, ...] = (3,)) -> list[Case]:
    """Those algorithms, and those with a server also with so many, and with ranges."""
    found = [Case(name) for name in names]
    for case in list(found):
        if find(case.name).topology is Topology.SERVER:
            found += [Case(case.name, count) for count in servers]
            found.append(Case(case.name, ranges=True))
    return found


@dataclass
class Result:
    """A worker's parameters before the end, and after it; its port, algorithm and log."""

    own: np.ndarray
    final: np.ndarray
    worker: Any
    file: MemoryFile
    dtype: torch.dtype


def train(link: Any, num_workers: int, training: Training) -> Result:
    """One worker, from opening its channel to the end."""
    row, index = training.row, link.worker
    model = torch.nn.Module()
    model.x = torch.nn.Parameter(
        torch.zeros(training.size, dtype=training.dtype, device=training.device)
    )
    optimizer = torch.optim.SGD(
        [model.x], lr=training.lr, momentum=training.momentum, weight_decay=training.weight_decay
    )
    params = FlatParams(model.named_parameters(), [[model.x]])
    buffers = FlatBuffers(model, set())
    spec = ChannelSpec(
        (("x", "float32"),), (), tuple(params.group_ranges()), params.size, 0, 0, "toy",
        training.momentum, training.weight_decay, training.wire,
    )  # fmt: skip

    ranges = Sharding(training.servers, training.max_shard_bytes).ranges(params)
    end, _ = open_channels(link, spec, ranges, params, buffers)
    file = MemoryFile()
    with Recorder(file) as recorder:
        clock = StepClock(link, num_workers)
        served, sharded = row.topology is Topology.SERVER, len(ranges) > 1

        def algorithm(vector: Any) -> Any:
            return row.worker(training.config(), vector, num_workers)

        worker = algorithm(params)
        if sharded:
            gradients = "server_applies" in row.traits or (
                getattr(training.config(), "push", "") == "gradient"
            )
            worker = ShardedWorker(algorithm, params, ranges, gradients)
        momentum = getattr(training.config(), "server_momentum", training.momentum)
        make_port = partial(ShardedPort if sharded else WorkerPort, momentum=momentum)
        driver = Driver(
            optimizer, params, buffers, worker, end, link, clock, recorder, num_workers, "skip",
            lambda text: None, make_port if served else partial(PeerPort, seed=0),
        )  # fmt: skip
        if not served:
            driver.port.reducer = RangeReducer(params, end)
        for iteration in range(training.iterations(index)):
            training.before_step(index, iteration)
            x = model.x.detach().float().cpu().numpy()
            model.x.grad = torch.tensor(
                training.gradient(index, x.astype(np.float64), iteration),
                dtype=training.dtype,
                device=training.device,
            )
            clock.fetching()
            clock.fetched(1)
            driver.step(optimizer.step)
        own = model.x.detach().float().cpu().numpy().copy()
        driver.finish()
        for frame in per_optimizer([end], link.close(lambda: None)):
            params.assign(frame.params)
    final = model.x.detach().float().cpu().numpy().copy()
    return Result(own, final, worker, file, model.x.dtype)


def serve(link: Any, num_workers: int, training: Training, relays: int = 0) -> ServerLoop:
    """The server, until all workers have ended."""
    row = training.row
    assert row.server is not None
    loop = ServerLoop(
        link, num_workers, lambda spec: row.server(training.config(), num_workers),
        Recorder(MemoryFile()), Progress("off", 0, ""), relays=relays,
    )  # fmt: skip
    loop.serve()
    return loop


def run(num_workers: int, training: Training, timeout: float = 20.0) -> list[Result]:
    """Train with a thread for each worker, and one for the server where there is one."""
    results: list[Any] = [None] * num_workers
    errors: list[BaseException] = []
    served = training.row.topology is Topology.SERVER
    world: Any = (
        InProcess(num_workers, servers=training.servers) if served else InProcessPeers(num_workers)
    )

    def work(index: int) -> None:
        try:
            results[index] = train(world.workers[index], num_workers, training)
        except BaseException as error:
            errors.append(error)
            if served:
                for server in world.servers:
                    world.workers[index].ask(server, RequestKind.BYE)
            else:
                world.barrier.abort()

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(num_workers)]
    if served:
        threads += [
            threading.Thread(target=serve, args=(server, num_workers, training), daemon=True)
            for server in world.servers
        ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "somebody hangs"
    return results
