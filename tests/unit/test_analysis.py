"""Runs as frames, and what they come to, on made-up logs whose figures are known."""

import json
import math
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import h5py
import logs
import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner
from rich.console import Console

from aladdin_mpi.analysis import figures, load_run, metrics
from aladdin_mpi.analysis.compare import slow_downs, summary
from aladdin_mpi.analysis.groups import group, labels
from aladdin_mpi.analysis.report import page, pictures, screen, write_csv
from aladdin_mpi.cli.main import main
from aladdin_mpi.errors import RecordError
from aladdin_mpi.record.hdf5 import RankFile
from aladdin_mpi.record.schema import SCHEMA_VERSION, TABLES, EventKind

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return logs.served(tmp_path_factory.mktemp("runs") / "one")


@pytest.fixture(scope="module")
def run(folder):
    return load_run(folder)


def test_tables_have_ranks_and_one_clock(run):
    assert run.steps.index.names == ["rank", "row"]
    assert run.steps.groupby("rank").size().to_dict() == {1: 100, 2: 100}
    # worker 1's clock is 500 s behind; the first steps of both began a second after the start
    assert run.steps["start_s"].groupby("rank").min().to_list() == pytest.approx([1.0, 1.0])
    assert list(run.steps.columns) == [*TABLES["steps"].names, "part"]
    assert run.ranks["state"].to_list() == ["ended"] * 3
    assert run.algorithm == "aladdin"
    assert run.config["algorithm_options"] == {"period": 4}
    assert run.notes == []


def test_a_clock_that_drifts_is_corrected_in_between(tmp_path):
    steps = logs.rows("steps", 3, start_s=[1000.0, 1050.0, 1100.0], step_s=0.1)
    logs.write(tmp_path, 1, {"steps": steps}, start_clock_s=1000.0, clock_offset_s=2.0, end={})
    with h5py.File(tmp_path / "rank0001.h5", "r+") as file:
        file["run/end_clock_s"][()] = 1100.0
        file["run/clock_offset_s"][()] = 4.0
    log = load_run(tmp_path).logs[0]
    assert log.to_clock_of_rank_0(np.array([1000.0, 1050.0, 1100.0])).tolist() == [
        1002.0, 1053.0, 1104.0,
    ]  # fmt: skip


def test_split_adds_up(run):
    table = metrics.split(run)
    assert table.index.to_list() == [0, 1]
    assert table["step"].to_list() == pytest.approx([0.01, 0.01])
    assert table[metrics.PARTS].sum(axis=1).to_list() == pytest.approx(table["step"].to_list())
    assert table.loc[0, "other"] == pytest.approx(0.001, rel=1e-4)
    assert metrics.shares(run)["compute"] == pytest.approx(0.5, rel=1e-5)
    assert sum(metrics.shares(run).values()) == pytest.approx(1)


def test_figures_of_a_run(run):
    assert metrics.throughput(run).to_list() == pytest.approx([3200.0, 3200.0], rel=1e-5)
    view = metrics.overview(run)
    assert (view.iterations, view.samples, view.pushes) == (200, 6400, 100)
    assert (view.iterations_per_push, view.coalesced, view.accuracy) == (2.0, 0.5, np.float32(0.9))
    assert view.duration_s == pytest.approx(1.0, rel=1e-4)
    assert math.isnan(view.speedup)
    assert metrics.overview(run, run).speedup == 1.0
    assert metrics.staleness(run).to_dict() == {1: 100}
    assert metrics.coalescing(run).to_dict() == {2: 100}
    sender = metrics.senders(run).loc[1]
    assert sender["MB_per_s"] == pytest.approx(50.0, rel=1e-4)
    assert sender["transfer_share"] == pytest.approx(0.1, rel=1e-4)
    server = metrics.servers(run).loc[0]
    assert server["merges_per_s"] == pytest.approx(100, rel=1e-4)
    assert server["MB_in_per_s"] == pytest.approx(100, rel=1e-4)
    assert server["busy_share"] == pytest.approx(0.25)
    assert metrics.accuracy_at(run, 0.7) == pytest.approx(0.8)
    assert metrics.time_to(run, 0.85) == pytest.approx(1.0, rel=1e-4)
    assert math.isnan(metrics.time_to(run, 0.95))


