"""Damaged logs: they load with notes or an error line, and what can be read of them is saved."""

from __future__ import annotations

import collections
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import h5py
import logs
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from aladdin_mpi.analysis import load_run
from aladdin_mpi.analysis.load import SALVAGED
from aladdin_mpi.analysis.salvage import salvage
from aladdin_mpi.analysis.scan import scan_attributes, scan_rows
from aladdin_mpi.cli.main import main
from aladdin_mpi.errors import RecordError
from aladdin_mpi.record import reader as reader_module
from aladdin_mpi.record import schema
from aladdin_mpi.record.hdf5 import RankFile
from aladdin_mpi.record.reader import READER, Reader
from aladdin_mpi.record.reading import open_rank_file, rank_path

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).resolve().parents[2]
KINDS = ["swmr", "flush", "swmr-killed", "flush-killed"]
NUM_ROWS = {
    "server": {"arrivals": 1300, "merges": 1200, "polls": 70, "replies": 400, "events": 3},
    "worker": {"steps": 1000, "sends": 600, "mixes": 300, "evals": 9, "events": 5, "user": 800},
}
START_S = 5000.0
HISTORY = 0.01  # [s] between two rows


def fill(table: schema.Table, count: int, seed: int) -> np.ndarray:
    """Rows such as a run leaves."""
    random = np.random.default_rng(seed)
    rows = np.zeros(count, table.dtype)
    for column in table.columns:
        kind = np.dtype(column.dtype)
        if column.name in schema.CLOCK_COLUMNS:
            rows[column.name] = START_S + 1 + np.arange(count) * HISTORY
        elif kind.kind == "S":
            rows[column.name] = b"loss" if table is schema.USER else b"something happened"
        elif kind.kind == "f":
            rows[column.name] = random.random(count)
        else:
            rows[column.name] = np.arange(count) if kind.itemsize > 2 else 1
    return rows


def write_run(folder: Path, kind: str, ranks: int = 3) -> None:
    """One server and workers."""
    for rank in range(ranks):
        role = "worker" if rank else "server"
        attributes: dict[str, schema.Value] = {
            "rank": rank, "worker": rank - 1, "world_size": ranks, "num_workers": ranks - 1,
            "role": role, "config": "algorithm: aladdin\nperiod: 4\n", "versions": "{}",
            "run": "x", "start_clock_s": START_S, "clock_offset_s": 0.0, "pid": 2**22 + 1,
        }  # fmt: skip
        path = rank_path(folder, rank)
        with RankFile(path, attributes, swmr=kind.startswith("swmr")) as file:
            for part in range(4):
                for name, count in NUM_ROWS[role].items():
                    rows = fill(schema.TABLES[name], count, rank)
                    file.append(name, np.array_split(rows, 4)[part])
                file.flush()
            file.set_end("iterations", 1000)
            killed = path.read_bytes()
        if kind.endswith("killed") and rank < 2:
            path.write_bytes(killed)
        os.utime(path, (1e9, 1e9))


@functools.cache
def good_run(kind: str, folder: Path) -> tuple[list[bytes], list[dict[str, np.ndarray]]]:
    """Bytes of the files, and where in them the rows are, by table."""
    write_run(folder / kind, kind)
    files, places = [], []
    for rank in range(3):
        path = rank_path(folder / kind, rank)
        files.append(path.read_bytes())
        where = {}
        with open_rank_file(path) as file:
            for name in NUM_ROWS["worker" if rank else "server"]:
                data = file[name]
                row = np.arange(len(data))
                first = np.array([i.byte_offset for i in chunks(data)])
                chunk, place = np.divmod(row, data.chunks[0])
                where[name] = first[chunk] + place * data.dtype.itemsize
        places.append(where)
    return files, places


def chunks(data: h5py.Dataset) -> Iterator[h5py.h5d.StoreInfo]:
    infos = [data.id.get_chunk_info(i) for i in range(data.id.get_num_chunks())]
    return iter(sorted(infos, key=lambda info: info.chunk_offset))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("good")


# ---- any damage

fraction = st.floats(0, 1, exclude_max=True)
damages = st.one_of(
    st.tuples(st.just("cut"), fraction, st.just(0)),
    st.tuples(st.just("zero"), fraction, st.sampled_from([1, 16, 512, 4096, 50_000])),
    st.tuples(st.just("zero the beginning"), st.just(0.0), st.integers(1, 60_000)),
    st.tuples(st.just("flip"), fraction, st.sampled_from([1, 3, 60])),
    st.tuples(st.just("flip structure"), fraction, st.sampled_from([1, 3, 10])),
)


