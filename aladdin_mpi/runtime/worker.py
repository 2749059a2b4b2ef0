"""A worker's step: runs the algorithm around the user's optimizer, and times all of it.

Times are taken at the borders that the package owns: the loader and the optimizer's step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from aladdin_mpi.algorithms.base import Worker
from aladdin_mpi.core.flat import FlatBuffers, FlatParams
from aladdin_mpi.core.rates import scaled
from aladdin_mpi.errors import NonFiniteError
from aladdin_mpi.messages import MAX_GROUPS, Phase
from aladdin_mpi.runtime.clock import StepClock
from aladdin_mpi.runtime.links import Recording, WorkerLinkLike
from aladdin_mpi.runtime.ports import WorkerPort

__all__ = ["AfterStep", "Driver"]


class AfterStep(Protocol):
    """Something that is done now and then between two steps; it counts to neither."""

    def after_step(self, iteration: int) -> None:
        """``iteration``, from 0, has been made."""

    def finish(self) -> None:
        """No step is made any more."""


class Driver:
    """What happens in ``optimizer.step()`` of one optimizer.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        For the learning rates that are logged and pushed, and for the state to clear after a NaN.
    on_nonfinite : {'skip', 'stop'}
    say : callable
        Shows a line to the user.
    make_port : callable
        What the algorithm calls: :class:`~aladdin_mpi.runtime.ports.WorkerPort` or
        :class:`~aladdin_mpi.runtime.peerport.PeerPort`.
    slow_factor : float
        How many times longer computing takes; the missing time is slept.

    Attributes
    ----------
    after : list of AfterStep
        What else is done between two steps.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        params: FlatParams,
        buffers: FlatBuffers,
        algorithm: Worker,
        end: Any,
        link: WorkerLinkLike,
        clock: StepClock,
        recorder: Recording,
        num_workers: int,
        on_nonfinite: str,
        say: Callable[[str], None],
        make_port: Callable[..., Any] = WorkerPort,
        slow_factor: float = 1.0,
    ) -> None:
        self.params, self.buffers, self.algorithm, self.end = params, buffers, algorithm, end
        self.optimizer, self._link, self._clock = optimizer, link, clock
        self._recorder, self._on_nonfinite, self._say = recorder, on_nonfinite, say
        groups = len(optimizer.param_groups)
        self._rates_fit = groups <= MAX_GROUPS
        self.port = make_port(
            end, link, clock, recorder, buffers, self._rates, self._lost, num_workers
        )
        self.after: list[AfterStep] = []
        self._slow_factor = slow_factor
        self._optimizer_s = 0.0
        self._first = True
        self._lost_count = 0

    def step(self, local_update: Callable[[], None]) -> None:
        """One step: the local update and what the algorithm makes of it."""
        clock, port = self._clock, self.port
        self._sleep_slow()
        start = time.monotonic()
        clock.phase(Phase.STEP)
        if self._first:
            self.params.check_all()
            self.params.check_sparse()
            self._first = False
        else:
            self.params.check_next()
        if self.params.staging is not None:
            self.params.staging.losses.notice()
        port.start_step()
        self._optimizer_s = 0.0
        lr = float(self.optimizer.param_groups[0]["lr"])

        def timed_update(rate: float = 1.0) -> None:
            nonlocal lr
            lr *= rate
            began = time.monotonic()
            with scaled(self.optimizer, rate):
                local_update()
            self._optimizer_s += time.monotonic() - began

        began = time.monotonic()
        self.algorithm.step(self.params, timed_update, port, clock.iteration)
        self.algorithm.before_forward(self.params)
        took = time.monotonic() - began
        push_s = took - self._optimizer_s - port.times["blocked_s"] - port.times["mix_s"]
        self._log(start, lr, push_s)
        if self.after:
            with clock.outside(Phase.STEP):
                for part in self.after:
                    part.after_step(clock.iteration - 1)

    def _sleep_slow(self) -> None:
        """Sleep for what the step's computing would take longer on the slow worker emulated."""
        if self._slow_factor > 1:
            clock = self._clock
            computed_s = clock.compute_s + time.monotonic() - clock.ready_s
            time.sleep((self._slow_factor - 1) * computed_s)
            clock.emulated = True

    def _log(self, start: float, lr: float, push_s: float) -> None:
        clock, port, times = self._clock, self.port, self.port.times
        now = time.monotonic()
        step_s = now - clock.end_s
        compute_s = clock.compute_s + start - clock.ready_s
        port.iteration_mean_s += (step_s - port.iteration_mean_s) * (
            0.1 if port.iteration_mean_s else 1.0
        )
        self._recorder.add(
            "steps",
            (clock.iteration, self.end.index, clock.epoch, clock.end_s, step_s, clock.data_s,
             compute_s, self._optimizer_s, push_s, times["blocked_s"], times["mix_s"],
             clock.forward_s, clock.backward_s, clock.loss, lr, clock.batch, port.coalesced,
             port.sent_iterations, port.staleness, clock.emulated),
        )  # fmt: skip
        clock.iteration += 1
        self._link.steps = clock.iteration
        clock.batch, clock.data_s, clock.compute_s = 0, 0.0, 0.0
        clock.end_s = clock.ready_s = now
        clock.phase(Phase.COMPUTE)

    def finish(self) -> None:
        """Push the rest and wait until it is merged."""
        self.params.check_all()
        for part in self.after:
            part.finish()
        self.algorithm.finish(self.params, self.port)
        self.port.settle()

    def close(self) -> None:
        """Everybody has finished."""
        self.port.close()

    def _rates(self) -> tuple[float, ...]:
        if not self._rates_fit:
            return ()
        return tuple(float(group["lr"]) for group in self.optimizer.param_groups)

    def _lost(self, kind: str) -> None:
        """A NaN or an infinity: stop, or go on from the last good parameters."""
        what = {
            "nonfinite_push": "the step made a NaN or an infinity",
            "nonfinite_reply": "a reply held a NaN or an infinity",
        }[kind]
        where = f"iteration {self._clock.iteration}: {what}"
        if self._on_nonfinite == "stop":
            raise NonFiniteError(
                f"{where}: training has diverged; lower --lr, or throw such steps away with "
                "--on-nonfinite skip"
            )
        self._lost_count += 1
        if self._lost_count in (1, 10, 100, 1000):
            self._say(f"{where}: thrown away ({self._lost_count} so far; --on-nonfinite skip)")
        for state in self.optimizer.state.values():
            for value in state.values():
                if torch.is_tensor(value) and value.is_floating_point():
                    torch.nan_to_num_(value, nan=0.0, posinf=0.0, neginf=0.0)
