"""Each kernel against its NumPy twin, to the bit unless a tolerance is stated."""

import itertools
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from aladdin_mpi.core import jit, kernels

pytestmark = pytest.mark.timeout(120)

examples = settings(deadline=None, derandomize=True, max_examples=30)
SIZES = st.sampled_from([0, 1, 2, 7, 8, 31, 33, 64, 127, 1000, 4095, 4097, 8193, 13_001])
OFFSETS = st.integers(0, 5)  # of a view: SIMD loads that are not aligned to 16, 32 or 64 bytes
SEEDS = st.integers(0, 2**32 - 1)
DTYPES = st.sampled_from([np.float32, np.float64])
SCALARS = st.floats(-2, 2)
case = given(SIZES, OFFSETS, SEEDS, DTYPES)


@pytest.fixture(scope="module", autouse=True)
def compiled():
    kernels.warm_up()


def arrays(count, size, offset, seed, dtype):
    """Contiguous views that begin at different distances from their memory's start."""
    rng = np.random.default_rng(seed)
    return [
        rng.standard_normal(size + offset + i).astype(dtype)[offset + i :] for i in range(count)
    ]


def spoil(array, seed):
    """Put NaN and infinities into up to half of the elements."""
    rng = np.random.default_rng(seed)
    where = rng.integers(0, max(array.size, 1), size=array.size // 2)
    array[where] = rng.choice([np.nan, np.inf, -np.inf], size=where.size)


def same(actual, expected):
    """Equal bits, but for the payload and sign of NaN."""
    assert actual.dtype == expected.dtype
    np.testing.assert_array_equal(actual, expected)
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(np.signbit(actual[finite]), np.signbit(expected[finite]))


def twin_difference(x, r):
    with np.errstate(all="ignore"):
        d = x - r
    ok = np.isfinite(d)
    return np.where(ok, d, x.dtype.type(0)), np.where(ok, x, r), int((~ok).sum())


@examples
@given(SIZES, OFFSETS, SEEDS, DTYPES, st.booleans())
def test_difference(size, offset, seed, dtype, bad):
    x, r, out = arrays(3, size, offset, seed, dtype)
    if bad:
        spoil(x, seed + 1)
    if size:
        r[-1] = -np.finfo(dtype).max
        x[-1] = np.finfo(dtype).max  # both are finite, their difference is not
    before, (d, r_new, count) = x.copy(), twin_difference(x, r)
    assert kernels.difference(x, r, out) == count
    same(x, before)
    same(out, d)
    same(r, r_new)


@examples
@case
def test_take_difference(size, offset, seed, dtype):
    p, r = arrays(2, size, offset, seed, dtype)
    if size:
        r[-1] = -np.finfo(dtype).max
        p[-1] = np.finfo(dtype).max  # both are finite, their difference is not
    with np.errstate(all="ignore"):
        x, d = p.copy(), p - r
    assert kernels.take_difference(p, r) == (~np.isfinite(d)).sum()
    same(p, d)
    same(r, x)


@examples
@given(SIZES, OFFSETS, SEEDS, DTYPES, st.booleans())
def test_copy_checked(size, offset, seed, dtype, bad):
    dst, src = arrays(2, size, offset, seed, dtype)
    if bad:
        spoil(src, seed + 1)
    before = src.copy()
    assert kernels.copy_checked(dst, src) == (~np.isfinite(src)).sum()
    same(dst, src)
    same(src, before)


@examples
@case
def test_restore_undoes_a_difference(size, offset, seed, dtype):
    x, r, out = arrays(3, size, offset, seed, dtype)
    spoil(x, seed)
    r_old = r.copy()
    bad = ~np.isfinite(x)
    assert kernels.difference(x, r, out) == bad.sum()
    twin = r - out
    kernels.restore(x, r, out)
    same(r, twin)
    same(x, twin)
    same(r[bad], r_old[bad])
    # fl(x - fl(x - r)): two roundings of numbers below 12, half an ulp of 8 each
    np.testing.assert_allclose(r, r_old, rtol=0, atol=8 * np.finfo(dtype).eps)


def test_restore_is_exact_on_whole_numbers():
    x, r = np.arange(100, dtype=np.float32), np.full(100, 7, np.float32)
    x[3] = np.nan
    out = np.empty_like(x)
    assert kernels.difference(x, r, out) == 1
    kernels.restore(x, r, out)
    same(r, np.full(100, 7, np.float32))
    same(x, r)


@examples
@given(SIZES, OFFSETS, SEEDS, DTYPES, st.integers(0, 9), st.data())
def test_merge(size, offset, seed, dtype, k, data):
    target, *payloads = arrays(k + 1, size, offset, seed, dtype)
    weights = data.draw(st.lists(SCALARS, min_size=k, max_size=k))
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    kept = [p.copy() for p in payloads]
    twin = target.copy()
    for p, w in zip(payloads, weights, strict=True):
        twin[start:stop] += dtype(w) * p[start:stop]
    kernels.merge(target, tuple(payloads), weights, start, stop)
    same(target, twin)  # hence also: k at once are k one by one, for any k and range
    for p, before in zip(payloads, kept, strict=True):
        same(p, before)


@examples
@given(SEEDS, DTYPES, st.integers(1, 9), st.lists(st.integers(0, 5000), max_size=6))
def test_merge_in_chunks_gives_the_bits_of_one_call(seed, dtype, k, cuts):
    whole, *payloads = arrays(k + 1, 5000, 3, seed, dtype)
    weights = np.random.default_rng(seed).standard_normal(k).tolist()
    chunked = whole.copy()
    kernels.merge(whole, payloads, weights)
    borders = [0, *sorted(cuts), 5000]
    for start, stop in itertools.pairwise(borders):
        kernels.merge(chunked, payloads, weights, start, stop)
    same(chunked, whole)


@pytest.mark.parametrize("k", range(1, 10))
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_merge_is_exact_on_whole_numbers(k, dtype):
    target = np.arange(1001, dtype=dtype)
    payloads = [np.full(1001, 10 * (j + 1), dtype) for j in range(k)]
    kernels.merge(target, payloads, [1.0] * k)
    same(target, np.arange(1001, dtype=dtype) + dtype(5 * k * (k + 1)))


def test_merge_takes_scalars_of_any_type_without_compiling():
    target, p = np.zeros(9, np.float32), np.ones(9, np.float32)
    before = [len(kernel.signatures) for kernel in jit._KERNELS]
    kernels.merge(target, [p, p], np.array([1, 2], np.float32), np.int32(0), np.int64(9))
    kernels.merge(target, [p], (1,))
    kernels.scale_add(target, 1, p, np.float32(2))
    kernels.mix_plain(target, p.copy(), 0)
    kernels.lazy_update(target, p.copy(), p.copy(), 0, 0, 0, 1)
    kernels.merge_buffers(target, p, 1)
    assert [len(kernel.signatures) for kernel in jit._KERNELS] == before


@pytest.mark.parametrize("bad", [np.zeros(4, np.float32), np.zeros(5, np.float64)])
def test_arrays_that_do_not_fit_are_refused(bad):
    x = np.zeros(5, np.float32)
    for call in (
        lambda: kernels.difference(x, x.copy(), bad),
        lambda: kernels.merge(x, [x.copy(), bad], [1.0, 1.0]),
        lambda: kernels.mix_lagged(x, bad, x.copy(), 0.5),
        lambda: kernels.copy(x, bad),
    ):
        with pytest.raises(ValueError, match="does not fit"):
            call()
    assert not x.any()


@pytest.mark.parametrize("span", [(-1, 3), (3, 2), (0, 6)])
def test_ranges_outside_are_refused(span):
    x = np.zeros(5, np.float32)
    with pytest.raises(ValueError, match="not a range of 5"):
        kernels.merge(x, [np.ones(5, np.float32)], [1.0], *span)
    with pytest.raises(ValueError, match="2 payloads, 1 weights"):
        kernels.merge(x, [x.copy(), x.copy()], [1.0])


@examples
@given(SIZES, OFFSETS, SEEDS, DTYPES, SCALARS, SCALARS, st.data())
def test_scale_add_add_and_copy(size, offset, seed, dtype, a, b, data):
    target, payload = arrays(2, size, offset, seed, dtype)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    twin = target.copy()
    twin[start:stop] = dtype(a) * twin[start:stop] + dtype(b) * payload[start:stop]
    kernels.scale_add(target, a, payload, b, start, stop)
    same(target, twin)
    kernels.add(target, payload)
    same(target, twin + payload)
    twin = target.copy()
    twin[start:stop] = payload[start:stop]
    kernels.copy(target, payload, start, stop)
    same(target, twin)


@examples
@given(SIZES, OFFSETS, SEEDS, DTYPES, st.booleans(), st.data())
def test_count_nonfinite(size, offset, seed, dtype, bad, data):
    (p,) = arrays(1, size, offset, seed, dtype)
    if size > 1:
        p[:2] = (
            np.finfo(dtype).max,
            np.finfo(dtype).tiny / 2,
        )  # largest and subnormal count as finite
    if bad:
        spoil(p, seed)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    assert kernels.count_nonfinite(p) == (~np.isfinite(p)).sum()
    assert kernels.count_nonfinite(p, start, stop) == (~np.isfinite(p[start:stop])).sum()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_count_nonfinite_counts_every_element(dtype):
    assert kernels.count_nonfinite(np.full(100_003, np.nan, dtype)) == 100_003


@examples
@given(SIZES, OFFSETS, SEEDS, DTYPES, SCALARS)
def test_mixes(size, offset, seed, dtype, alpha):
    x, target, s = arrays(3, size, offset, seed, dtype)
    for base, call in (
        (s, lambda: kernels.mix_lagged(x, target, s, alpha)),
        (x, lambda: kernels.mix_plain(x, target, alpha)),
    ):
        d = dtype(alpha) * (target - base)
        x_new = x + d
        call()
        same(x, x_new)
        same(target, d)


@examples
@given(SIZES, OFFSETS, SEEDS, DTYPES, st.lists(st.floats(0, 1), min_size=4, max_size=4), st.data())
def test_lazy_update(size, offset, seed, dtype, scalars, data):
    x, g, v = arrays(3, size, offset, seed, dtype)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    lr, momentum, weight_decay, scale = map(dtype, scalars)
    v_new, x_new, g_new = v.copy(), x.copy(), g.copy()
    cut = slice(start, stop)
    v_new[cut] = momentum * v[cut] + (scale * g[cut] + weight_decay * x[cut])
    x_new[cut] -= lr * v_new[cut]
    g_new[cut] = 0
    kernels.lazy_update(x, g, v, *scalars, start, stop)
    for actual, expected in ((x, x_new), (v, v_new), (g, g_new)):
        same(actual, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 1e-2])
