"""A user's DataLoader, restricted to this worker's part of the data and timed."""

from __future__ import annotations

import ast
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from aladdin_mpi.errors import ConfigError
from aladdin_mpi.messages import Phase
from aladdin_mpi.runtime.clock import StepClock
from aladdin_mpi.workload.partition import PartitionSampler

__all__ = ["PartitionedLoader", "batch_length", "children_without_signals"]


def batch_length(batch: Any) -> int:
    """Samples in a batch: the length of the first tensor found in it, 0 where there is none."""
    if torch.is_tensor(batch):
        return int(batch.shape[0]) if batch.ndim else 1
    if isinstance(batch, dict):
        batch = list(batch.values())
    if isinstance(batch, list | tuple):
        for part in batch:
            if length := batch_length(part):
                return length
    return 0


def _runs_again() -> bool:
    """Whether a process that imports the running script, as spawn does, would run it once more."""
    frame = sys._getframe()
    while frame.f_globals.get("__name__") != "__main__" or frame.f_code.co_name != "<module>":
        if frame.f_back is None:
            return False
        frame = frame.f_back
    spec = frame.f_globals.get("__spec__")
    if spec is not None and spec.name.endswith("__main__"):  # python -m package: is not imported
        return False
    try:
        script = ast.parse(Path(frame.f_code.co_filename).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):  # an interactive session
        return False
    for statement in script.body:
        if statement.lineno <= frame.f_lineno <= (statement.end_lineno or statement.lineno):
            guard = isinstance(statement, ast.If) and "'__name__'" in ast.dump(statement.test)
            return not guard
    return False


@contextmanager
def children_without_signals() -> Iterator[None]:
    """Processes that are started inside, those of loaders, never see SIGUSR1 and SIGTERM.

    Schedulers send them to all processes of a rank, and they are for the rank alone.

    A blocked signal stays blocked in children, whatever starts them; here it comes afterwards.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class PartitionedLoader:
    """What :func:`aladdin_mpi.partition` returns.

    An epoch ends when all workers together have consumed the data set, so that a slow worker
    holds nobody up.  A loader over a data set without a length, or with a sampler of the user's
    own, passes through unchanged and ends when it ends.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        clock: StepClock,
        worker: int,
        num_workers: int,
        seed: int,
        should_stop: Callable[[], bool],
        *,
        shared: bool = True,
    ) -> None:
        self._clock, self._should_stop = clock, should_stop
        self._num_workers, self._shared = num_workers, shared
        self._epoch = 0
        self._resume_at = self._resume_taken = 0
        self._base: int | None = None  # samples of the run before epoch 0 of this loader
        self._taken = 0  # samples of this worker in the epoch at hand
        self._before_first: Callable[[], None] | None = None
        self._sampler = self._make_sampler(loader, worker, num_workers, seed, shared)
        self._loader = loader if self._sampler is None else self._rebuild(loader, self._sampler)
        self._keep_fork_away(self._loader)
        self.length = 0 if self._sampler is None else self._sampler.length
        self.dataset = loader.dataset
        self.batch_size = loader.batch_size

    @staticmethod
    def _make_sampler(
        loader: DataLoader[Any], worker: int, num_workers: int, seed: int, shared: bool
    ) -> PartitionSampler | None:
        plain = type(loader.batch_sampler) is BatchSampler
        known = type(loader.sampler) in (RandomSampler, SequentialSampler)
        if isinstance(loader.dataset, IterableDataset) or not (plain and known):
            return None
        return PartitionSampler(
            len(loader.dataset), worker, num_workers, seed,  # type: ignore[arg-type]
            shuffle=isinstance(loader.sampler, RandomSampler), shared=shared,
        )  # fmt: skip

    @staticmethod
    def _rebuild(loader: DataLoader[Any], sampler: PartitionSampler) -> DataLoader[Any]:
        options: dict[str, Any] = {
            "batch_size": loader.batch_size, "num_workers": loader.num_workers,
            "collate_fn": loader.collate_fn, "pin_memory": loader.pin_memory,
            "drop_last": loader.drop_last, "timeout": loader.timeout,
            "worker_init_fn": loader.worker_init_fn, "generator": loader.generator,
            "persistent_workers": loader.persistent_workers,
            "multiprocessing_context": loader.multiprocessing_context,
        }  # fmt: skip
        if loader.num_workers:
            options["prefetch_factor"] = loader.prefetch_factor
        return DataLoader(loader.dataset, sampler=sampler, **options)

    @staticmethod
    def _keep_fork_away(loader: DataLoader[Any]) -> None:
        """Loader processes must not be forked from one that MPI has been initialized in."""
        if not loader.num_workers:
            return
        context = loader.multiprocessing_context
        if context is None:
            loader.multiprocessing_context = context = "forkserver"
        if (context if isinstance(context, str) else context.get_start_method()) != "fork":
            if _runs_again():
                raise ConfigError(
                    "DataLoader worker processes import the script again, which would start it "
                    "anew: put its code under if __name__ == '__main__':, or use num_workers=0"
                )
        else:
            warnings.warn(
                "DataLoader workers are forked from a process that has initialized MPI: on "
                "InfiniBand "
                "this corrupts memory; leave multiprocessing_context unset, or choose 'forkserver'",
                stacklevel=4,
            )

    def __len__(self) -> int:
        """Batches of this worker per epoch, when all workers are equally fast."""
        if self._sampler is None or not self._shared:
            return len(self._loader)
        size = self._loader.batch_size or 1
        share = -(-self._sampler.length // self._num_workers)
        return share // size if self._loader.drop_last else -(-share // size)

    def state_dict(self) -> dict[str, int]:
        """Where this loader is: ``epoch`` is the one at hand, from 0."""
        return {
            "epoch": self._epoch - 1, "taken": self._taken,
            "base": -1 if self._base is None else self._base,
        }  # fmt: skip

    def resume(self, state: dict[str, int], before_first: Callable[[], None]) -> None:
        """Go on where a loader with this state was: earlier epochs yield nothing, and that one the
        samples that are left of it.  ``before_first`` is called before the first batch.
        """
        self._resume_at, self._resume_taken = state["epoch"], state["taken"]
        self._base = None if state["base"] < 0 else state["base"]
        self._before_first = before_first

    def set_epoch(self, epoch: int) -> None:
        """The next pass is epoch ``epoch`` (by default each pass is the next one)."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        clock, sampler = self._clock, self._sampler
        if self._epoch < self._resume_at:
            self._epoch += 1
            return
        self._taken = self._resume_taken if self._epoch == self._resume_at else 0
        clock.epoch = self._epoch
        if sampler is not None:
            sampler.epoch, sampler.skip = self._epoch, self._taken
        for part in (self.dataset, self._loader.sampler):
            if part is not sampler and hasattr(part, "set_epoch"):
                part.set_epoch(self._epoch)
        if sampler is not None and self._base is None:
            self._base = clock.seen_samples() - self._epoch * sampler.length
        self._epoch += 1
        clock.fetching()
        with children_without_signals():
            batches = iter(self._loader)
        while not self._should_stop():
            shared = sampler is not None and self._shared
            if shared and clock.seen_samples() - self._base >= self._epoch * sampler.length:  # type: ignore[operator, union-attr]
                break
            clock.fetching()
            if self._before_first is not None:
                self._before_first()
                self._before_first = None
            try:
                batch = next(batches)
            except StopIteration:
                break
            length = batch_length(batch)
            self._taken += length
            clock.fetched(length)
            yield batch
        clock.phase(Phase.COMPUTE)
