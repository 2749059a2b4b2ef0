"""What is logged, and that it is there afterwards."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aladdin_mpi.errors import AladdinError, RecordError
from aladdin_mpi.record import layout, schema
from aladdin_mpi.record.hdf5 import RankFile
from aladdin_mpi.record.reading import open_rank_file, rank_path
from aladdin_mpi.record.recorder import MemoryFile, NullRecorder, Recorder

pytestmark = pytest.mark.timeout(120)
ROOT = Path(__file__).parents[2]
MODES = pytest.mark.parametrize("swmr", [True, False], ids=["swmr", "flush"])


def poll_row(number: int) -> schema.Row:
    return schema.POLLS.row(time_s=time.monotonic(), polls=number, empty=0, samples_total=number)


def python(code: str, *arguments: object, **options: object) -> subprocess.Popen[str]:
    """A Python process that runs ``code``; its standard output is a pipe."""
    header = """
        import os, sys, time
        import numpy as np
        from aladdin_mpi.record import schema
        from aladdin_mpi.record.hdf5 import RankFile
        from aladdin_mpi.record.reading import open_rank_file
        from aladdin_mpi.record.recorder import Recorder
    """
    code = textwrap.dedent(header) + textwrap.dedent(code)
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        **options,
    )


# ---- schema


@pytest.mark.parametrize("table", schema.TABLES.values(), ids=lambda t: t.name)
def test_every_column_is_explained(table: schema.Table) -> None:
    assert table.meaning
    assert set(table.roles) <= {"worker", "server", "relay"}
    assert table.roles
    assert len(set(table.names)) == len(table.names)
    for column in table.columns:
        assert column.unit in {"1", "s", "B", "text"}
        assert column.meaning.strip()
        assert "\n" not in column.meaning
        assert column.name.endswith("_s") == (column.unit == "s")
        assert (column.name == "bytes") == (column.unit == "B")
        assert (np.dtype(column.dtype).kind == "S") == (column.unit == "text")


@pytest.mark.parametrize("table", schema.TABLES.values(), ids=lambda t: t.name)
def test_rows_are_packed_and_little_endian(table: schema.Table) -> None:
    assert table.dtype.names == table.names
    assert table.dtype.itemsize == sum(np.dtype(c.dtype).itemsize for c in table.columns)
    assert all(table.dtype[n].byteorder in "<=|" for n in table.names)
    assert table.dtype.itemsize <= 150


def test_events_are_all_explained() -> None:
    assert set(schema.EVENT_MEANINGS) == set(schema.EventKind)
    kind = schema.EVENTS.columns[1]
    assert all(f"{k.value}: {k.name.lower()}" in kind.meaning for k in schema.EventKind)


def test_row_by_name() -> None:
    row = schema.MIXES.row(number=3, alpha=0.5)
    assert row[2] == 3
    assert row[3] == -1
    assert row[4] == 0.5
    assert math.isnan(row[0])
    with pytest.raises(TypeError, match="no column"):
        schema.MIXES.row(nubmer=3)


# ---- files


@MODES
def test_round_trip(tmp_path: Path, swmr: bool) -> None:
    path = rank_path(tmp_path / "new" / "folder", 3)
    assert path.name == "rank0003.h5"
    config = "period: 4\n" * 20_000  # longer than the 64 KiB that an attribute may hold itself
    attributes = {"rank": 3, "worker": 2, "world_size": 4, "role": "worker", "config": config}
    written = {}
    with RankFile(path, attributes, swmr=swmr) as file:
        assert file.mode == ("swmr" if swmr else "flush")
        random = np.random.default_rng(0)
        for name, table in schema.TABLES.items():
            raw = random.integers(1, 100, size=(1000, table.dtype.itemsize), dtype=np.uint8)
            written[name] = raw.reshape(-1).view(table.dtype)
            for part in np.split(written[name], [1, 2, 700]):
                file.append(name, part)
        file.set_end("iterations", 1000)
        file.set_end("reason", "ünd")
    with h5py.File(path, "r") as file:
        for name in schema.TABLES:
            assert file[name][:].tobytes() == written[name].tobytes()
        assert file.attrs["schema_version"] == schema.SCHEMA_VERSION
        assert file.attrs["config"] == config
        assert (file.attrs["rank"], file.attrs["worker"]) == (3, 2)
        assert file.attrs["mode"] == ("swmr" if swmr else "flush")
        assert set(file.attrs) == {c.name for c in schema.ATTRIBUTES}
        assert file["run/clean_end"][()] == 1
        assert file["run/iterations"][()] == 1000
        assert file["run/pushes"][()] == -1
        assert file["run/reason"][()].decode() == "ünd"
        assert file["run/end_clock_s"][()] >= file.attrs["start_clock_s"]


@MODES
def test_columns_are_described_in_the_file(tmp_path: Path, swmr: bool) -> None:
    with RankFile(tmp_path / "a.h5", swmr=swmr):
        pass
    with h5py.File(tmp_path / "a.h5", "r") as file:
        for name, table in schema.TABLES.items():
            assert file[name].attrs["meaning"] == table.meaning
            for column in table.columns:
                assert file[name].attrs[f"{column.name}.unit"] == column.unit
                assert file[name].attrs[f"{column.name}.meaning"] == column.meaning
        for column in schema.END_VALUES:
            assert file["run"][column.name].attrs["unit"] == column.unit
        assert json.loads(file["events"].attrs["kinds"])["4"][0] == "stall"


def test_a_closed_file_keeps_no_reserve(tmp_path: Path) -> None:
    with RankFile(tmp_path / "a.h5") as file:
        file.append("polls", np.zeros(10, schema.POLLS.dtype))
        assert file.path.stat().st_size > 300_000
    assert file.path.stat().st_size < 250_000  # tables, attributes, one chunk


def test_mistakes_of_the_caller(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not in the schema"):
        RankFile(tmp_path / "a.h5", {"wrold_size": 3})
    assert not (tmp_path / "a.h5").exists()
    with RankFile(tmp_path / "a.h5") as file, pytest.raises(KeyError, match="clean_end"):
        file.set_end("no such", 1)
    with pytest.raises(RecordError, match="run has ended"):
        file.append("polls", np.zeros(1, schema.POLLS.dtype))


def one_line(info: pytest.ExceptionInfo[RecordError], *parts: str) -> None:
    text = str(info.value)
    assert isinstance(info.value, AladdinError)
    assert "\n" not in text
    assert text.startswith("rank 3 (worker 2): ")
    assert all(part in text for part in parts)


def test_error_lines(tmp_path: Path) -> None:
    attributes = {"rank": 3, "worker": 2}
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(RecordError) as info:
        RankFile(tmp_path / "file" / "a.h5", attributes)
    one_line(info, "cannot write the log file", "choose a folder")
    (tmp_path / "a.h5").write_text("precious")
    with pytest.raises(RecordError) as info:
        RankFile(tmp_path / "a.h5", attributes)
    one_line(info, "exists already", "choose another folder")
    assert (tmp_path / "a.h5").read_text() == "precious"
    with pytest.raises(RecordError, match="cannot read"):
        open_rank_file(tmp_path / "file")
    with pytest.raises(RecordError, match="No such file"):
        open_rank_file(tmp_path / "none.h5")


def test_unwritable_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    user = os.geteuid()
    if user == 0:  # root may write everywhere
        os.seteuid(65534)
    try:
        with pytest.raises(RecordError) as info:
            RankFile(tmp_path / "a.h5", {"rank": 3, "worker": 2})
    finally:
        os.seteuid(user)
    one_line(info, "Permission denied")


def test_falls_back_without_swmr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: h5py.File, value: bool) -> None:
        raise ValueError("Unable to start swmr mode")

    swmr_mode = property(h5py.File.swmr_mode.fget, refuse)
    monkeypatch.setattr(h5py.File, "swmr_mode", swmr_mode)
    with RankFile(tmp_path / "a.h5") as file:
        assert file.mode == "flush"
        file.append("polls", np.zeros(3, schema.POLLS.dtype))
    with h5py.File(tmp_path / "a.h5", "r") as read:
        assert read.attrs["mode"] == "flush"
        assert len(read["polls"]) == 3
    with pytest.raises(RecordError, match=r"cannot create .*swmr"):
        RankFile(tmp_path / "b.h5", swmr=True)
    assert not (tmp_path / "b.h5").exists()


def test_falls_back_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = h5py.File.__init__

    def init(self: h5py.File, *args: object, **kwargs: object) -> None:
        if "w" in args and kwargs["locking"] is not False:
            raise BlockingIOError(37, "Unable to lock file, errno = 37")
        original(self, *args, **kwargs)

    monkeypatch.setattr(h5py.File, "__init__", init)
    with RankFile(tmp_path / "a.h5") as file:
        assert (file.mode, file.locking) == ("swmr", False)
    with open_rank_file(tmp_path / "a.h5") as read:
        assert read.attrs["locking"] == 0


def test_no_swmr_on_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert layout.filesystem(Path("/proc/self/status")) == "proc"
    monkeypatch.setattr(layout, "filesystem", lambda path: "nfs4")
    with RankFile(tmp_path / "a.h5") as file:
        assert file.mode == "flush"


def test_read_while_it_is_written(tmp_path: Path) -> None:
    """Rows seen by a reader are right, in order, and become more."""
    reader = python(
        """
        with open_rank_file(sys.argv[1]) as file:
            polls, seen = file["polls"], []
            print("open", flush=True)
            while len(seen) < 5:
                polls.refresh()
                rows = polls[:]
                assert (rows["polls"] == np.arange(len(rows))).all(), rows["polls"]
                if len(rows) and (not seen or len(rows) > seen[-1]):
                    seen.append(len(rows))
                time.sleep(0.01)
        print(seen)
        """,
        tmp_path / "a.h5",
    )
    with RankFile(tmp_path / "a.h5", swmr=True) as file, Recorder(file, period_s=0.02) as recorder:
        deadline = time.monotonic() + 60
        number = 0
        while reader.poll() is None and time.monotonic() < deadline:
            recorder.polls(poll_row(number))
            number += 1
            time.sleep(0.001)
        out, err = reader.communicate(timeout=20)
        assert reader.returncode == 0, err
        assert out.startswith("open")


@MODES
@pytest.mark.parametrize("attempt", range(5))
def test_rows_survive_a_kill(tmp_path: Path, swmr: bool, attempt: int) -> None:
    """Five kills per mode, each at another moment of the writing."""
    writer = python(
        """
        recorder = Recorder(RankFile(sys.argv[1], swmr=sys.argv[2] == "True"), period_s=0.5)
        print("go", flush=True)
        number = 0
        while True:
            now = time.monotonic()
            recorder.polls(schema.POLLS.row(time_s=now, polls=number))
            recorder.steps(schema.STEPS.row(start_s=now, iteration=number))
            number += 1
            if number % 100 == 0:
                os.write(1, b"%.6f\\n" % now)  # time of the last row
            time.sleep(0.0002)
        """,
        tmp_path / "a.h5",
        swmr,
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == "go\n"
    time.sleep(1.3 + 0.11 * attempt)
    writer.send_signal(signal.SIGKILL)
    last = float(writer.communicate(timeout=10)[0].split()[-1])
    with open_rank_file(tmp_path / "a.h5") as file:
        assert file["run/clean_end"][()] == 0
        for table, number, clock in (
            ("polls", "polls", "time_s"),
            ("steps", "iteration", "start_s"),
        ):
            rows = file[table][:]
            assert (rows[number] == np.arange(len(rows))).all()
            assert rows[clock][-1] >= last - 1.0


DISK_FULL = """
    import resource
    lines = []
    file = RankFile(sys.argv[1], {"rank": 1}, swmr=sys.argv[2] == "True")
    recorder = Recorder(file, period_s=0.02, report=lines.append)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, 2_000_000))
    for number in range(60_000):
        recorder.polls(schema.POLLS.row(polls=number))
    while recorder.error is None:
        time.sleep(0.01)
    recorder.close()
    assert len(lines) == 1, lines
    print(recorder.rows_lost, lines[0])
