"""The live view: what is made of new rows, that only new rows are read, and how it looks."""

from __future__ import annotations

import io
import math
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import h5py
import logs
import numpy as np
import pytest
import yaml
from click.testing import CliRunner, Result
from rich.console import Console

from aladdin_mpi.analysis.guarded import GuardedWatcher
from aladdin_mpi.analysis.load import RankLog, Run
from aladdin_mpi.analysis.tail import Watcher
from aladdin_mpi.analysis.watch import Memory, News, View, view
from aladdin_mpi.cli.main import main
from aladdin_mpi.cli.watch_screen import line, number, screen, span
from aladdin_mpi.errors import RecordError
from aladdin_mpi.record import schema
from aladdin_mpi.record.reading import rank_path
from aladdin_mpi.record.schema import EventKind

pytestmark = pytest.mark.timeout(120)

ROOT = Path(__file__).resolve().parents[2]
START_S = 1000.0


def call(*args: object, **environ: str) -> Result:
    return CliRunner().invoke(
        main, ["watch", *map(str, args)], prog_name="aladdin-mpi", env={"COLUMNS": "120", **environ}
    )


# ---- what is made of new rows


def log(rank: int, state: str = "running", **given: object) -> RankLog:
    attributes = {c.name: c.unknown for c in schema.ATTRIBUTES} | {
        "rank": rank, "worker": rank - 1, "num_workers": 2, "world_size": 3, "host": "alpha",
        "role": "worker" if rank else "server", "start_clock_s": START_S, "clock_offset_s": 0.0,
        "config": yaml.safe_dump({"algorithm": "aladdin", "epochs": 4.0}), **given,
    }  # fmt: skip
    end = {c.name: c.unknown for c in schema.END_VALUES}
    return RankLog(Path(f"run/rank{rank:04}.h5"), attributes, end, {}, state)


def steps(first_s: float, count: int, step_s: float = 0.1, **columns: object) -> np.ndarray:
    start = START_S + first_s + step_s * np.arange(count)
    given = {
        "data_s": 0.1 * step_s, "compute_s": 0.6 * step_s, "optimizer_s": 0, "push_s": 0.1 * step_s,
        "blocked_s": 0, "mix_s": 0, "samples": 32, "loss": 2.0, "epoch": 0,
    }  # fmt: skip
    return logs.rows("steps", count, start_s=start, step_s=step_s, **(given | columns))


def look(now_s: float, *tables: dict[str, np.ndarray], **given: object) -> View:
    """The view when every rank's rows come at once; the first table is the server's."""
    memories = [
        Memory(News(log(rank, **given), START_S + now_s, rows)) for rank, rows in enumerate(tables)
    ]
    return view(memories, Run(Path("run"), [memory.log for memory in memories]))


def test_rates_and_shares_are_those_of_the_last_seconds() -> None:
    slow = steps(0, 100, 1.0, compute_s=0.0)  # long ago
    shown = look(110.0, {}, {"steps": np.concatenate([slow, steps(100, 90)])})
    (worker,) = shown.workers
    assert worker.iterations == 190 and worker.state == "training" and worker.remark == ""
    assert worker.step_s == pytest.approx(0.1)
    assert worker.samples_per_s == pytest.approx(320)
    assert worker.parts["compute"] == pytest.approx(0.6)
    assert worker.parts["other"] == pytest.approx(0.2)
    assert sum(worker.parts.values()) == pytest.approx(1)
    assert shown.samples_per_s == pytest.approx(320)
    assert shown.loss == pytest.approx(2)
    assert (shown.state, shown.at_s, shown.epochs) == ("running", 110.0, 4.0)
    assert (shown.name, shown.algorithm, shown.num_workers) == ("run", "aladdin", 2)


def test_pieces_make_the_same_view() -> None:
    rows = np.concatenate([steps(0, 100), steps(10, 50, 0.2, epoch=1)])
    whole = look(20.5, {}, {"steps": rows})
    memory = Memory(News(log(1), 0.0, {}))
    for piece in np.split(rows, [1, 7, 90, 120]):
        memory.take(News(log(1), START_S + 20.5, {"steps": piece}))
    server = Memory(News(log(0), START_S + 20.5, {}))
    assert str(view([memory, server], Run(Path("run"), [server.log, memory.log]))) == str(whole)
    assert whole.epoch == 1


