"""What every algorithm of the registry is held to, with threads as ranks."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from teams import CLOSE, SHARDED_SIZE, Case, Result, cases, mixed, run, steady, toy

from aladdin_mpi.algorithms import REGISTRY
from aladdin_mpi.algorithms.base import Topology
from aladdin_mpi.runtime.globals import GlobalModel

pytestmark = pytest.mark.timeout(120)

NAMES = sorted(REGISTRY)
COUNTED = {"count_leavers": False, "staleness_aware": False}
"""ALADDIN's options with which every step counts alike, however late anything is."""


def having(trait: str) -> list[str]:
    return [name for name in NAMES if trait in REGISTRY[name].traits]


def lacking(trait: str) -> list[str]:
    return [name for name in NAMES if trait not in REGISTRY[name].traits]


def sgd(size: int, gradients: Any, iterations: int, **settings: float) -> np.ndarray:
    """torch's own SGD on the mean of some workers' gradients."""
    x = torch.nn.Parameter(torch.zeros(size))
    optimizer = torch.optim.SGD([x], **settings)
    for iteration in range(iterations):
        x.grad = torch.tensor(gradients(x.detach().double().numpy(), iteration)).float()
        optimizer.step()
    return x.detach().numpy()


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("case", cases(NAMES, (2, 3)), ids=str)
def test_converges_and_all_end_alike(case: Case, n: int) -> None:
    results = run(n, case.toy(iterations=lambda worker: 100))
    for result in results:
        assert np.abs(result.final - case.target).max() < CLOSE.get(case.name, 0.15), (
            "the quadratic's minimum"
        )
        assert np.array_equal(result.final, results[0].final), "all end with the same parameters"


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("case", cases(NAMES), ids=str)
def test_one_that_ends_early_holds_nobody_up(case: Case, n: int) -> None:
    results = run(n, case.toy(iterations=lambda worker: 3 + 12 * worker))
    for worker, result in enumerate(results):
        assert len(result.file.rows("steps")) == 3 + 12 * worker
        assert np.array_equal(result.final, results[0].final)
        assert np.isfinite(result.final).all()


@pytest.mark.parametrize("case", cases(NAMES), ids=str)
def test_one_that_makes_no_step_at_all_holds_nobody_up(case: Case) -> None:
    run(3, case.toy(iterations=lambda worker: 0 if worker == 1 else 10))


