"""Encodings of a push: what travels in place of 32 bits per element.

A pushed update loses nothing by it: the worker's reference r moves by what was sent, not by what
was meant, so that the rest is part of the next difference (error feedback; Seide et al., 1-bit SGD,
Interspeech 2014; Karimireddy et al., ICML 2019)::

    d = encode(x − r),   r ← r + decode(d)

The server merges straight from the encoded form.  What is sent as it is (gradients, elastic
differences) is rounded to 16 bits and not fed back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from aladdin_mpi.core import jit, kernels, narrow
from aladdin_mpi.errors import ConfigError

__all__ = ["PLAIN", "Encoding", "TopK", "find", "warm_up"]

_ALIGN = 64
_SAMPLE = 1 << 14
"""Elements by which the threshold of the largest ones is estimated."""


class Encoding(Protocol):
    """A frozen, comparable description; ``size`` is that of the vector."""

    def nbytes(self, size: int) -> int:
        """[bytes] of a payload, a multiple of 64."""

    def items(self, size: int) -> int:
        """How many items the ranges of :meth:`merge` count."""

    def view(self, raw: np.ndarray, size: int) -> Any:
        """The payload in these bytes."""

    def take(self, p: np.ndarray, r: np.ndarray, payload: Any, turn: int) -> None:
        """``payload = encode(p − r)``, ``r += decode(payload)``; p is used up.  ``turn`` counts."""

    def encode(self, p: np.ndarray, payload: Any) -> None:
        """``payload = encode(p)``."""

    def merge(
        self, target: np.ndarray, payloads: Sequence[Any], weights: Sequence[float], a: int, b: int
    ) -> None:
        """``target += w_1 p_1 + w_2 p_2 + …`` for the items ``a:b``."""

    def count_nonfinite(self, payload: Any, a: int, b: int) -> int:
        """How many of the items ``a:b`` are NaN or infinite."""


@dataclass(frozen=True)
class Float32:
    """As it is: the payload is the staging vector itself."""

    def nbytes(self, size: int) -> int:
        return _up(4 * size)

    def items(self, size: int) -> int:
        return size

    def view(self, raw: np.ndarray, size: int) -> np.ndarray:
        return raw[: 4 * size].view(np.float32)

    def take(self, p: np.ndarray, r: np.ndarray, payload: np.ndarray, turn: int) -> None:
        kernels.take_difference(p, r)

    def encode(self, p: np.ndarray, payload: np.ndarray) -> None:
        """It is there already."""

    def merge(
        self, target: np.ndarray, payloads: Sequence[Any], weights: Sequence[float], a: int, b: int
    ) -> None:
        kernels.merge(target, payloads, weights, a, b)

    def count_nonfinite(self, payload: np.ndarray, a: int, b: int) -> int:
        return kernels.count_nonfinite(payload, a, b)


@dataclass(frozen=True)
class Half:
    """16-bit floats: ``bfloat16`` (8 bits of precision) or ``float16`` (11, up to 65504)."""

    name: str

    def nbytes(self, size: int) -> int:
        return _up(2 * size)

    def items(self, size: int) -> int:
        return size

    def view(self, raw: np.ndarray, size: int) -> np.ndarray:
        return raw[: 2 * size].view(np.uint16)

    def take(self, p: np.ndarray, r: np.ndarray, payload: np.ndarray, turn: int) -> None:
        getattr(narrow, f"take_{self.name}")(p, r, payload)

    def encode(self, p: np.ndarray, payload: np.ndarray) -> None:
        getattr(narrow, f"encode_{self.name}")(p, payload)

    def merge(
        self, target: np.ndarray, payloads: Sequence[Any], weights: Sequence[float], a: int, b: int
    ) -> None:
        kernel = getattr(narrow, f"merge_{self.name}")
        for payload, weight in zip(payloads, weights, strict=True):
            kernel(target, payload, float(weight), a, b)

    def count_nonfinite(self, payload: np.ndarray, a: int, b: int) -> int:
        exponent = 0x7F80 if self.name == "bfloat16" else 0x7C00
        return int(narrow.count_nonfinite(payload, exponent, a, b))


@dataclass(frozen=True)
class Sparse:
    """A payload of :class:`TopK`: how many elements, which ones, their values."""

    count: np.ndarray
    index: np.ndarray
    value: np.ndarray


@dataclass(frozen=True)
class TopK:
    """The largest elements, each with its place: 8 bytes for ``fraction`` of them.

    Which are the largest is estimated by a sample, so that their number differs a little from push
    to push; where it exceeds the room, another place comes first every time.
    """

    fraction: float

    def items(self, size: int) -> int:
        return max(1, math.ceil(self.fraction * size))

    def nbytes(self, size: int) -> int:
        return _ALIGN + 2 * _up(4 * self.items(size))

    def view(self, raw: np.ndarray, size: int) -> Sparse:
        k, half = self.items(size), _up(4 * self.items(size))
        index = raw[_ALIGN:][: 4 * k].view(np.uint32)
        value = raw[_ALIGN + half :][: 4 * k].view(np.float32)
        return Sparse(raw[:8].view(np.int64), index, value)

    def take(self, p: np.ndarray, r: np.ndarray, payload: Sparse, turn: int) -> None:
        narrow.subtract(p, r)
        stride = max(1, p.size // _SAMPLE) | 1  # odd: rows have even lengths
        sample = np.abs(p[turn * 5 % stride :: stride])
        rank = max(0, sample.size - max(1, round(self.fraction * sample.size)))
        threshold = float(np.partition(sample, rank)[rank])
        first = (turn * 7919 * 64) % p.size
        payload.count[0] = narrow.take_sparse(
            p, r, max(threshold, 1e-38), first, payload.index, payload.value
        )

    def encode(self, p: np.ndarray, payload: Sparse) -> None:
        raise NotImplementedError("what is not sent would be lost")

    def merge(
        self, target: np.ndarray, payloads: Sequence[Any], weights: Sequence[float], a: int, b: int
    ) -> None:
        for payload, weight in zip(payloads, weights, strict=True):
            stop = min(b, int(payload.count[0]))
            narrow.merge_sparse(target, payload.index, payload.value, float(weight), a, stop)

    def count_nonfinite(self, payload: Sparse, a: int, b: int) -> int:
        stop = max(a, min(b, int(payload.count[0])))
        return kernels.count_nonfinite(payload.value, a, stop)


PLAIN = Float32()


def find(wire: str) -> Encoding:
    """The encoding called ``float32``, ``bfloat16``, ``float16`` or ``topk:FRACTION``.

    Raises
    ------
    ConfigError
    """
    name, _, fraction = wire.partition(":")
    if wire == "float32":
        return PLAIN
    if wire in ("bfloat16", "float16"):
        return Half(wire)
    if name == "topk":
        try:
            if 0 < float(fraction) <= 0.5:
                return TopK(float(fraction))
        except ValueError:
            pass
        raise ConfigError(
            f"--wire {wire}: give topk:FRACTION, such as topk:0.01, above 0 and up to 0.5 (8 bytes "
            "an element: beyond that float32 is smaller)"
        )
    raise ConfigError(f"--wire {wire}: choose from float32, bfloat16, float16, topk:FRACTION")


def _up(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def _call_all() -> None:
    encodings: tuple[Encoding, ...] = (Half("bfloat16"), Half("float16"), TopK(0.5))
    for encoding in encodings:
        p, r = np.zeros(16, np.float32), np.zeros(16, np.float32)
        payload = encoding.view(np.zeros(encoding.nbytes(16), np.uint8), 16)
        encoding.take(p, r, payload, 0)
        if not isinstance(encoding, TopK):
            encoding.encode(p, payload)
        encoding.merge(p, [payload], [1.0], 0, encoding.items(16))
        encoding.count_nonfinite(payload, 0, encoding.items(16))


def warm_up() -> float:
    """Compile the kernels, or load them from the cache; returns the seconds."""
    return jit.warm_up(_call_all)
