"""Parameters on a GPU: copies that nobody waits for, and mixes, against the CPU's.

Every test runs with a stand-in on the CPU, whose copies are late by chance, and, where there is a
GPU, with that.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import require
import teams
import torch
from devices import stand_in
from lockstep import Lockstep
from teams import CLOSE, Case, towards

from aladdin_mpi.core.flat import FlatBuffers, FlatParams
from aladdin_mpi.core.shards import Shard
from aladdin_mpi.core.staging import STREAMS, CudaStream, HostStream, Stage
from aladdin_mpi.errors import NonFiniteError

pytestmark = pytest.mark.timeout(120)

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SIZE = 1000

Place = Callable[[float], str]


class PromptStream(CudaStream):
    """A copy has arrived when somebody looks."""

    def done(self) -> bool:
        torch.cuda.synchronize()
        return super().done()


@pytest.fixture(params=["stand-in", pytest.param("gpu", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Call it with the chance that a copy has arrived; returns the device to put a model on."""
    if request.param == "gpu":
        require.gpu()

        def on_gpu(chance: float = 0.3) -> str:
            if chance == 1.0:
                monkeypatch.setitem(STREAMS, "cuda", PromptStream)
            return "cuda"

        return on_gpu

    def on_cpu(chance: float = 0.3) -> str:
        stand_in(monkeypatch, chance)
        return "cpu"

    return on_cpu


def model_of(values: np.ndarray, dtype: torch.dtype, device: str = "cpu") -> torch.nn.Module:
    model = torch.nn.Module()
    model.x = torch.nn.Parameter(torch.tensor(values, dtype=dtype, device=device))
    return model


def flat_of(model: torch.nn.Module) -> FlatParams:
    return FlatParams(model.named_parameters(), [list(model.parameters())])


def make(call: Callable[[], bool]) -> int:
    """Make a call until it returns True; returns how often it was made."""
    calls = 1
    while not call():
        calls += 1
    return calls


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_copy_is_of_the_parameters_as_they_were_when_it_was_begun(place, dtype):
    values = np.random.default_rng(0).normal(size=SIZE)
    model = model_of(values, dtype, place())
    flat = flat_of(model)
    assert not flat.direct
    expected = torch.tensor(values, dtype=dtype).float().numpy()
    out, later = flat.new_vector(), flat.new_vector()
    for _ in range(3):
        model.x.data.copy_(torch.tensor(values))
        first = flat.staging.read()
        model.x.data.add_(1.0)
        second = flat.staging.read()
        model.x.data.fill_(float("nan"))
        make(second.done)
        assert second.take(later)
        make(first.done)
        assert first.take(out)
        assert np.array_equal(out[:SIZE], expected)
        assert np.array_equal(later[:SIZE], (torch.tensor(values, dtype=dtype) + 1).float())
    bad = flat.staging.read()
    make(bad.done)
    assert not bad.take(out)