def test_the_slowest_worker_is_named_with_its_reason(run, tmp_path):
    assert metrics.slowest(run)[0] == -1
    slow = load_run(logs.served(tmp_path / "slow", slow=3.0))
    worker, text = metrics.slowest(slow)
    assert worker == 1
    assert "2.0 times" in text and "compute takes 10.00 ms more" in text
    assert "slept on purpose" in text


def test_what_went_wrong_is_listed(tmp_path):
    events = logs.rows("events", 3, time_s=logs.CLOCK_S + 2, worker=1, value=1.0)
    events["kind"] = [EventKind.NONFINITE_PUSH, EventKind.STALL, EventKind.NONFINITE_PUSH]
    events["text"][1] = b"worker 1 has said nothing for 12 s"
    logs.write(tmp_path, 1, {"events": events}, end={"rows_lost": 3})
    lines = metrics.problems(load_run(tmp_path))
    assert "2 step(s) thrown away because of a NaN or an infinity" in lines
    assert "at 2.0 s, seen by rank 1: worker 1 has said nothing for 12 s" in lines
    assert "rank 1: 3 row(s) of the log could not be written" in lines
    assert "of 3 ranks, these are missing: 0, 2" in lines


def test_a_killed_run_and_a_live_one(tmp_path):
    """The second process is alive and holds its file; the first one was killed."""
    code = """
import sys, time, os, signal
sys.path.insert(0, sys.argv[3])
import logs
from aladdin_mpi.record.hdf5 import RankFile
from aladdin_mpi.record.reading import rank_path
rank = int(sys.argv[2])
file = RankFile(rank_path(sys.argv[1], rank), {
    "rank": rank, "world_size": 2, "role": "worker", "worker": rank, "num_workers": 2})
start = time.monotonic()
for k in range(5):
    file.append("steps", logs.rows("steps", 100, start_s=time.monotonic(), step_s=0.01))
    file.flush()
print("written", flush=True)
if rank == 0:
    os.kill(os.getpid(), signal.SIGKILL)
sys.stdin.read()
"""
    here = str(Path(logs.__file__).parent)
    children = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path), str(rank), here],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        for child in children:
            assert child.stdout.readline() == "written\n"
        children[0].wait(10)
        run = load_run(tmp_path)
        assert run.ranks["state"].to_list() == ["stopped", "running"]
        assert len(run.steps) == 1000
        assert "rank 0 did not end in order (killed, or an error)" in run.notes
    finally:
        for child in children:
            child.stdin.close()
            child.wait(10)
            child.stdout.close()


def test_older_and_newer_files(tmp_path):
    path = logs.write(tmp_path, 1, {"steps": logs.rows("steps", 4, start_s=1001.0)})
    with h5py.File(path, "r+") as file:  # as a version before `emulated` and `sends` would be
        old = file["steps"][()]
        del file["steps"], file["sends"]
        names = [name for name in old.dtype.names if name != "emulated"]
        file.create_dataset("steps", data=old[names].astype([(n, old.dtype[n]) for n in names]))
        file.attrs["schema_version"] = SCHEMA_VERSION + 1
    run = load_run(tmp_path)
    assert run.steps["emulated"].to_list() == [-1] * 4
    assert len(run.sends) == 0
    assert any("newer than this package's" in note for note in run.notes)


def test_damaged_rows_are_left_out_and_counted(tmp_path):
    steps = logs.rows("steps", 10, start_s=logs.CLOCK_S + np.arange(10.0))
    steps["start_s"][3] = 1e300
    steps["start_s"][5] = np.nan
    logs.write(tmp_path, 1, {"steps": steps})
    run = load_run(tmp_path)
    assert len(run.steps) == 8
    assert "rank0001.h5: 2 row(s) of steps are damaged and left out" in run.notes


def test_what_is_no_run(tmp_path):
    with pytest.raises(RecordError, match="no such folder"):
        load_run(tmp_path / "nowhere")
    with pytest.raises(RecordError, match=r"no rank\*\.h5"):
        load_run(tmp_path)
    (tmp_path / "rank0000.h5").write_text("no log")
    with pytest.raises(RecordError, match=r"rank0000\.h5"):
        load_run(tmp_path)