def test_lazy_update_is_torch_sgd(dtype, momentum, weight_decay):
    generator = torch.Generator().manual_seed(1)
    parameter = torch.randn(1003, dtype=dtype, generator=generator, requires_grad=True)
    x = parameter.detach().numpy().copy()
    v = np.zeros_like(x)
    optimizer = torch.optim.SGD([parameter], 0.1, momentum=momentum, weight_decay=weight_decay)
    for _ in range(10):
        g = torch.randn(1003, dtype=dtype, generator=generator)
        parameter.grad = g / 4
        optimizer.step()
        kernels.lazy_update(x, g.numpy(), v, 0.1, momentum, weight_decay, 0.25)
        assert not g.any()
    # torch may fuse multiply and add: a few roundings per step of numbers below 8, for ten steps
    atol = 10 * 4 * np.finfo(x.dtype).eps
    np.testing.assert_allclose(x, parameter.detach().numpy(), rtol=0, atol=atol)


@examples
@given(SIZES, OFFSETS, SEEDS, DTYPES, st.floats(0, 1), st.booleans())
def test_merge_buffers(size, offset, seed, dtype, weight, bad):
    b, p = arrays(2, size, offset, seed, dtype)
    p[::3] = b[::3]
    if bad:
        spoil(p, seed)
    with np.errstate(all="ignore"):
        twin = np.where(np.isfinite(p) & (p != b), b + dtype(weight) * (p - b), b)
    kernels.merge_buffers(b, p, weight)
    same(b, twin)
    assert np.isfinite(b).all()


