"""Deep gradient compression: the memory by hand, what it keeps, and training with it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from teams import CLOSE, Case, cases, mixed, run, towards, toy

from aladdin_mpi.algorithms import find as find_algorithm
from aladdin_mpi.config import RunConfig
from aladdin_mpi.core.dgc import GradientMemory
from aladdin_mpi.core.encoding import Dgc, find
from aladdin_mpi.core.wire import Frame, FrameLayout
from aladdin_mpi.errors import ConfigError
from aladdin_mpi.runtime.options import check_wire, configure
from aladdin_mpi.runtime.train import largest_norm

pytestmark = pytest.mark.timeout(120)

GRADIENTS = ("asp", "bsp", "ssp", "dssp", "shat", "aladdin")
OPTIONS: dict[str, dict[str, Any]] = {
    "aladdin": {
        "preset": "paper", "server_momentum": 0.5, "coalesce": False, "in_flight": "1"
    },
}  # fmt: skip
"""One push at a time, so that replies are never late: late ones let the paper's server run away."""


def memory_of(wire: str, size: int, momentum: float) -> tuple[GradientMemory, Frame]:
    encoding = find(wire)
    assert isinstance(encoding, Dgc)
    return GradientMemory(encoding, size, momentum), FrameLayout(
        size, encoding=encoding
    ).new_frame()


def sent(frame: Frame) -> np.ndarray:
    """What the server reads."""
    out = np.zeros(frame.params.size, np.float32)
    frame.encoding.merge(out, [frame.payload], [1.0], 0, out.size)
    return out


def push(memory: GradientMemory, frame: Frame, g: Any, iteration: int = 0) -> np.ndarray:
    frame.params[:] = g
    memory.encode(frame, iteration)
    return sent(frame)


def test_two_pushes_by_hand() -> None:
    """m = ½, one of four elements: g = (4, 2, 1, 0) twice, then none."""
    memory, frame = memory_of("dgc:0.25", 4, 0.5)
    assert push(memory, frame, [4, 2, 1, 0]).tolist() == [4, 0, 0, 0]
    assert memory.u.tolist() == memory.v.tolist() == [0, 2, 1, 0], "masked where it was sent"
    # u = ½ (0, 2, 1, 0) + g, v = v + u = (4, 2 + 3, 1 + 1.5, 0)
    assert push(memory, frame, [4, 2, 1, 0]).tolist() == [0, 5, 0, 0]
    assert memory.u.tolist() == [4, 0, 1.5, 0]
    assert memory.v.tolist() == [4, 0, 2.5, 0]
    # u = (2, 0, 0.75, 0), v = (6, 0, 3.25, 0)
    assert push(memory, frame, 0.0).tolist() == [6, 0, 0, 0]
    assert memory.u.tolist() == [0, 0, 0.75, 0]
    assert memory.v.tolist() == [0, 0, 3.25, 0]


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32 - 1), st.sampled_from([16, 4096, 70_000]),
       st.sampled_from(["dgc:0.01", "dgc:0.5", "dgc:0.01:6"]))  # fmt: skip
def test_without_momentum_what_is_sent_and_what_is_kept_are_the_sum(seed, size, wire):
    rng = np.random.default_rng(seed)
    memory, frame = memory_of(wire, size, 0.0)
    added, arrived = np.zeros(size), np.zeros(size)
    for iteration in range(8):
        g = rng.integers(-1000, 1000, size)
        added += g
        arrived += push(memory, frame, g, iteration)
        assert np.array_equal(arrived + memory.v, added)
        assert not memory.v[sent(frame) != 0].any() and not memory.u[sent(frame) != 0].any()


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.01, 0.1, 0.5]))
def test_the_largest_are_sent_in_as_many_bytes_as_they_need(seed, fraction):
    size = 50_000
    g = np.random.default_rng(seed).standard_normal(size).astype(np.float32)
    memory, frame = memory_of(f"dgc:{fraction}", size, 0.9)
    out = push(memory, frame, g)
    chosen = np.flatnonzero(out)
    assert 0.7 * fraction * size <= chosen.size <= np.ceil(fraction * size)
    assert np.array_equal(out[chosen], g[chosen])
    assert np.abs(g[chosen]).min() >= 0.8 * np.sort(np.abs(g))[-int(fraction * size)]
    travels = sum(b - a for a, b in frame.stretches())
    assert 8 * chosen.size < travels <= 8 * chosen.size + 4096 + 1024


def test_the_parts_of_a_frame_are_all_that_a_reader_needs() -> None:
    size = 100_000
    memory, frame = memory_of("dgc:0.001:10", size, 0.9)
    layout = FrameLayout(size, floats=3, counts=2, encoding=frame.encoding)
    ours, theirs = layout.new_frame(), layout.new_frame()
    ours.floats[:], ours.counts[:] = 1.5, 7
    ours.header["sequence"], ours._trailer[0] = 5, 5
    for iteration in (0, 9, 10):
        push(memory, ours, np.random.default_rng(iteration).standard_normal(size), iteration)
        theirs.raw[:] = 255
        for a, b in ours.stretches():
            theirs.raw[a:b] = ours.raw[a:b]
        out = np.zeros(size, np.float32)
        frame.encoding.merge(out, [theirs.payload], [1.0], 0, frame.encoding.items(size))
        assert np.array_equal(out, sent(ours))
        assert theirs.intact(5)
        assert (theirs.floats == 1.5).all() and (theirs.counts == 7).all()


def test_dense_frames_travel_as_one_part() -> None:
    for wire in ("float32", "bfloat16"):
        layout = FrameLayout(1000, floats=3, counts=2, encoding=find(wire))
        assert layout.new_frame().stretches() == [(0, layout.frame_bytes)]


