"""A worker that is slow on purpose."""

from __future__ import annotations

import time

import pytest
from lockstep import Lockstep

from aladdin_mpi.errors import ConfigError
from aladdin_mpi.runtime.options import check_slow


def test_the_missing_time_is_slept_and_marked() -> None:
    run = Lockstep(2)
    run.drivers[1][0]._slow_factor = 4.0
    for worker, clock in enumerate(run.clocks):
        clock.fetching()
        clock.fetched(1)
        time.sleep(0.01)
        driver, optimizer = run.drivers[worker]
        run.models[worker].x.grad = run.models[worker].x.detach().clone()
        driver.step(optimizer.step)
    run.recorder.flush()
    quick, slow = run.file.rows("steps")
    assert slow["compute_s"] >= 4 * 0.01
    assert (quick["emulated"], slow["emulated"]) == (0, 1)
    assert quick["compute_s"] < slow["compute_s"]


def test_factors_by_worker() -> None:
    assert check_slow({"3": "10", 0: 2}) == {3: 10.0, 0: 2.0}


@pytest.mark.parametrize("given", [{0: 0.5}, {-1: 2}, {"a": 2}, {0: "fast"}, {0: float("inf")}])
def test_what_is_refused(given: dict) -> None:
    with pytest.raises(ConfigError) as caught:
        check_slow(given)
    assert str(caught.value).startswith("--slow-worker ")
    assert "\n" not in str(caught.value)