def test_running_variance_stays_positive_and_counters_grow():
    variance = np.array([1e-6, 1.0], np.float32)
    for _ in range(100):
        kernels.merge_buffers(variance, np.array([1e-3, 1e-8], np.float32), 0.25)
        assert (variance > 0).all()
    counters = np.array([3, 2**60, 0], np.int64)
    kernels.max_counters(counters, np.array([5, 1, 0], np.int64))
    assert counters.tolist() == [5, 2**60, 0]


def test_no_kernel_fuses_multiply_and_add():
    """What makes chunks, batches and machines agree, beyond the sizes that are tried above."""
    for kernel in jit._KERNELS:
        fresh = njit(nogil=True)(kernel.py_func)  # what comes from a cache cannot be inspected
        for signature in kernel.signatures:
            fresh.compile(signature)
            code = fresh.inspect_asm(signature)
            assert kernel.__name__ in code
            assert not re.search(r"fn?m(add|sub|la|ls)\d*[sp]?[sd]?\b", code)


# ---- the cache, in processes of their own ----

USE = """
import logging, sys
logging.basicConfig(stream=sys.stdout, format="%(message)s")
import numpy as np, numba
chosen = numba.config.CACHE_DIR
from aladdin_mpi.core import jit, kernels
assert numba.config.CACHE_DIR == chosen
assert not any(kernel.signatures for kernel in jit._KERNELS)
kernels.warm_up()
x = np.ones(3, np.float32)
kernels.merge(x, [np.ones(3, np.float32)], [2.0])
assert x.tolist() == [3, 3, 3]
hits = sum(sum(kernel.stats.cache_hits.values()) for kernel in jit._KERNELS)
print("hits", hits, "in", jit._CACHE_DIR)
"""