def test_many_rows_load_quickly(tmp_path):
    """No time is asserted; the figure is bench/analysis.py's."""
    with RankFile(tmp_path / "rank0000.h5", {"rank": 0, "world_size": 1, "worker": 0}) as file:
        file.append("steps", logs.rows("steps", 100_000, start_s=time.monotonic()))
    assert len(load_run(tmp_path).steps) == 100_000


def test_a_run_that_was_started_again_is_one_run(tmp_path):
    """Two starts of one folder: other clocks, a gap between them, one worker less."""
    logs.served(tmp_path, steps=100)
    start = run_start(tmp_path)
    for rank in range(2):
        steps = logs.rows(
            "steps", 50 if rank else 0, start_s=5.0 + 0.01 * np.arange(50 if rank else 0),
            step_s=0.01, samples=32, iteration=100 + np.arange(50 if rank else 0),
        )  # fmt: skip
        logs.write(
            tmp_path, rank, {"steps": steps}, part=1, start_clock_s=4.0, world_size=2,
            num_workers=1, start_unix_s=start + 60.0,
        )  # fmt: skip
    run = load_run(tmp_path)
    assert run.parts == [0, 1] and run.num_workers == 1 and run.notes == []
    assert run.steps.loc[1]["part"].value_counts().to_dict() == {0: 100, 1: 50}
    assert len(run.steps.loc[1].index.unique()) == 150
    assert run.steps.loc[1]["start_s"].iloc[100] == pytest.approx(61.0)
    assert metrics.duration_s(run) == pytest.approx(1.5, rel=1e-3)
    assert metrics.throughput(run)[0] == pytest.approx(3200, rel=1e-3)
    console = Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(screen(run))
    assert "2 times; between last and first step: 59 s" in console.export_text()


def run_start(folder):
    found = []
    for path in folder.glob("rank*[0-9].h5"):
        with h5py.File(path) as file:
            found.append(float(file.attrs["start_unix_s"]))
    return min(found)


# -- several runs ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    base = tmp_path_factory.mktemp("several")
    made = []
    for name, options in {
        "a0": {"seed": 0, "accuracy": (0.5, 0.90)},
        "a1": {"seed": 1, "accuracy": (0.5, 0.94)},
        "p8": {"algorithm_options": {"period": 8}, "accuracy": (0.6, 0.91)},
        "bsp": {"algorithm": "bsp", "algorithm_options": {}, "step_s": 0.02},
        "slow": {"slow": 3.0, "slow_worker": {1: 3}},
    }.items():
        made.append(load_run(logs.served(base / name, **options)))
    return made


def test_labels_say_in_what_runs_differ(several):
    assert labels(several[:2]) == ["aladdin", "aladdin"]
    assert labels(several) == [
        "aladdin, period 4, none slow", "aladdin, period 4, none slow",
        "aladdin, period 8, none slow", "bsp, none slow", "aladdin, period 4, worker 1 ×3",
    ] or labels(several)[2] == "aladdin, period 8"  # fmt: skip
    assert [len(members) for members in group(several[:4]).values()] == [2, 1, 1]


def test_comparison_has_means_and_deviations_over_seeds(several):
    table = summary(several[:4], accuracy=0.85)
    row = table.loc["aladdin, period 4"]
    assert row["runs", ""] == 2
    assert row["accuracy", "mean"] == pytest.approx(0.92)
    assert row["accuracy", "sd"] == pytest.approx(np.std([0.90, 0.94], ddof=1), rel=1e-5)
    assert row["seconds to 85 %", "mean"] == pytest.approx(1.0, rel=1e-4)
    assert table.loc["bsp"]["samples/s", "mean"] == pytest.approx(3200, rel=1e-4)


def test_a_slow_worker_costs_its_own_share(several):
    table = slow_downs([several[0], several[4]])
    assert table.columns.to_list() == [1.0, 3.0]
    assert table.iloc[0].to_list() == pytest.approx([1.0, 0.75], rel=1e-4)
    assert len(slow_downs(several[:2])) == 0