@pytest.mark.parametrize("case", cases(having("equals_sgd_at_one_worker")), ids=str)
def test_one_worker_makes_the_steps_of_its_optimizer(case: Case) -> None:
    settings = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-2}
    (result,) = run(1, case.toy(mixed, iterations=lambda worker: 20, **settings))
    expected = sgd(case.target.size, lambda x, k: mixed(0, x, k), 20, **settings)
    np.testing.assert_allclose(result.final, expected, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("case", cases([*having("synchronous"), "ssp"]), ids=str)
def test_synchronous_ones_make_the_steps_of_sgd_on_the_joined_batch(case: Case) -> None:
    options = {"staleness": 0} if case.name == "ssp" else {}
    results = run(4, case.toy(mixed, iterations=lambda worker: 20, options=options))
    expected = sgd(
        case.target.size, lambda x, k: sum(mixed(w, x, k) for w in range(4)) / 4, 20, lr=0.1
    )
    np.testing.assert_allclose(results[0].final, expected, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("case", cases(having("keeps_the_mean")), ids=str)
@pytest.mark.parametrize("n", [2, 3, 4])
def test_communication_keeps_the_mean(case: Case, n: int) -> None:
    options = COUNTED if case.name == "aladdin" else {}
    results = run(n, case.toy(steady, iterations=lambda worker: 12, options=options))
    steps = [-0.1 * steady(w, case.target, k) for w in range(n) for k in range(12)]
    np.testing.assert_allclose(results[0].final, np.sum(steps, axis=0) / n, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", cases(having("keeps_the_sum")), ids=str)
def test_communication_keeps_the_sum_of_workers_and_server(case: Case) -> None:
    results = run(3, case.toy(steady, iterations=lambda worker: 12))
    steps = [-0.1 * steady(w, case.target, k) for w in range(3) for k in range(12)]
    total = sum(result.own for result in results) + results[0].final
    np.testing.assert_allclose(total, np.sum(steps, axis=0), rtol=1e-4, atol=1e-4)


def straggling(case: Case) -> bool:
    """Worker 0 makes its second step only when the others have made 60, or make none any more."""
    others_done, counts = threading.Event(), [0, 0, 0]
    waited_in_vain = []

    def before_step(worker: int, iteration: int) -> None:
        counts[worker] = iteration
        if worker and min(counts[1:]) >= 50:
            others_done.set()
        if worker == 0 and iteration == 1:
            waited_in_vain.append(not others_done.wait(3.0))

    run(3, case.toy(iterations=lambda worker: 60, before_step=before_step))
    return waited_in_vain[0]


@pytest.mark.parametrize("case", cases(having("waits_for_stragglers")), ids=str)
def test_those_that_wait_for_stragglers(case: Case) -> None:
    assert straggling(case)


@pytest.mark.parametrize("case", cases(lacking("waits_for_stragglers")), ids=str)
def test_those_that_do_not(case: Case) -> None:
    assert not straggling(case)


@pytest.mark.parametrize(
    "case", cases(sorted({*having("synchronous"), "localsgd", "diloco", "d-psgd"})), ids=str
)
def test_those_that_repeat_to_the_bit(case: Case) -> None:
    once, again = (
        run(3, case.toy(mixed, momentum=0.9, iterations=lambda worker: 15)) for _ in range(2)
    )
    assert np.array_equal(once[0].final, again[0].final)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("case", cases(NAMES), ids=str)
def test_dtypes_are_kept(case: Case, dtype: torch.dtype) -> None:
    for result in run(2, case.toy(dtype=dtype, iterations=lambda worker: 60)):
        assert result.dtype == dtype
        assert np.abs(result.final - case.target).max() < CLOSE.get(case.name, 0.3)


@pytest.mark.parametrize(
    "case",
    cases(name for name in NAMES if REGISTRY[name].topology is Topology.SERVER),
    ids=str,
)
def test_payloads_are_never_changed(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = GlobalModel.handle

    def checked(self: GlobalModel, frames: Any) -> Any:
        before = [frame.payload.copy() for frame in frames]
        found = handle(self, frames)
        assert all(np.array_equal(a, f.payload) for a, f in zip(before, frames, strict=True))
        return found

    monkeypatch.setattr(GlobalModel, "handle", checked)
    run(3, case.toy(mixed))


@pytest.mark.parametrize("case", cases(NAMES), ids=str)
def test_a_nan_is_thrown_away_and_holds_nobody_up(case: Case) -> None:
    def sometimes(worker: int, x: np.ndarray, iteration: int) -> np.ndarray:
        bad = worker == 1 and iteration in (4, 5)
        return np.full(x.size, np.nan) if bad else x - case.target

    results = run(3, case.toy(sometimes, iterations=lambda worker: 100))
    for result in results:
        assert np.abs(result.final - case.target).max() < CLOSE.get(case.name, 0.2)


@pytest.mark.parametrize("case", cases(NAMES), ids=str)
def test_the_state_can_be_saved_and_loaded(case: Case) -> None:
    results = run(2, case.toy(mixed, iterations=lambda worker: 7))
    state = results[0].worker.state_dict()
    fresh = run(2, case.toy(mixed, iterations=lambda worker: 0))[0].worker
    fresh.load_state_dict(state)
    for key, value in fresh.state_dict().items():
        assert np.array_equal(value, state[key]), key


@pytest.mark.parametrize("case", cases(having("waits_for_stragglers")), ids=str)
def test_waiting_is_logged_as_blocked(case: Case) -> None:
    def before_step(worker: int, iteration: int) -> None:
        if worker == 0:
            threading.Event().wait(0.01)

    results = run(2, case.toy(iterations=lambda worker: 30, before_step=before_step))
    assert float(results[1].file.rows("steps")["blocked_s"].sum()) > 0.05


@pytest.mark.parametrize("n", [1, 3])
def test_bsp_gives_the_same_bits_with_any_number_of_servers(n: int) -> None:
    ends = [
        run(n, toy("bsp", mixed, momentum=0.9, size=SHARDED_SIZE, **cut))[0].final
        for cut in ({}, {"servers": 2}, {"servers": 3}, {"max_shard_bytes": 64})
    ]
    assert all(np.array_equal(ends[0], other) for other in ends[1:])


# -- identities -----------------------------------------------------------------------------------


def finals(name: str, **options: Any) -> np.ndarray:
    results: list[Result] = run(3, toy(name, mixed, iterations=lambda worker: 20, options=options))
    return results[0].final


def test_local_sgd_with_period_1_is_arsgd() -> None:
    np.testing.assert_allclose(finals("localsgd", period=1), finals("arsgd"), rtol=2e-5, atol=1e-6)


def test_diloco_with_a_plain_outer_step_is_local_sgd() -> None:
    plain = finals("diloco", period=5, outer_lr=1.0, outer_momentum=0.0)
    np.testing.assert_allclose(plain, finals("localsgd", period=5), rtol=2e-5, atol=1e-6)


def test_gosgd_that_never_sends_is_independent_workers() -> None:
    results = run(3, toy("gosgd", mixed, options={"p": 0.0}))
    for worker, result in enumerate(results):
        alone = sgd(4, lambda x, k, w=worker: mixed(w, x, k), 20, lr=0.1)
        np.testing.assert_allclose(result.own, alone, rtol=1e-6)


def test_push_sum_weights_sum_to_n() -> None:
    for name, total, options in (("sgp", 4.0, {}), ("sgp", 4.0, {"overlap": 0}),
                                 ("gosgd", 1.0, {"p": 1.0})):  # fmt: skip
        results = run(
            4, toy(name, mixed, options=options, iterations=lambda worker: 5 + 3 * worker)
        )
        assert sum(result.worker.weight for result in results) == pytest.approx(total)


@pytest.mark.parametrize("name", having("waits_for_answers"))
def test_every_push_is_answered_in_its_step(name: str) -> None:
    for result in run(3, toy(name, iterations=lambda worker: 8 + worker)):
        steps, mixes = result.file.rows("steps"), result.file.rows("mixes")
        assert len(mixes) == len(steps)
        assert (mixes["time_s"] >= steps["start_s"]).all()
        assert (mixes["time_s"] <= steps["start_s"] + steps["step_s"] + 1e-4).all()
