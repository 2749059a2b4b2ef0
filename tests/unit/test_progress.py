"""What the server says while a run goes on."""

from __future__ import annotations

import math

import pytest

from aladdin_mpi.runtime.progress import FULL_S, Progress
from aladdin_mpi.runtime.sharded import Sharding


def said(capsys: pytest.CaptureFixture[str], mode: str, overloads: list[float]) -> list[str]:
    progress = Progress(mode, 100, "rank 0 (server):", Sharding(2).advice)
    for number, overload in enumerate(overloads):
        progress.update(number, overload, 3)
    progress.close()
    return [line for line in capsys.readouterr().err.splitlines() if "--servers" in line]


def test_a_link_that_stays_full_is_said_once_with_what_to_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = said(capsys, "lines", [3.2] * (3 * FULL_S))
    assert lines == [
        "rank 0 (server): full links: a push carries 3.2 iterations; --servers 7 would carry each, "
        "--wire bfloat16 and --merge-on-node send less, and --max-shard-bytes of an eighth of a "
        "push has them merged fresher"
    ]


@pytest.mark.parametrize(
    ("mode", "overloads"),
    [
        ("lines", [1.4] * 40),
        ("lines", ([5.0] * (FULL_S - 1) + [1.0]) * 4),
        ("lines", [math.nan] * 40),
        ("off", [5.0] * 40),
    ],
)
def test_a_link_that_is_full_for_a_moment_or_not_at_all_is_not(
    capsys: pytest.CaptureFixture[str], mode: str, overloads: list[float]
) -> None:
    assert said(capsys, mode, overloads) == []


def test_ranges_are_not_advised_where_there_are_some() -> None:
    assert "--max-shard-bytes" not in Sharding(1, max_bytes=4096).advice(2.0)
    assert "--max-shard-bytes" not in Sharding(2, by="layer").advice(2.0)