"""


@MODES
def test_disk_full(tmp_path: Path, swmr: bool) -> None:
    """A limit on the size of files fails like a full disk, in the middle of HDF5 if we let it."""
    writer = python(DISK_FULL, tmp_path / "a.h5", swmr)
    out, err = writer.communicate(timeout=60)
    assert (writer.returncode, err) == (0, "")
    lost = int(out.split()[0])
    assert re.search(r"rank 1: cannot write .*File too large; what was written .*goes on", out)
    with h5py.File(tmp_path / "a.h5", "r") as file:
        rows = file["polls"][:]
        assert file["run/clean_end"][()] == 1
        assert file["run/rows_lost"][()] == lost == 60_000 - len(rows)
        assert (rows["polls"] == np.arange(len(rows))).all()
        assert len(rows) > 10_000


@MODES
def test_write_fails_inside_hdf5(tmp_path: Path, swmr: bool) -> None:
    """HDF5's own write fails: what was flushed is there, and the process ends in order."""
    writer = python(
        """
        file = RankFile(sys.argv[1], {"rank": 1}, swmr=sys.argv[2] == "True")
        rows = np.zeros(3000, schema.POLLS.dtype)
        rows["polls"] = np.arange(3000)
        file.append("polls", rows)
        file.flush()
        full = os.open("/dev/full", os.O_RDWR)
        kept = os.dup(file._descriptor)
        file._reserve = lambda num_bytes: None
        os.dup2(full, file._descriptor)
        lines = []
        recorder = Recorder(file, report=lines.append, period_s=0.02)
        for number in range(30_000):
            recorder.polls(schema.POLLS.row(polls=number))
        while recorder.error is None:
            time.sleep(0.01)
        recorder.set_end("iterations", 5)
        recorder.close()
        recorder.close()
        print(len(lines), lines[0])
        """,
        tmp_path / "a.h5",
        swmr,
    )
    out, err = writer.communicate(timeout=60)
    assert (writer.returncode, err) == (0, "")
    assert re.search(r"1 rank 1: cannot write .*No space left on device; what was", out)
    with open_rank_file(tmp_path / "a.h5") as file:
        assert (file["polls"][:]["polls"] == np.arange(3000)).all()


