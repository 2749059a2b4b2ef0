"""The simulated timing against closed forms, by itself and through the command line."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from aladdin_mpi.cli.main import main
from aladdin_mpi.core import ready
from aladdin_mpi.errors import ConfigError
from aladdin_mpi.simulation import rounds
from aladdin_mpi.simulation.answers import ALGORITHMS, advice, enough_servers, sweep
from aladdin_mpi.simulation.events import Events
from aladdin_mpi.simulation.links import SharedLink
from aladdin_mpi.simulation.outcome import Outcome
from aladdin_mpi.simulation.rounds import last_end
from aladdin_mpi.simulation.setting import FRAMING_BYTES, ComputeTimes, Setting

pytestmark = pytest.mark.timeout(120)

MEGABYTE = 1e6
COMPUTE_S = 0.1


def setting(overload: float = 0.5, **changes: Any) -> Setting:
    """Workers whose pushes are ``overload`` times what the server's link carries."""
    values: dict[str, Any] = {
        "num_workers": 8, "compute_s": COMPUTE_S, "payload_bytes": MEGABYTE,
        "merge_bytes_per_s": 1e15, "iterations": 200,
    } | changes  # fmt: skip
    if "bytes_per_s" not in values:
        size = values["payload_bytes"] + FRAMING_BYTES
        values["bytes_per_s"] = values["num_workers"] * size / (overload * COMPUTE_S)
    return Setting(**values)


def run(name: str, *args: Any, **changes: Any) -> Outcome:
    return ALGORITHMS[name](setting(*args, **changes))


# -- the link -------------------------------------------------------------------------------------


def ends_of(transfers: list[tuple[float, float]], rate: float, each: float) -> list[float]:
    """When transfers (begin, bytes) of one link end, in the order given."""
    events = Events()
    link = SharedLink(events, rate, each)
    ends = [math.nan] * len(transfers)

    def ended(index: int) -> None:
        ends[index] = events.now

    for index, (begin, size) in enumerate(transfers):
        events.at(begin, link.start, size, ended, index)
    events.run()
    assert link.under_way == 0
    assert link.carried_bytes == pytest.approx(sum(size for _, size in transfers))
    return ends


def test_a_link_is_shared_equally() -> None:
    # one alone for 1 s (100 B), two for 2 s (100 B each), the second alone for the rest
    assert ends_of([(0.0, 200.0), (1.0, 150.0)], 100.0, 1e9) == pytest.approx([3.0, 3.5])


def test_a_transfer_is_no_faster_than_its_worker() -> None:
    assert ends_of([(0.0, 100.0)], 100.0, 25.0) == pytest.approx([4.0])
    assert ends_of([(0.0, 100.0)] * 8, 100.0, 25.0) == pytest.approx([8.0] * 8)


TRANSFERS = st.lists(
    st.tuples(st.floats(0, 10, allow_subnormal=False), st.floats(1, 1e3)), min_size=1, max_size=30
)


@given(TRANSFERS, st.floats(0.1, 2.0))
@settings(deadline=None)
def test_a_link_carries_all_and_never_more_than_it_can(
    transfers: list[tuple[float, float]], share: float
) -> None:
    rate = 100.0
    ends = ends_of(transfers, rate, share * rate)
    fastest = min(1.0, share) * rate
    for (begin, size), end in zip(transfers, ends, strict=True):
        assert end >= begin + size / fastest * (1 - 1e-9)
    begin = min(begin for begin, _ in transfers)
    assert max(ends) >= begin + sum(size for _, size in transfers) / rate * (1 - 1e-9)
    if share >= 1:  # work-conserving: it idles only while nothing is there to be sent
        busy = 0.0
        for start, size in sorted(transfers):
            busy = max(busy, start) + size / rate
        assert max(ends) == pytest.approx(busy)


@given(st.lists(st.floats(0, 10), min_size=1, max_size=30), st.floats(0.05, 2.0))
@settings(deadline=None)
def test_the_end_of_the_last_of_equal_transfers(begins: list[float], share: float) -> None:
    begins = sorted(begins)
    expected = max(ends_of([(begin, 50.0) for begin in begins], 100.0, 100 * share))
    assert last_end(begins, 50.0, 100.0, 100 * share) == pytest.approx(expected)


# -- times of computing ---------------------------------------------------------------------------


