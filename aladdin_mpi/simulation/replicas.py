"""What is trained in virtual time, and what every worker has of it: data, model, optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from aladdin_mpi.core.flat import FlatBuffers, FlatParams
from aladdin_mpi.core.schedule import Schedule

__all__ = ["Batches", "Replica", "Task", "fetch"]

EVALUATION_SAMPLES = 1000


@dataclass(frozen=True)
class Task:
    """What is trained, with SGD.

    Attributes
    ----------
    build : callable
        Makes the model, with the same parameters each time.
    train, test : Dataset
        With a length; of pairs of a sample and its class.
    batch_size : int
        Of a worker.
    epochs : float
        Passes of all workers together.
    schedule : Schedule
    momentum, weight_decay : float
    nesterov : bool
    seed : int
        Of the order of the samples, and of the algorithm's choices.
    """

    build: Callable[[], nn.Module]
    train: Any
    test: Any
    batch_size: int
    epochs: float
    schedule: Schedule
    momentum: float = 0.9
    weight_decay: float = 0.0
    nesterov: bool = False
    seed: int = 0


class Batches:
    """Batches, in a new order each epoch, to whichever worker begins a step next."""

    def __init__(self, task: Task) -> None:
        self.task, self.length = task, len(task.train)
        self.total = round(task.epochs * self.length)
        self.drawn = 0
        self._order = np.zeros(0, np.int64)

    @property
    def epochs(self) -> float:
        """Done so far."""
        return self.drawn / self.length

    def next(self) -> tuple[Tensor, Tensor] | None:
        """The next batch; None at the end."""
        if self.drawn >= self.total:
            return None
        epoch, at = divmod(self.drawn, self.length)
        if at == 0:
            self._order = np.random.default_rng([self.task.seed, epoch]).permutation(self.length)
            if hasattr(self.task.train, "set_epoch"):
                self.task.train.set_epoch(epoch)
        chosen = self._order[at : at + min(self.task.batch_size, self.total - self.drawn)]
        self.drawn += len(chosen)
        return fetch(self.task.train, chosen)

    def num_batches(self) -> int:
        """Of all epochs."""
        whole, rest = divmod(self.total, self.length)
        size = self.task.batch_size
        return whole * -(-self.length // size) + -(-rest // size)


def fetch(dataset: Any, indices: np.ndarray) -> tuple[Tensor, Tensor]:
    """Samples and classes of a data set."""
    if hasattr(dataset, "__getitems__"):
        batch = dataset.__getitems__(indices.tolist())
        if isinstance(batch, tuple):
            return batch
        return tuple(default_collate(batch))
    return tuple(default_collate([dataset[i] for i in indices.tolist()]))


class Replica:
    """A worker's model, optimizer and vector."""

    def __init__(self, task: Task) -> None:
        self.model = task.build()
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=task.schedule.lr(0.0), momentum=task.momentum,
            weight_decay=task.weight_decay, nesterov=task.nesterov,
        )  # fmt: skip
        groups = [group["params"] for group in self.optimizer.param_groups]
        self.params = FlatParams(self.model.named_parameters(), groups)
        self.buffers = FlatBuffers(self.model, set())

    def rates(self) -> tuple[float, ...]:
        """The learning rate of each group."""
        return tuple(float(group["lr"]) for group in self.optimizer.param_groups)

    def accuracy(self, dataset: Any) -> float:
        """Share of a data set that the model gets right."""
        self.model.eval()
        correct = 0
        with torch.no_grad():
            for start in range(0, len(dataset), EVALUATION_SAMPLES):
                stop = min(start + EVALUATION_SAMPLES, len(dataset))
                x, y = fetch(dataset, np.arange(start, stop))
                correct += int((self.model(x).argmax(dim=1) == y).sum())
        return correct / len(dataset)
