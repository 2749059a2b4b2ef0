"""Numba kernels of the narrow encodings: encode a difference and keep its remainder, merge.

16-bit floats are whole numbers here (uint16), made and read by their bits: round to nearest, ties
to even.  Everything goes through memory once, in blocks that stay in the first-level cache.  Arrays
are contiguous, of the sizes that :mod:`~aladdin_mpi.core.encoding` makes; no GIL is held.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import numpy as np

from aladdin_mpi.core import jit

__all__ = [
    "encode_bfloat16",
    "encode_float16",
    "merge_bfloat16",
    "merge_float16",
    "merge_sparse",
    "subtract",
    "take_bfloat16",
    "take_corrected",
    "take_float16",
    "take_sparse",
]

BLOCK = 2048


@jit.kernel
def _to_bfloat16(bits, out):
    """uint32 bits of float32 → bfloat16."""
    for i in range(bits.size):
        b = bits[i]
        out[i] = np.uint16((b + np.uint32(0x7FFF) + ((b >> np.uint32(16)) & np.uint32(1))) >> 16)


@jit.kernel
def _from_bfloat16(half, bits):
    for i in range(half.size):
        bits[i] = np.uint32(half[i]) << np.uint32(16)


@jit.kernel
def _infinite(half):
    """How many bfloat16 are NaN or infinite."""
    bad = np.uint32(0)
    for i in range(half.size):
        bad = np.uint32(bad + ((half[i] & np.uint16(0x7F80)) == np.uint16(0x7F80)))
    return bad


@jit.kernel
def _to_float16(values, bits, scratch, scratch_bits, out):
    """float32 (and its bits) → float16; what is too large becomes the largest."""
    for i in range(values.size):  # for those below 2⁻¹⁴ the sum's last bits are float16's
        scratch[i] = abs(values[i]) + np.float32(0.5)
    for i in range(values.size):
        b = bits[i] & np.uint32(0x7FFFFFFF)
        sign = (bits[i] >> np.uint32(16)) & np.uint32(0x8000)
        odd = (b >> np.uint32(13)) & np.uint32(1)
        normal = (b + np.uint32(0xFFF) + odd - np.uint32(0x38000000)) >> np.uint32(13)
        small = scratch_bits[i] - np.uint32(0x3F000000)
        h = small if b < np.uint32(0x38800000) else normal
        h = h if b < np.uint32(0x477FF000) else np.uint32(0x7BFF)
        out[i] = np.uint16(sign | h)


@jit.kernel
def _from_float16(half, values, bits):
    """float16 → float32 and its bits, which are the same memory."""
    for i in range(half.size):
        bits[i] = (np.uint32(half[i]) & np.uint32(0x7FFF)) << np.uint32(13)
    for i in range(half.size):
        values[i] = values[i] * np.float32(5.192296858534828e33)  # 2¹¹², exact
    for i in range(half.size):
        bits[i] = bits[i] | ((np.uint32(half[i]) & np.uint32(0x8000)) << np.uint32(16))


@jit.kernel
def take_bfloat16(p, r, out):
    """``out = bfloat16(p − r)``, ``r += out``; p becomes what was encoded.  Returns how many are
    not finite.
    """
    bits, bad = p.view(np.uint32), 0
    for a in range(0, p.size, BLOCK):
        pa, ra, ba, oa = p[a:][:BLOCK], r[a:][:BLOCK], bits[a:][:BLOCK], out[a:][:BLOCK]
        for i in range(pa.size):
            pa[i] = pa[i] - ra[i]
        _to_bfloat16(ba, oa)
        bad += int(_infinite(oa))
        _from_bfloat16(oa, ba)
        for i in range(pa.size):
            ra[i] += pa[i]
    return bad


@jit.kernel
def take_float16(p, r, out):
    """``out = float16(p − r)``, ``r += out``; p becomes what was encoded.  All of it is finite:
    returns 0.
    """
    bits = p.view(np.uint32)
    scratch = np.empty(BLOCK, np.float32)
    scratch_bits = scratch.view(np.uint32)
    for a in range(0, p.size, BLOCK):
        pa, ra, ba, oa = p[a:][:BLOCK], r[a:][:BLOCK], bits[a:][:BLOCK], out[a:][:BLOCK]
        for i in range(pa.size):
            pa[i] = pa[i] - ra[i]
        _to_float16(pa, ba, scratch, scratch_bits, oa)
        _from_float16(oa, pa, ba)
        for i in range(pa.size):
            ra[i] += pa[i]
    return 0


@jit.kernel
def encode_bfloat16(p, out):
    """``out = bfloat16(p)``; returns how many are not finite."""
    bits, bad = p.view(np.uint32), 0
    for a in range(0, p.size, BLOCK):
        _to_bfloat16(bits[a:][:BLOCK], out[a:][:BLOCK])
        bad += int(_infinite(out[a:][:BLOCK]))
    return bad


@jit.kernel
def encode_float16(p, out):
    """``out = float16(p)``; all of it is finite: returns 0."""
    bits = p.view(np.uint32)
    scratch = np.empty(BLOCK, np.float32)
    scratch_bits = scratch.view(np.uint32)
    for a in range(0, p.size, BLOCK):
        _to_float16(p[a:][:BLOCK], bits[a:][:BLOCK], scratch, scratch_bits, out[a:][:BLOCK])
    return 0


@jit.kernel
def merge_bfloat16(target, payload, weight, start, stop):
    """``target += weight payload`` in a range."""
    w = np.float32(weight)
    scratch = np.empty(BLOCK, np.float32)
    bits = scratch.view(np.uint32)
    for a in range(start, stop, BLOCK):
        size = min(BLOCK, stop - a)
        t, h = target[a:][:size], payload[a:][:size]
        _from_bfloat16(h, bits)
        for i in range(size):
            t[i] += w * scratch[i]


@jit.kernel
def merge_float16(target, payload, weight, start, stop):
    """``target += weight payload`` in a range."""
    w = np.float32(weight)
    scratch = np.empty(BLOCK, np.float32)
    bits = scratch.view(np.uint32)
    for a in range(start, stop, BLOCK):
        size = min(BLOCK, stop - a)
        t, h = target[a:][:size], payload[a:][:size]
        _from_float16(h, scratch, bits)
        for i in range(size):
            t[i] += w * scratch[i]


@jit.kernel
def subtract(p, r):
    """``p −= r``."""
    for i in range(p.size):
        p[i] = p[i] - r[i]


@jit.kernel
def take_sparse(p, r, threshold, first, index, value):
    """The elements of p (a difference) of at least ``threshold``, from ``first`` on and around the
    end, until ``index`` is full: into ``index`` and ``value``, and ``r += value``.

    Returns how many.
    """
    t = np.float32(threshold)
    found = 0
    for half in range(2):
        begin, end = (first, p.size) if half == 0 else (0, first)
        for i in range(begin, end):
            if abs(p[i]) >= t and found < index.size:
                index[found] = np.uint32(i)
                value[found] = p[i]
                r[i] += p[i]
                found += 1
    return found


@jit.kernel
def take_corrected(g, u, v, momentum, threshold, first, limit, index, value):
    """``u = momentum u + g``, ``v += u``; the elements of v of at least ``threshold``, from
    ``first`` on and around the end, ``limit`` at most: into ``index`` and ``value``, and u and v
    become 0 there.  What is not a number is sent, too, so that it does not stay.

    Returns how many.
    """
    m, t, zero = np.float32(momentum), np.float32(threshold), np.float32(0)
    found = 0
    for half in range(2):
        begin, end = (first, g.size) if half == 0 else (0, first)
        for a in range(begin, end, BLOCK):
            size = min(BLOCK, end - a)
            ga, ua, va = g[a:][:size], u[a:][:size], v[a:][:size]
            for i in range(size):
                ua[i] = m * ua[i] + ga[i]
                va[i] += ua[i]
            for i in range(size):
                if not abs(va[i]) < t and found < limit:
                    index[found] = np.uint32(a + i)
                    value[found] = va[i]
                    ua[i] = zero
                    va[i] = zero
                    found += 1
    return found


@jit.kernel
def merge_sparse(target, index, value, weight, start, stop):
    """``target[index] += weight value`` for a range of them."""
    w = np.float32(weight)
    for j in range(start, stop):
        target[index[j]] += w * value[j]
