"""What the experiments on virtual hosts count, and how a table goes on."""

from __future__ import annotations

from pathlib import Path

import experiments
import jobs
import numpy as np
import pytest
from rivals import ALGORITHMS, closed_queue

from aladdin_mpi.algorithms import find


def steps(*spans: tuple[float, float]) -> np.ndarray:
    rows = np.zeros(len(spans), dtype=[("start_s", "f8"), ("step_s", "f4")])
    for row, (start, took) in zip(rows, spans, strict=True):
        row["start_s"], row["step_s"] = start, took
    return rows


@pytest.mark.parametrize(
    ("spans", "rate"),
    [
        ([(0.5 * k, 0.5) for k in range(40)], 2.0),
        ([(0.0, 100.0)], 0.01),  # under way all the time
        ([(0.0, 7.0), (7.0, 4.0), (11.0, 20.0)], (2 / 7 + 1 + 4 / 20) / 10),
        ([(0.0, 5.0), (15.0, 1.0)], 0.0),
    ],
)
def test_steps_count_by_their_share_in_the_window(
    spans: list[tuple[float, float]], rate: float
) -> None:
    window = jobs._Window(jobs.Phase(1.0), 5.0, 15.0)
    assert jobs._steps_per_s(steps(*spans), window) == pytest.approx(rate, rel=1e-6)


def test_a_job_that_is_in_the_table_is_not_made_again(tmp_path: Path) -> None:
    path = tmp_path / "links.csv"
    first, second = list(experiments.quick(0.2))[:2]
    seen = [jobs.Seen(*np.arange(13.0) + k) for k in range(len(first.phases))]
    experiments.Table(path).add(first, "mpich", 0, seen)
    found = experiments.Table(path)
    assert found.has(first, "mpich", 0)
    assert not found.has(first, "mpich", 1) and not found.has(first, "openmpi", 0)
    assert not found.has(second, "mpich", 0)
    assert float(found.rows[1]["steps_per_s"]) == 1.0


def test_a_phase_is_long_enough_for_some_steps_and_a_period() -> None:
    for name, algorithm in ALGORITHMS.items():
        for ratio in experiments.RATIOS:
            part = experiments.phase(algorithm, 8, ratio, 1.0, 0.2)
            step_s = 0.2 * algorithm.bound(8, ratio)
            assert part.seconds >= min(6 * step_s, 40.0), name
            assert part.settle_s >= 1.5 * step_s


def test_rivals_are_algorithms_of_the_package_with_as_many_servers_as_they_need() -> None:
    for rival in ALGORITHMS.values():
        row = find(rival.options["algorithm"])
        assert bool(rival.serving) == (row.server is not None)
        assert rival.bound(1, 2.0) >= 1.0


def test_every_job_of_a_table_has_a_name_of_its_own() -> None:
    for make in (experiments.links, experiments.settings, experiments.quick):
        keys = [(job.experiment, job.name, job.workers) for job in make(0.2)]
        assert len(set(keys)) == len(keys) > 5


@pytest.mark.parametrize(
    ("workers", "computing", "service", "overlapped", "cycle"),
    [
        (1, 1.0, 0.25, False, 1.5),
        (1, 1.0, 0.25, True, 1.25),
        (1, 1.0, 4.0, True, 8.0),
        (8, 0.0, 1.0, False, 9.0),  # n / (n + 1) of what one station carries
        (2, 1.0, 1.0, False, 1.0 + 2 * (1 + 1 / 3)),
        (100, 1.0, 1.0, True, 101.0),
    ],
)
def test_closed_queue(
    workers: int, computing: float, service: float, overlapped: bool, cycle: float
) -> None:
    assert closed_queue(workers, computing, service, overlapped) == pytest.approx(cycle, rel=1e-3)
