"""Workers and a server that take turns in one thread, over the real runtime and in-process links.

Every worker trains a vector with plain SGD at η = 1: a step adds exactly what the test says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from aladdin_mpi.algorithms import find
from aladdin_mpi.comm.inprocess import InProcess
from aladdin_mpi.core.flat import FlatBuffers, FlatParams
from aladdin_mpi.core.wire import Frame
from aladdin_mpi.messages import ChannelSpec, Push, RequestKind
from aladdin_mpi.record.recorder import MemoryFile, Recorder
from aladdin_mpi.runtime.clock import StepClock
from aladdin_mpi.runtime.progress import Progress
from aladdin_mpi.runtime.server import ServerLoop
from aladdin_mpi.runtime.worker import Driver


class Blocked(Exception):
    """A worker waited for somebody while nobody else moves."""


class Lockstep:
    """``n`` workers and a server; nothing moves by itself.

    ``hold`` names the kinds of messages (``push``, ``notice``, ``reply``) that do not arrive at
    present; ``chance`` is the probability that a message has arrived when somebody looks.  The
    models lie on ``device``.
    """

    def __init__(
        self,
        n: int,
        size: int = 4,
        *,
        algorithm: str = "aladdin",
        seed: int = 0,
        chance: float = 1.0,
        slots: int = 2,
        lr: float = 1.0,
        on_nonfinite: str = "skip",
        batch_norm: bool = False,
        device: str = "cpu",
        **options: Any,
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self.hold: set[str] = set()
        self.chance = chance
        self.n = n
        row = find(algorithm)
        self.config = row.config(**options)
        self.world = InProcess(n, slots, self._arrives)
        self.file = MemoryFile()
        self.recorder = Recorder(self.file)
        self.pushes: list[Push] = []
        self.loop = ServerLoop(
            self.world.server, n, self._rules(row), self.recorder, Progress("off", 0, ""),
            on_nonfinite,
        )  # fmt: skip
        self.models, self.drivers, self.clocks, self.taken = [], [], [], []
        self.steps = np.zeros((n, size))
        for link in self.world.workers:
            model = torch.nn.Module()
            model.x = torch.nn.Parameter(torch.zeros(size))
            if batch_norm:
                model.norm = torch.nn.BatchNorm1d(2, affine=False)
            model.to(device)
            optimizer = torch.optim.SGD([model.x], lr=lr)
            params = FlatParams(model.named_parameters(), [[model.x]])
            buffers = FlatBuffers(model, set())
            spec = ChannelSpec(
                (("x", "float32"),), buffers.names, tuple(params.group_ranges()), params.size,
                buffers.floats.size, buffers.counts.size, "toy",
            )  # fmt: skip
            end, _ = link.open_channel(spec, _start(params, buffers))
            end.wait_change = self._blocked  # type: ignore[method-assign]
            clock = StepClock(link)
            worker = row.worker(self.config, params, n)
            driver = Driver(
                optimizer, params, buffers, worker, end, link, clock, self.recorder, n,
                on_nonfinite, lambda text: None,
            )  # fmt: skip
            self.models.append(model)
            self.clocks.append(clock)
            self.drivers.append((driver, optimizer))
        self.turn()

    def _rules(self, row: Any) -> Callable[[ChannelSpec], Any]:
        def make(spec: ChannelSpec) -> Any:
            rules = row.server(self.config, self.n)
            decide = rules.on_push

            def on_push(push: Push) -> Any:
                self.pushes.append(push)
                return decide(push)

            rules.on_push = on_push
            return rules

        return make

    def _arrives(self, kind: str, worker: int) -> bool:
        return kind not in self.hold and self.rng.random() < self.chance

    def _blocked(self, timeout_s: float) -> None:
        raise Blocked

    def step(self, worker: int, change: float | np.ndarray, samples: int = 1) -> None:
        """One iteration of ``worker``, whose local step adds ``change`` (times η)."""
        driver, optimizer = self.drivers[worker]
        x = self.models[worker].x
        x.grad = torch.zeros_like(x) - torch.tensor(np.asarray(change, np.float32)).to(x.device)
        self.steps[worker] += np.asarray(change)
        self.clocks[worker].fetching()
        self.clocks[worker].fetched(samples)
        driver.step(optimizer.step)

    def turn(self) -> None:
        """One turn of the server."""
        self.loop.turn()

    def finish(self, *workers: int) -> None:
        """These workers (by default all) push the rest and leave; then the server has it all."""
        self.hold.clear()
        for index in workers or range(self.n):
            driver = self.drivers[index][0]

            def wait(timeout_s: float) -> None:
                self.loop.turn()

            driver.end.wait_change = wait
            driver.finish()
            self.world.workers[index].tell(RequestKind.BYE)
            self.loop.turn()

    def x(self, worker: int) -> np.ndarray:
        """The worker's parameters."""
        return self.models[worker].x.detach().cpu().numpy()

    @property
    def server(self) -> np.ndarray:
        """The global parameters."""
        return self.loop.models[0].frame.params[: self.steps.shape[1]]


def _start(params: FlatParams, buffers: FlatBuffers) -> Callable[[Frame], None]:
    def initial(frame: Frame) -> None:
        params.read(frame.params)
        frame.floats[:] = buffers.floats
        frame.counts[:] = buffers.counts

    return initial