@pytest.mark.parametrize("name", figures.ACROSS_RUNS)
def test_every_figure_is_drawn_and_labelled(several, name, tmp_path):
    figure = getattr(figures, name)(several)
    figure.savefig(tmp_path / "x.svg")
    for ax in figure.axes:
        if ax.axison:
            assert ax.get_ylabel(), name
            assert ax.get_xlabel() or ax.get_xticklabels(), name
    assert (tmp_path / "x.svg").stat().st_size > 5000


@pytest.mark.parametrize("name", figures.ACROSS_RUNS)
def test_figures_of_runs_that_logged_nothing(name, tmp_path):
    logs.write(tmp_path, 1, {})
    getattr(figures, name)([load_run(tmp_path)]).savefig(tmp_path / "x.svg")


# -- reports --------------------------------------------------------------------------------------


def test_the_report_fits_a_terminal(run):
    console = Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(screen(run))
    text = console.export_text()
    assert len(text.splitlines()) < 50
    for part in ("aladdin", "test accuracy  0.9000", "50.0%", "server, rank 0", "no worker stands"):
        assert part in text, part


def test_the_page_is_whole_and_needs_nothing_else(run):
    text = page(run)
    assert text.count("<figure>") == text.count("</figure>") == len(list(pictures(run))) >= 5
    assert "http://" not in text.replace("http://www.w3.org", "")
    for outside in ("<script", "src=", "@import", '<link rel="stylesheet'):
        assert outside not in text.replace('href="data:,"', "")


def test_csv_has_every_table_with_rows(run, tmp_path):
    names = {path.stem for path in write_csv(run, tmp_path / "csv")}
    assert {"steps", "sends", "merges", "evals"} <= names
    head = (tmp_path / "csv" / "steps.csv").read_text().splitlines()[0]
    assert head.startswith("rank,iteration,")


def invoke(*arguments):
    return CliRunner().invoke(main, [str(a) for a in arguments])


def test_commands(folder, several, tmp_path):
    result = invoke("report", folder, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["accuracy"] == pytest.approx(0.9)
    assert json.loads(result.stdout)["speedup"] is None
    result = invoke("report", folder, "--html", tmp_path / "p.html", "--csv", tmp_path / "t")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "p.html").read_text().startswith("<!DOCTYPE html>")
    paths = [r.path for r in several]
    csv = tmp_path / "c.csv"
    result = invoke("compare", *paths, "--csv", csv, "--figures", tmp_path / "f")
    assert result.exit_code == 0, result.output
    assert "with one worker slower" in result.output
    assert csv.read_text().startswith("configuration,runs,accuracy mean,accuracy sd")
    assert len(list((tmp_path / "f").iterdir())) == len(figures.ACROSS_RUNS)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["report", "/no/such"], "/no/such: no such folder"),
        (["report", "{run}", "--html", "/proc/x/y.html"], "--html /proc/x/y.html: cannot be wr"),
        (["report", "{run}", "--csv", "/proc/x"], "--csv /proc/x: cannot be written"),
        (["compare", "{run}", "--figures", "/proc/x"], "--figures /proc/x: cannot be written"),
        (["compare"], "Missing argument"),
        (["compare", "{run}", "--accuracy", "93"], "93"),
    ],
)
def test_mistakes_are_one_line(folder, arguments, says):
    command = [sys.executable, "-m", "aladdin_mpi", *(a.format(run=folder) for a in arguments)]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert shown.returncode == 2, shown.stderr
    assert says in shown.stderr
    assert len(shown.stderr.strip().splitlines()) == 1


def test_a_file_that_disappears_is_noted(tmp_path):
    shutil.copytree(logs.served(tmp_path / "a"), tmp_path / "b")
    run = load_run(tmp_path / "b")
    (tmp_path / "b" / "rank0001.h5").unlink()
    assert len(run.steps) == 100
    assert any("rank0001.h5" in note for note in run.notes)


def test_transfers_to_several_servers_that_overlap_count_once() -> None:
    sends = pd.DataFrame(
        {"queued_s": [0.0, 0.0, 1.0, 5.0], "queue_s": [0.0, 0.5, 0.0, 0.0],
         "put_s": [2.0, 1.0, 2.0, np.nan]}
    )  # fmt: skip
    assert metrics.covered_s(sends) == pytest.approx(3.0)
