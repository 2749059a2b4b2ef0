"""Encodings of a push: what travels in place of 32 bits per element.

A pushed update loses nothing by it: the worker's reference r moves by what was sent, not by what
was meant, so that the rest is part of the next difference (error feedback; Seide et al., 1-bit SGD,
Interspeech 2014; Karimireddy et al., ICML 2019)::

    d = encode(x − r),   r ← r + decode(d)

The server merges straight from the encoded form.  What is sent as it is (gradients, elastic
differences) is rounded to 16 bits and not fed back; the largest elements of gradients need the
memory of :mod:`aladdin_mpi.core.dgc`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from aladdin_mpi.core import jit, kernels, narrow
from aladdin_mpi.core.sparse import Dgc, TopK, up
from aladdin_mpi.errors import ConfigError

__all__ = ["PLAIN", "Dgc", "Encoding", "TopK", "find", "warm_up"]


class Encoding(Protocol):
    """A frozen, comparable description; ``size`` is that of the vector."""

    def nbytes(self, size: int) -> int:
        """[bytes] of a payload, a multiple of 64."""

    def items(self, size: int) -> int:
        """How many items the ranges of :meth:`merge` count."""

    def view(self, raw: np.ndarray, size: int) -> Any:
        """The payload in these bytes."""

    def used(self, payload: Any) -> tuple[tuple[int, int], ...]:
        """[bytes] ``(start, stop)`` of the stretches of the payload that say something."""

    def take(self, p: np.ndarray, r: np.ndarray, payload: Any, turn: int) -> int:
        """``payload = encode(p − r)``, ``r += decode(payload)``; p is used up.  ``turn`` counts.

        Returns how many elements of the payload are NaN or infinite.
        """

    def encode(self, p: np.ndarray, payload: Any) -> int:
        """``payload = encode(p)``, p finite; returns how many elements have become infinite."""

    def merge(
        self, target: np.ndarray, payloads: Sequence[Any], weights: Sequence[float], a: int, b: int
    ) -> None:
        """``target += w_1 p_1 + w_2 p_2 + …`` for the items ``a:b``."""


@dataclass(frozen=True)
class Float32:
    """As it is: the payload is the staging vector itself."""

    def nbytes(self, size: int) -> int:
        return up(4 * size)

    def items(self, size: int) -> int:
        return size

    def view(self, raw: np.ndarray, size: int) -> np.ndarray:
        return raw[: 4 * size].view(np.float32)

    def used(self, payload: np.ndarray) -> tuple[tuple[int, int], ...]:
        return ((0, payload.nbytes),)

    def take(self, p: np.ndarray, r: np.ndarray, payload: np.ndarray, turn: int) -> int:
        return kernels.take_difference(p, r)

    def encode(self, p: np.ndarray, payload: np.ndarray) -> int:
        """It is there already."""
        return 0

    def merge(
        self, target: np.ndarray, payloads: Sequence[Any], weights: Sequence[float], a: int, b: int
    ) -> None:
        kernels.merge(target, payloads, weights, a, b)


@dataclass(frozen=True)
class Half:
    """16-bit floats: ``bfloat16`` (8 bits of precision) or ``float16`` (11, up to 65504)."""

    name: str

    def nbytes(self, size: int) -> int:
        return up(2 * size)

    def items(self, size: int) -> int:
        return size

    def view(self, raw: np.ndarray, size: int) -> np.ndarray:
        return raw[: 2 * size].view(np.uint16)

    def used(self, payload: np.ndarray) -> tuple[tuple[int, int], ...]:
        return ((0, payload.nbytes),)

    def take(self, p: np.ndarray, r: np.ndarray, payload: np.ndarray, turn: int) -> int:
        return int(getattr(narrow, f"take_{self.name}")(p, r, payload))

    def encode(self, p: np.ndarray, payload: np.ndarray) -> int:
        return int(getattr(narrow, f"encode_{self.name}")(p, payload))

    def merge(
        self, target: np.ndarray, payloads: Sequence[Any], weights: Sequence[float], a: int, b: int
    ) -> None:
        kernel = getattr(narrow, f"merge_{self.name}")
        for payload, weight in zip(payloads, weights, strict=True):
            kernel(target, payload, float(weight), a, b)


PLAIN = Float32()


def find(wire: str) -> Encoding:
    """The encoding called ``float32``, ``bfloat16``, ``float16``, ``topk:FRACTION`` or
    ``dgc:FRACTION[:ITERATIONS]``.

    Raises
    ------
    ConfigError
    """
    name, *numbers = wire.split(":")
    if wire == "float32":
        return PLAIN
    if wire in ("bfloat16", "float16"):
        return Half(wire)
    if name not in ("topk", "dgc"):
        raise ConfigError(
            f"--wire {wire}: choose from float32, bfloat16, float16, topk:FRACTION, "
            "dgc:FRACTION[:ITERATIONS]"
        )
    try:
        fraction, warmup = float(numbers[0]), int(numbers[1]) if numbers[1:] else 0
        good = 0 < fraction <= 0.5 and len(numbers) <= (1 if name == "topk" else 2)
    except (ValueError, IndexError):
        good = False
    if not good:
        form = "topk:FRACTION, such as topk:0.01"
        if name == "dgc":
            form = "dgc:FRACTION or dgc:FRACTION:ITERATIONS, such as dgc:0.01 or dgc:0.01:1000"
        raise ConfigError(
            f"--wire {wire}: give {form}, FRACTION above 0 and up to 0.5 (8 bytes an element: "
            "beyond that float32 is smaller)"
        )
    if name == "topk":
        return TopK(fraction)
    found = Dgc(fraction, warmup)
    if warmup < len(found.stages) or (warmup and not found.stages):
        raise ConfigError(
            f"--wire {wire}: the warm-up sends 1/4, 1/16, 1/64, … of the elements while that is "
            "more than FRACTION, each for at least one iteration; give more iterations, a FRACTION "
            "below 0.25, or no warm-up"
        )
    return found


def _call_all() -> None:
    encodings: tuple[Encoding, ...] = (Half("bfloat16"), Half("float16"), TopK(0.5))
    for encoding in encodings:
        p, r = np.zeros(16, np.float32), np.zeros(16, np.float32)
        payload = encoding.view(np.zeros(encoding.nbytes(16), np.uint8), 16)
        encoding.take(p, r, payload, 0)
        if not isinstance(encoding, TopK):
            encoding.encode(p, payload)
        encoding.merge(p, [payload], [1.0], 0, encoding.items(16))
    g, u, v = (np.zeros(16, np.float32) for _ in range(3))
    narrow.take_corrected(g, u, v, 0.5, 1.0, 0, 1, payload.index, payload.value)


def warm_up() -> float:
    """Compile the kernels, or load them from the cache; returns the seconds."""
    return jit.warm_up(_call_all)
