"""The public API in real jobs of a server and two workers.

A script tries many features one after the other in one job, for most of its time goes into the
start of three processes; here each feature is a test of its own.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launching import mpirun

from aladdin_mpi.record.reading import open_rank_file, rank_path

pytestmark = pytest.mark.timeout(300)

SCRIPTS = Path(__file__).parent / "scripts"
LIMIT_S = 280
WORKERS = 2

Reports = list[dict[str, dict[str, Any]]]


def reports(script: str, folder: Path) -> Reports:
    """Run a script of features; what each worker has found, by the features' names."""
    mpirun(1 + WORKERS, [sys.executable, SCRIPTS / script, folder], timeout=LIMIT_S, cwd=folder)
    return [json.loads((folder / f"worker-{i}.json").read_text()) for i in range(WORKERS)]


def same_everywhere(found: Reports, feature: str) -> None:
    """The feature went through on all workers, which end with the same parameters."""
    assert {report[feature]["digest"] for report in found} == {found[0][feature]["digest"]}


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    return reports("kinds.py", tmp_path_factory.mktemp("kinds"))


@pytest.mark.parametrize(
    "feature",
    [
        "parameter_groups", "frozen", "tied", "channels_last", "bfloat16", "float64",
        "mixed_dtypes", "batch_norm", "two_models", "optimizers",
    ],
)  # fmt: skip
def test_parameters_and_optimizers(kinds: Reports, feature: str) -> None:
    same_everywhere(kinds, feature)


@pytest.fixture(scope="module")
def loops_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("loops")


@pytest.fixture(scope="module")
def loops(loops_folder: Path) -> Reports:
    return reports("loops.py", loops_folder)


@pytest.mark.parametrize(
    "feature",
    [
        "ranks", "accumulation_and_clipping", "mixed_precision", "schedules", "stream", "compiled",
        "global_parameters", "logging", "stopping",
    ],
)  # fmt: skip
def test_training_loops(loops: Reports, feature: str) -> None:
    same_everywhere(loops, feature)


def test_ranks_are_those_of_workers(loops: Reports) -> None:
    assert [report["ranks"]["rank"] for report in loops] == [0, 1]


def test_a_stream_ends_where_it_ends(loops: Reports) -> None:
    assert [report["stream"]["batches"] for report in loops] == [20, 40]


def test_what_a_loop_reports_is_in_the_file(loops: Reports, loops_folder: Path) -> None:
    for rank in (1, 2):
        with open_rank_file(rank_path(loops_folder, rank)) as file:
            user, steps, evals = file["user"][:], file["steps"][:], file["evals"][:]
        assert user["name"].tolist() == [b"wobble"] * 5
        assert user["value"].tolist() == [0.0, 2.0, 4.0, 6.0, 8.0]
        logged = steps[np.isin(steps["iteration"], user["iteration"])]
        assert logged["loss"].tolist() == [0.5, 1.5, 2.5, 3.5, 4.5]
        assert logged["lr"].tolist() == [0.125] * 5
        assert evals[["epoch", "loss", "accuracy"]].tolist() == [(1.5, 0.25, 0.75)]


def test_a_step_is_one_step_however_many_passes_came_before(
    loops: Reports, loops_folder: Path
) -> None:
    with open_rank_file(rank_path(loops_folder, 1)) as file:
        steps = file["steps"][:]
    assert steps["iteration"].tolist() == list(range(len(steps)))
    assert (steps["channel"] == 0).sum() == 20  # accumulation is the first to open a channel
    assert (steps["channel"] == 1).sum() == 20  # mixed precision, on the worker without overflow
    with open_rank_file(rank_path(loops_folder, 2)) as file:
        assert (file["steps"]["channel"] == 1).sum() == 19