def start(**environment):
    env = {k: v for k, v in os.environ.items() if k not in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME")}
    command = [sys.executable, "-c", USE]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=env | environment, stdout=pipe, stderr=pipe, text=True)


def use(**environment):
    process = start(**environment)
    out, err = process.communicate(timeout=110)
    assert process.returncode == 0, err
    return out


def test_a_broken_cache_is_repaired(tmp_path):
    assert "hits 0" in use(NUMBA_CACHE_DIR=str(tmp_path))
    files = [*tmp_path.rglob("*.nbi"), *tmp_path.rglob("*.nbc")]
    assert files
    for i, file in enumerate(files):
        file.write_bytes([b"", b"not a pickle", file.read_bytes()[:-7]][i % 3])
    out = use(NUMBA_CACHE_DIR=str(tmp_path))
    assert "kernel cache" in out
    out = use(NUMBA_CACHE_DIR=str(tmp_path))
    assert "kernel cache" not in out
    assert "hits 0" not in out


def test_the_cache_follows_the_environment(tmp_path):
    assert f"in {tmp_path / 'xdg' / 'aladdin_mpi'}" in use(XDG_CACHE_HOME=str(tmp_path / "xdg"))
    (tmp_path / "file").touch()  # no directory can be made below it, not even by root
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    out = use(
        NUMBA_CACHE_DIR=str(tmp_path / "file" / "a"),
        XDG_CACHE_HOME=str(tmp_path / "file" / "b"),
        TMPDIR=str(temporary),
    )
    assert f"in {temporary / f'aladdin_mpi-{os.getuid()}'}" in out


def test_a_shared_temporary_directory_of_others_is_not_trusted(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / f"aladdin_mpi-{os.getuid()}").mkdir()
    (tmp_path / f"aladdin_mpi-{os.getuid()}").chmod(0o777)
    out = use(XDG_CACHE_HOME=str(tmp_path / "file"), TMPDIR=str(tmp_path))
    assert out.strip().endswith("in")  # compiled without a cache


def test_ranks_of_a_host_fill_the_cache_one_after_another(tmp_path):
    ranks = [start(NUMBA_CACHE_DIR=str(tmp_path)) for _ in range(3)]
    outputs = [rank.communicate(timeout=110)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0, 0]
    assert sum("hits 0" in out for out in outputs) == 1