@pytest.mark.parametrize("distribution", ["normal", "lognormal", "exponential"])
def test_times_have_their_mean_and_spread(distribution: str) -> None:
    s = setting(num_workers=1, distribution=distribution, spread=0.2)
    times = ComputeTimes(s).draw(0, 100_000)
    assert times.mean() == pytest.approx(COMPUTE_S, rel=0.01)  # five deviations of the mean
    assert times.std() == pytest.approx(0.2 * COMPUTE_S, rel=0.05)
    assert times.min() > 0


def test_times_are_the_same_for_all_algorithms_and_by_seed() -> None:
    s = setting(distribution="normal", spread=0.1, slow={2: 3.0})
    times = ComputeTimes(s)
    one_by_one = [[times.next(worker) for worker in range(8)] for _ in range(300)]
    assert np.array_equal(one_by_one, ComputeTimes(s).blocks(300))
    other = ComputeTimes(setting(distribution="normal", spread=0.1, seed=1)).blocks(300)
    assert not np.array_equal(one_by_one, other)


def test_measured_times_are_drawn_from() -> None:
    times = ComputeTimes(setting(measured_s=(0.09, 0.11), slow={0: 2.0}))
    assert set(times.draw(1, 100)) == {0.09, 0.11}
    assert set(times.draw(0, 100)) == {0.18, 0.22}


# -- closed forms ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["aladdin", "sgp"])
def test_without_load_a_step_takes_what_computing_does(name: str) -> None:
    outcome = run(name, 0.01)
    assert outcome.step_s == pytest.approx(COMPUTE_S, rel=1e-6)
    assert outcome.speedup == pytest.approx(8, rel=1e-6)
    assert outcome.blocked == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("overload", [0.5, 2.0, 4.0, 8.0])
def test_aladdin_never_waits_and_coalesces_by_the_overload(overload: float) -> None:
    outcome = run("aladdin", overload, distribution="normal", spread=0.05, iterations=800)
    assert outcome.step_s == pytest.approx(COMPUTE_S, rel=0.005)
    assert outcome.blocked == pytest.approx(0, abs=1e-9)
    assert outcome.iterations_per_push == pytest.approx(max(1, overload), rel=0.03)
    assert outcome.link_in == pytest.approx(min(1, overload), rel=0.03)
    assert outcome.overload == pytest.approx(overload)


@pytest.mark.parametrize("period", [1, 4, 16])
def test_replies_come_once_per_period_of_a_link_that_is_not_full(period: int) -> None:
    """But not with every push: a reply is mixed after the next one, which so cannot ask."""
    outcome = run("aladdin", 0.1, period=period)
    assert outcome.link_out == pytest.approx(0.1 / max(period, 2), rel=0.05)
    assert outcome.reply_age == 1  # asked for at the end of a step, there at that of the next


@pytest.mark.parametrize(("servers", "overload"), [(2, 4.0), (16, 0.5)])
def test_servers_share_the_load(servers: int, overload: float) -> None:
    one = run("aladdin", 8.0)
    several = run(
        "aladdin", servers=servers, bytes_per_s=setting(8.0).bytes_per_s, worker_bytes_per_s=1e9,
        distribution="normal", spread=0.05,
    )  # fmt: skip
    assert one.overload / several.overload == pytest.approx(servers, rel=0.01)  # headers
    assert several.iterations_per_push == pytest.approx(max(overload, 1), rel=0.1)


def test_a_slow_worker_costs_a_wait_free_algorithm_its_own_share() -> None:
    """S(k) = S(1) (n − 1 + 1/k)/n."""
    for factor in (2.0, 10.0, 100.0):
        outcome = run("aladdin", 0.1, slow={3: factor}, iterations=400)
        assert outcome.speedup == pytest.approx(7 + 1 / factor, rel=0.01)


def test_asp_is_bound_by_the_servers_link() -> None:
    """At 8 times overload nothing else matters, once the workers are out of step."""
    s = setting(8.0, distribution="normal", spread=0.1)
    outcome = ALGORITHMS["asp"](s)
    floor = s.num_workers * s.push_bytes / s.bytes_per_s
    assert floor <= outcome.step_s < 1.2 * floor
    assert outcome.link_in == pytest.approx(floor / outcome.step_s, rel=0.02)
    assert outcome.staleness == pytest.approx(s.num_workers - 1, rel=0.02)