def test_impossible_durations_do_no_harm() -> None:
    bad = steps(0, 4, 1.0, data_s=[-1.0, math.nan, math.inf, 1e30])
    bad["step_s"] = [0.1, math.nan, 1e30, 0.2]
    shown = look(4.5, {}, {"steps": bad})
    assert sum(shown.workers[0].parts.values()) == pytest.approx(1)
    assert "cc" in text(shown)


def test_who_is_late() -> None:
    normal = {"steps": steps(0, 200)}
    shown = look(20.5, {}, normal, {"steps": steps(0, 100, 0.2)})
    assert [w.remark for w in shown.workers] == ["", "2.0× slower"]
    blocked = {"steps": steps(0, 200, 0.1, blocked_s=0.05)}  # waits for the slow one
    shown = look(20.5, {}, blocked, {"steps": steps(0, 200)})
    assert [w.remark for w in shown.workers] == ["", "2.0× slower"]
    shown = look(30.0, {}, {"steps": steps(0, 300)}, normal)
    assert [w.remark for w in shown.workers] == ["", "no step for 10 s"]
    assert shown.workers[1].samples_per_s == 0 and shown.samples_per_s == pytest.approx(320)
    shown = look(30.0, {}, {"steps": steps(0, 2, 12.0)}, {})
    assert [w.remark for w in shown.workers] == ["", "no step yet"], "a step takes 12 s"
    assert shown.workers[0].samples_per_s == pytest.approx(32 / 12)


def test_who_has_finished_is_not_late() -> None:
    kind = int(EventKind.LEAVE)
    leave = logs.rows("events", 1, time_s=START_S + 20, kind=kind, worker=0, text=b"")
    shown = look(60.0, {}, {"steps": steps(0, 200), "events": leave}, {"steps": steps(0, 590)})
    assert [w.state for w in shown.workers] == ["finished", "training"]
    assert shown.workers[0].remark == "finished"
    assert shown.samples_per_s == pytest.approx(320), "the other's"
    assert shown.events == (), "its own farewell is told by the server"


def test_the_server() -> None:
    seconds = np.arange(1, 21)
    late = seconds > 10
    polls = logs.rows(
        "polls", 20, time_s=START_S + seconds, busy_s=np.where(late, 0.5, 0.0), longest_gap_s=0.01,
        overload=np.where(late, 2.0, np.nan), samples_total=100 * seconds,
    )  # fmt: skip
    times = START_S + np.arange(0, 20, 0.1)
    merges = logs.rows("merges", 200, time_s=times, count=3, version=3 * np.arange(1, 201))
    shown = look(20.5, {"polls": polls, "merges": merges}, {"steps": steps(0, 200)})
    (server,) = shown.servers
    assert server.passes_per_s == pytest.approx(10, abs=0.3)
    assert server.pushes_per_s == pytest.approx(30, abs=0.9)
    assert (server.busy, server.overload, server.version) == (0.5, 2.0, 600)
    assert server.remark == ""
    assert shown.samples == 6400, "worker 1's file is missing; its own samples are more"
    shown = look(40.0, {"polls": polls}, {"steps": steps(0, 10)})
    assert shown.servers[0].remark == "silent for 20 s"
    assert shown.samples == 2000, "the server knows of both"


def test_evaluations_tell_how_far_it_is() -> None:
    evals = logs.rows(
        "evals", 7, time_s=START_S + np.arange(7), epoch=0.5 * np.arange(7), split=0,
        samples_total=1600 * np.arange(7), loss=1.0, accuracy=0.1 * np.arange(7),
    )  # fmt: skip
    evals[5]["split"] = 1
    shown = look(20.5, {}, {"steps": steps(0, 200), "evals": evals})
    assert [e.epoch for e in shown.evaluations] == [1.0, 1.5, 2.0, 3.0], "those kept, on test data"
    assert shown.epoch == 2.0, "6400 of 3200 samples"
    assert shown.share == 0.5
    assert shown.left_s == pytest.approx(20)


def test_a_run_that_has_ended() -> None:
    rows = {"steps": steps(0, 200)}
    shown = look(5000.0, {}, rows, rows, state="ended")
    assert (shown.state, shown.at_s) == ("ended", pytest.approx(20))
    assert [w.remark for w in shown.workers] == ["", ""]
    assert shown.samples_per_s == pytest.approx(640) and math.isnan(shown.left_s)
    shown = look(5000.0, {}, rows, rows, state="stopped")
    assert shown.state == "stopped"
    assert [w.remark for w in shown.workers] == ["stopped"] * 2