def test_a_forked_child_leaves_the_file_alone(tmp_path: Path) -> None:
    writer = python(
        """
        recorder = Recorder(RankFile(sys.argv[1]), period_s=0.01, capacity=4)
        for number in range(100):
            recorder.polls(schema.POLLS.row(polls=number))
            if number % 20 == 10:
                child = os.fork()
                if child == 0:
                    for _ in range(100):
                        recorder.polls(schema.POLLS.row(polls=-7))
                    recorder.close()
                    sys.exit(0)
                assert os.waitpid(child, 0)[1] == 0
        recorder.close()
        """,
        tmp_path / "a.h5",
    )
    _, err = writer.communicate(timeout=60)
    assert (writer.returncode, err) == (0, "")
    with h5py.File(tmp_path / "a.h5", "r") as file:
        assert (file["polls"][:]["polls"] == np.arange(100)).all()


# ---- recorder


@settings(max_examples=30, deadline=None)
@given(capacity=st.integers(1, 9), bursts=st.lists(st.integers(0, 40), max_size=8))
def test_no_row_is_lost_or_reordered(capacity: int, bursts: list[int]) -> None:
    file = MemoryFile()
    with Recorder(file, period_s=0.001, capacity=capacity) as recorder:
        number = 0
        for burst in bursts:
            for _ in range(burst):
                recorder.add("polls", poll_row(number))
                number += 1
            recorder.flush()
    assert file.rows("polls")["polls"].tolist() == list(range(number))
    assert file.end["clean_end"] == 1
    assert file.end["rows_lost"] == 0


