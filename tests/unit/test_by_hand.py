"""One step or two of every algorithm, computed by hand."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import pytest
from lockstep import Lockstep
from teams import Result, Training, run

from aladdin_mpi.algorithms import bsp, dssp, sgp, shat, ssp
from aladdin_mpi.algorithms.asp import Server as AspServer
from aladdin_mpi.messages import Apply, Hold, Merge, MergeHeld, Push, Send

pytestmark = pytest.mark.timeout(60)

ETA = (0.1,)


def push(worker: int, sequence: int, **fields: Any) -> Push:
    return Push(worker, sequence, **{"rates": ETA, "wants_reply": True, **fields})


def constant(*gradients: float) -> Any:
    """Worker i's gradient in every iteration."""
    return lambda worker, x, iteration: np.full(1, gradients[worker])


def train(name: str, iterations: int, *gradients: float, **options: Any) -> list[Result]:
    training = Training(
        name, constant(*gradients), options, size=1, lr=1.0, iterations=lambda worker: iterations
    )
    return run(len(gradients), training)


def own(results: list[Result]) -> list[float]:
    return [float(result.own[0]) for result in results]


# -- over a server --------------------------------------------------------------------------------


def test_bsp_merges_in_the_order_of_the_workers_when_all_have_come() -> None:
    server = bsp.Server(bsp.Config(), 3)
    assert server.on_push(push(2, 1)) == [Hold()]
    assert server.on_push(push(0, 1)) == [Hold()]
    assert server.on_push(push(1, 1)) == [
        MergeHeld("sum", (0, 1, 2)), Apply(ETA, 1 / 3),
        Send(0, 1.0), Send(1, 1.0), Send(2, 1.0),
    ]  # fmt: skip


def test_bsp_goes_on_without_one_that_has_ended_or_had_no_finite_gradient() -> None:
    server = bsp.Server(bsp.Config(), 3)
    server.on_push(push(0, 1))
    server.on_push(push(1, 1, iterations=0))
    assert server.on_push(push(2, 1, iterations=0, last=True)) == []
    assert server.on_leave(2) == [
        MergeHeld("sum", (0,)), Apply(ETA, 1.0), Send(0, 1.0), Send(1, 1.0),
    ]  # fmt: skip


def test_asp_applies_each_gradient_on_arrival() -> None:
    server = AspServer(None, 4)
    assert server.on_push(push(1, 1)) == [Merge("sum", 1.0), Apply(ETA, 0.25), Send(1, 1.0)]


def test_ssp_answers_when_the_slowest_is_near_enough() -> None:
    server = ssp.BoundedServer(1, 2)
    go = [Merge("sum", 1.0), Apply(ETA, 0.5)]
    assert server.on_push(push(0, 1, wants_reply=False)) == go
    assert server.on_push(push(0, 2)) == go, "two ahead, one is allowed"
    assert server.on_push(push(1, 1, wants_reply=False)) == [*go, Send(0, 1.0, 1)]
    assert server.on_push(push(0, 3)) == go
    assert server.on_leave(1) == [Send(0, 1.0, 3)], "nobody else is slow"


def test_ssp_local_steps_are_at_full_rate_until_the_copy_is_too_old() -> None:
    """Gradient 1 at η = 1: three local steps, then x̃ with all four pushes."""
    (result,) = train("ssp", 3, 1.0)
    assert own([result]) == [-3.0]
    (result,) = train("ssp", 4, 1.0)
    assert own([result]) == [-4.0]


def test_dssp_chooses_the_iterations_after_which_the_wait_is_shortest() -> None:
    server = dssp.Server(dssp.Config(low=1, high=4), 2)
    server.clocks = {0: 2, 1: 1}
    server.times = [1.0, 2.5]
    # waits after r = 0 … 3 further iterations: 2.5, 1.5, 0.5, 2.0
    assert server.further(0) == 2
    server.times = [1.0, 3.0]  # 3, 2, 1, 0
    assert server.further(0) == 3
    server.clocks = {0: 5, 1: 1}
    assert server.further(0) == 0, "never further than high"


def test_dssp_with_equal_bounds_decides_as_ssp() -> None:
    rng = np.random.default_rng(0)
    fixed, moving = ssp.BoundedServer(2, 3), dssp.Server(dssp.Config(low=2, high=2), 3)
    for sequence in range(200):
        worker = int(rng.integers(3))
        if worker in fixed.waiting:
            continue
        one = push(worker, sequence, wants_reply=bool(rng.random() < 0.5), iteration_s=rng.random())
        assert fixed.on_push(one) == moving.on_push(one)


def test_easgd_moves_worker_and_center_by_the_same() -> None:
    """β·n = 0.5, one worker: x = −1, −2 → exchange d = −1 → x = −1, x̃ = −1."""
    (result,) = train("easgd", 2, 1.0, period=2, beta=0.5)
    assert own([result]) == [-1.0]
    assert result.final[0] == -1.0


