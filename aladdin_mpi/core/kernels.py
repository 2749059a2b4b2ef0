"""Numba kernels on flat vectors: differences, merges, mixes and the lazy global update.

Arrays are contiguous and writable, shape (P,), of one length and dtype per call. ``start``,
``stop`` cut one range out of each. Those left of an ``=`` are changed in place. No GIL is held,
one thread.

Notes
-----
No fused multiply-add, no reassociation: each operation is rounded once. So a range cut in chunks
gives the bits of one call, and k payloads merged at once those of k merges one by one. Scalars are
turned into ``float``: another type would be a new signature, compiled at its first call.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from aladdin_mpi.core import jit

Vector = NDArray[np.floating]  # of float32 or float64
_BLOCK = 4096  # elements whose count stays 32 bits wide, which keeps the loop at full vector width


@jit.kernel
def _difference(x, r, out):
    zero, bad = x.dtype.type(0), 0
    for i in range(x.size):
        d = x[i] - r[i]
        ok = np.isfinite(d)
        out[i] = d if ok else zero
        r[i] = x[i] if ok else r[i]
        bad += not ok
    return bad


@jit.kernel
def _take_difference(p, r):
    total = 0
    for begin in range(0, p.size, _BLOCK):
        a, b, bad = p[begin:][:_BLOCK], r[begin:][:_BLOCK], np.uint32(0)
        for i in range(a.size):
            x = a[i]
            d = x - b[i]
            a[i] = d
            b[i] = x
            bad = np.uint32(bad + (not np.isfinite(d)))
        total += int(bad)
    return total


@jit.kernel
def _copy_checked(dst, src):
    total = 0
    for begin in range(0, src.size, _BLOCK):
        a, b, bad = dst[begin:][:_BLOCK], src[begin:][:_BLOCK], np.uint32(0)
        for i in range(b.size):
            a[i] = b[i]
            bad = np.uint32(bad + (not np.isfinite(b[i])))
        total += int(bad)
    return total


@jit.kernel
def _scale_add(t, p, a, b):
    a, b = t.dtype.type(a), t.dtype.type(b)
    for i in range(t.size):
        t[i] = a * t[i] + b * p[i]


@jit.kernel
def _add_two(out, a, b):
    for i in range(out.size):
        out[i] = a[i] + b[i]


@jit.kernel
def _swap(a, b):
    for i in range(a.size):
        a[i], b[i] = b[i], a[i]


@jit.kernel
def _merge1(t, p0, w0):
    w0 = t.dtype.type(w0)
    for i in range(t.size):
        t[i] = t[i] + w0 * p0[i]


@jit.kernel
def _merge2(t, p0, p1, w0, w1):
    w0, w1 = t.dtype.type(w0), t.dtype.type(w1)
    for i in range(t.size):
        t[i] = t[i] + w0 * p0[i] + w1 * p1[i]


@jit.kernel
def _merge4(t, p0, p1, p2, p3, w0, w1, w2, w3):
    w0, w1, w2, w3 = t.dtype.type(w0), t.dtype.type(w1), t.dtype.type(w2), t.dtype.type(w3)
    for i in range(t.size):
        t[i] = t[i] + w0 * p0[i] + w1 * p1[i] + w2 * p2[i] + w3 * p3[i]


@jit.kernel
def _merge8(t, p0, p1, p2, p3, p4, p5, p6, p7, w0, w1, w2, w3, w4, w5, w6, w7):
    w0, w1, w2, w3 = t.dtype.type(w0), t.dtype.type(w1), t.dtype.type(w2), t.dtype.type(w3)
    w4, w5, w6, w7 = t.dtype.type(w4), t.dtype.type(w5), t.dtype.type(w6), t.dtype.type(w7)
    for i in range(t.size):
        half = t[i] + w0 * p0[i] + w1 * p1[i] + w2 * p2[i] + w3 * p3[i]
        t[i] = half + w4 * p4[i] + w5 * p5[i] + w6 * p6[i] + w7 * p7[i]


@jit.kernel
def _count_nonfinite(p):
    total = 0
    for begin in range(0, p.size, 2 * _BLOCK):
        a, b, bad = p[begin:][:_BLOCK], p[begin + _BLOCK :][:_BLOCK], np.uint32(0)
        for i in range(b.size):  # one stream of reads alone would not fill the memory's bandwidth
            bad = np.uint32(bad + (not np.isfinite(a[i])) + (not np.isfinite(b[i])))
        for i in range(b.size, a.size):
            bad = np.uint32(bad + (not np.isfinite(a[i])))
        total += int(bad)
    return total


@jit.kernel
def _mix(x, target, s, alpha):
    alpha = x.dtype.type(alpha)
    for i in range(x.size):
        # which of the two is decided when it is compiled
        d = alpha * (target[i] - (x[i] if s is None else s[i]))
        x[i] += d
        target[i] = d


@jit.kernel
def _change(out, target, s, alpha):
    alpha = out.dtype.type(alpha)
    for i in range(out.size):
        out[i] = alpha * (target[i] - s[i])


@jit.kernel
def _lazy_update(x, g, v, lr, momentum, weight_decay, scale):
    c, zero = x.dtype.type, x.dtype.type(0)
    lr, momentum, weight_decay, scale = c(lr), c(momentum), c(weight_decay), c(scale)
    for i in range(x.size):
        v[i] = momentum * v[i] + (scale * g[i] + weight_decay * x[i])
        x[i] -= lr * v[i]
        g[i] = zero


@jit.kernel
def _nesterov(x, g, v, lr, momentum, scale):
    c = x.dtype.type
    lr, momentum, scale = c(lr), c(momentum), c(scale)
    for i in range(x.size):
        d = scale * g[i]
        v[i] = momentum * v[i] + d
        x[i] -= lr * (d + momentum * v[i])


@jit.kernel
def _merge_buffers(b, p, weight):
    weight = b.dtype.type(weight)
    for i in range(b.size):
        if p[i] != b[i] and np.isfinite(p[i]):
            b[i] += weight * (p[i] - b[i])


_MERGES = ((8, _merge8), (4, _merge4), (2, _merge2), (1, _merge1))


def _cut(start: int, stop: int | None, first: np.ndarray, *others: np.ndarray) -> list[np.ndarray]:
    """Views of the range, after the checks that compiled code does not make."""
    arrays, size, dtype = [first, *others], first.size, first.dtype
    for other in others:
        if other.size != size or other.dtype != dtype:
            raise ValueError(f"{dtype}[{size}] does not fit {other.dtype}[{other.size}]")
    stop = size if stop is None else stop
    if not 0 <= start <= stop <= size:
        raise ValueError(f"start={start}, stop={stop}: not a range of {size} elements")
    return arrays if stop - start == size else [array[start:stop] for array in arrays]


def difference(x: Vector, r: Vector, out: Vector) -> int:
    """``out = x - r``, ``r = x``; where the difference is not finite, ``out = 0`` and r stays.

    Returns
    -------
    int
        How many elements were not finite; see :func:`restore`.
    """
    return _difference(*_cut(0, None, x, r, out))


def take_difference(p: Vector, r: Vector) -> int:
    """``p, r = p - r, p``; returns how many differences are NaN or infinite."""
    return _take_difference(*_cut(0, None, p, r))


def copy_checked(dst: Vector, src: Vector) -> int:
    """``dst = src``; returns how many elements are NaN or infinite."""
    return _copy_checked(*_cut(0, None, dst, src))


def restore(x: Vector, r: Vector, out: Vector) -> None:
    """Undo a difference, up to its rounding: ``r -= out``, ``x = r``. Not fast: a rare path."""
    np.copyto(x, np.subtract(r, out, out=r))


def merge(
    target: Vector,
    payloads: Sequence[Vector],
    weights: Sequence[float],
    start: int = 0,
    stop: int | None = None,
) -> None:
    """``target += w_1 p_1 + w_2 p_2 + ...`` from left to right, up to 8 payloads in one pass."""
    target, *payloads = _cut(start, stop, target, *payloads)
    scalars, done = [float(weight) for weight in weights], 0
    if len(payloads) != len(scalars):
        raise ValueError(f"{len(payloads)} payloads, {len(scalars)} weights")
    for width, kernel in _MERGES:
        while len(scalars) - done >= width:
            kernel(target, *payloads[done : done + width], *scalars[done : done + width])
            done += width


def scale_add(
    target: Vector, a: float, payload: Vector, b: float, start: int = 0, stop: int | None = None
) -> None:
    """``target = a target + b payload``."""
    _scale_add(*_cut(start, stop, target, payload), float(a), float(b))


def add(target: Vector, g: Vector) -> None:
    """``target += g``."""
    _merge1(*_cut(0, None, target, g), 1.0)


def add_two(out: Vector, a: Vector, b: Vector) -> None:
    """``out = a + b``; out may be one of them."""
    _add_two(*_cut(0, None, out, a, b))


def swap(a: Vector, b: Vector) -> None:
    """``a, b = b, a``."""
    _swap(*_cut(0, None, a, b))


def copy(dst: Vector, src: Vector, start: int = 0, stop: int | None = None) -> None:
    """``dst = src``."""
    dst, src = _cut(start, stop, dst, src)
    np.copyto(dst, src)


def count_nonfinite(p: Vector, start: int = 0, stop: int | None = None) -> int:
    """How many elements are NaN or infinite."""
    return _count_nonfinite(*_cut(start, stop, p))


def mix_lagged(x: Vector, target: Vector, s: Vector, alpha: float) -> None:
    """Lag-compensated mix: ``d = α (target - s)``, ``x += d``, ``target = d``."""
    _mix(*_cut(0, None, x, target, s), float(alpha))


def mix_plain(x: Vector, target: Vector, alpha: float) -> None:
    """Printed mix (Algorithm 1): ``d = α (target - x)``, ``x += d``, ``target = d``."""
    _mix(*_cut(0, None, x, target), None, float(alpha))


def change(out: Vector, target: Vector, s: Vector, alpha: float) -> None:
    """``out = α (target - s)``: what a lag-compensated mix adds."""
    _change(*_cut(0, None, out, target, s), float(alpha))


def lazy_update(
    x: Vector,
    g: Vector,
    v: Vector,
    lr: float,
    momentum: float,
    weight_decay: float,
    scale: float,
    start: int = 0,
    stop: int | None = None,
) -> None:
    """Lazy global update (Algorithm 2), a step of ``torch.optim.SGD`` if v starts from zeros:

    ``d = scale g + weight_decay x``, ``v = momentum v + d``, ``x -= lr v``, ``g = 0``.
    """
    _lazy_update(*_cut(start, stop, x, g, v), *map(float, (lr, momentum, weight_decay, scale)))


def nesterov(x: Vector, g: Vector, v: Vector, lr: float, momentum: float, scale: float) -> None:
    """``d = scale g``, ``v = momentum v + d``, ``x -= lr (d + momentum v)``: Nesterov's momentum as
    in ``torch.optim.SGD``.
    """
    _nesterov(*_cut(0, None, x, g, v), float(lr), float(momentum), float(scale))


def merge_buffers(target: Vector, payload: Vector, weight: float) -> None:
    """Running statistics: ``b += w (p - b)`` where p is finite and differs from b."""
    _merge_buffers(*_cut(0, None, target, payload), float(weight))


def max_counters(target: NDArray[np.int64], payload: NDArray[np.int64]) -> None:
    """``target = max(target, payload)``."""
    np.maximum(target, payload, out=target)


def _call_all() -> None:
    for dtype in ("float32", "float64"):
        x, r, s, g = (np.zeros(1, dtype) for _ in range(4))
        difference(x, r, g)
        take_difference(x, r)
        copy_checked(x, r)
        merge(x, [g] * 15, [1.0] * 15)  # 8 + 4 + 2 + 1
        count_nonfinite(x)
        scale_add(x, 1.0, g, 1.0)
        add_two(x, g, g)
        swap(x, r)
        mix_plain(x, g, 1.0)
        mix_lagged(x, g, s, 1.0)
        change(x, g, s, 1.0)
        lazy_update(x, g, s, 0.0, 0.0, 0.0, 0.0)
        nesterov(x, g, s, 0.0, 0.0, 1.0)
        merge_buffers(x, g, 1.0)


def warm_up() -> float:
    """Compile all kernels for both dtypes, or load them from the cache; returns the seconds."""
    return jit.warm_up(_call_all)
