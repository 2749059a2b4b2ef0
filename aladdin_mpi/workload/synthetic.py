"""Made-up classes of any shape and number, for tests and for timing without files."""

from __future__ import annotations

import math
import re

import numpy as np

from aladdin_mpi.errors import ConfigError
from aladdin_mpi.workload.arrays import ArrayDataset, DataBundle

__all__ = ["load_synthetic"]

DEFAULT = "synthetic:1x28x28:10:10000"
PATTERN = re.compile(r"synthetic:([1-9]\d*(?:x[1-9]\d*)*):([1-9]\d*):([1-9]\d*)", re.ASCII)
MAX_BYTES = 4 * 2**30
"""Largest set that is made [bytes]; every rank holds its own."""

SIGNAL = 4.5
"""Length of a class's prototype, beside noise of standard deviation 1 in every direction."""

COARSE = 4
"""Prototypes of images have this many patches in each direction, so that convolutions see them."""

TEST_PART = 6
"""There is one test sample for so many training samples, as in MNIST."""


def load_synthetic(spec: str, seed: int) -> DataBundle:
    """Make a prototype for each class, and samples that are prototypes with noise.

    Parameters
    ----------
    spec : str
        ``synthetic`` or ``synthetic:1x28x28:10:60000``: shape of a sample, classes, training
        samples.  The test set has a sixth of them, at least one for each class.
    seed : int
        The same seed makes the same samples.

    Raises
    ------
    ConfigError
        The specification is wrong or asks for more than memory should hold.

    Notes
    -----
    A sample is ``x = 4.5 · p + noise``, with ``p`` of length 1 and normal noise of variance 1: the
    inputs are about standardised, and the best classifier of ten classes is right for 98 to 99 %.
    """
    full = DEFAULT if spec == "synthetic" else spec
    match = PATTERN.fullmatch(full)
    if match is None:
        raise ConfigError(
            f"--dataset {spec}: not of the form synthetic:SHAPE:CLASSES:SAMPLES with numbers "
            f"above 0; give for example {DEFAULT}"
        )
    shape = tuple(int(size) for size in match[1].split("x"))
    classes, samples = int(match[2]), int(match[3])
    if classes < 2 or samples < classes:
        raise ConfigError(
            f"--dataset {spec}: {samples} samples of {classes} classes; give 2 classes or more, "
            "and at least one sample for each"
        )
    tests = max(samples // TEST_PART, classes)
    needed = 4 * math.prod(shape) * (samples + tests + classes)
    if needed > MAX_BYTES:
        raise ConfigError(
            f"--dataset {spec}: needs {needed / 2**30:.1f} GiB in every rank, allowed are "
            f"{MAX_BYTES / 2**30:.0f} GiB; ask for fewer samples"
        )
    rng = np.random.default_rng(seed)
    prototypes = _prototypes(shape, classes, rng)
    train = _samples(prototypes, samples, rng)
    return DataBundle(train, _samples(prototypes, tests, rng), shape, classes, full)


def _prototypes(shape: tuple[int, ...], classes: int, rng: np.random.Generator) -> np.ndarray:
    """Return (classes, ...), float32, each of length SIGNAL."""
    coarse = tuple(min(size, COARSE) for size in shape) if len(shape) == 3 else shape
    coarse = (shape[0], *coarse[1:])
    values = rng.standard_normal((classes, *coarse), dtype=np.float32)
    for axis, (fine, few) in enumerate(zip(shape, coarse, strict=True), start=1):
        values = np.take(values, np.arange(fine) * few // fine, axis=axis)
    lengths = np.sqrt((values.reshape(classes, -1) ** 2).sum(axis=1))
    scale: np.ndarray = SIGNAL / lengths
    scaled: np.ndarray = values * scale.reshape(-1, *[1] * len(shape))
    return scaled


def _samples(prototypes: np.ndarray, count: int, rng: np.random.Generator) -> ArrayDataset:
    """Classes in turn, so that every range of the samples has all of them alike."""
    y = np.arange(count) % len(prototypes)
    x = rng.standard_normal((count, *prototypes.shape[1:]), dtype=np.float32)
    for index, prototype in enumerate(prototypes):  # no second array of this size
        x[index :: len(prototypes)] += prototype
    return ArrayDataset(x, y)