class SlowFile(MemoryFile):
    def __init__(self) -> None:
        super().__init__()
        self.threads: set[str] = set()

    def append(self, table: str, rows: np.ndarray) -> None:
        self.threads.add(threading.current_thread().name)
        time.sleep(0.005)
        super().append(table, rows)


def test_slow_file_and_several_producers() -> None:
    """More rows than the rings hold, two tables with a producer each, events from both."""
    file = SlowFile()
    with Recorder(file, period_s=0.01, capacity=64) as recorder:

        def produce(table: str, column: str) -> None:
            for number in range(3000):
                recorder.add(table, schema.TABLES[table].row(**{column: number}))
                if number % 300 == 0:
                    recorder.event(schema.EventKind.NOTE, value=number, text=table)

        producers = [
            threading.Thread(target=produce, args=a, name=a[0])
            for a in (("steps", "iteration"), ("sends", "sequence"))
        ]
        for producer in producers:
            producer.start()
        for producer in producers:
            producer.join()
    assert file.rows("steps")["iteration"].tolist() == list(range(3000))
    assert file.rows("sends")["sequence"].tolist() == list(range(3000))
    events = file.rows("events")
    for table in (b"steps", b"sends"):
        assert events[events["text"] == table]["value"].tolist() == list(range(0, 3000, 300))
    assert {"steps", "sends"} <= file.threads  # full rings made their producers write


def test_a_crowded_ring_is_written_before_its_time() -> None:
    file = MemoryFile()
    recorder = Recorder(file, period_s=60, capacity=10)
    for number in range(15):
        recorder.polls(poll_row(number))
    deadline = time.monotonic() + 30
    while not len(file.rows("polls")) and time.monotonic() < deadline:
        time.sleep(0.005)
    assert len(file.rows("polls")) >= 10
    recorder.close()
    assert len(file.rows("polls")) == 15


