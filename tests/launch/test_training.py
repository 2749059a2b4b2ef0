"""The main job, from the command line: real data, the accuracy that is due; and a fault shows."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from launching import mpirun

from aladdin_mpi.record.reading import open_rank_file, rank_path
from aladdin_mpi.workload.data import load_dataset
from aladdin_mpi.workload.models import build_model

pytestmark = pytest.mark.timeout(300)

SCRIPTS = Path(__file__).parent / "scripts"


def train(folder: Path, *options: str) -> None:
    argv = [
        sys.executable, "-m", "aladdin_mpi", "train", "--dataset", "digits", "--model", "mlp",
        "--epochs", "20", "--batch-size", "16", "--lr", "0.05", "--momentum", "0.9", "--out",
        folder, *options,
    ]  # fmt: skip
    mpirun(5, argv, timeout=240, env={"PYTHONPATH": str(SCRIPTS)})


def check_learned(folder: Path) -> None:
    """The saved global model is right on 90 % of the test digits, a tenth by chance: on a crowded
    machine workers hear little of each other in these few tenths of a second.
    """
    data = load_dataset("digits", None, 0)
    model = build_model("mlp", data.input_shape, data.num_classes, 0)
    model.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
    x, y = data.test.__getitems__(list(range(len(data.test))))
    with torch.no_grad():
        assert float((model(x).argmax(1) == y).float().mean()) >= 0.9


def check_exchanged(folder: Path) -> None:
    """Every worker pushed, was merged, and mixed replies in; nobody waited for anybody."""
    with open_rank_file(rank_path(folder, 0)) as file:
        arrivals = file["arrivals"][:]
        assert int(file["run/clean_end"][()]) == 1
    total = 0
    for rank in range(1, 5):
        with open_rank_file(rank_path(folder, rank)) as file:
            steps, mixes = file["steps"][:], file["mixes"][:]
            assert int(file["run/clean_end"][()]) == 1
        total += len(steps)
        merged = arrivals[arrivals["worker"] == rank - 1]
        assert int(merged["iterations"].sum()) == len(steps)
        assert np.array_equal(np.sort(merged["sequence"]), np.arange(1, len(merged) + 1))
        assert float(steps["blocked_s"].sum()) == 0.0
        assert len(mixes) >= 1, f"worker {rank - 1} never heard of the others"
        parts = sum(
            steps[f"{name}_s"]
            for name in ("data", "compute", "optimizer", "push", "blocked", "mix")
        )
        assert (parts <= steps["step_s"] * 1.001 + 1e-5).all()  # float32 roundings
    assert total == int(arrivals["iterations"].sum())


def test_training_learns_and_exchanges(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(folder)
    check_learned(folder)
    check_exchanged(folder)
    options = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    assert (options["dataset"], options["epochs"], options["lr"]) == ("digits", 20, 0.05)


@pytest.mark.first_mpi
def test_a_server_that_drops_pushes_is_noticed(tmp_path: Path) -> None:
    train(tmp_path / "run", "--algorithm", "broken:DROPPING")
    with pytest.raises(AssertionError):
        check_learned(tmp_path / "run")


@pytest.mark.first_mpi
def test_replies_that_are_off_are_noticed(tmp_path: Path) -> None:
    train(tmp_path / "run", "--no-replies")
    with pytest.raises(AssertionError, match="never heard of the others"):
        check_exchanged(tmp_path / "run")