@pytest.mark.parametrize(
    ("n", "by_others", "alpha"),
    [(1, 0, 1.0), (4, 0, 0.0), (4, 3, 1 - 4 / 3 / math.log(4)), (4, 30, 1 - 4 / 30 / math.log(4))],
)
def test_shat_mixes_by_scale_and_heterogeneity(n: int, by_others: int, alpha: float) -> None:
    assert shat.mixing_weight(n, by_others) == pytest.approx(min(1.0, max(0.0, alpha)))


def test_shat_counts_merges_of_others() -> None:
    server = shat.Server(shat.Config(), 2)
    alphas = [server.on_push(push(w, 1))[-1].alpha for w in (0, 1, 1, 0)]
    assert alphas == [shat.mixing_weight(2, c) for c in (0, 1, 0, 2)]


def test_asp_in_turns() -> None:
    """η = 1, n = 2: each gradient moves x̃ by half of it."""
    done: list[float] = []
    order = [threading.Event() for _ in range(2)]
    order[0].set()

    def before_step(worker: int, iteration: int) -> None:
        order[worker].wait(10)

    def gradient(worker: int, x: np.ndarray, iteration: int) -> np.ndarray:
        done.append(float(x[0]))
        return np.full(1, 2.0)

    training = Training(
        "asp", gradient, size=1, lr=1.0, iterations=lambda worker: 1, before_step=before_step
    )
    original = training.before_step

    def release(worker: int, iteration: int) -> None:
        original(worker, iteration)
        order[1].set()

    training.before_step = release
    results = run(2, training)
    assert results[0].final[0] == -2.0
    assert done == [0.0, 0.0]


# -- all together ---------------------------------------------------------------------------------


def test_arsgd_steps_with_the_mean() -> None:
    assert own(train("arsgd", 1, 1.0, 2.0, 6.0, backend="mpi")) == [-3.0, -3.0, -3.0]


def test_local_sgd_averages_parameters() -> None:
    assert own(train("localsgd", 1, 1.0, 3.0, period=2)) == [-1.0, -3.0]
    assert own(train("localsgd", 2, 1.0, 3.0, period=2)) == [-4.0, -4.0]


def test_diloco_takes_a_nesterov_step_on_the_mean_difference() -> None:
    """r = 0, x = −1 and −3: Δ = 2, v = 2, r = −0.7 (2 + 0.9·2); then Δ = 2, v = 3.8."""
    first = -0.7 * (2 + 0.9 * 2)
    assert own(train("diloco", 1, 1.0, 3.0, period=1)) == pytest.approx([first, first])
    second = first - 0.7 * (2 + 0.9 * 3.8)
    assert own(train("diloco", 2, 1.0, 3.0, period=1)) == pytest.approx([second, second])


# -- from worker to worker ------------------------------------------------------------------------


def test_d_psgd_averages_with_its_neighbours_one_step_behind() -> None:
    """x(1) = −g; x_i(2) = mean of x(1) over the ring of three − g_i."""
    results = train("d-psgd", 2, 1.0, 2.0, 6.0)
    assert own(results) == pytest.approx([-3 - 1, -3 - 2, -3 - 6])
    four = train("d-psgd", 2, 3.0, 6.0, 9.0, 12.0)
    assert own(four) == pytest.approx(
        [-(12 + 3 + 6) / 3 - 3, -(3 + 6 + 9) / 3 - 6, -(6 + 9 + 12) / 3 - 9, -(9 + 12 + 3) / 3 - 12]
    )


def test_sgp_keeps_half_and_sends_half() -> None:
    """Two workers, overlap 0: x = −1 and −3, halves exchanged: both −2 with weight 1."""
    results = train("sgp", 1, 1.0, 3.0, overlap=0)
    assert own(results) == [-2.0, -2.0]


@pytest.mark.parametrize(
    ("n", "distances"), [(2, [1, 1, 1]), (3, [1, 2, 1]), (4, [1, 2, 1]), (7, [1, 2, 4, 1])]
)
def test_the_directed_exponential_graph(n: int, distances: list[int]) -> None:
    assert [sgp.distance(n, k) for k in range(len(distances))] == distances


def test_gosgd_takes_the_weighted_mean() -> None:
    """Whatever the order: weights sum to 1, and all end with Σ w x."""
    results = train("gosgd", 6, 1.0, 3.0, p=1.0)
    weights = [result.worker.weight for result in results]
    assert sum(weights) == pytest.approx(1.0)
    assert -18.0 <= results[0].final[0] <= -6.0


def test_ad_psgd_keeps_the_sum_and_ends_with_the_mean() -> None:
    results = train("ad-psgd", 5, 1.0, 3.0, 5.0)
    assert results[0].final[0] == pytest.approx(-5 * 3.0)


def test_pushed_gradients_of_aladdin_wait_for_the_period() -> None:
    team = Lockstep(1, size=1, preset="paper", period=2, server_momentum=0.0,
                    server_weight_decay=0.0)  # fmt: skip
    team.step(0, 1.0)
    team.turn()
    assert team.server[0] == 0.0
