"""Checkpoints over MPI: the same run after a stop, nothing lost across the cut, preemption."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from launching import RunFailed, Started, command, environment, mpirun

from aladdin_mpi.record.reading import open_rank_file, rank_path
from aladdin_mpi.runtime import checkpoint

pytestmark = pytest.mark.timeout(300)

SCRIPTS = Path(__file__).parent / "scripts"


def train(ranks: int, folder: Path, *options: str) -> str:
    argv = [
        sys.executable, "-m", "aladdin_mpi", "train", "--dataset", "digits", "--model", "mlp",
        "--batch-size", "16", "--lr", "0.1", "--momentum", "0.9", "--progress", "off", "--out",
        folder, *options,
    ]  # fmt: skip
    return mpirun(ranks, argv, timeout=120).stderr


def same(a: Path, b: Path) -> bool:
    one, two = (torch.load(folder / "model.pt", weights_only=True) for folder in (a, b))
    return all(torch.equal(one[key], two[key]) for key in one)


@pytest.mark.first_mpi
@pytest.mark.parametrize(
    ("algorithm", "ranks", "options"),
    [
        ("bsp", 3, ()),
        ("bsp", 4, ("--servers", "2")),
        ("bsp", 4, ("--servers", "2", "--wire", "dgc:0.05:40")),
        ("bsp", 5, ("--merge-on-node",)),
        ("localsgd", 2, ()),
        ("arsgd", 2, ("--backend", "mpi")),
    ],
)
def test_a_resumed_synchronous_run_is_the_same_to_the_bit(tmp_path, algorithm, ranks, options):
    rest = ("--algorithm", algorithm, *options)
    train(ranks, tmp_path / "straight", "--epochs", "6", *rest)
    train(ranks, tmp_path / "halves", "--epochs", "3", "--checkpoint-iterations", "15", *rest)
    number = checkpoint.latest(tmp_path / "halves")
    assert number >= 3
    said = train(ranks, tmp_path / "halves", "--epochs", "6", "--resume", "auto", *rest)
    assert f"goes on from checkpoint {number} of" in said
    assert same(tmp_path / "straight", tmp_path / "halves")
    with open_rank_file(rank_path(tmp_path / "halves", ranks - 1, 1)) as file:
        first = int(file["steps"][0]["iteration"])
        last = int(file["steps"][-1]["iteration"])
        assert file.attrs["part"] == 1
    with open_rank_file(rank_path(tmp_path / "straight", ranks - 1)) as file:
        assert last == int(file["steps"][-1]["iteration"])
    assert first > 0


@pytest.mark.first_mpi
def test_bsp_is_the_same_to_the_bit_where_a_node_merges(tmp_path):
    options = ("--algorithm", "bsp", "--epochs", "2")
    train(4, tmp_path / "apart", *options)
    train(5, tmp_path / "merged", "--merge-on-node", *options)
    train(6, tmp_path / "two", "--merge-on-node", "--servers", "2", *options)
    assert same(tmp_path / "apart", tmp_path / "merged")
    assert same(tmp_path / "apart", tmp_path / "two")


@pytest.mark.parametrize(
    ("servers", "merges"),
    [
        (1, False),
        pytest.param(2, False, marks=pytest.mark.first_mpi),
        pytest.param(2, True, marks=pytest.mark.first_mpi),
    ],
)
def test_nothing_is_lost_or_applied_twice_across_the_cut(tmp_path, servers, merges):
    """Workers of different speed; a server's part is the mean of their steps, exactly."""
    folder, ranks = tmp_path / "run", 4 + servers
    script = [sys.executable, str(SCRIPTS / "steady.py"), str(folder), str(servers)]
    mpirun(ranks + merges, [*script, "300", "", str(int(merges))], timeout=120)
    found = 0
    for number in checkpoint.numbers(folder):
        left = checkpoint.head(folder, number)["left"]
        if not checkpoint.complete(folder, number) or left:
            continue
        found += 1
        workers = range(servers, ranks)
        made = [checkpoint.read(folder, number, rank)["iteration"] for rank in workers]
        parts = [checkpoint.read(folder, number, rank) for rank in range(servers)]
        channels = [channel for part in parts for channel in part["channels"]]
        params = torch.cat([channel["params"] for channel in channels])
        assert params[:1000].unique().tolist() == [sum(made) / 4]
        assert [channel["version"] for channel in channels] == [sum(made)] * servers**2
    assert found >= 3
    mpirun(ranks, [*script, "500", "auto", "0"], timeout=120)


def running(folder: Path, rank: int) -> int:
    """The process of a rank, once it has trained or merged for a while."""
    for _ in range(600):
        try:
            with open_rank_file(rank_path(folder, rank)) as file:
                if len(file["steps"]) + len(file["merges"]) > 100:
                    return int(file.attrs["pid"])
        except (OSError, KeyError):
            pass
        time.sleep(0.1)
    raise AssertionError("the run does not start")


