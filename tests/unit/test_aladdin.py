"""ALADDIN: the paper's algorithms by hand, the invariants, and what each improvement is for."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from lockstep import Blocked, Lockstep

from aladdin_mpi.algorithms.aladdin import Config, Server
from aladdin_mpi.errors import ConfigError, NonFiniteError
from aladdin_mpi.messages import Apply, Merge, Push, Send

pytestmark = pytest.mark.timeout(120)

HALF = 1 - 1 / math.sqrt(4)  # α of two workers with π = 2, or of four with π = 1


def paper(n: int, **options) -> Lockstep:
    return Lockstep(n, preset="paper", server_momentum=0.0, server_weight_decay=0.0, **options)


# -- the algorithms by hand -----------------------------------------------------------------------


def test_algorithms_1_and_2_by_hand():
    """n = 2, π = 2, η = 0.1: worker 0 pushes gradients −1 and −5, worker 1 pushes −3 in between."""
    run = paper(2, size=1, period=2, lr=0.1)
    run.step(0, 1.0)
    run.turn()
    run.step(1, 3.0)
    run.turn()
    assert run.server[0] == 0.0, "the lazy global update waits for c_i = π"
    run.hold.add("reply")
    run.step(0, 5.0)
    run.turn()
    assert run.server[0] == pytest.approx(0.1 * (1 + 3 + 5) / 3)  # x̃ − η g̃/c̃
    assert run.x(0)[0] == pytest.approx(0.1 * (1 + 5))  # self-updates only
    run.hold.clear()
    run.step(0, 2.0)  # the reply is there: (1 − α) x_0 + α x̃
    assert run.x(0)[0] == pytest.approx((1 - HALF) * 0.8 + HALF * 0.3)
    assert run.x(1)[0] == pytest.approx(0.3), "worker 1 has no reply: its c_i is 1"


def test_server_momentum_and_weight_decay_are_those_of_sgd():
    run = Lockstep(1, size=1, preset="paper", period=1, lr=0.5)
    run.step(0, 1.0)
    run.turn()
    run.step(0, 1.0)
    run.turn()
    v1 = -1.0
    x1 = -0.5 * v1
    v2 = 0.9 * v1 + (-1.0 + 1e-4 * x1)
    assert run.server[0] == pytest.approx(x1 - 0.5 * v2, rel=1e-6)


def push(worker: int, sequence: int, iterations: int = 1, wants: bool = False, n: int = 4) -> Push:
    return Push(worker, sequence, iterations, wants_reply=wants, rates=(0.1,), active=n)


def test_decisions_for_pushed_updates():
    server = Server(Config(period=4), 4)
    assert server.on_push(push(0, 1)) == [Merge("global", 0.25)]
    assert server.on_push(push(1, 1, 3)) == [Merge("global", 0.25)]
    reply = server.on_push(push(0, 2, 3, wants=True))
    assert reply == [Merge("global", 0.25), Send(0, 1 - 1 / math.sqrt(16))]
    assert server.on_leave(3) == []
    assert server.on_push(push(0, 3, 4, wants=True, n=3)) == [
        Merge("global", 1 / 3),
        Send(0, 1 - 1 / math.sqrt(12)),
    ]


def test_decisions_for_pushed_gradients():
    cfg = Config(preset="paper", period=2)
    server = Server(cfg, 4)
    assert server.on_push(push(0, 1)) == [Merge("sum", 1.0)]
    assert server.on_push(push(1, 1)) == [Merge("sum", 1.0)]
    assert server.on_push(push(0, 2, 1, wants=True)) == [
        Merge("sum", 1.0),
        Apply((0.1,), 1 / 3, 0.9, 1e-4),
        Send(0, 1 - 1 / math.sqrt(8)),
    ]
    assert server.on_push(push(1, 2, 1, wants=True))[1] == Apply((0.1,), 1.0, 0.9, 1e-4)


def test_alpha_from_the_count_is_zero_right_after_another_reply():
    server = Server(Config(preset="paper", period=2, alpha="count"), 4)
    for worker in (0, 1):
        server.on_push(push(worker, 1))
    assert server.on_push(push(0, 2, 1, wants=True))[-1] == Send(0, 1 - 1 / math.sqrt(3))
    assert server.on_push(push(1, 2, 1, wants=True))[-1] == Send(1, 0.0)


def test_a_server_goes_on_from_its_state():
    one, two = Server(Config(), 2), Server(Config(), 2)
    one.on_push(push(0, 1, 3))
    two.load_state_dict(one.state_dict())
    assert one.on_push(push(0, 2, 1, wants=True)) == two.on_push(push(0, 2, 1, wants=True))


@pytest.mark.parametrize(
    "options",
    [{"period": 0}, {"preset": "mine"}, {"push": "all"}, {"alpha": "0.5"}, {"in_flight": "3"},
     {"server_momentum": 1.0}, {"server_weight_decay": -1.0}],
)  # fmt: skip
def test_options_are_checked_in_one_line(options):
    with pytest.raises(ConfigError) as caught:
        Config(**options)
    name, value = next(iter(options.items()))
    assert str(caught.value).startswith(f"--{name.replace('_', '-')} {value}: ")
    assert "\n" not in str(caught.value)


# -- the invariant --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("in_flight", ["1", "2"])
def test_global_is_start_plus_the_mean_of_all_steps(n, seed, in_flight):
    """Exact on integers under random delays and coalescing, by self-updates only."""
    run = Lockstep(n, seed=seed, chance=0.3, period=2, replies=False, in_flight=in_flight)
    for _ in range(150):
        worker = int(run.rng.integers(n))
        run.step(worker, run.rng.integers(-8, 9, run.steps.shape[1]))
        if run.rng.random() < 0.5:
            run.turn()
    assert any(p.iterations > 1 for p in run.pushes), "nothing was coalesced"
    run.finish()
    assert np.array_equal(run.server, run.steps.sum(0) / n)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("n,period", [(1, 4), (2, 2), (4, 1)])
def test_mixes_are_never_pushed(n, period, seed):
    """The same with replies: exact while every value is a short dyadic fraction, α = 1/2."""
    run = Lockstep(n, seed=seed, chance=0.5, period=period, staleness_aware=False)
    while sum(len(run.file.rows(t)) for t in ("mixes",)) < 6:
        worker = int(run.rng.integers(n))
        run.step(worker, run.rng.integers(-4, 5, run.steps.shape[1]))
        run.turn()
        run.recorder.flush()
    run.finish()
    assert np.array_equal(run.server, run.steps.sum(0) / n)


def test_mixes_are_never_pushed_in_a_long_run():
    run = Lockstep(4, seed=1, chance=0.5, period=4, staleness_aware=False)
    for _ in range(4000):
        run.step(int(run.rng.integers(4)), run.rng.normal(size=4))
        run.turn()
    run.finish()
    error = np.abs(run.server - run.steps.sum(0) / 4).max()
    assert error < 1e-3  # 4000 float32 additions to values of about 60: a few 1e-6 each


def test_a_push_is_weighted_by_those_who_trained_when_its_steps_were_begun():
    run = Lockstep(2, size=1, replies=False)
    for worker in (0, 1):
        run.step(worker, 1.0)
    run.turn()
    run.finish(1)
    expected = 2 / 2
    for weight in (1 / 2, 1 / 2, 1.0):  # worker 0 hears of it with an acknowledgement
        run.step(0, 1.0)
        run.turn()
        expected += weight
        assert run.server[0] == expected
    assert [p.active for p in run.pushes if p.worker == 0] == [2, 2, 2, 1]


# -- what each improvement is for: holds with it, fails without -----------------------------------


def moves_as_the_mean(**options) -> bool:
    run = Lockstep(4, size=1, period=1, lr=0.5, server_momentum=0.0, server_weight_decay=0.0,
                   **options)  # fmt: skip
    for worker in range(4):
        run.step(worker, 1.0)
        run.turn()
    return bool(np.isclose(run.server[0], 0.5))


def test_1_pushed_updates_move_the_global_model_as_the_mean_step():
    assert moves_as_the_mean(push="update")
    assert not moves_as_the_mean(push="gradient"), "n/π times as far, by the printed update"


def never_waits(**options) -> bool:
    run = Lockstep(1, **options)
    run.hold = {"push", "notice"}
    try:
        for _ in range(10):
            run.step(0, 1.0)
    except Blocked:
        return False
    run.finish()
    return bool((run.server == 10.0).all())


def test_2_coalescing_never_waits_and_loses_nothing():
    for in_flight in ("auto", "1", "2"):
        assert never_waits(coalesce=True, in_flight=in_flight)
        assert not never_waits(coalesce=False, in_flight=in_flight)


def test_2_pushed_gradients_coalesce_with_their_count():
    run = paper(1, size=1, period=8)
    run.hold = {"notice"}
    for _ in range(5):
        run.step(0, 1.0)
    run.hold.clear()
    run.turn()
    run.step(0, 1.0)
    run.turn()
    run.turn()
    assert [p.iterations for p in run.pushes] == [1, 1, 4]


def equals_sgd(**options) -> bool:
    run = Lockstep(1, size=1, period=2, **options)
    for k in range(40):
        run.hold = set() if k % 5 == 0 else {"reply"}  # replies arrive some steps late
        run.step(0, 1.0)
        run.turn()
        if run.x(0)[0] != k + 1:
            return False
    return True


def test_3_lag_compensation_keeps_the_steps_made_meanwhile():
    """With one worker the result is plain SGD, exactly."""
    assert equals_sgd(lag_compensation=True)
    assert not equals_sgd(lag_compensation=False)


def overshoots(**options) -> bool:
    """Worker 1 has moved x̃ to 8; worker 0 stands still at 0 while its replies are late."""
    run = Lockstep(2, size=1, period=2, **options)
    run.step(1, 16.0)
    run.turn()
    run.hold = {"reply"}
    for _ in range(8):
        run.step(0, 0.0)
        run.turn()
    run.hold.clear()
    for _ in range(3):
        run.step(0, 0.0)
        run.turn()
        if run.x(0)[0] > 8.0:
            return True
    return False


def test_4_no_correction_is_applied_twice():
    assert not overshoots(one_outstanding=True)
    assert overshoots(one_outstanding=False)


def test_4_a_reply_that_was_thrown_away_counts_as_handled():
    run = Lockstep(1, size=1, period=1)
    run.hold = {"reply"}
    run.step(0, 1.0)
    run.turn()
    run.world.workers[0].channels[0].replies[0].params[0] = np.nan
    run.hold.clear()
    run.step(0, 1.0)
    assert run.x(0)[0] == 2.0
    run.turn()
    run.step(0, 1.0)
    run.turn()
    assert run.pushes[-1].handled == 1 and run.pushes[-1].wants_reply
    run.recorder.flush()
    assert run.file.rows("mixes")["discarded"].tolist()[0] == 1


def one_that_stays_moves_fully(**options) -> bool:
    run = Lockstep(2, size=1, **options)
    run.finish(1)
    for _ in range(3):
        run.step(0, 1.0)
        run.turn()
    return bool(run.server[0] == 1 / 2 + 1 / 2 + 1)


def test_5_a_worker_that_has_left_does_not_count():
    assert one_that_stays_moves_fully(count_leavers=True)
    assert not one_that_stays_moves_fully(count_leavers=False)


def steps_while_no_reply_arrives(steps: int, **options) -> np.ndarray:
    """How far x goes in each step of a gradient of 1, with period 2."""
    run = Lockstep(2, size=1, period=2, **options)
    run.hold = {"reply"}
    seen = [run.x(0)[0]]
    for _ in range(steps):
        run.step(0, 1.0)
        run.turn()
        seen.append(run.x(0)[0])
    return np.diff(seen)


def test_6_steps_become_smaller_while_replies_are_late():
    """η min(1, (π + 4)/a): full ones up to six iterations, then 6/7, 6/8, …"""
    went = steps_while_no_reply_arrives(12, staleness_aware=True)
    np.testing.assert_allclose(went, [1] * 6 + [6 / age for age in range(7, 13)], rtol=1e-6)
    assert set(steps_while_no_reply_arrives(12, staleness_aware=False)) == {1.0}


def test_6_a_reply_is_as_old_as_the_push_that_it_names():
    run = Lockstep(2, size=1, period=2)
    run.hold = {"reply"}
    for _ in range(9):  # the push of the second one asks
        run.step(0, 1.0)
        run.turn()
    run.hold.clear()
    run.step(0, 0.0)  # mixes it in: the next step is 9 iterations after that push
    run.hold = {"reply"}
    before = run.x(0)[0]
    run.step(0, 1.0)
    assert run.x(0)[0] - before == pytest.approx(6 / 9, rel=1e-6)
    run.recorder.flush()
    lr = run.file.rows("steps")["lr"]
    assert lr[0] == 1.0 and lr[-1] == pytest.approx(6 / 9), "the log has the rate that was used"
    assert run.drivers[0][1].param_groups[0]["lr"] == 1.0, "the user's rate is what it was"


@pytest.mark.parametrize("options", [{"replies": False}, {"push": "none"}, {"preset": "paper"}])
def test_6_where_no_replies_are_expected_steps_stay_as_they_are(options):
    assert set(steps_while_no_reply_arrives(12, **options)) == {1.0}


def in_flight_reached(in_flight: str, send_time_s: float) -> int:
    run = Lockstep(1, in_flight=in_flight)
    run.hold = {"push"}
    driver = run.drivers[0][0]
    for _ in range(4):
        driver.end.send_time_s, driver.port.iteration_mean_s = send_time_s, 0.1
        run.step(0, 1.0)
    return run.drivers[0][0].end.in_flight()


def test_a_second_push_is_under_way_only_while_the_link_is_not_full():
    assert in_flight_reached("auto", send_time_s=0.01) == 2
    assert in_flight_reached("auto", send_time_s=0.5) == 1, "a queue would only be staleness"
    assert in_flight_reached("1", 0.01) == 1
    assert in_flight_reached("2", 0.5) == 2


# -- two slots, one reply: which push a reply names -----------------------------------------------


def test_a_reply_names_the_last_push_merged_with_the_one_that_asked():
    run = Lockstep(1, size=1, period=1, in_flight="2")
    run.hold = {"push", "reply"}
    run.step(0, 1.0)
    run.step(0, 1.0)  # asks nothing: one reply is due
    run.hold = {"reply"}
    run.turn()  # both are merged at once
    assert [p.wants_reply for p in run.pushes] == [True, False]
    frame = run.world.workers[0].channels[0].replies[0]
    assert frame.read_reply().sequence == 2
    run.hold.clear()
    run.step(0, 1.0)
    assert run.x(0)[0] == 3.0


# -- NaN ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("push_what", ["update", "gradient"])
def test_a_nan_is_thrown_away_before_the_push(push_what):
    run = Lockstep(
        1, size=2, push=push_what, server_momentum=0.0, server_weight_decay=0.0, period=1
    )
    run.step(0, 1.0)
    run.turn()
    run.step(0, np.array([np.nan, 1.0]))
    run.turn()
    assert np.isfinite(run.x(0)).all()
    run.step(0, 1.0)
    run.turn()
    assert run.server.tolist() == [2.0, 2.0]
    run.recorder.flush()
    assert run.file.rows("events")["kind"].tolist() == [1]


def test_a_nan_can_stop_the_run():
    run = Lockstep(1, on_nonfinite="stop")
    with pytest.raises(NonFiniteError, match="--on-nonfinite skip"):
        run.step(0, np.nan)


@pytest.mark.parametrize("on_nonfinite", ["skip", "stop"])
def test_a_difference_of_finite_parameters_that_is_infinite_is_not_merged(on_nonfinite):
    run = Lockstep(1, size=2, on_nonfinite=on_nonfinite, period=1)
    largest = float(np.finfo(np.float32).max)
    run.drivers[0][0].algorithm.pending._r[:2] = [-largest, 0.0]
    run.models[0].x.data[:] = torch.tensor([largest, 0.0])
    run.hold = {"push"}
    run.step(0, 0.0)
    run.hold.clear()
    if on_nonfinite == "stop":
        with pytest.raises(NonFiniteError, match="worker 0: push 1"):
            run.turn()
        return
    run.turn()
    assert run.server.tolist() == [0.0, 0.0]
    run.step(0, 1.0)
    assert run.drivers[0][0].algorithm.replies.handled == 1, (
        "the reply it asked for came all the same"
    )


# -- buffers --------------------------------------------------------------------------------------


def test_batch_norm_statistics_reach_the_global_model():
    run = Lockstep(2, batch_norm=True, replies=False)
    for worker, (mean, count) in enumerate([(4.0, 3), (8.0, 9)]):
        run.models[worker].norm.running_mean.fill_(mean)
        run.models[worker].norm.num_batches_tracked.fill_(count)
        run.step(worker, 1.0)
        run.turn()
    frame = run.loop.models[0].frame
    assert frame.floats[:2].tolist() == [5.0, 5.0]  # 0 + (4 − 0)/2, then + (8 − 2)/2
    assert frame.counts.tolist() == [9]
