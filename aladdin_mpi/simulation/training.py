"""Training in virtual time: the algorithms' own files, real gradients, simulated links.

Each worker has a model of its own and computes real gradients; how long that takes, and every
message, is virtual.  Time and parameters are exact for a seed, whatever this machine is busy with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from torch.nn.functional import cross_entropy

from aladdin_mpi.algorithms.base import Algorithm, Topology
from aladdin_mpi.core.rates import scaled
from aladdin_mpi.errors import ConfigError
from aladdin_mpi.simulation.globals import SgdOptions
from aladdin_mpi.simulation.outcome import Outcome, Tally
from aladdin_mpi.simulation.parts import PartedWorld
from aladdin_mpi.simulation.peers import PeerWorld, VirtualPeerPort
from aladdin_mpi.simulation.replicas import Batches, Replica, Task
from aladdin_mpi.simulation.setting import ComputeTimes, Setting
from aladdin_mpi.simulation.turns import NeverWaits, Process

__all__ = ["Evaluation", "Trained", "train"]


@dataclass(frozen=True)
class Evaluation:
    """Of the global model, or where there is none, the mean of the workers'.

    Attributes
    ----------
    epoch : float
    time_s : float
        [s] virtual time.
    accuracy : float
        On the test data, 0 to 1.
    """

    epoch: float
    time_s: float
    accuracy: float


@dataclass(frozen=True)
class Trained:
    """What comes of a training.

    Attributes
    ----------
    outcome : Outcome
        Timing.
    evaluations : tuple of Evaluation
        After each epoch; the last one is that of the final model.
    params : ndarray of float32, shape (size,)
        The final parameters.
    iterations : tuple of int
        Of each worker.
    thrown_away : int
        Steps and replies that held a NaN or an infinity.
    """

    outcome: Outcome
    evaluations: tuple[Evaluation, ...]
    params: np.ndarray
    iterations: tuple[int, ...]
    thrown_away: int

    def to_json(self) -> dict[str, Any]:
        """Plain values: those of the outcome, and of the training."""
        last = self.evaluations[-1]
        return self.outcome.to_json() | {
            "accuracy": last.accuracy, "time_s": last.time_s, "thrown_away": self.thrown_away,
            "evaluations": [asdict(evaluation) for evaluation in self.evaluations],
        }  # fmt: skip


class _Training:
    """One run."""

    def __init__(self, setting: Setting, algorithm: Algorithm, config: Any, task: Task) -> None:
        self.data, self.task = Batches(task), task
        n = setting.num_workers
        each = self.data.num_batches() // n
        if each < 8:
            raise ConfigError(
                f"--epochs {task.epochs:g}: gives each of {n} workers {each} iterations; at least "
                "8 are needed: train longer, or with fewer workers or a smaller batch"
            )
        self.setting = replace(setting, iterations=each)
        self.tally = Tally(self.setting)
        self.times = ComputeTimes(self.setting)
        self.replicas = [Replica(task) for _ in range(n)]
        self.judge = Replica(task)
        self.evaluations: list[Evaluation] = []
        self.iterations, self.samples = [0] * n, [0] * n
        self.began_s, self.computed_s = [0.0] * n, [0.0] * n
        self.waits = not (algorithm.name == "aladdin" and config.coalesce)
        self.world: Any
        if algorithm.topology is Topology.SERVER:
            sgd = SgdOptions(task.momentum, task.weight_decay)
            self.world = PartedWorld(
                self.setting, self.tally, algorithm, config, self.replicas, sgd
            )
            joined = [self.world.join(w, r) for w, r in enumerate(self.replicas)]
            self.ports: list[Any] = [port for port, _ in joined]
            self.workers = [worker for _, worker in joined]
        else:
            self.world = PeerWorld(self.setting, self.tally)
            self.ports = [
                VirtualPeerPort(self.world, w, r.params, task.seed)
                for w, r in enumerate(self.replicas)
            ]
            self.workers = [algorithm.worker(config, r.params, n) for r in self.replicas]

    def run(self) -> None:
        """Train until the data has ended."""
        events = self.world.events
        try:
            for worker in range(len(self.ports)):
                if self.waits:
                    self._become(worker, self._work)
                else:
                    self.ports[worker].process = NeverWaits()
                    events.at(events.now, self._next, worker)
            events.run()
            stuck = [port.worker for port in self.ports if not port.process.ended]
            assert not stuck, f"workers {stuck} wait for something that never happens"
        finally:
            for port in self.ports:
                port.process.cancel()
        self._evaluate(self.task.epochs)

    def _become(self, worker: int, body: Callable[[int], None]) -> None:
        """From now on the worker can wait."""
        self.ports[worker].process = Process(self.world.events, partial(body, worker))

    def _next(self, worker: int) -> None:
        """Begin a step of a worker that does not wait, or end it."""
        if self._begin(worker):
            events = self.world.events
            events.at(events.now + self.computed_s[worker], self._step_and_next, worker)
        else:
            self._become(worker, self._finish)

    def _step_and_next(self, worker: int) -> None:
        self._step(worker)
        self._next(worker)

    def _work(self, worker: int) -> None:
        """All of a worker that may wait."""
        while self._begin(worker):
            self.ports[worker].process.sleep(self.computed_s[worker])
            self._step(worker)
        self._finish(worker)

    def _finish(self, worker: int) -> None:
        self.workers[worker].finish(self.replicas[worker].params, self.ports[worker])
        self.ports[worker].settle()

    def _begin(self, worker: int) -> bool:
        """Compute gradients, which is over after ``computed_s``; False where the data has ended."""
        batch = self.data.next()
        if batch is None:
            return False
        replica, epochs = self.replicas[worker], self.data.epochs
        self.began_s[worker] = self.world.events.now
        if int(epochs) > len(self.evaluations) and epochs < self.task.epochs:
            self._evaluate(float(int(epochs)))
        self.computed_s[worker] = self.times.next(worker)
        for group in replica.optimizer.param_groups:
            group["lr"] = self.task.schedule.lr(epochs)
        replica.model.train()
        replica.optimizer.zero_grad()
        x, y = batch
        self.samples[worker] = len(y)
        cross_entropy(replica.model(x), y).backward()
        return True

    def _step(self, worker: int) -> None:
        """The algorithm's step, when gradients are there."""
        events, computed_s = self.world.events, self.computed_s[worker]
        replica, algorithm, port = self.replicas[worker], self.workers[worker], self.ports[worker]
        iteration = self.iterations[worker]
        port.computed(computed_s, self.samples[worker], iteration)

        def local_update(rate: float = 1.0) -> None:
            with scaled(replica.optimizer, rate):
                replica.optimizer.step()

        algorithm.step(replica.params, local_update, port, iteration)
        algorithm.before_forward(replica.params)
        self.iterations[worker] += 1
        took_s = events.now - self.began_s[worker]
        port.stepped(took_s)
        self.tally.step(events.now, took_s, computed_s, *self.world.carried_bytes)

    def final(self) -> np.ndarray:
        """The global parameters, or the mean of the workers'."""
        if isinstance(self.world, PartedWorld):
            return self.world.params
        vectors = np.stack([r.params.gathered() for r in self.replicas])
        mean: np.ndarray = vectors.mean(axis=0, dtype=np.float64).astype(np.float32)
        return mean

    def _evaluate(self, epoch: float) -> None:
        judge = self.judge
        judge.params.assign(self.final())
        if isinstance(self.world, PartedWorld):
            judge.buffers.assign(self.world.floats, self.world.counts)
        elif self.replicas[0].buffers.floats.size:
            floats = np.mean([r.buffers.floats for r in self.replicas], axis=0)
            judge.buffers.assign(floats, self.replicas[0].buffers.counts)
        accuracy = judge.accuracy(self.task.test)
        self.evaluations.append(Evaluation(epoch, self.world.events.now, accuracy))


def train(setting: Setting, algorithm: Algorithm, config: Any, task: Task) -> Trained:
    """Train in virtual time.

    Parameters
    ----------
    setting : Setting
        Its number of iterations is not used: the data says when to end.
    algorithm : Algorithm
        A row of the registry.
    config : dataclass
        The algorithm's options.
    task : Task

    Raises
    ------
    ConfigError
        There is too little data for so many workers.
    """
    run = _Training(setting, algorithm, config, task)
    run.run()
    outcome = run.tally.outcome(algorithm.name)
    if algorithm.topology is not Topology.SERVER:
        outcome = replace(outcome, servers=0, overload=float("nan"))
    return Trained(
        outcome, tuple(run.evaluations), run.final(), tuple(run.iterations),
        sum(port.lost_count for port in run.ports),
    )  # fmt: skip
