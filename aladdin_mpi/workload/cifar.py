"""CIFAR-10 from its two distributions: pickled batches for Python, and the binary version."""

from __future__ import annotations

import io
import pickle
from pathlib import Path

import numpy as np

from aladdin_mpi.errors import DataError
from aladdin_mpi.workload.arrays import DataBundle, RandomCropFlip, image_dataset
from aladdin_mpi.workload.folders import find_folder

__all__ = ["load_cifar10"]

SHAPE = (3, 32, 32)
NUM_PIXELS = 3 * 32 * 32
NUM_CLASSES = 10
MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)
"""Per-channel mean and standard deviation of the training images, in [0, 1]."""

TRAIN = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST = ("test_batch",)
PICKLED, BINARY = "cifar-10-batches-py", "cifar-10-batches-bin"


def load_cifar10(data_dir: Path | None, seed: int) -> DataBundle:
    """Load CIFAR-10, its training images with the usual random crop and flip.

    Raises
    ------
    DataError
        A file is missing or corrupt, or a pickle asks for code to be run.
    """
    folder = find_folder(
        "cifar10",
        data_dir,
        subfolders=(PICKLED, BINARY, "cifar10", f"cifar10/{PICKLED}", f"cifar10/{BINARY}"),
        wanted=[(name, f"{name}.bin") for name in (*TRAIN, *TEST)],
        advice=f"unpack cifar-10-python.tar.gz or cifar-10-binary.tar.gz and name the folder that "
        f"holds {PICKLED} or {BINARY}",
    )
    augment = RandomCropFlip(seed)
    train = image_dataset(*_read(folder, TRAIN), MEAN, STD, augment)
    test = image_dataset(*_read(folder, TEST), MEAN, STD)
    return DataBundle(train, test, SHAPE, NUM_CLASSES, "cifar10")


def _read(folder: Path, names: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return the images (n, 3, 32, 32), uint8, and classes (n,), int64, of some batches."""
    images, classes = [], []
    for name in names:
        pickled = folder / name
        path = pickled if pickled.exists() else folder / f"{name}.bin"
        try:
            content = path.read_bytes()
        except OSError as error:
            raise _corrupt(path, f"cannot be read ({error})") from error
        rows, labels = (_unpickle if path is pickled else _split_records)(path, content)
        if len(rows) != len(labels) or not len(labels):
            raise _corrupt(path, f"has {len(rows)} images and {len(labels)} labels")
        if labels.min() < 0 or labels.max() >= NUM_CLASSES:
            raise _corrupt(path, f"has labels outside 0 … {NUM_CLASSES - 1}")
        images.append(rows.reshape(-1, *SHAPE))
        classes.append(labels)
    return np.concatenate(images), np.concatenate(classes)


def _split_records(path: Path, content: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Records of one byte for the class and 3072 for the pixels."""
    if len(content) % (1 + NUM_PIXELS):
        raise _corrupt(path, f"has {len(content)} bytes, no multiple of {1 + NUM_PIXELS}")
    records = np.frombuffer(content, dtype=np.uint8).reshape(-1, 1 + NUM_PIXELS)
    return records[:, 1:], records[:, 0].astype(np.int64)


class _Recorded:
    """Stands in for what a pickle calls to rebuild an array: keeps the arguments, runs nothing."""

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments
        self.state: object = None

    def __setstate__(self, state: object) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Reads plain containers, numbers, strings and recorded arrays, and refuses everything else."""

    names = frozenset(
        [
            ("numpy.core.multiarray", "_reconstruct"),
            ("numpy._core.multiarray", "_reconstruct"),
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
        ]
    )

    def find_class(self, module: str, name: str, /) -> type[_Recorded]:
        if (module, name) not in self.names:
            raise pickle.UnpicklingError(f"asks for {module}.{name}, which is refused")
        return _Recorded


def _unpickle(path: Path, content: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Rows (n, 3072) under ``data``, a list under ``labels``; none of the file's code is run."""
    try:
        batch = _Unpickler(io.BytesIO(content), encoding="bytes").load()
        data, labels = (
            batch[key if key in batch else key.decode()] for key in (b"data", b"labels")
        )
        # the state of a NumPy array: version, shape, dtype, whether in Fortran's order, bytes
        _, shape, dtype, fortran, pixels = data.state
        code = dtype.arguments[0]
        if code not in ("u1", b"u1") or not isinstance(pixels, bytes):
            raise ValueError("data is not an array of unsigned bytes")
        rows = np.frombuffer(pixels, dtype=np.uint8).reshape(shape, order="F" if fortran else "C")
        if rows.ndim != 2 or rows.shape[1] != NUM_PIXELS:
            raise ValueError(f"data has the shape {rows.shape}, not (n, {NUM_PIXELS})")
        return rows, np.asarray(labels, dtype=np.int64)
    except (
        *(pickle.UnpicklingError, EOFError, ImportError, UnicodeError, MemoryError, RecursionError),
        *(ValueError, TypeError, AttributeError, LookupError, OverflowError),
    ) as error:  # what a corrupt pickle, or one of another content, can raise
        raise _corrupt(path, f"is no pickled CIFAR-10 batch ({error})") from error


def _corrupt(path: Path, reason: str) -> DataError:
    reason = " ".join(reason.split())
    return DataError(f"--data-dir {path.parent}: {path.name} {reason}; unpack the archive anew")