@pytest.mark.parametrize(
    ("algorithm", "ranks", "signalled", "number"),
    [
        ("aladdin", 3, 0, signal.SIGUSR1),
        pytest.param("aladdin", 3, 2, signal.SIGTERM, marks=pytest.mark.first_mpi),
        pytest.param("bsp", 3, 1, signal.SIGUSR1, marks=pytest.mark.first_mpi),
        ("localsgd", 2, 1, signal.SIGUSR1),
        pytest.param("bsp --servers 2", 4, 1, signal.SIGUSR1, marks=pytest.mark.first_mpi),
        ("aladdin --merge-on-node", 4, 1, signal.SIGTERM),
        pytest.param("ad-psgd", 3, 1, signal.SIGUSR1, marks=pytest.mark.first_mpi),
    ],
)
def test_a_signal_to_any_rank_stops_all_with_a_checkpoint(
    tmp_path, algorithm, ranks, signalled, number
):
    folder = tmp_path / "run"
    argv = [
        sys.executable, "-m", "aladdin_mpi", "train", "--dataset", "digits", "--model", "mlp",
        "--algorithm", *algorithm.split(), "--epochs", "100000", "--emulate-compute", "2",
        "--progress", "off", "--out", str(folder),
    ]  # fmt: skip
    with Started(command(ranks, argv), env=environment()) as started:
        os.kill(running(folder, signalled), number)
        assert started.wait(60) == 75
        assert started.pids() == []
    assert checkpoint.complete(folder, 1)
    assert not (folder / "model.pt").exists()
    for rank in range(ranks):
        with open_rank_file(rank_path(folder, rank)) as file:
            assert int(file["run/clean_end"][()]) == 1
            assert file["run/reason"][()].decode() == "preempted"


@pytest.mark.first_mpi
def test_a_signal_to_all_processes_spares_those_of_the_loaders(tmp_path):
    """As Slurm sends it."""
    folder = tmp_path / "run"
    argv = [
        sys.executable, "-m", "aladdin_mpi", "train", "--dataset", "digits", "--model", "mlp",
        "--epochs", "100000", "--workers", "1", "--eval-every", "0", "--progress", "off", "--out",
        str(folder),
    ]  # fmt: skip
    with Started(command(3, argv), env=environment()) as started:
        running(folder, 1)
        running(folder, 2)
        for pid in started.pids():
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
            if line.startswith(sys.executable.encode() + b"\0"):
                os.kill(pid, signal.SIGUSR1)
        assert started.wait(60) == 75
    assert checkpoint.complete(folder, 1)


@pytest.mark.first_mpi
def test_the_time_limit_stops_and_the_run_goes_on_with_other_workers(tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(RunFailed) as caught:
        train(3, folder, "--epochs", "10000", "--time-limit", "0.02")
    assert caught.value.run.returncode == 75
    assert "start it again with --resume auto" in caught.value.run.stderr
    seen = checkpoint.read(folder, 1, 0)["worker_samples"]
    epochs = sum(seen) / 1437 + 1
    said = train(
        4, folder, "--epochs", f"{epochs:.3f}", "--resume", str(folder / "checkpoints/000001")
    )
    assert "2 worker(s) then, 3 now" in said
    with open_rank_file(rank_path(folder, 0, 1)) as file:
        assert int(file["arrivals"]["samples"].sum()) >= 0.9 * 1437
        total = int(file["run/samples"][()])
    assert total >= sum(seen) + 0.9 * 1437


@pytest.mark.first_mpi
def test_a_damaged_checkpoint_is_passed_over(tmp_path):
    folder = tmp_path / "run"
    train(3, folder, "--epochs", "3", "--checkpoint-iterations", "15", "--checkpoint-keep", "3")
    last = checkpoint.latest(folder)
    path = folder / "checkpoints" / f"{last:06d}" / "rank0001.pt"
    path.write_bytes(path.read_bytes()[:-1000])
    said = train(3, folder, "--epochs", "4", "--resume", "auto")
    assert "cannot be read" in said
    assert f"goes on from checkpoint {last - 1} of" in said


@pytest.mark.first_mpi
@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--resume", "{run}", "--algorithm", "bsp"), "--algorithm bsp: the checkpoint is of alad"),
        (("--resume", "{run}", "--model", "cnn"), "made with another"),
        (("--resume", "{run}/checkpoints/000099"), "no complete checkpoint 99"),
        (("--resume", "/nowhere"), "--resume /nowhere: holds no checkpoints"),
    ],
)
def test_what_cannot_be_resumed_is_one_line(tmp_path_factory, options, says):
    base = tmp_path_factory.getbasetemp() / "resumable"
    if not base.exists():
        train(3, base, "--epochs", "3", "--checkpoint-iterations", "15")
    argv = [
        sys.executable, "-m", "aladdin_mpi", "train", "--dataset", "digits", "--epochs", "4",
        *(option.format(run=base) for option in options),
    ]  # fmt: skip
    with pytest.raises(RunFailed) as caught:
        mpirun(3, argv, timeout=60)
    stderr = caught.value.run.stderr
    assert says in stderr
    assert stderr.count("aladdin-mpi: error") + stderr.count("error:") <= 2
    assert "Traceback" not in stderr
