"""Where the time of a worker's step goes, and how far training is."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from aladdin_mpi.messages import Phase
from aladdin_mpi.runtime.links import WorkerLinkLike

__all__ = ["StepClock"]


class StepClock:
    """Where the time of the current step goes; one per worker, shared by its optimizers.

    Parameters
    ----------
    link : WorkerLinkLike
    num_workers : int
    evenly : bool
        All workers make as many steps: the others' samples are this one's.

    Attributes
    ----------
    end_s : float
        [s] monotonic time when the last step ended.
    data_s, compute_s : float
        [s] waited for batches, and computed on all but the last of them, since then.
    ready_s : float
        [s] monotonic time from which computing counts.
    samples, epoch, iteration : int
        Samples since the last push; where training is.
    """

    def __init__(self, link: WorkerLinkLike, num_workers: int = 1, evenly: bool = False) -> None:
        self._link, self._num_workers, self._evenly = link, num_workers, evenly
        self.end_s = self.ready_s = time.monotonic()
        self.data_s = self.compute_s = 0.0
        self._asked = self.end_s
        self.samples = 0  # not pushed yet
        self.batch = 0  # of the current step
        self.own_samples = 0
        self.epoch = 0
        self.iteration = 0
        self.loss = math.nan
        self.forward_s = self.backward_s = math.nan
        self.emulated = False

    def phase(self, phase: Phase) -> None:
        """Tell the others, by the next heartbeat, what this worker is doing."""
        self._link.phase, self._link.phase_since = phase, time.monotonic()

    def fetching(self) -> None:
        """The loop asks the loader for a batch."""
        self.phase(Phase.DATA)
        self._asked = time.monotonic()
        if self.batch:  # another batch of the same step: gradients are accumulated
            self.compute_s += self._asked - self.ready_s

    def fetched(self, samples: int) -> None:
        """A batch is there."""
        self.ready_s = time.monotonic()
        self.data_s += self.ready_s - self._asked
        self.batch += samples
        self.samples += samples
        self.own_samples += samples
        self._link.own_samples = self.own_samples
        self.phase(Phase.COMPUTE)

    def seen_samples(self) -> int:
        """Samples that all workers have consumed, as far as this one knows."""
        if self._evenly:
            return self.own_samples * self._num_workers
        notice = self._link.notice
        return notice.samples - notice.own_samples + self.own_samples

    @contextmanager
    def outside(self, phase: Phase) -> Iterator[None]:
        """What happens inside counts to no step."""
        start = time.monotonic()
        self.phase(phase)
        yield
        took = time.monotonic() - start
        self.end_s += took
        self.ready_s += took
        self.phase(Phase.COMPUTE)
