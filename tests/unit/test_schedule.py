"""The learning-rate schedule, against numbers worked out by hand."""

from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import FrozenInstanceError

import pytest

from aladdin_mpi.core.schedule import Schedule
from aladdin_mpi.errors import AladdinError, ConfigError

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize(
    ("epochs_done", "expected"),
    [
        (0, 0.01),  # the base rate
        (5, 0.0275),  # 0.01 + 0.07 · 5/20
        (10, 0.045),
        (20, 0.08),  # 0.01 · 8
        (149.99, 0.08),
        (150, 0.008),
        (249.5, 0.008),
    ],
)
def test_cifar_setting_of_the_paper(epochs_done: float, expected: float) -> None:
    """0.01·n, warm-up over 20 epochs, a tenth from epoch 150 on, eight workers."""
    schedule = Schedule(0.01, 8, "linear", 20, (150,), 0.1)
    assert schedule.lr(epochs_done) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("epochs_done", "expected"),
    [(0, 0.05), (2.5, 0.225), (5, 0.4), (30, 0.04), (60, 0.004), (79, 0.004), (80, 0.0004)],
)
def test_imagenet_setting_of_the_paper(epochs_done: float, expected: float) -> None:
    """0.05·n, warm-up over 5 epochs, a tenth at epochs 30, 60 and 80, eight workers."""
    schedule = Schedule(0.05, 8, "linear", 5, (30, 60, 80), 0.1)
    assert schedule.lr(epochs_done) == pytest.approx(expected, rel=1e-12)


def test_without_scaling_the_warmup_starts_at_a_tenth() -> None:
    schedule = Schedule(0.2, 8, "none", 4)
    expected = [0.02, 0.065, 0.11, 0.155, 0.2, 0.2]
    assert [schedule.lr(epoch) for epoch in range(6)] == pytest.approx(expected, rel=1e-12)


def test_one_worker_with_linear_scaling_trains_at_the_base_rate() -> None:
    schedule = Schedule(0.1, 1, "linear", 20)
    assert {schedule.lr(epoch / 4) for epoch in range(100)} == {0.1}


def test_without_warmup_it_starts_at_the_peak() -> None:
    assert Schedule(0.1, 4).lr(0) == pytest.approx(0.4)
    assert Schedule(0.1, 4, "none").lr(0) == 0.1


def test_before_the_start_it_is_the_start() -> None:
    assert Schedule(0.1, 4, "linear", 2).lr(-1) == 0.1


def test_it_never_rises_after_the_warmup_nor_falls_in_it() -> None:
    schedule = Schedule(0.1, 4, "linear", 3, (5, 7.5), 0.5)
    rates = [schedule.lr(step / 10) for step in range(101)]
    assert rates[:31] == sorted(rates[:31])
    assert rates[30:] == sorted(rates[30:], reverse=True)
    assert rates[-1] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("base_lr", [0, -0.1, float("nan"), float("inf"), "fast", True, None]),
        ("num_workers", [0, -1, 2.5, True]),
        ("scaling", ["sqrt", "", None]),
        ("warmup_epochs", [-1, float("inf"), "5", None]),
        ("milestones", [(30, 30), (60, 30), (0,), (-1,), (4,), 30, ("a",), (float("nan"),)]),
        ("gamma", [0, -0.1, 1.1, float("nan"), None]),
    ],
)
def test_wrong_values_are_named(option: str, values: list[object]) -> None:
    good = {"base_lr": 0.1, "num_workers": 2, "warmup_epochs": 5, "milestones": (30, 60)}
    for value in values:
        with pytest.raises(ConfigError, match=option) as caught:
            Schedule(**(good | {option: value}))
        assert isinstance(caught.value, AladdinError | ValueError)
        assert repr(value) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_it_is_frozen_comparable_and_takes_a_list() -> None:
    schedule = Schedule(0.1, 2, milestones=[30, 60])  # type: ignore[arg-type]
    assert schedule.milestones == (30.0, 60.0)
    assert schedule == pickle.loads(pickle.dumps(schedule))
    with pytest.raises(FrozenInstanceError):
        schedule.gamma = 1.0  # type: ignore[misc]


def test_it_needs_no_torch() -> None:
    code = "import sys, aladdin_mpi.core.schedule; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=50).returncode == 0
