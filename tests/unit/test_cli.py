"""The command line without MPI: help, mistakes in one line, the summary, the doctor's judgement."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from rich.console import Console
from torch import nn

from aladdin_mpi.cli import checks
from aladdin_mpi.cli.errors import single_host
from aladdin_mpi.cli.main import main
from aladdin_mpi.config import RunConfig
from aladdin_mpi.record import schema
from aladdin_mpi.record.hdf5 import RankFile
from aladdin_mpi.record.reading import rank_path
from aladdin_mpi.runtime import compute
from aladdin_mpi.runtime.options import option_names
from aladdin_mpi.runtime.summary import print_summary, summarize
from aladdin_mpi.workload.arrays import ArrayDataset, DataBundle

pytestmark = pytest.mark.timeout(120)

ROOT = Path(__file__).resolve().parents[2]
CPU = compute.Placement(torch.device("cpu"))


def call(*args: str, **environ: str) -> Result:
    return CliRunner().invoke(main, list(args), env=environ, prog_name="aladdin-mpi")


def test_help_is_light_and_train_lists_every_option() -> None:
    code = (
        "import sys; from aladdin_mpi.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print('HEAVY', [m for m in ('torch', 'mpi4py', 'numba', 'pydantic') if m in sys.modules])"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert "train" in shown.stdout and "doctor" in shown.stdout
    assert "HEAVY []" in shown.stdout
    result = call("train", "--help")
    assert result.exit_code == 0
    for name in [*RunConfig.model_fields, *option_names()]:
        if name != "algorithm_options":
            assert "--" + name.replace("_", "-") in result.output, name
    assert call("--version").output.startswith("aladdin-mpi ")


MISTAKES = {
    "unknown algorithm": (["--algorithm", "none-such"], "--algorithm none-such"),
    "unknown model": (["--model", "none-such"], "--model none-such"),
    "unknown data set": (["--dataset", "none-such"], "--dataset none-such"),
    "missing data": (["--dataset", "mnist", "--data-dir", "/none/such"], "--data-dir /none/such"),
    "period": (["--period", "0"], "--period 0: must be at least 1"),
    "learning rate": (["--lr", "-1"], "--lr -1: must be above 0"),
    "batch size": (["--batch-size", "many"], "--batch-size many: must be a whole number"),
    "milestones": (["--milestones", "3,2"], "milestones"),
    "warm-up": (["--milestones", "3", "--warmup-epochs", "4"], "milestones"),
    "unknown flag": (["--bathc-size", "3"], "--bathc-size"),
    "stray argument": (["fast"], "fast"),
    "missing value": (["--lr"], "--lr"),
    "missing file": (["--config", "/none/such.yaml"], "--config /none/such.yaml"),
    "unknown key": (["--config", "{file}"], "bathc_size: no such option"),
    "unwritable output": (["--out", "/proc/none/such"], "--out /proc/none/such"),
    "output below a file": (["--out", "{file}/x"], "cannot be written"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("bathc_size: 3\n")
    monkeypatch.setenv("ALADDIN_DATA", str(tmp_path))
    args, words = MISTAKES[case]
    arguments = [arg.replace("{file}", str(file)) for arg in args]
    if "--config" not in arguments and "--out" not in arguments:
        arguments = ["--out", str(tmp_path / "out"), *arguments]
    result = call("train", *arguments)
    (line,) = result.stderr.splitlines()
    assert line.startswith("aladdin-mpi: error: ")
    assert words in line
    assert result.exit_code == 2
    assert result.stdout == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.yaml"]  # no folder is left


@pytest.mark.parametrize(("rank", "lines"), [("0", 1), ("1", 0)])
def test_one_rank_of_a_job_prints(rank: str, lines: int) -> None:
    environ = {**os.environ, "PMI_RANK": rank, "PMI_SIZE": "2"}
    shown = subprocess.run(
        [sys.executable, "-m", "aladdin_mpi", "train", "--period", "0"],
        capture_output=True, text=True, cwd=ROOT, env=environ, timeout=100,
    )  # fmt: skip
    assert shown.returncode == 2
    assert len(shown.stderr.splitlines()) == lines
    assert "Traceback" not in shown.stderr


def test_an_unknown_command_is_one_line() -> None:
    result = call("trian")
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1


def test_whether_a_job_is_on_one_host() -> None:
    assert single_host({})
    assert single_host({"PMI_SIZE": "5", "MPI_LOCALNRANKS": "5"})
    assert not single_host({"PMI_SIZE": "5", "MPI_LOCALNRANKS": "3"})
    assert single_host({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"})
    assert not single_host({"SLURM_STEP_NUM_TASKS": "8", "SLURM_TASKS_PER_NODE": "4(x2)"})
    assert not single_host({"PMI_SIZE": "5"})


class OneParameter(nn.Module):
    """y = w x, so that gradients are known by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.w


def test_accumulated_gradients_are_the_mean() -> None:
    x, y = torch.eye(2), torch.tensor([0, 1])
    whole, halves = OneParameter(), OneParameter()
    compute.Compute(whole, CPU)(x, y)
    run = compute.Compute(halves, CPU, accumulate=2)
    run(x[:1], y[:1])
    run(x[1:], y[1:])
    torch.testing.assert_close(halves.w.grad, whole.w.grad)
    result = run.take()
    assert result.loss == pytest.approx(np.log(2))
    assert result.forward_s > 0 and result.backward_s > 0


def test_emulated_compute_sleeps_and_leaves_gradients() -> None:
    model = OneParameter()
    run = compute.EmulatedCompute(model, 0.05)
    start = time.perf_counter()
    run(torch.eye(2), torch.tensor([0, 1]))
    assert time.perf_counter() - start >= 0.05
    assert np.isnan(run.take().loss)
    assert model.w.grad is not None and bool((model.w.grad != 0).all())