# ---- how it looks


def text(shown: View, width: int = 120, height: int = 40) -> str:
    console = Console(file=io.StringIO(), width=width, record=True)
    console.print(screen(shown, console, height))
    return console.export_text()


def whole_view(workers: int = 2) -> View:
    evals = logs.rows(
        "evals", 1, time_s=START_S + 9, epoch=1.0, split=0, samples_total=1600, loss=0.25,
        accuracy=0.875,
    )  # fmt: skip
    polls = logs.rows("polls", 1, time_s=START_S + 20, busy_s=0.5, overload=2.0, samples_total=1)
    event = logs.rows("events", 1, time_s=START_S + 7, kind=4, worker=1, text=b"[red] has stalled")
    table = {"steps": steps(0, 200), "evals": evals}
    slow = {"steps": steps(0, 100, 0.2)}
    rest = [{"steps": steps(0, 200)}] * (workers - 2)
    return look(20.5, {"polls": polls, "events": event}, table, *rest, slow)


def test_everything_is_on_the_screen() -> None:
    shown = text(whole_view())
    assert "run  aladdin, 2 worker(s)  running for 20 s" in shown
    assert "epoch 6 of 4, 100%" in shown
    assert "480 samples/s, 300 iterations, 9600 samples, training loss 2" in shown
    assert "9 s   1.00     0.2500    0.8750" in shown
    assert "2.0× slower" in shown
    assert "7 s  rank 0: worker 1 [red] has stalled" in shown, "no markup"
    assert "busy 50%, 2.00 iterations per push" in shown and "link overloaded" in shown
    rows = [row for row in shown.splitlines() if "ccc" in row]
    bars = [next(word for word in row.split() if "ccc" in word) for row in rows]
    assert [len(bar) for bar in bars] == [len(bars[0])] * 2
    assert bars[0].count("c") == pytest.approx(0.6 * len(bars[0]), abs=1)


@pytest.mark.parametrize("width", [60, 80, 200])
def test_it_fits_the_terminal(width: int) -> None:
    shown = text(whole_view(40), width, 24)
    assert len(shown.splitlines()) <= 24
    assert "slower" in shown, "the slow one is among those shown"
    assert "more worker(s)" in shown
    assert all(len(row) <= width for row in shown.splitlines())


def test_a_view_of_nothing_can_be_shown() -> None:
    assert "no step yet" in text(look(0.0, {}, {}, {}))
    assert line(look(0.0, {}))


def test_a_line_says_the_most_important_things() -> None:
    assert line(whole_view()) == (
        "20 s: epoch 6 of 4, 100%, about 0 s left, 300 iterations, 480 samples/s, training loss 2, "
        "test loss 0.25, accuracy 0.8750, 0 pushes/s in 0 merges/s, busy 50%, 2.00 iterations per "
        "push, version 0, worker 1 2.0× slower"
    )


def test_numbers_for_people() -> None:
    assert [number(v) for v in (0.0, 1.234, 99.96, 1234.5, math.nan)] == [
        "0", "1.23", "100", "1234", "?",
    ]  # fmt: skip
    assert [span(v) for v in (0.2, 61, 3725, math.nan)] == ["0 s", "1 min 01 s", "1 h 02 min", "?"]


# ---- files

WRITER = """
import sys, time
import numpy as np
from aladdin_mpi.record import schema
from aladdin_mpi.record.hdf5 import RankFile
folder, rank, swmr = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "swmr"
attributes = {"rank": rank, "worker": rank, "world_size": 2, "num_workers": 2, "role": "worker"}
file = RankFile(f"{folder}/rank{rank:04}.h5", attributes, swmr=swmr)
print("open", flush=True)
for line in sys.stdin:
    if line.strip() == "close":
        file.close()
        break
    rows = np.zeros(int(line), schema.STEPS.dtype)
    rows["start_s"], rows["step_s"], rows["samples"] = time.monotonic(), 0.001, 1
    file.append("steps", rows)
    file.flush()
    print("written", flush=True)
"""


