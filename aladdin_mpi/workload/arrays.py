"""Data sets held in memory, fetched a batch at a time, and the bundle that a run trains on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import Dataset, default_collate

__all__ = ["ArrayDataset", "Augment", "DataBundle", "RandomCropFlip", "collate", "image_dataset"]

MAX_FLOAT_BYTES = 64 * 2**20
"""Images that float32 would make larger than this [bytes] stay uint8, normalised when fetched."""


class Augment(Protocol):
    """A random change of a batch that depends on nothing but its arguments."""

    def __call__(self, x: Tensor, indices: Tensor, epoch: int) -> Tensor:
        """Return the changed batch, of the same shape and dtype; ``x`` is left as it is."""
        ...


@dataclass(frozen=True)
class DataBundle:
    """The data of a run.

    Attributes
    ----------
    train, test : Dataset
        Pairs of a sample and its class.
    input_shape : tuple of int
        Shape of one sample, (channels, height, width) for images.
    num_classes : int
    name : str
    """

    train: Dataset[tuple[Tensor, Tensor]]
    test: Dataset[tuple[Tensor, Tensor]]
    input_shape: tuple[int, ...]
    num_classes: int
    name: str


class ArrayDataset(Dataset[tuple[Tensor, Tensor]]):
    """Samples and classes in memory; a batch is one indexing operation.

    Use it with :func:`collate`, or ``DataLoader`` takes the batch apart sample by sample.

    Parameters
    ----------
    x : array (num_samples, ...), float32 or uint8
        Samples.  With ``mean`` and ``std``, raw images of values 0 … 255, normalised when fetched.
    y : array (num_samples,), integer
        Classes.
    augment : Augment, optional
        Applied to every fetched batch, before it is normalised.
    mean, std : tuple of float, optional
        Per channel, of values in [0, 1].

    Notes
    -----
    The arrays become torch tensors, so that the workers of a ``DataLoader`` share them rather than
    copy them, also when started by spawn or forkserver.
    """

    def __init__(
        self,
        x: np.ndarray | Tensor,
        y: np.ndarray | Tensor,
        augment: Augment | None = None,
        *,
        mean: tuple[float, ...] | None = None,
        std: tuple[float, ...] | None = None,
    ) -> None:
        self.x = torch.as_tensor(x)
        self.y = torch.as_tensor(y).to(torch.int64)
        self.augment = augment
        self.mean = mean
        self.std = std
        if len(self.x) != len(self.y):
            raise ValueError(f"{len(self.x)} samples but {len(self.y)} classes")
        if (mean is None) != (std is None):
            raise ValueError("give mean and std both, or neither")
        self._epoch = torch.zeros(1, dtype=torch.int64)
        if augment is not None:  # shared memory: persistent loader processes see it change
            self._epoch.untyped_storage().share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """Choose the augmentations of ``epoch``; to be called before the loader is iterated."""
        self._epoch.fill_(epoch)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = self.__getitems__([index])
        return x[0], y[0]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the samples (len(indices), ...), float32, and classes (len(indices),), int64."""
        chosen = torch.as_tensor(indices, dtype=torch.int64)
        x = self.x[chosen]
        if self.augment is not None:
            x = self.augment(x, chosen, int(self._epoch))
        if self.mean is not None and self.std is not None:
            x = normalise(x, self.mean, self.std)
        return x, self.y[chosen]


def collate(batch: object) -> object:
    """Return a batch that was fetched as a whole as it is; collate a list of samples."""
    return default_collate(batch) if isinstance(batch, list) else batch


def normalise(x: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Return ``(x / 255 − mean) / std`` as float32; ``x`` is (n, channels, height, width)."""
    scale = torch.tensor([1 / (255 * s) for s in std])[:, None, None]
    shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)])[:, None, None]
    return x.to(torch.float32).mul_(scale).add_(shift)


def image_dataset(
    images: np.ndarray,
    classes: np.ndarray,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    augment: Augment | None = None,
) -> ArrayDataset:
    """Make a data set of uint8 images (n, channels, height, width).

    They are kept as normalised float32 when that is small and there is no augmentation, which
    works on the raw images; else as uint8.  What is fetched is the same to the bit.
    """
    raw = torch.as_tensor(images)
    if augment is None and raw.numel() * 4 <= MAX_FLOAT_BYTES:
        return ArrayDataset(normalise(raw, mean, std), classes)
    return ArrayDataset(raw, classes, augment, mean=mean, std=std)


@dataclass(frozen=True)
class RandomCropFlip:
    """Random crop of the image padded with zeros, and a horizontal flip of every second one.

    The change of a sample depends on the seed, the epoch and the sample's index only: it is the
    same for any number of workers, batch size and order.

    Attributes
    ----------
    seed : int
    padding : int
        [pixels] on every side.

    References
    ----------
    K. He et al., "Deep Residual Learning for Image Recognition", CVPR 2016, sec. 4.2.
    """

    seed: int
    padding: int = 4

    def __call__(self, x: Tensor, indices: Tensor, epoch: int) -> Tensor:
        """Return the changed images; ``x`` is (n, channels, height, width)."""
        bits = _hash(self.seed, epoch, indices)
        shifts = 2 * self.padding + 1
        down = torch.from_numpy((bits % shifts).astype(np.int64))
        right = torch.from_numpy((bits // shifts % shifts).astype(np.int64))
        flip = torch.from_numpy(bits >> np.uint64(63) == 1)
        height, width = x.shape[-2:]
        # every possible crop as a view: (n, channels, shifts, shifts, height, width)
        crops = pad(x, (self.padding,) * 4).unfold(2, height, 1).unfold(3, width, 1)
        cropped = crops[torch.arange(len(x)), :, down, right]
        return torch.where(flip[:, None, None, None], cropped.flip(-1), cropped)


def _hash(seed: int, epoch: int, indices: Tensor) -> np.ndarray:
    """Return 64 well-mixed bits per index (SplitMix64 of Steele et al., OOPSLA 2014), uint64."""
    golden = 0x9E3779B97F4A7C15
    start = _mix(np.array([seed % 2**64], dtype=np.uint64))
    start = _mix(start + np.uint64(epoch * golden % 2**64))
    return _mix(start + (indices.numpy().astype(np.uint64) + np.uint64(1)) * np.uint64(golden))


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = z ^ (z >> np.uint64(31))
    return mixed