def test_values_that_do_not_fit_are_brought_into_range() -> None:
    file = MemoryFile()
    with Recorder(file) as recorder:
        recorder.merges((1.0, 10**6, 2**70, -(2**40), 1e300, 5, 1))
        with pytest.warns(RuntimeWarning, match="overflow"):
            recorder.merges((1.0, 0, 0, 0, 1e300, 5, 1))
        with warnings.catch_warnings(action="error"):
            recorder.merges((1.0, 0, 0, 0, 1e300, 5, 1))
        recorder.merges((None, math.nan, math.inf, np.int64(3), np.float32(2), True, 1))
        recorder.events((1.0, 2, 3, 4.0, "ü" * 100))
        with pytest.raises(ValueError, match="7 values, not 2"):
            recorder.merges((1, 2))
    first, large, same, second = file.rows("merges")
    assert first.tolist() == (1.0, 2**15 - 1, 2**63 - 1, -(2**31), math.inf, 5, 1)
    assert large.tolist() == same.tolist() == (1.0, 0, 0, 0, math.inf, 5, 1)
    assert math.isnan(second["time_s"])
    assert second.tolist()[1:] == (-1, -1, 3, 2.0, 1, 1)
    assert file.rows("events")["text"][0] == ("ü" * 60).encode()


def test_failed_append_stops_the_recording_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    file = RankFile(tmp_path / "a.h5")
    recorder = Recorder(file, period_s=60, capacity=8, report=lines.append)
    recorder.polls(poll_row(0))
    recorder.flush()

    def fail(table: str, rows: np.ndarray) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(file, "append", fail)
    for number in range(1, 100):
        recorder.polls(poll_row(number))
    recorder.close()
    assert len(lines) == 1
    assert "\n" not in lines[0]
    assert "No space left" in lines[0]
    assert "training goes on" in lines[0]
    assert recorder.rows_lost == 99
    with h5py.File(tmp_path / "a.h5", "r") as read:
        assert read["polls"][:]["polls"].tolist() == [0]
        assert read["run/rows_lost"][()] == 99
        assert read["run/clean_end"][()] == 1


def test_close_twice_and_rows_after_it(tmp_path: Path) -> None:
    file = RankFile(tmp_path / "a.h5")
    recorder = Recorder(file, capacity=4)
    recorder.polls(poll_row(0))
    recorder.set_end("samples", 7)
    recorder.close(clean=False)
    recorder.close()
    file.close()
    for number in range(20):
        recorder.polls(poll_row(number))
    recorder.flush()
    recorder.set_end("samples", 8)
    with h5py.File(tmp_path / "a.h5", "r") as read:
        assert len(read["polls"]) == 1
        assert read["run/samples"][()] == 7
        assert read["run/clean_end"][()] == 0


def test_a_program_that_forgets_to_close(tmp_path: Path) -> None:
    writer = python(
        """
        recorder = Recorder(RankFile(sys.argv[1]), period_s=60)
        recorder.polls(schema.POLLS.row(polls=1))
        """,
        tmp_path / "a.h5",
    )
    out, err = writer.communicate(timeout=60)
    assert (writer.returncode, out, err) == (0, "", "")
    with h5py.File(tmp_path / "a.h5", "r") as file:
        assert len(file["polls"]) == 1
        assert file["run/clean_end"][()] == 0


@pytest.mark.parametrize("kind", ["null", "real"])
def test_ticks(kind: str) -> None:
    lines: list[str] = []
    if kind == "null":
        recorder = NullRecorder(period_s=0.01, report=lines.append)
    else:
        recorder = Recorder(MemoryFile(), period_s=0.01, report=lines.append)
    ticks: list[float] = []
    broken: list[int] = []

    def fail() -> None:
        broken.append(1)
        raise KeyError("two\nlines")

    recorder.every(fail)
    recorder.every(lambda: ticks.append(time.monotonic()))
    for name in schema.TABLES:
        getattr(recorder, name)(schema.TABLES[name].row())
    recorder.event(schema.EventKind.NOTE, text="hello")
    recorder.set_end("samples", 3)
    deadline = time.monotonic() + 30
    while len(ticks) < 3 and time.monotonic() < deadline:
        time.sleep(0.005)
    recorder.close()
    count = len(ticks)
    assert count >= 3
    time.sleep(0.05)
    assert len(ticks) == count
    assert broken == [1]
    assert len(lines) == 1
    assert "KeyError" in lines[0]
    assert "\n" not in lines[0]


def test_the_room_imports_neither_torch_nor_mpi() -> None:
    writer = python("print(sorted({'torch', 'mpi4py', 'horovod'} & set(sys.modules)))")
    assert writer.communicate(timeout=60)[0] == "[]\n"