class Writer:
    """A process that writes a rank's file."""

    def __init__(self, folder: Path, rank: int, mode: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(folder), str(rank), mode],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip
        self.answer("open")

    def answer(self, expected: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip() == expected

    def write(self, rows: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{rows}\n")
        self.process.stdin.flush()
        self.answer("written")

    def end(self) -> None:
        self.process.communicate("close\n", timeout=60)
        assert self.process.returncode == 0

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.mark.parametrize("mode", ["swmr", "flush"])
def test_it_follows_files_while_they_are_written(tmp_path: Path, mode: str) -> None:
    with Writer(tmp_path, 0, mode) as one, Watcher(tmp_path) as watcher:
        shown = watcher.look()
        assert (shown.state, shown.iterations) == ("running", 0)
        assert shown.notes == ("of 2 ranks, 1 have no readable file here",)
        one.write(10)
        assert watcher.look().iterations == 10
        with Writer(tmp_path, 1, mode) as two:  # a file that comes later
            one.write(5000)
            two.write(1)
            shown = watcher.look()
            assert [w.iterations for w in shown.workers] == [5010, 1]
            assert shown.notes == ()
            two.write(2)
            two.end()
        shown = watcher.look()
        assert [w.state for w in shown.workers] == ["training", "ended"]
        assert shown.iterations == 5013 and shown.state == "running"
        one.write(1)
        one.end()
        shown = watcher.look()
        assert (shown.state, shown.iterations, shown.samples) == ("ended", 5014, 5014)
        assert str(watcher.look()) == str(shown)


def test_of_a_run_that_was_started_again_the_last_start_is_shown(tmp_path: Path) -> None:
    logs.served(tmp_path)
    for rank in range(2):
        rows = {"steps": logs.rows("steps", 5 * rank, start_s=5.0, step_s=0.1, iteration=149)}
        logs.write(
            tmp_path, rank, rows, part=1, world_size=2, num_workers=1, start_clock_s=4.0
        )  # fmt: skip
    with Watcher(tmp_path) as watcher:
        shown = watcher.look()
    assert [w.worker for w in shown.workers] == [0], "rank 2 is of the first start"
    assert (shown.iterations, shown.notes, shown.num_workers) == (150, (), 1)


def test_many_rows_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aladdin_mpi.analysis.tail.BLOCK_ROWS", 7)
    logs.served(tmp_path)
    with Watcher(tmp_path) as watcher:
        assert watcher.look().iterations == 200


@pytest.mark.parametrize("mode", ["swmr", "flush"])
def test_a_killed_run_is_told_from_one_that_goes_on(tmp_path: Path, mode: str) -> None:
    with Writer(tmp_path, 0, mode) as one, Watcher(tmp_path) as watcher:
        one.write(10)
        assert watcher.look().state == "running"
        one.process.kill()
        one.process.wait()
        shown = watcher.look()
    assert (shown.state, shown.iterations) == ("stopped", 10)
    result = call(tmp_path)
    assert result.exit_code == 0
    (only,) = result.stdout.splitlines()
    assert "the run has stopped" in only and "stopped" in only


def test_damage_in_one_file_leaves_the_rest(tmp_path: Path) -> None:
    logs.served(tmp_path)
    for rank in (0, 1):
        raw = rank_path(tmp_path, rank).read_bytes()
        rank_path(tmp_path, rank).write_bytes(raw[: len(raw) // 3] if rank else b"nothing")
    with Watcher(tmp_path) as watcher:
        shown = watcher.look()
    assert shown.workers[-1].worker == 1 and shown.workers[-1].iterations == 100
    assert any("rank0000.h5" in note for note in shown.notes)
    assert call("--once", tmp_path).exit_code == 0


# ---- the command


def test_a_finished_run_is_shown_once(tmp_path: Path) -> None:
    logs.served(tmp_path / "one")
    result = call(tmp_path / "one")
    assert result.exit_code == 0 and len(result.stdout.splitlines()) == 1
    assert "the run has ended" in result.stdout and "accuracy 0.9000" in result.stdout
    whole = call("--once", tmp_path / "one").stdout
    assert "link overloaded" in whole and "1.00     0.5000    0.5000" in whole


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "rank0000.h5").write_bytes(b"no HDF5")
    for name, expected in (
        ("none", "no such folder"), ("empty", "no rank*.h5 in it"), ("bad", "cannot be read"),
    ):  # fmt: skip
        result = call(tmp_path / name)
        (only,) = result.stderr.splitlines()
        assert only.startswith("aladdin-mpi: error: ") and expected in only
        assert (result.exit_code, result.stdout) == (2, "")
    with pytest.raises(RecordError), Watcher(tmp_path / "bad") as watcher:
        watcher.look()


def started(*args: object) -> subprocess.Popen[str]:
    """As a terminal starts it; the tests themselves may run where Ctrl-C is ignored."""
    return subprocess.Popen(
        [sys.executable, "-m", "aladdin_mpi", "watch", *map(str, args)], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, cwd=ROOT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip


def test_it_waits_for_a_run_and_ends_with_it(tmp_path: Path) -> None:
    folder = tmp_path / "later"
    watching = started("--wait", folder)
    try:
        assert watching.stderr is not None
        assert "waiting for the first files" in watching.stderr.readline()
        with Writer(folder, 0, "swmr") as writer:
            writer.write(3)
            assert watching.stdout is not None
            assert "iterations" in watching.stdout.readline()
            writer.end()
        out, err = watching.communicate(timeout=60)
        assert "the run has ended" in out and "3 iterations" in out and err == ""
        assert watching.returncode == 0
    finally:
        watching.kill()
        watching.communicate()


@pytest.mark.parametrize("waits", [False, True])
def test_ctrl_c_ends_it_quietly(tmp_path: Path, waits: bool) -> None:
    with Writer(tmp_path, 0, "swmr"):
        folder = tmp_path / "none" if waits else tmp_path
        watching = started("--wait", folder)
        try:
            stream = watching.stderr if waits else watching.stdout
            assert stream is not None and stream.readline()
            time.sleep(0.3)
            watching.send_signal(signal.SIGINT)
            _, err = watching.communicate(timeout=60)
            assert (watching.returncode, err) == (0, "")
        finally:
            watching.kill()
            watching.communicate()


def test_a_reader_that_has_enough_is_no_error(tmp_path: Path) -> None:
    with Writer(tmp_path, 0, "swmr") as writer:
        watching = started(tmp_path)
        try:
            assert watching.stdout is not None and watching.stdout.readline()
            watching.stdout.close()
            writer.end()
            assert watching.wait(60) == 0
            assert watching.stderr is not None and watching.stderr.read() == ""
        finally:
            watching.kill()
            watching.wait()


def test_on_another_host_a_quiet_file_is_not_given_up_at_once(tmp_path: Path) -> None:
    there = {"host": "elsewhere" + platform.node(), "pid": os.getpid()}
    with Watcher(tmp_path) as watcher:
        logs.write(tmp_path, 1, {"steps": steps(0, 3)}, **there)
        path = rank_path(tmp_path, 1)
        with h5py.File(path, "r+") as file:
            file["run/clean_end"][()], file["run/end_unix_s"][()] = 0, math.nan
        old = time.time() - 30
        os.utime(path, (old, old))
        assert watcher.look().state == "running"
        os.utime(path, (old - 60, old - 60))
        assert watcher.look().state == "stopped"


def test_a_file_that_hdf5_never_comes_back_from_is_left_out(tmp_path: Path) -> None:
    logs.served(tmp_path)
    path = rank_path(tmp_path, 0)
    raw = bytearray(path.read_bytes())
    raw[44] ^= 1  # the check sum of the first bytes: HDF5 waits for a writer to put it right
    path.write_bytes(raw)
    with GuardedWatcher(tmp_path, limit_s=3) as watcher:
        shown = watcher.look()
        assert [w.iterations for w in shown.workers] == [100, 100]
        assert shown.notes[0] == "rank0000.h5: left out, the process that read it came to no end"
        assert str(watcher.look()) == str(shown)


@pytest.mark.parametrize("how", ["exit", "segfault"])
def test_a_reader_that_dies_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    logs.served(tmp_path)
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys, aladdin_mpi.analysis.tail as tail\n"
        "def read(self):\n"
        f"    os._exit(3) if {how == 'exit'} else os.kill(os.getpid(), 11)\n"
        "tail.Tail.read = read\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    with pytest.raises(RecordError) as raised, GuardedWatcher(tmp_path) as watcher:
        watcher.look()
    expected = "has ended" if how == "exit" else "was ended by signal 11"
    assert f"rank0002.h5: left out, the process that read it {expected}" in str(raised.value)