def test_evaluation_keeps_the_mode() -> None:
    model = OneParameter().train()
    with torch.no_grad():
        model.w.copy_(torch.eye(2))
    batches = [(torch.eye(2), torch.tensor([0, 1])), (torch.eye(2)[:1], torch.tensor([1]))]
    result = compute.evaluate(model, batches, CPU)
    assert result.accuracy == pytest.approx(2 / 3)
    assert result.loss == pytest.approx((3 * np.log(1 + np.e) - 2) / 3)
    assert model.training


def write_run(folder: Path) -> None:
    """Two workers with ten steps of 10 ms each, half of it computing, every second one pushed."""
    for worker in range(2):
        attributes = {"rank": worker + 1, "role": "worker", "worker": worker}
        file = RankFile(rank_path(folder, worker + 1), attributes)
        rows = [
            schema.STEPS.row(
                iteration=i, start_s=i * 0.01, step_s=0.01, data_s=0.001, compute_s=0.005,
                optimizer_s=0.001, push_s=0.0005, blocked_s=0.0, mix_s=0.0005, samples=32,
                coalesced=(i + 1) % 2, iterations_in_push=2 * (i % 2), emulated=0,
            )
            for i in range(10)
        ]  # fmt: skip
        file.append("steps", np.array(rows, schema.STEPS.dtype))
        if worker == 0:
            evals = [
                schema.EVALS.row(epoch=e, loss=1.0, accuracy=e / 10, split=0) for e in (2, 9, 3)
            ]
            file.append("evals", np.array(evals, schema.EVALS.dtype))
        file.flush()
        if worker == 1:
            file.close()
        else:
            write_run.still_open = file  # type: ignore[attr-defined]


def test_summary_of_a_run_that_is_still_written(tmp_path: Path) -> None:
    write_run(tmp_path)
    (tmp_path / "rank0009.h5").write_text("not a log")
    summary = summarize(tmp_path)
    assert (summary.num_workers, summary.iterations, summary.samples) == (2, 20, 640)
    assert summary.accuracy == pytest.approx(0.9)
    assert summary.samples_per_s == pytest.approx(6400, rel=1e-5)
    assert summary.parts["compute"] == pytest.approx(0.5, rel=1e-5)
    assert summary.parts["other"] == pytest.approx(0.2, rel=1e-5)
    assert sum(summary.parts.values()) == pytest.approx(1)
    assert (summary.pushes, summary.coalesced, summary.overload) == (10, 0.5, 2.0)
    console = Console(record=True, width=80, file=io.StringIO())
    print_summary(tmp_path, 0.95, console)
    text = console.export_text()
    assert "0.9500" in text and "50.0%" in text and str(tmp_path) in text.replace("\n", "")


def test_summary_without_logs(tmp_path: Path) -> None:
    console = Console(record=True, width=80, file=io.StringIO())
    print_summary(tmp_path, 0.5, console)
    assert "not logged" in console.export_text()


def test_doctor_warns_of_debians_open_mpi() -> None:
    library = "Open MPI v4.1.4, package: Debian OpenMPI, ident: 4.1.4, repo rev: v4.1.4"
    whole = {"library": library, "threads": True, "unified": True}
    (finding,) = checks.judge_mpi(whole, "")
    assert finding.level is checks.Level.WARNING and "pip install mpich" in finding.advice
    (fine,) = checks.judge_mpi({**whole, "library": "MPICH Version: 5.0.2"}, "")
    assert fine.level is checks.Level.OK and fine.found == "MPICH 5.0.2"
    _, hung = checks.judge_mpi({**whole, "library": "Open MPI v5.0.11"}, "no answer within 1 s")
    assert hung.level is checks.Level.ERROR


def test_doctor_finds_files_of_killed_jobs(tmp_path: Path) -> None:
    old = time.time() - 3600
    for name in ("mpich_shm_1", "sm_segment.x", "mpich_shm_used", "somebody's"):
        (tmp_path / name).write_bytes(b"12345678")
        os.utime(tmp_path / name, (old, old))
    (tmp_path / "mpich_shm_new").touch()
    maps = tmp_path / "proc" / "7"
    maps.mkdir(parents=True)
    (maps / "maps").write_text(f"7f00-7f01 rw-s 0 00:1 5 {tmp_path / 'mpich_shm_used'}\n")
    found = checks.stale_files(tmp_path, tmp_path / "proc")
    assert [(path.name, size) for path, size in found] == [("mpich_shm_1", 8), ("sm_segment.x", 8)]


def test_doctor_reports_every_part() -> None:
    result = call("doctor", "--timeout", "60")
    lines = result.output.splitlines()
    assert result.exit_code in (0, 1)
    for what in ("Python", "torch", "numba", "h5py", "MPI", "shared memory", "CPU cores"):
        assert any(what in line for line in lines), what
    assert all(line.split()[0] in ("ok", "warning", "error") for line in lines)


def no_parameters() -> nn.Module:
    return nn.Flatten()


def test_a_model_without_parameters_is_refused() -> None:
    from aladdin_mpi.errors import ModelError
    from aladdin_mpi.runtime.train import _build_model

    data = ArrayDataset(np.zeros((2, 3), np.float32), np.zeros(2, np.int64))
    bundle = DataBundle(data, data, (3,), 3, "x")
    config = RunConfig(model=f"{__name__}:no_parameters")
    with pytest.raises(ModelError, match="no trainable parameters"):
        _build_model(config, bundle)
