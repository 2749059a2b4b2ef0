"""What travels in place of 32 bits: rounding, remainders, merges from the encoded form."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from teams import Case, mixed, run, steady, toy

from aladdin_mpi.algorithms import find as find_algorithm
from aladdin_mpi.core.encoding import TopK, find
from aladdin_mpi.core.wire import FrameLayout
from aladdin_mpi.errors import ConfigError
from aladdin_mpi.runtime.options import check_wire, configure

pytestmark = pytest.mark.timeout(120)

WIRES = ("float32", "bfloat16", "float16", "topk:0.1")
TORCH = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def frame_of(wire, size):
    return FrameLayout(size, encoding=find(wire)).new_frame()


def decoded(wire, frame, size):
    out = np.zeros(size, np.float32)
    find(wire).merge(out, [frame.payload], [1.0], 0, find(wire).items(size))
    return out


def values(seed, size, scale):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(size).astype(np.float32) * np.float32(scale)
    x[rng.random(size) < 0.1] = 0.0
    return x * np.exp2(rng.integers(-12, 3, size)).astype(np.float32)


@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 16, 2048, 5000]),
       st.sampled_from([1e-8, 1e-5, 1e-3, 1.0, 100.0]))  # fmt: skip
def test_rounding_is_torchs(wire, seed, size, scale):
    x = values(seed, size, scale)
    frame = frame_of(wire, size)
    frame.params[:] = x
    frame.encode()
    expected = torch.from_numpy(x).to(TORCH[wire])
    assert np.array_equal(frame.payload, expected.view(torch.int16).numpy().view(np.uint16))
    assert np.array_equal(decoded(wire, frame, size), expected.float().numpy())


def test_what_float16_cannot_hold_becomes_its_largest_value_and_the_rest_follows():
    r = np.zeros(2, np.float32)
    x = np.array([1e5, -1e6], np.float32)
    frame = frame_of("float16", 2)
    sent = np.zeros(2, np.float32)
    for _ in range(20):
        frame.params[:] = x
        frame.take_difference(r)
        sent += decoded("float16", frame, 2)
    assert np.array_equal(sent, x) and np.array_equal(r, x)


@pytest.mark.parametrize("wire", WIRES)
@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32 - 1), st.sampled_from([16, 4096, 5008]))
def test_the_reference_moves_by_exactly_what_is_sent(wire, seed, size):
    x, r = np.zeros(size, np.float32), np.zeros(size, np.float32)
    frame = frame_of(wire, size)
    for step in range(6):
        if step < 3:
            x = x + values(seed + step, size, 1e-3)
        frame.params[:] = x
        before = r.copy()
        frame.take_difference(r)
        if wire != "float32":
            assert np.array_equal(r, before + decoded(wire, frame, size))
    # what was not sent is still in x − r, and becomes less where nothing is added
    assert np.abs(x - r).max() <= np.abs(x).max()
    if wire != "topk:0.1":
        smallest = 6e-8 if wire == "float16" else 1e-12
        np.testing.assert_allclose(r, x, rtol=1e-6, atol=smallest)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.01, 0.1, 0.5]))
def test_topk_sends_about_the_largest(seed, fraction):
    size = 20_000
    x = np.random.default_rng(seed).standard_normal(size).astype(np.float32)
    frame, r = frame_of(f"topk:{fraction}", size), np.zeros(size, np.float32)
    frame.params[:] = x
    frame.take_difference(r)
    k = TopK(fraction).items(size)
    count = int(frame.payload.count[0])
    assert 0.7 * k <= count <= k
    chosen = np.sort(frame.payload.index[:count])
    assert len(set(chosen.tolist())) == count
    smallest = np.abs(x[chosen]).min()
    assert smallest >= 0.8 * np.sort(np.abs(x))[-k]
    assert np.array_equal(decoded(f"topk:{fraction}", frame, size)[chosen], x[chosen])


@pytest.mark.parametrize("wire", WIRES)
def test_merges_add_up_in_pieces(wire):
    size, encoding = 6000, find(wire)
    frames = [frame_of(wire, size) for _ in range(3)]
    for i, frame in enumerate(frames):
        frame.params[:] = values(i, size, 1e-2)
        frame.take_difference(np.zeros(size, np.float32))
    payloads, weights = [f.payload for f in frames], [0.5, -1.0, 0.25]
    whole, pieces = np.ones(size, np.float32), np.ones(size, np.float32)
    items = encoding.items(size)
    encoding.merge(whole, payloads, weights, 0, items)
    for a in range(0, items, 1000):
        encoding.merge(pieces, payloads, weights, a, min(a + 1000, items))
    assert np.array_equal(whole, pieces)
    expected = 1 + sum(w * decoded(wire, f, size) for w, f in zip(weights, frames, strict=True))
    np.testing.assert_allclose(whole, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("wire", WIRES)
@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32 - 1), st.sampled_from([16, 2048, 5008]), st.integers(0, 3))
def test_a_frame_says_what_of_its_payload_is_not_finite(wire, seed, size, bad):
    largest = np.finfo(np.float32).max
    frame, x, r = frame_of(wire, size), values(seed, size, 1e-2), np.zeros(size, np.float32)
    at = np.random.default_rng(seed).choice(size, bad, replace=False)
    x[at], r[at] = largest, -largest  # both finite, their difference is not
    frame.params[:] = x
    frame.take_difference(r)
    with np.errstate(invalid="ignore"):
        assert frame.nonfinite == (~np.isfinite(decoded(wire, frame, size))).sum()
    assert wire == "float16" or (frame.nonfinite > 0) == (bad > 0)
    frame.params[:] = 0.0
    frame.take_difference(np.zeros(size, np.float32))
    assert frame.nonfinite == 0
    if not wire.startswith("topk"):
        frame.params[:] = x
        frame.encode()
        assert frame.nonfinite == (bad if wire == "bfloat16" else 0)
        assert frame.nonfinite == (~np.isfinite(decoded(wire, frame, size))).sum()


@pytest.mark.parametrize(
    ("wire", "share"), [("bfloat16", 0.5), ("float16", 0.5), ("topk:0.01", 0.02)]
)
def test_bytes(wire, share):
    size = 1_000_000
    plain, narrow = FrameLayout(size).frame_bytes, FrameLayout(size, encoding=find(wire))
    assert narrow.frame_bytes == pytest.approx(share * plain, rel=0.01)


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("wire", WIRES)
def test_aladdin_ends_at_the_mean_of_all_steps(wire, servers):
    """What is on its way, or was not sent yet, is in the last push up to what it leaves out."""
    case = Case("aladdin", servers)
    # topk leaves out what the last pushes had no room for: that is much if there are few of them
    options = {"count_leavers": False, "replies": False, "coalesce": not wire.startswith("topk")}
    results = run(3, case.toy(steady, iterations=lambda worker: 40, options=options, wire=wire))
    steps = [-0.1 * steady(w, case.target, k) for w in range(3) for k in range(40)]
    tolerance = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 2e-3}.get(wire, 0.6)
    mean = np.sum(steps, axis=0) / 3
    np.testing.assert_allclose(results[0].final, mean, rtol=tolerance)


@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["bsp", "asp", "ssp", "dssp", "shat", "easgd"])
def test_what_is_sent_as_it_is_is_rounded(name, wire):
    plain, rounded = (
        run(1, toy(name, mixed, iterations=lambda worker: 20, wire=w))[0].final
        for w in ("float32", wire)
    )
    assert not np.array_equal(plain, rounded)
    np.testing.assert_allclose(plain, rounded, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    ("algorithm", "wire", "line"),
    [
        (
            "aladdin",
            "int8",
            "--wire int8: choose from float32, bfloat16, float16, topk:FRACTION, dgc:FRACTION",
        ),
        ("aladdin", "topk:2", "--wire topk:2: give topk:FRACTION"),
        ("aladdin", "topk", "--wire topk: give topk:FRACTION"),
        ("bsp", "topk:0.1", "what is not sent would be lost"),
        ("arsgd", "bfloat16", "--algorithm arsgd has no server"),
    ],
)
def test_mistakes_are_one_line(algorithm, wire, line):
    options = {"backend": "mpi"} if algorithm == "arsgd" else {}
    with pytest.raises(ConfigError) as error:
        check_wire(find_algorithm(algorithm), configure(algorithm, options), wire)
    assert line in str(error.value) and "\n" not in str(error.value)