def damaged(good: bytes, rows: dict[str, np.ndarray], what: tuple[str, float, int]) -> bytes:
    kind, where, amount = what
    data = bytearray(good)
    begin = int(where * len(data))
    if kind == "cut":
        return good[:begin]
    if kind.startswith("zero"):
        data[begin : begin + amount] = bytes(len(data[begin : begin + amount]))
        return bytes(data)
    places = np.arange(len(data))
    if kind == "flip structure":
        places = places[np.frombuffer(good, np.uint8) != 0]
        for name, starts in rows.items():
            end = starts.max() + schema.TABLES[name].dtype.itemsize
            places = places[(places < starts.min()) | (places >= end)]
    random = np.random.default_rng(begin)
    for place in random.choice(places, amount):
        data[place] ^= 1 << int(random.integers(8))
    return bytes(data)


def check(
    good: bytes, bad: bytes, places: dict[str, np.ndarray], found: dict[str, np.ndarray]
) -> None:
    """Rows whose bytes are as they were are there; no others than those that are damaged."""
    before = np.frombuffer(good, np.uint8)
    after = np.frombuffer(bad.ljust(len(good), b"\0"), np.uint8)
    differs = before != after
    differs[len(bad) :] = True
    sums = np.concatenate([[0], np.cumsum(differs)])
    for name, starts in places.items():
        size = schema.TABLES[name].dtype.itemsize
        intact = sums[starts + size] == sums[starts]
        rows = [good[start : start + size] for start in starts.tolist()]
        here = [row.tobytes() for row in found[name]]
        want = collections.Counter(row for row, good in zip(rows, intact, strict=True) if good)
        extra = collections.Counter(here) - want
        assert extra.total() <= np.count_nonzero(~intact), name
        # A row that lost both neighbours is not recognised where the structure is gone.
        assert (want - collections.Counter(here)).total() <= 3, name
        numbers = {row: number for number, row in enumerate(rows)}
        order = [numbers[row] for row in here if row in numbers]
        assert order == sorted(order), name