@pytest.mark.parametrize("lagged", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_mix_has_the_bits_of_the_cpu(place, dtype, lagged):
    rng = np.random.default_rng(1)
    values, target, s, r = rng.normal(size=(4, SIZE)).astype(np.float32)
    reference = flat_of(model_of(values, dtype))
    padded = [np.zeros(reference.size, np.float32) for _ in range(3)]
    for vector, part in zip(padded, (target, s, r), strict=True):
        vector[:SIZE] = part
    expected = padded[0].copy()
    reference.mix(0.3, expected, padded[1] if lagged else None)

    model = model_of(values, dtype, place())
    flat = flat_of(model)
    for _ in range(2):  # the second one through the same memory
        model.x.data.copy_(torch.tensor(values))
        mix = flat.staging.mix(0.3)
        assert not mix.apply(True), "nothing was sent yet"
        mix.prepare(padded[0], padded[1] if lagged else None)
        make(partial(mix.apply, True))
        own = padded[2].copy()
        make(partial(mix.add_change, own))
        assert np.array_equal(model.x.detach().float().cpu().numpy(), reference.x[:SIZE])
        assert np.array_equal(own, padded[2] + expected)


def test_the_stages_of_both_ranges_of_a_vector(place):
    model = model_of(np.arange(SIZE), torch.float32, place())
    flat = flat_of(model)
    shards = [Shard(flat, 0, 512), Shard(flat, 512, flat.size)]
    readings = [shard.staging.read() for shard in shards]
    found = []
    for shard, reading in zip(shards, readings, strict=True):
        out = shard.new_vector()
        make(reading.done)
        assert reading.take(out)
        found.append(out)
    assert np.array_equal(np.concatenate(found)[:SIZE], np.arange(SIZE))
    target = shards[1].new_vector()
    mix = shards[1].staging.mix(1.0)
    mix.prepare(target, None)
    make(lambda: mix.apply(False))
    assert np.array_equal(model.x.detach().cpu()[:512], np.arange(512))
    assert not model.x.detach()[512:].any()


def test_buffers_are_written_as_they_were(place):
    device = place()
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(2).double())
    model = model.to(device)
    buffers = FlatBuffers(model, set())
    posted: list[Callable[[], bool]] = []
    for turn in range(3):
        for value, buffer in enumerate(model.buffers(), 10 * turn):
            buffer.fill_(value)
        floats, counts = np.zeros(10, np.float32), np.zeros(2, np.int64)
        buffers.write(floats, counts, lambda call, *args: posted.append(lambda: call(*args)))
        for buffer in model.buffers():
            buffer.fill_(77)
        make(posted.pop())
        assert (floats - 10 * turn).tolist() == [0] * 3 + [1] * 3 + [3] * 2 + [4] * 2
        assert (counts - 10 * turn).tolist() == [2, 5]


LAGGED_PAPER = {"preset": "paper", "lag_compensation": True}


def run_of(n: int, steps: int, device: str, **options) -> Lockstep:
    rng = np.random.default_rng(3)
    run = Lockstep(n, device=device, **options)
    for _ in range(steps):
        run.step(int(rng.integers(n)), rng.normal(size=4))
        run.turn()
    return run


@pytest.mark.parametrize(
    "options",
    [{}, {"lag_compensation": False}, {"batch_norm": True}, {"preset": "paper"}, LAGGED_PAPER],
    ids=str,
)
def test_without_delay_a_run_has_the_bits_of_the_cpu(place, options):
    """What is at hand at once is used at once: the same trajectory, step by step."""
    expected = run_of(3, 60, "cpu", **options)
    run = run_of(3, 60, place(1.0), **options)
    run.recorder.flush()
    assert len(run.file.rows("mixes")) >= 3
    for worker in range(3):
        assert np.array_equal(run.x(worker), expected.x(worker))
    assert np.array_equal(run.server, expected.server)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("n,period", [(1, 4), (2, 2), (4, 1)])
def test_late_mixes_are_never_pushed(place, n, period, seed):
    """Exact while every value is a short dyadic fraction, α = 1/2."""
    run = Lockstep(
        n, seed=seed, chance=0.5, period=period, device=place(0.2), staleness_aware=False
    )
    while len(run.file.rows("mixes")) < 6:
        worker = int(run.rng.integers(n))
        run.step(worker, run.rng.integers(-4, 5, run.steps.shape[1]))
        run.turn()
        run.recorder.flush()
    run.finish()
    assert np.array_equal(run.server, run.steps.sum(0) / n)


@pytest.mark.parametrize("options", [{"preset": "paper"}, LAGGED_PAPER], ids=str)
def test_pushed_gradients_mix_late_as_well(place, options):
    """What is read before it has arrived is NaN on the stand-in."""
    run = run_of(2, 100, place(0.2), period=2, **options)
    run.recorder.flush()
    assert len(run.file.rows("mixes")) >= 10
    assert len(run.file.rows("events")) == 0
    assert np.isfinite(run.x(0)).all() and np.isfinite(run.server).all()


