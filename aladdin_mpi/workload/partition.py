"""Which samples a worker trains on.

Every epoch has a permutation of its own, the same on all workers.  Worker i begins with block i
of it. Where an epoch ends only when all workers together have consumed the data set, a fast
worker that is through with its block goes on with the others' blocks, each from its end, so that
it takes first what a slow worker would reach last.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from torch.utils.data import Sampler

__all__ = ["PartitionSampler", "worker_order"]


def worker_order(
    length: int,
    worker: int,
    num_workers: int,
    epoch: int,
    seed: int,
    *,
    shuffle: bool,
    shared: bool,
) -> np.ndarray:
    """Indices of the samples for one worker and epoch, in order.

    Parameters
    ----------
    length : int
        Samples of the data set.
    shared : bool
        The epoch ends when all workers together are through: the others' blocks follow.  Else only
        this worker's block, padded from its start so that all blocks are equally long.

    Returns
    -------
    ndarray of int64
        ``length`` indices where ``shared``, else ``ceil(length / num_workers)``.
    """
    if shuffle:
        permutation = np.random.default_rng([seed, epoch]).permutation(length)
    else:
        permutation = np.arange(length)
    blocks = np.array_split(permutation, num_workers)
    own = blocks[worker]
    if not shared:
        share = -(-length // num_workers)
        return np.concatenate([own, permutation[: share - own.size]])
    others = [blocks[(worker + k) % num_workers][::-1] for k in range(1, num_workers)]
    return np.concatenate([own, *others])


class PartitionSampler(Sampler[int]):
    """Yields :func:`worker_order` but for the first ``skip``; both are set before each pass."""

    def __init__(
        self,
        length: int,
        worker: int,
        num_workers: int,
        seed: int,
        *,
        shuffle: bool,
        shared: bool,
    ) -> None:
        self.length, self.worker, self.num_workers, self.seed = length, worker, num_workers, seed
        self.shuffle, self.shared = shuffle, shared
        self.epoch = self.skip = 0

    def __iter__(self) -> Iterator[int]:
        order = worker_order(
            self.length, self.worker, self.num_workers, self.epoch, self.seed,
            shuffle=self.shuffle, shared=self.shared,
        )  # fmt: skip
        return iter(order[self.skip :].tolist())

    def __len__(self) -> int:
        whole = self.length if self.shared else -(-self.length // self.num_workers)
        return max(0, whole - self.skip)
