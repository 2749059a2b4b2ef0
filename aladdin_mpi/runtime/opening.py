"""A worker's session, and how an optimizer joins it: its vector, channels, and driver of steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from aladdin_mpi.algorithms import Algorithm
from aladdin_mpi.algorithms.base import Topology
from aladdin_mpi.algorithms.ranges import ShardedWorker
from aladdin_mpi.core.flat import FlatBuffers, FlatParams
from aladdin_mpi.errors import ConfigError, ModelError
from aladdin_mpi.messages import MAX_GROUPS, ChannelSpec
from aladdin_mpi.optim.adascale import Gain
from aladdin_mpi.runtime.clock import StepClock
from aladdin_mpi.runtime.cuts import PeerCuts
from aladdin_mpi.runtime.job import Job, Settings
from aladdin_mpi.runtime.loader import PartitionedLoader
from aladdin_mpi.runtime.optimizer import check_sgd, check_supported, scale_rates
from aladdin_mpi.runtime.peerport import PeerPort
from aladdin_mpi.runtime.ports import WorkerPort
from aladdin_mpi.runtime.reducers import make_reducer
from aladdin_mpi.runtime.restart import restore_parameters, restore_state
from aladdin_mpi.runtime.sharded import ShardedPort, Sharding, open_channels
from aladdin_mpi.runtime.spread import SpreadLog
from aladdin_mpi.runtime.worker import Driver

__all__ = ["Session", "open_driver"]

NamedParameters = Iterable[tuple[str, torch.nn.Parameter]]


@dataclass
class Session:
    """What a worker has from ``init()`` to ``finish()``.

    Attributes
    ----------
    drivers : list of Driver
        One per distributed optimizer.
    taken : set of int
        Buffers that travel with an optimizer already.
    """

    job: Job
    algorithm: Algorithm
    options: Any
    settings: Settings
    link: Any
    clock: StepClock
    drivers: list[Driver] = field(default_factory=list)
    taken: set[int] = field(default_factory=set)
    ended: bool = False
    loaders: list[PartitionedLoader] = field(default_factory=list)
    cuts: Any = None
    calls: PeerCuts | None = None

    @property
    def rank(self) -> int:
        """This worker's index."""
        return self.job.roles.worker

    @property
    def size(self) -> int:
        """Workers of the run."""
        return len(self.job.roles.workers)

    @property
    def served(self) -> bool:
        """The algorithm has servers."""
        return self.algorithm.topology is Topology.SERVER

    def log(self, name: str, value: float) -> None:
        """A value of the user's for this step."""
        self.job.recorder.add("user", (self.clock.iteration, name.encode(), float(value)))


def open_driver(
    session: Session,
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module | None,
    named_parameters: NamedParameters | None,
    backward_passes: int,
) -> Driver:
    """The driver of an optimizer's steps, its channels open and its parameters those that all start
    from.  Collective over all workers.

    Raises
    ------
    ModelError, ConfigError
    """
    check_supported(optimizer, model)
    if backward_passes < 1:
        raise ConfigError(f"backward_passes_per_step {backward_passes}: must be at least 1")
    named = _named(model, named_parameters)
    gradients = _pushes_gradients(session, optimizer)
    groups = [group["params"] for group in optimizer.param_groups]
    params, buffers = FlatParams(named, groups, backward_passes), FlatBuffers(model, session.taken)
    spec = _spec(session, optimizer, params, buffers)

    ranges = (session.settings.sharding if session.served else Sharding()).ranges(params)
    end, start = open_channels(session.link, spec, ranges, params, buffers)
    if session.rank != 0:
        params.assign(start.params)
        buffers.assign(start.floats, start.counts)
    restart, at = session.job.restart, len(session.drivers)
    topology = session.algorithm.topology
    if restart is not None:
        restore_parameters(restart, topology, at, end, params, buffers, session.size)

    def algorithm(vector: Any) -> Any:
        return session.algorithm.worker(session.options, vector, session.size)

    sharded = len(ranges) > 1
    worker = ShardedWorker(algorithm, params, ranges, gradients) if sharded else algorithm(params)
    if session.served:
        momentum = getattr(session.options, "server_momentum", spec.momentum)
        make_port: Callable[..., Any] = partial(
            ShardedPort if sharded else WorkerPort, momentum=momentum
        )
    else:
        make_port = partial(PeerPort, seed=session.settings.seed)
    driver = Driver(
        optimizer, params, buffers, worker, end, session.link, session.clock, session.job.recorder,
        session.size, session.settings.on_nonfinite, session.job.say, make_port,
        session.settings.slow_worker.get(session.rank, 1.0),
    )  # fmt: skip
    if restart is not None:
        restore_state(restart, topology, at, optimizer, worker, driver.port)
    if getattr(session.options, "backend", None) is not None:
        _reduce(session, driver, optimizer, model, named)
    if at == 0:
        if session.settings.log_variance:
            every = session.settings.log_variance
            driver.after.append(SpreadLog(session.link, params, session.job.recorder, every))
        driver.after.append(session.cuts if session.calls is None else session.calls)
    driver.port.cut = session.cuts.done
    return driver


def _named(
    model: torch.nn.Module | None, named_parameters: NamedParameters | None
) -> list[tuple[str, torch.nn.Parameter]]:
    if named_parameters is not None:
        return list(named_parameters)
    if model is None:
        raise ModelError("DistributedOptimizer needs the model, or named_parameters")
    return list(model.named_parameters())


def _pushes_gradients(session: Session, optimizer: torch.optim.Optimizer) -> bool:
    """Gradients are pushed, not updates; and the server can do what the optimizer asks for."""
    applied = "server_applies" in session.algorithm.traits
    if applied:
        check_sgd(optimizer, session.algorithm.name, session.settings.wire)
    count = len(optimizer.param_groups)
    gradients = applied or getattr(session.options, "push", "") == "gradient"
    if gradients and count > MAX_GROUPS:
        raise ConfigError(
            f"--algorithm {session.algorithm.name}: {count} parameter groups, at most {MAX_GROUPS} "
            "where gradients are pushed; push updates (aladdin --push update)"
        )
    return gradients


def _spec(
    session: Session, optimizer: torch.optim.Optimizer, params: FlatParams, buffers: FlatBuffers
) -> ChannelSpec:
    """What all ranks must agree on."""
    group = optimizer.param_groups[0]
    return ChannelSpec(
        tuple((e.name, f"{e.dtype}{list(e.shape)}") for e in params.entries), buffers.names,
        tuple(params.group_ranges()), params.size, buffers.floats.size, buffers.counts.size,
        session.settings.description, group.get("momentum", 0.0), group.get("weight_decay", 0.0),
        session.settings.wire,
    )  # fmt: skip


def _reduce(
    session: Session,
    driver: Driver,
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module | None,
    named: list[tuple[str, torch.nn.Parameter]],
) -> None:
    """Give an algorithm with a backend the one that sums its gradients."""
    options = session.options
    gain = Gain(session.size) if options.adascale else None
    driver.port.reducer = reducer = make_reducer(
        options.backend, session.link, session.job.comm, optimizer, model, named, driver.params,
        driver.end, gain, round(options.bucket_mb * 1e6),
    )  # fmt: skip
    if gain is not None:
        scale_rates(optimizer, lambda: gain.gain, partial(session.log, "adascale_gain"))
    if session.rank == 0 and not session.drivers:
        session.job.say(f"gradients are all-reduced by {reducer.name}")
    session.job.recorder.set_end("backend", reducer.name)