def test_asp_without_load_takes_a_round_trip() -> None:
    s = setting(num_workers=1, latency_s=0.003, overhead_s=0.002, merge_bytes_per_s=1e9)
    expected = COMPUTE_S + 2 * s.push_bytes / s.bytes_per_s + 2 * 0.003 + 0.001 + 2 * s.merge_s
    assert ALGORITHMS["asp"](s).step_s == pytest.approx(expected)


def test_bsp_takes_the_slowest_and_all_transfers() -> None:
    s = setting(2.0, slow={5: 3.0}, latency_s=0.003, overhead_s=0.002, merge_bytes_per_s=1e9)
    alone = s.push_bytes / s.bytes_per_s  # the slow worker's push has the link for itself
    all_replies = 8 * s.reply_bytes / s.bytes_per_s
    expected = 3 * COMPUTE_S + alone + 9 * s.merge_s + all_replies + 2 * 0.003 + 0.001
    assert ALGORITHMS["bsp"](s).step_s == pytest.approx(expected)


def test_bsp_of_equal_workers_moves_all_pushes_at_once() -> None:
    s = setting(2.0)
    expected = COMPUTE_S + 2 * 8 * s.push_bytes / s.bytes_per_s
    assert ALGORITHMS["bsp"](s).step_s == pytest.approx(expected)


@pytest.mark.parametrize("n", [1, 2, 5, 64])
def test_a_ring_moves_twice_the_parameters(n: int) -> None:
    s = setting(num_workers=n, bytes_per_s=1e8, latency_s=0.001)
    expected = COMPUTE_S + 2 * (n - 1) / n * MEGABYTE / 1e8 + 2 * (n - 1) * 0.001
    assert ALGORITHMS["arsgd"](s).step_s == pytest.approx(expected)


def test_gradients_that_travel_early_hide_the_ring() -> None:
    s = setting(payload_bytes=100 * MEGABYTE, bytes_per_s=2e9, overlap=0.6)
    whole = rounds.allreduce_s(s, s.payload_bytes)
    last = rounds.allreduce_s(s, rounds.RANGE_BYTES)
    expected = max(0.4 * COMPUTE_S + whole, COMPUTE_S + last)
    assert ALGORITHMS["arsgd"](s).step_s == pytest.approx(expected)
    assert rounds.RANGE_BYTES == ready.RANGE_BYTES


def test_sgp_is_bound_by_the_workers_link() -> None:
    s = setting(bytes_per_s=1e9, worker_bytes_per_s=5e6)
    assert ALGORITHMS["sgp"](s).step_s == pytest.approx((MEGABYTE + FRAMING_BYTES) / 5e6, rel=0.01)


def test_sgp_waits_for_a_slow_worker() -> None:
    assert run("sgp", 0.01, slow={0: 4.0}).step_s == pytest.approx(4 * COMPUTE_S, rel=0.05)


@given(
    name=st.sampled_from(sorted(ALGORITHMS)), n=st.integers(1, 12), overload=st.floats(0.05, 20),
    spread=st.floats(0, 0.5), seed=st.integers(0, 5), servers=st.integers(1, 4),
)  # fmt: skip
@settings(deadline=None, max_examples=40)
def test_nothing_is_carried_that_cannot_be(
    name: str, n: int, overload: float, spread: float, seed: int, servers: int
) -> None:
    s = setting(
        overload, num_workers=n, distribution="lognormal", spread=spread, seed=seed,
        servers=servers, iterations=60,
    )  # fmt: skip
    outcome = ALGORITHMS[name](s)
    assert outcome == ALGORITHMS[name](s), "the seed decides"
    # transfers are counted when they end: of two pushes of each worker, overload / n steps long
    slack = (2 * n + 2 * overload) / 60
    assert 0 <= outcome.link_in <= 1 + slack
    assert 0 <= outcome.link_out <= 1 + slack
    assert -0.02 <= outcome.blocked < 1 and outcome.step_s > 0
    assert math.isnan(outcome.iterations_per_push) or outcome.iterations_per_push >= 1


def test_iterations_are_enough_for_some_sends_and_few_for_many_workers() -> None:
    assert setting(iterations=0).num_iterations == 400
    assert setting(num_workers=4096, iterations=0).num_iterations == 73
    assert setting(50.0, iterations=0).num_iterations == 600
    assert setting(50.0, iterations=20).num_iterations == 20


# -- answers --------------------------------------------------------------------------------------


