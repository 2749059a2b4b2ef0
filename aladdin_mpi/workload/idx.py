"""The IDX files of MNIST and Fashion-MNIST, gzipped or not."""

from __future__ import annotations

import gzip
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from aladdin_mpi.errors import DataError
from aladdin_mpi.workload.arrays import DataBundle, image_dataset
from aladdin_mpi.workload.folders import find_folder

__all__ = ["IDX_SETS", "load_idx", "read_idx"]


@dataclass(frozen=True)
class _Source:
    """Normalisation, and where the files usually are."""

    mean: float
    std: float
    subfolders: tuple[str, ...]
    advice: str
    system: tuple[Path, ...] = ()


FOUR_FILES = "put the four IDX files (.gz or not) into one folder and name it"
IDX_SETS = {
    "fashion-mnist": _Source(
        mean=0.2860,
        std=0.3530,
        subfolders=("fashion-mnist", "FashionMNIST/raw"),
        advice=f"apt-get install dataset-fashion-mnist, or {FOUR_FILES}",
        system=(Path("/usr/share/datasets/fashion-mnist"),),
    ),
    "mnist": _Source(mean=0.1307, std=0.3081, subfolders=("mnist", "MNIST/raw"), advice=FOUR_FILES),
}
NUM_CLASSES = 10
UNSIGNED_BYTE = 0x08


def load_idx(name: str, data_dir: Path | None) -> DataBundle:
    """Load ``mnist`` or ``fashion-mnist``.

    Raises
    ------
    DataError
        A file is missing or corrupt.
    """
    known = IDX_SETS[name]
    files = {
        (half, kind): (f"{half}-{kind}-ubyte", f"{half}-{kind}-ubyte.gz")
        for half in ("train", "t10k")
        for kind in ("images-idx3", "labels-idx1")
    }
    folder = find_folder(
        name,
        data_dir,
        subfolders=known.subfolders,
        system=known.system,
        wanted=files.values(),
        advice=known.advice,
    )
    halves = []
    for half in ("train", "t10k"):
        images, classes = (
            read_idx(
                next(path for file in files[half, kind] if (path := folder / file).exists()), ndim
            )
            for kind, ndim in (("images-idx3", 3), ("labels-idx1", 1))
        )
        if len(images) != len(classes) or len(images) == 0 or classes.max() >= NUM_CLASSES:
            raise DataError(
                f"--data-dir {folder}: {half} has {len(images)} images and {len(classes)} labels, "
                f"expected as many labels, from 0 to {NUM_CLASSES - 1}; fetch the files anew"
            )
        halves.append(image_dataset(images[:, None], classes, (known.mean,), (known.std,)))
    shape = tuple(halves[0].x.shape[1:])
    return DataBundle(halves[0], halves[1], shape, NUM_CLASSES, name)


def read_idx(path: Path, ndim: int) -> np.ndarray:
    """Read a file of unsigned bytes.

    Parameters
    ----------
    path : Path
        Unpacked on the fly when its name ends in ``.gz``.
    ndim : int
        The number of dimensions it must have.

    Returns
    -------
    array, uint8

    Raises
    ------
    DataError
        It cannot be read, is of another kind, or its length is not what its header says.

    Notes
    -----
    The file begins with two zero bytes, the code of the type, the number of dimensions, and each
    dimension as a big-endian 32-bit number.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = file.read()
    except (OSError, EOFError, zlib.error) as error:
        raise _corrupt(path, f"cannot be read ({error})") from error
    header_bytes = 4 + 4 * ndim
    if len(content) < header_bytes or content[:4] != bytes((0, 0, UNSIGNED_BYTE, ndim)):
        raise _corrupt(path, f"is not an IDX file of {ndim} dimension(s) of unsigned bytes")
    shape = tuple(int(size) for size in np.frombuffer(content[4:header_bytes], dtype=">u4"))
    expected = header_bytes + int(np.prod(shape, dtype=object))
    if len(content) != expected:
        raise _corrupt(path, f"has {len(content)} bytes, its header says {expected}")
    return np.frombuffer(content, dtype=np.uint8, offset=header_bytes).reshape(shape).copy()


def _corrupt(path: Path, reason: str) -> DataError:
    reason = " ".join(reason.split())
    return DataError(f"--data-dir {path.parent}: {path.name} {reason}; fetch the file anew")