def test_a_nan_is_noticed_before_it_is_sent(place):
    """Two steps: what they were made of is gone, the server has what was pushed before."""
    run = Lockstep(1, size=2, device=place(0.2), replies=False, in_flight="1")
    run.step(0, 1.0)
    while not run.server.any():
        run.turn()
        run.world.workers[0].deliver()
    assert np.array_equal(run.server, [1.0, 1.0])
    run.step(0, np.array([np.nan, 1.0]))
    while len(run.pushes) < 2:
        run.turn()
        run.world.workers[0].deliver()
    assert run.pushes[1].iterations == 1
    run.turn()
    assert np.array_equal(run.server, [1.0, 1.0])
    run.step(0, 1.0)  # thrown away: its gradient was taken where x was not finite
    assert np.array_equal(run.x(0), [1.0, 1.0])
    run.recorder.flush()
    assert len(run.file.rows("events")) == 1
    run.step(0, 2.0)
    run.finish()
    assert np.array_equal(run.server, [3.0, 3.0])


def test_a_nan_in_the_last_step_is_not_pushed(place):
    run = Lockstep(1, size=2, device=place(0.2), replies=False)
    run.step(0, 1.0)
    run.step(0, np.nan)
    run.finish()
    assert np.array_equal(run.server, [1.0, 1.0])


def test_a_nan_can_stop_the_run_one_step_later(place):
    run = Lockstep(1, size=2, on_nonfinite="stop", device=place(0.2))
    run.step(0, np.nan)
    with pytest.raises(NonFiniteError, match="training has diverged"):
        while True:
            run.turn()
            run.step(0, 1.0)


def test_all_ranges_go_back_after_a_nan_in_one(place):
    """Several servers: one worker's gradient is not finite in its third step."""

    def broken_once(worker: int, x: np.ndarray, iteration: int) -> np.ndarray:
        g = towards(worker, x, iteration)
        if worker == 1 and iteration == 3:
            g[20] = np.nan
        return g if np.isfinite(x).all() else np.full_like(x, np.nan)

    case = Case("aladdin", 3)
    training = case.toy(broken_once, iterations=lambda worker: 120, device=place(0.3))
    for result in teams.run(2, training):
        assert np.abs(result.own - case.target).max() < CLOSE["aladdin"]
        assert np.abs(result.final - case.target).max() < CLOSE["aladdin"]


def test_what_lies_on_the_cpu_is_there_at_once():
    stage = Stage(4, torch.float32, torch.device("cpu"))
    assert stage.host is stage.device
    stage.fetch()
    stage.send()
    assert stage.done()
    out = torch.zeros(4)
    HostStream().copy(out, torch.ones(4))
    assert (out == 1).all()


@pytest.mark.gpu
def test_a_copy_begun_while_the_gpu_computes_holds_nobody_up():
    require.gpu()
    flat = flat_of(model_of(np.ones(1 << 22), torch.float32, "cuda"))
    warm = flat.staging.read()
    make(warm.done)
    out = flat.new_vector()
    warm.take(out)
    torch.cuda._sleep(1_000_000_000)  # clock cycles: half a second or so
    reading = flat.staging.read()
    assert not reading.done(), "the call came back before the stream had come so far"
    make(reading.done)
    assert reading.take(out)
    assert (out == 1).all()


@pytest.mark.gpu
def test_the_memory_of_the_host_is_page_locked():
    require.gpu()
    stage = Stage(1000, torch.float32, torch.device("cuda"))
    assert stage.host.is_pinned()
    assert stage.host.device.type == "cpu"


@pytest.mark.gpu
def test_stages_on_every_gpu():
    require.gpu()
    for index in range(torch.cuda.device_count()):
        stage = Stage(1000, torch.float32, torch.device("cuda", index))
        stage.device.fill_(index + 1.0)
        stage.fetch()
        make(stage.done)
        assert (stage.host == index + 1).all()
        stage.host.fill_(7.0)
        stage.send()
        make(stage.done)
        stage.follow()
        assert bool((stage.device == 7).all())