@pytest.mark.parametrize("kind", KINDS)
@settings(
    max_examples=20, deadline=None, derandomize=True, database=None,
    phases=[Phase.explicit, Phase.generate],  # to shrink an example takes minutes
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(what=st.tuples(damages, damages))
def test_any_damage(
    kind: str, store: Path, tmp_path: Path, what: tuple[tuple[str, float, int], ...]
) -> None:
    """Two of three files are damaged."""
    files, places = good_run(kind, store)
    folder, new = tmp_path / "run", tmp_path / "new"
    folder.mkdir(exist_ok=True)
    shutil.rmtree(new, ignore_errors=True)
    bad = [damaged(files[rank], places[rank], what[rank]) for rank in (0, 1)] + [files[2]]
    for rank in range(3):
        rank_path(folder, rank).write_bytes(bad[rank])
        os.utime(rank_path(folder, rank), (1e9, 1e9))
    run = load_run(folder)
    frames = {name: run.table(name) for name in schema.TABLES}
    assert len(run.ranks) == len(run.logs) >= 1
    assert run.num_workers == 2
    assert all("\n" not in note for note in run.notes)
    for name, count in NUM_ROWS["worker"].items():
        rank_2 = frames[name][frames[name].index.get_level_values("rank") == 2]
        assert len(rank_2) == count
    before = [rank_path(folder, rank).stat() for rank in range(3)]
    _, logs = salvage(folder, new)
    assert [rank_path(folder, rank).stat() for rank in range(3)] == before
    saved = load_run(new)
    assert logs[2].copied
    assert rank_path(new, 2).read_bytes() == files[2]
    for rank, log in enumerate(logs[:2]):
        assert log.written or log.copied or log.lines
        if log.written or log.copied:
            assert saved.log(rank).worker == rank - 1
            assert saved.log(rank).attributes["role"] == ("worker" if rank else "server")
            rows = {name: READER.rows(rank_path(new, rank), name) for name in places[rank]}
            found = {name: part.rows for name, part in rows.items() if part is not None}
        else:
            found = {name: np.empty(0, schema.TABLES[name].dtype) for name in places[rank]}
        check(files[rank], bad[rank], places[rank], found)
        if not log.lines:
            assert {name: len(rows) for name, rows in found.items()} == {
                name: len(rows) for name, rows in places[rank].items()
            }


@pytest.mark.parametrize("kind", KINDS)
def test_the_raw_bytes_are_enough(kind: str, store: Path) -> None:
    """No byte is damaged; HDF5 is not asked."""
    good_run(kind, store)
    for rank in range(3):
        path = rank_path(store / kind, rank)
        found = scan_rows(path)
        for name in schema.TABLES:
            rows = READER.rows(path, name)
            assert rows is not None and not rows.lost
            assert found[name].tobytes() == rows.rows.tobytes()
        values = {k: v for k, v in READER.facts(path).attributes.items() if not isinstance(v, str)}
        scanned = scan_attributes(path)
        assert values.keys() == scanned.keys()
        np.testing.assert_array_equal(list(values.values()), list(scanned.values()))


# ---- other files


def no_file(path: Path) -> None:
    path.touch()


def text_file(path: Path) -> None:
    path.write_text("rank,step\n1,2\n" * 10_000)


def other_program(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file["steps"] = np.arange(1000)
        file.create_group("run")


def a_folder(path: Path) -> None:
    path.mkdir()


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def random_bytes(path: Path) -> None:
    path.write_bytes(np.random.default_rng(0).bytes(200_000))


def no_permission(path: Path) -> None:
    write_run(path.parent / "other", "swmr")
    shutil.copy(rank_path(path.parent / "other", 1), path)
    path.chmod(0)


def a_loop(path: Path) -> None:
    path.symlink_to(path.name)


FORBIDDEN = [no_permission] if os.geteuid() else []  # root may read everything


@pytest.mark.parametrize(
    "make",
    [no_file, text_file, other_program, a_folder, a_pipe, random_bytes, a_loop, *FORBIDDEN],
)
def test_what_is_no_log(make: Callable[[Path], None], store: Path, tmp_path: Path) -> None:
    alone, among = tmp_path / "alone", tmp_path / "among"
    alone.mkdir()
    make(alone / "rank0001.h5")
    with pytest.raises(RecordError, match=r"rank0001\.h5: cannot be read"):
        load_run(alone)
    with pytest.raises(RecordError, match="nothing could be saved"):
        salvage(alone)
    assert not (tmp_path / "alone-salvaged").exists()
    good_run("swmr", store)
    shutil.copytree(store / "swmr", among)
    rank_path(among, 1).unlink()
    make(rank_path(among, 1))
    run = load_run(among)
    assert [log.rank for log in run.logs] == [0, 2]
    assert len(run.steps) == NUM_ROWS["worker"]["steps"]
    assert any(note.startswith("rank0001.h5: cannot be read") for note in run.notes)
    folder, logs = salvage(among)
    assert [log.copied for log in logs] == [True, False, True]
    assert rank_path(folder, 2).read_bytes() == rank_path(among, 2).read_bytes()
    assert any("salvaged.txt" in note for note in load_run(folder).notes)


# ---- a child that dies

DYING = """
import os, signal, time
from aladdin_mpi.record import serving
piece, fact = serving._piece, serving._fact
def die():
    {how}
def dying_piece(dataset, table, begin, end, chunk):
    if begin <= {row} < end:
        die()
    yield from piece(dataset, table, begin, end, chunk)
def dying_fact(file, path, kind, name, column):
    if name == {name!r}:
        die()
    return fact(file, path, kind, name, column)
serving._piece, serving._fact, serving.LIMIT_S = dying_piece, dying_fact, 1
serving.serve()
"""
CRASH = "os.kill(os.getpid(), signal.SIGSEGV)"
HANG = "while True: pass"


@pytest.mark.parametrize(("how", "reason"), [(CRASH, "SIGSEGV"), (HANG, "took more than")])
def test_a_child_that_dies_loses_one_piece(
    how: str, reason: str, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good_run("swmr", store)
    path = rank_path(store / "swmr", 1)
    code = DYING.format(how=how, row=450, name="host")
    original = subprocess.Popen
    monkeypatch.setattr(
        reader_module.subprocess, "Popen",
        lambda command, **options: original([sys.executable, "-c", code], **options),
    )  # fmt: skip
    reader = Reader()
    try:
        facts = reader.facts(path)
        assert list(facts.lost) == ["attribute host"]
        assert reason in facts.lost["attribute host"]
        assert facts.attributes["rank"] == 1
        assert facts.counts["steps"] == 1000
        rows = reader.rows(path, "steps")
        assert rows is not None
        assert (rows.lost, rows.total) == ([(409, 818)], 1000)
        assert reason in rows.reason
        assert rows.rows["iteration"].tolist() == [*range(409), *range(818, 1000)]
        rows = reader.rows(path, "sends", first=590)
        assert rows is not None and len(rows.rows) == 10 and not rows.lost
    finally:
        reader.close()


def test_a_child_that_does_not_start(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good_run("swmr", store)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RecordError, match="exit code 1"):
        Reader().facts(rank_path(store / "swmr", 1))


# ---- the command


def call(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "aladdin_mpi", "salvage", *map(str, arguments)],
        capture_output=True, text=True, cwd=ROOT, timeout=100,
    )  # fmt: skip


def test_the_command(store: Path, tmp_path: Path) -> None:
    files, places = good_run("swmr", store)
    folder = tmp_path / "x"
    shutil.copytree(store / "swmr", folder)
    (folder / "config.yaml").write_text("algorithm: aladdin\n")
    half = int(places[1]["steps"][700])
    rank_path(folder, 1).write_bytes(files[1][:half])
    shown = call(folder)
    assert (shown.returncode, shown.stderr) == (0, "")
    lines = shown.stdout.splitlines()
    assert lines[0] == "rank 0: copied"
    assert "rank 1: steps: 700 of 1000 rows saved" in lines
    assert "rank 2: copied" in lines
    assert lines[-1] == f"saved in {folder}-salvaged"
    new = Path(f"{folder}-salvaged")
    assert "rank 1: steps: 700 of 1000" in (new / SALVAGED).read_text()
    assert (new / "config.yaml").is_file()
    assert len(load_run(new).steps) == 1700
    again = call(folder)
    assert again.returncode == 2
    assert "exists already" in again.stderr


def test_the_command_with_nothing_to_save(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "rank0000.h5").write_text("no log")
    result = CliRunner().invoke(main, ["salvage", str(tmp_path / "x"), "-o", str(tmp_path / "y")])
    assert result.exit_code == 2
    assert len(result.output.splitlines()) == 1
    assert "nothing could be saved" in result.output
    assert not (tmp_path / "y").exists()
    result = CliRunner().invoke(main, ["salvage", str(tmp_path / "none")])
    assert result.exit_code == 2
    assert "no such folder" in result.output


@settings(
    max_examples=15, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    phases=[Phase.explicit, Phase.generate],
)  # fmt: skip
@given(kind=st.sampled_from(KINDS), what=st.tuples(damages, damages))
def test_commands_on_damaged_runs(
    kind: str, store: Path, tmp_path: Path, what: tuple[tuple[str, float, int], ...]
) -> None:
    files, places = good_run(kind, store)
    folder = tmp_path / "run"
    folder.mkdir(exist_ok=True)
    for rank in (0, 1):
        bad = damaged(files[rank], places[rank], what[rank])
        rank_path(folder, rank).write_bytes(bad)
    for arguments in (["report", folder], ["compare", folder, store / kind]):
        result = CliRunner().invoke(main, list(map(str, arguments)))
        assert result.exit_code in (0, 2), result.exception
        if result.exit_code:
            assert len(result.output.splitlines()) == 1


def test_attributes_come_from_the_others(store: Path, tmp_path: Path) -> None:
    """The first 50 kB are gone: all structure and all attributes."""
    files, places = good_run("flush", store)
    folder = tmp_path / "x"
    shutil.copytree(store / "flush", folder)
    first = min(int(starts.min()) for starts in places[1].values())
    rank_path(folder, 1).write_bytes(bytes(first) + files[1][first:])
    new, logs = salvage(folder)
    log = load_run(new).log(1)
    assert (log.worker, log.attributes["role"], log.attributes["num_workers"]) == (0, "worker", 2)
    assert log.attributes["config"].startswith("algorithm")
    assert log.attributes["host"] == ""
    assert any("not known any more: " in line and "host" in line for line in logs[1].lines)
    assert log.counts["steps"] == 1000
    rank_path(folder, 0).unlink()
    rank_path(folder, 2).unlink()
    new, logs = salvage(folder, tmp_path / "alone")
    assert load_run(new).log(1).counts["steps"] == 1000
    assert any("world_size" in line for line in logs[0].lines)


def test_ranks_of_several_servers_keep_their_roles(tmp_path: Path) -> None:
    """Ranks 0 and 2 serve, as two servers on two nodes do."""
    roles = {0: ("server", -1), 1: ("worker", 0), 2: ("server", -1), 3: ("worker", 1)}
    for rank, (role, worker) in roles.items():
        logs.write(
            tmp_path / "run", rank, {"polls" if worker < 0 else "steps": fill(
                schema.TABLES["polls" if worker < 0 else "steps"], 20, rank
            )},
            world_size=4, role=role, worker=worker,
        )  # fmt: skip
    good, _ = salvage(tmp_path / "run")
    for rank, expected in roles.items():
        with open_rank_file(rank_path(good, rank)) as file:
            assert (str(file.attrs["role"]), int(file.attrs["worker"])) == expected