def test_enough_servers_carry_every_push() -> None:
    s = setting(3.5)
    assert enough_servers(s) == 4
    outcomes = sweep(s, [8], [], ["aladdin", "bsp", "arsgd"])
    assert [(o.algorithm, o.servers) for o in outcomes] == [
        ("aladdin", 1), ("aladdin", 2), ("aladdin", 4), ("bsp", 1), ("bsp", 2), ("bsp", 4),
        ("arsgd", 0),
    ]  # fmt: skip
    servers, best = advice(s, outcomes)
    assert "carries one push in 3.5, 4 servers carry all" in servers
    assert best.startswith("8 workers: most iterations (speed-up): aladdin with 1 server (8)")


def test_a_workers_own_link_can_be_what_is_full() -> None:
    """More servers share one worker's push, which crosses its link as a whole all the same."""
    s = setting(0.5, worker_bytes_per_s=5.2e6)
    outcomes = sweep(s, [8], [1, 4], ["aladdin"])
    for outcome in outcomes:
        assert outcome.iterations_per_push == pytest.approx(2.0, rel=0.1)
    lines = advice(s, outcomes)
    assert "a worker's own link carries one push in 1.92" in lines[0]


def test_headers_alone_can_be_too_much() -> None:
    with pytest.raises(ConfigError, match="no number of servers"):
        enough_servers(setting(bytes_per_s=100.0))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_workers": 0}, "--workers 0: must be at least 1"),
        ({"compute_s": 0.0}, "--compute 0.0: must be above 0"),
        ({"bytes_per_s": math.inf}, "--rate inf"),
        ({"latency_s": -1.0}, "--latency -1.0: must be at least 0"),
        ({"distribution": "cauchy"}, "choose from constant"),
        ({"distribution": "exponential", "spread": 1.5}, "--spread 1.5: must be at most 1"),
        ({"in_flight": "3"}, "--in-flight 3"),
        ({"overlap": 1.5}, "--overlap 1.5"),
        ({"servers": 2, "shards": 3}, "--shards 3: must be a multiple"),
        ({"slow": {8: 2.0}}, "--slow-worker 8:2: give INDEX:FACTOR, a worker from 0 to 7"),
        ({"slow": {1: 0.5}}, "--slow-worker 1:0.5"),
        ({"iterations": 3}, "--iterations 3: must be at least 8"),
        ({"seed": -1}, "--seed -1"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        setting(**changes)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


# -- the command ----------------------------------------------------------------------------------


def call(*args: str) -> Result:
    return CliRunner().invoke(main, ["simulate", *args], prog_name="aladdin-mpi")


def test_the_command_prints_a_table_and_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "tables" / "simulated.csv"
    shown = call("--payload", "92", "--compute", "300", "--servers", "1,2", "--csv", str(path))
    assert shown.exit_code == 0, shown.output
    for words in ("aladdin", "arsgd", "speed-up", "staleness", "one server's link", str(path)):
        assert words in shown.stdout
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 8
    (aladdin,) = [r for r in rows if r["algorithm"] == "aladdin" and r["servers"] == "1"]
    assert float(aladdin["overload"]) == pytest.approx(8 * 92e6 / (0.3 * 1.25e9), rel=1e-3)


def test_the_command_prints_json() -> None:
    shown = call("--json", "--workers", "2,4", "--algorithm", "bsp", "--servers", "1")
    found = json.loads(shown.stdout)
    assert [row["workers"] for row in found["outcomes"]] == [2, 4]
    assert found["outcomes"][0]["reply_age"] is None
    assert found["setting"]["bytes_per_s"] == 1.25e9
    assert len(found["answers"]) == 5  # two lines for each number of workers, and the price


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--workers", "none"], "--workers none: must be whole numbers"),
        (["--workers", "4,0"], "--workers 4,0"),
        (["--rate", "-1"], "--rate"),
        (["--slow-worker", "1"], "--slow-worker 1: give INDEX:FACTOR"),
        (["--slow-worker", "9:2"], "--slow-worker 9:2"),
        (["--algorithm", "none"], "--algorithm"),
        (["--servers", "2", "--shards", "3"], "--shards 3"),
        (["--csv", "/proc/none/x.csv"], "--csv /proc/none/x.csv: cannot be written"),
    ],
)
def test_a_mistake_is_one_line(args: list[str], words: str) -> None:
    shown = call(*args)
    assert shown.exit_code == 2
    (line,) = shown.stderr.splitlines()
    assert words in line
