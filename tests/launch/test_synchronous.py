"""Synchronous algorithms make the steps of one process with the joined batch, on a real network."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import require
from launching import mpirun

pytestmark = pytest.mark.timeout(240)

SCRIPT = Path(__file__).parent / "scripts" / "joined.py"


def difference(ranks: int, folder: Path, *arguments: str) -> float:
    run = mpirun(ranks, [sys.executable, SCRIPT, *arguments, f"out={folder}"], timeout=200)
    found = re.search(r"difference (\S+)", run.stdout)
    assert found, run.stdout
    return float(found[1])


@pytest.mark.parametrize(
    ("ranks", "arguments"),
    [
        (4, ("bsp", "momentum=0.9", "extra=3")),
        (3, ("arsgd", "backend=mpi", "momentum=0.9", "extra=3")),
        pytest.param(
            3, ("arsgd", "backend=ddp", "momentum=0.9", "extra=3"), marks=pytest.mark.first_mpi
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else str(value),
)
def test_same_parameters(ranks: int, arguments: tuple[str, ...], tmp_path: Path) -> None:
    assert difference(ranks, tmp_path, *arguments) < 1e-5


@pytest.mark.first_mpi
def test_same_parameters_with_horovod(tmp_path: Path) -> None:
    require.horovod()
    assert difference(3, tmp_path, "arsgd", "backend=horovod", "momentum=0.9") < 1e-5
