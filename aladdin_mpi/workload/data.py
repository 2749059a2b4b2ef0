"""The data sets that can be trained on by name, and the user's own."""

from __future__ import annotations

import importlib.util
from collections.abc import Sized
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from aladdin_mpi.errors import ConfigError
from aladdin_mpi.workload.arrays import (
    ArrayDataset,
    DataBundle,
    RandomCropFlip,
    collate,
)
from aladdin_mpi.workload.cifar import load_cifar10
from aladdin_mpi.workload.idx import IDX_SETS, load_idx
from aladdin_mpi.workload.synthetic import load_synthetic
from aladdin_mpi.workload.user import call_offering, load_callable
from aladdin_mpi.workload.vision import image_folder

__all__ = [
    "ArrayDataset",
    "DataBundle",
    "RandomCropFlip",
    "collate",
    "dataset_names",
    "load_dataset",
]


def dataset_names() -> list[str]:
    """Names of the data sets; ``synthetic`` can be followed by ``:shape:classes:samples``."""
    return ["digits", *IDX_SETS, "cifar10", "imagefolder", "synthetic"]


def load_dataset(name: str, data_dir: Path | None, seed: int) -> DataBundle:
    """Load a data set.

    Parameters
    ----------
    name : str
        One of :func:`dataset_names`, ``synthetic:1x28x28:10:60000`` (shape of a sample, classes,
        training samples), or ``package.module:callable``.  The callable gets ``data_dir`` and
        ``seed`` as far as its signature accepts them and returns a :class:`DataBundle` or a pair of
        data sets.
    data_dir : Path or None
        Folder of the files, or one above it.  Without one, a folder of the data set's name in
        ``$ALADDIN_DATA`` is used, or the place where Debian's package puts it.
    seed : int
        Of synthetic samples and of augmentations; the split of ``digits`` is always the same.

    Returns
    -------
    DataBundle

    Raises
    ------
    ConfigError
        No such data set, a wrong ``synthetic`` specification, or a library is missing.
    DataError
        Files are missing or corrupt.

    Notes
    -----
    Use the loaders with ``collate_fn=collate``: a batch of an in-memory set is fetched as a whole.
    """
    if name == "digits":
        return _digits()
    if name in IDX_SETS:
        return load_idx(name, data_dir)
    if name == "cifar10":
        return load_cifar10(data_dir, seed)
    if name == "imagefolder":
        return image_folder(data_dir)
    if name.partition(":")[0] == "synthetic":
        return load_synthetic(name, seed)
    if ":" in name:
        return _from_user(name, data_dir, seed)
    raise ConfigError(
        f"--dataset {name}: no such data set; available are {', '.join(dataset_names())}, "
        "synthetic:1x28x28:10:60000 and package.module:callable"
    )


def _digits() -> DataBundle:
    """scikit-learn's 1797 digits of 8 × 8, a fifth of each class for testing, standardised."""
    # its file is read, not its code: importing scikit-learn takes every rank two seconds
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise ConfigError(
            "--dataset digits: needs scikit-learn, which is not installed; pip install "
            "scikit-learn, or use --dataset synthetic"
        )
    table = np.loadtxt(Path(package.origin).parent / "datasets/data/digits.csv.gz", delimiter=",")
    pixels, classes = table[:, :-1], table[:, -1].astype(np.int64)
    x = (pixels / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    order = np.random.default_rng(0).permutation(len(classes))
    is_test = np.zeros(len(classes), dtype=bool)
    for digit in range(10):
        of_class = order[classes[order] == digit]
        is_test[of_class[: round(0.2 * len(of_class))]] = True
    x = (x - x[~is_test].mean()) / x[~is_test].std()
    train, test = (ArrayDataset(x[part], classes[part]) for part in (~is_test, is_test))
    return DataBundle(train, test, (1, 8, 8), 10, "digits")


def _from_user(path: str, data_dir: Path | None, seed: int) -> DataBundle:
    where = f"--dataset {path}"
    function = load_callable(path, "--dataset")
    made = call_offering(function, where, data_dir=data_dir, seed=seed)
    if isinstance(made, DataBundle):
        return made
    if (
        not isinstance(made, tuple | list)
        or len(made) != 2
        or not all(isinstance(half, Sized) and hasattr(half, "__getitem__") for half in made)
    ):
        raise ConfigError(
            f"{where}: returned {type(made).__name__}, expected a DataBundle or a pair (train, "
            "test) of data sets with a length and an index; return one of them"
        )
    train, test = made
    if not len(train) or not len(test):
        raise ConfigError(f"{where}: {len(train)} training and {len(test)} test samples; give some")
    sample = train[0]
    if not (isinstance(sample, tuple | list) and len(sample) == 2 and hasattr(sample[0], "shape")):
        raise ConfigError(
            f"{where}: its first sample is no pair of a tensor and a class; add a transform that "
            "makes a tensor, or return a DataBundle"
        )
    return DataBundle(train, test, tuple(sample[0].shape), _count_classes(train, where), path)


def _count_classes(dataset: Dataset[tuple[Tensor, Tensor]], where: str) -> int:
    """Find the number of classes without reading the samples."""
    count = getattr(dataset, "num_classes", None)
    if isinstance(count, int):
        return count
    classes = getattr(dataset, "classes", None)
    if isinstance(classes, Sized):
        return len(classes)
    labels = getattr(dataset, "targets", None)
    if isinstance(dataset, ArrayDataset):
        labels = dataset.y
    elif isinstance(dataset, TensorDataset) and len(dataset.tensors) == 2:
        labels = dataset.tensors[1]
    if labels is not None:
        numbers = torch.as_tensor(labels)
        if not numbers.is_floating_point() and numbers.ndim == 1:
            return int(numbers.max()) + 1
    raise ConfigError(
        f"{where}: the number of classes is unknown; give the training set an attribute "
        "num_classes, or return a DataBundle"
    )