def test_warm_up_falls_by_a_factor_of_four() -> None:
    """As in the paper for 0.1 %: 75 %, 93.75 %, 98.4375 % and 99.6 % are not sent at first."""
    encoding = Dgc(0.001, 40)
    assert encoding.stages == (1 / 4, 1 / 16, 1 / 64, 1 / 256)
    found = [encoding.fraction_at(k) for k in (0, 9, 10, 20, 39, 40, 1000)]
    assert found == [1 / 4, 1 / 4, 1 / 16, 1 / 64, 1 / 256, 0.001, 0.001]
    assert encoding.items(1000) == 250
    assert Dgc(0.001).items(1000) == 1 and Dgc(0.001).fraction_at(0) == 0.001
    size = 40_000
    memory, frame = memory_of("dgc:0.001:40", size, 0.0)
    rng = np.random.default_rng(0)
    for iteration, share in ((0, 1 / 4), (10, 1 / 16), (40, 0.001)):
        count = np.count_nonzero(push(memory, frame, rng.standard_normal(size), iteration))
        assert 0.6 * share * size <= count <= share * size + 1


def test_what_is_not_a_number_is_sent_and_does_not_stay() -> None:
    memory, frame = memory_of("dgc:0.25", 16, 0.9)
    for bad in (np.nan, np.inf):
        g = np.ones(16, np.float32)
        g[3] = bad
        for iteration in range(8):
            push(memory, frame, g if iteration == 0 else 0.0, iteration)
            assert (frame.nonfinite > 0) == (iteration == 0)
        assert np.isfinite(memory.u).all() and np.isfinite(memory.v).all()


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("case", cases(GRADIENTS), ids=str)
def test_training_converges_and_all_end_alike(case: Case, n: int) -> None:
    training = case.toy(
        wire="dgc:0.2:8", lr=0.05, iterations=lambda worker: 150,
        options=OPTIONS.get(case.name, {}),
    )  # fmt: skip
    results = run(n, training)
    for result in results:
        assert np.abs(result.final - case.target).max() < CLOSE.get(case.name, 0.3)
        assert np.array_equal(result.final, results[0].final)


def test_the_servers_step_is_without_momentum_and_decays_as_with_it() -> None:
    """One worker, one element, m = ½, λ = 0.1: each gradient is sent whole, so that u and v are 0
    after it, and ``x ← x − η (g + 0.1/(1 − ½) x)``.
    """
    (result,) = run(
        1, toy("bsp", towards, size=1, wire="dgc:0.5", lr=0.1, momentum=0.5, weight_decay=0.1,
               iterations=lambda worker: 5),
    )  # fmt: skip
    x = 0.0
    for _ in range(5):
        x -= 0.1 * ((x - 1.0) + 0.2 * x)
    np.testing.assert_allclose(result.final, [x], rtol=1e-6)


def test_bsp_repeats_to_the_bit() -> None:
    training = Case("bsp", 3).toy(mixed, momentum=0.9, wire="dgc:0.1:5", lr=0.02)
    once, again = run(2, training), run(2, training)
    assert np.array_equal(once[0].final, again[0].final)


def test_each_worker_clips_at_a_norm_that_is_smaller_by_the_root_of_n() -> None:
    config = RunConfig(algorithm="bsp", clip_norm=3.0, wire="dgc:0.01")
    assert largest_norm(config, 9) == 1.0
    assert largest_norm(config.model_copy(update={"wire": "float32"}), 9) == 3.0
    assert largest_norm(config.model_copy(update={"clip_norm": None}), 9) is None


@pytest.mark.parametrize("name", ["asp", "bsp", "ssp"])
def test_a_gradient_that_is_not_finite_leaves_the_memory_alone(name: str) -> None:
    def sometimes(worker: int, x: np.ndarray, iteration: int) -> np.ndarray:
        return np.full(x.size, np.nan) if iteration in (4, 5) else x - np.resize(1.0, x.size)

    results = run(2, toy(name, sometimes, size=64, wire="dgc:0.25", lr=0.05,
                         iterations=lambda worker: 120))  # fmt: skip
    assert np.abs(results[0].final - 1.0).max() < 0.2


@pytest.mark.parametrize(
    ("algorithm", "wire", "line"),
    [
        ("bsp", "dgc", "--wire dgc: give dgc:FRACTION or dgc:FRACTION:ITERATIONS"),
        ("bsp", "dgc:2", "--wire dgc:2: give dgc:FRACTION"),
        ("bsp", "dgc:0.01:x", "give dgc:FRACTION or dgc:FRACTION:ITERATIONS"),
        ("bsp", "dgc:0.01:2", "give more iterations"),
        ("bsp", "dgc:0.3:20", "a FRACTION below 0.25"),
        ("bsp", "dgc:0.01:-1", "give more iterations"),
        ("bsp", "topk:0.1", "use --wire dgc:FRACTION for gradients"),
        ("aladdin", "dgc:0.1", "use --wire topk:FRACTION for aladdin --push update"),
        ("easgd", "dgc:0.1", "is for pushed gradients"),
        ("arsgd", "dgc:0.1", "--algorithm arsgd has no server"),
    ],
)
def test_mistakes_are_one_line(algorithm: str, wire: str, line: str) -> None:
    options = {"backend": "mpi"} if algorithm == "arsgd" else {}
    with pytest.raises(ConfigError) as error:
        check_wire(find_algorithm(algorithm), configure(algorithm, options), wire)
    assert line in str(error.value) and "\n" not in str(error.value)
