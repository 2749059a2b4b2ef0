"""Checkpoints: files that a killed writer cannot spoil, and the server's part of one."""

import json
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lockstep import Lockstep

from aladdin_mpi.algorithms.base import Stateful
from aladdin_mpi.errors import CheckpointError, ConfigError
from aladdin_mpi.runtime import checkpoint, restart
from aladdin_mpi.runtime.checkpoint import Writer
from aladdin_mpi.runtime.cuts import LEAD, Due, Plan, Signals
from aladdin_mpi.runtime.options import check_plan
from aladdin_mpi.runtime.servercuts import ServerCuts
from aladdin_mpi.runtime.state import clone, from_plain, restore_rng, rng_state, to_plain
from aladdin_mpi.workload.partition import PartitionSampler

pytestmark = pytest.mark.timeout(120)


def writer(folder, rank, size=2, keep=2, said=None):
    said = [] if said is None else said
    return Writer(folder, rank, size, (), keep, lambda number, seconds: None, said.append)


def make(folder, number, ranks=(0, 1), left=(), size=2, keep=2):
    for rank in ranks:
        one = writer(folder, rank, size, keep)
        one.write(number, {"x": torch.full((3,), float(number))})
        if rank == 0:
            one.write_head(number, left)
        one.wait()


# -- files ----------------------------------------------------------------------------------------


def test_a_checkpoint_counts_once_all_its_files_are_there(tmp_path):
    assert checkpoint.latest(tmp_path) == 0
    make(tmp_path, 1)
    make(tmp_path, 2, ranks=(0,))
    make(tmp_path, 3, ranks=(1,))
    assert checkpoint.numbers(tmp_path) == [1, 2, 3]
    assert checkpoint.latest(tmp_path) == 1
    make(tmp_path, 2, ranks=(1,))
    assert checkpoint.latest(tmp_path) == 2
    assert checkpoint.read(tmp_path, 2, 1)["x"].tolist() == [2.0] * 3


def test_a_worker_that_had_ended_counts_with_what_it_left(tmp_path):
    make(tmp_path, 1, ranks=(0,), left=(1,))
    assert checkpoint.latest(tmp_path) == 0
    one = writer(tmp_path, 1)
    one.write_ended({"x": torch.ones(1)})
    one.wait()
    assert checkpoint.latest(tmp_path) == 1
    assert checkpoint.read(tmp_path, 1, 1)["x"].tolist() == [1.0]


@pytest.mark.parametrize("damage", ["cut", "zeros", "text", "empty"])
def test_a_damaged_file_is_one_line(tmp_path, damage):
    make(tmp_path, 1)
    path = tmp_path / "checkpoints" / "000001" / "rank0001.pt"
    content = path.read_bytes()
    path.write_bytes(
        {"cut": content[: len(content) // 2], "zeros": bytes(len(content)), "text": b"no",
         "empty": b""}[damage]
    )  # fmt: skip
    with pytest.raises(CheckpointError, match="cannot be read") as caught:
        checkpoint.read(tmp_path, 1, 1)
    assert "\n" not in str(caught.value)


def test_another_schema_version_is_refused(tmp_path):
    make(tmp_path, 1)
    path = tmp_path / "checkpoints" / "000001" / "rank0000.pt"
    torch.save({**torch.load(path), "schema_version": 99}, path)
    with pytest.raises(CheckpointError, match="schema version 99"):
        checkpoint.read(tmp_path, 1, 0)


def test_nothing_in_a_file_is_executed(tmp_path):
    class Trap:
        def __reduce__(self):
            return (open, (str(tmp_path / "trapped"), "w"))

    make(tmp_path, 1)
    torch.save({"schema_version": 1, "x": Trap()}, tmp_path / "checkpoints/000001/rank0000.pt")
    with pytest.raises(CheckpointError):
        checkpoint.read(tmp_path, 1, 0)
    assert not (tmp_path / "trapped").exists()


def test_old_ones_are_removed_and_incomplete_ones_never_count(tmp_path):
    for number in range(1, 8):
        make(tmp_path, number, ranks=(0,) if number == 5 else (0, 1), keep=2)
    there = checkpoint.numbers(tmp_path)
    assert there[-1] == 7 and 1 not in there and 2 not in there
    assert sum(checkpoint.complete(tmp_path, n) for n in there) >= 2


def test_a_full_disk_is_said_and_the_run_goes_on(tmp_path):
    said = []
    (tmp_path / "checkpoints").write_text("in the way")
    one = writer(tmp_path, 0, said=said)
    one.write(1, {})
    one.wait()
    (line,) = said
    assert "the run goes on" in line and "\n" not in line


def test_a_head_that_is_no_json_does_not_count(tmp_path):
    make(tmp_path, 1)
    (tmp_path / "checkpoints/000001/checkpoint.json").write_text("{")
    assert not checkpoint.complete(tmp_path, 1)
    (tmp_path / "checkpoints/000001/checkpoint.json").write_text(json.dumps({"left": []}))
    assert not checkpoint.complete(tmp_path, 1)


# -- states ---------------------------------------------------------------------------------------


def test_states_survive_the_way_to_the_disk_and_back(tmp_path):
    state = {"v": np.arange(3, dtype=np.float32), "n": np.int64(4), "t": (1, [np.ones(2)])}
    torch.save(to_plain(state), tmp_path / "x.pt")
    back = from_plain(torch.load(tmp_path / "x.pt", weights_only=True))
    assert np.array_equal(back["v"], state["v"]) and back["n"] == 4
    assert np.array_equal(back["t"][1][0], np.ones(2))


def test_a_clone_is_nobody_elses():
    x = torch.ones(2)
    copy = clone({"a": [x], "b": 3})
    x.add_(1)
    assert copy["a"][0].tolist() == [1.0, 1.0] and copy["b"] == 3


def test_random_numbers_go_on(tmp_path):
    import random

    def draw():
        return random.random(), np.random.rand(), torch.rand(1).item()  # noqa: NPY002

    draw()
    torch.save(rng_state(), tmp_path / "x.pt")
    expected = [draw() for _ in range(3)]
    restore_rng(torch.load(tmp_path / "x.pt", weights_only=True))
    assert [draw() for _ in range(3)] == expected


def test_a_partition_goes_on_where_it_was():
    sampler = PartitionSampler(20, 1, 2, 7, shuffle=True, shared=True)
    whole = list(sampler)
    sampler.skip = 6
    assert list(sampler) == whole[6:] and len(sampler) == 14


# -- when -----------------------------------------------------------------------------------------


def test_due_by_epochs_iterations_and_time(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    due = Due(Plan(epochs=1.0))
    due.begin(2.5, 10)
    assert not due.now(3.4, 999)
    assert due.now(3.5, 999) and not due.now(4.0, 999) and due.now(4.5, 999)
    due = Due(Plan(iterations=10))
    assert [due.now(0, i) for i in (9, 10, 19, 20)] == [False, True, False, True]
    due = Due(Plan(minutes=2, time_limit=5))
    now[0] += 119
    assert not due.now(0, 0)
    now[0] += 1
    assert due.now(0, 0) and not due.now(0, 0)
    now[0] += 179
    assert not due.out_of_time()
    now[0] += 1
    assert due.out_of_time()
    assert not Due(Plan()).now(1e9, 1e9) and not Due(Plan()).out_of_time()


@pytest.mark.parametrize(
    "given",
    [
        {"epochs": -1}, {"iterations": float("nan")}, {"minutes": "x"}, {"keep": 0},
        {"time_limit": float("inf")},
    ],
)  # fmt: skip
def test_bad_plans_are_one_line(given):
    usual = {"epochs": 0, "iterations": 0, "minutes": 0, "keep": 2, "time_limit": 0}
    with pytest.raises(ConfigError, match=r"^--\S+ \S+: must be"):
        check_plan(**(usual | given))


def test_a_signal_that_comes_early_is_not_lost():
    signals, calls = Signals(), []
    signals._handle(0, None)
    signals.call(lambda: calls.append(1))
    assert calls == [1]
    signals._handle(0, None)
    assert calls == [1, 1]


@pytest.mark.parametrize(
    ("resume", "out", "expected"),
    [
        ("auto", "x", ("x", 0)),
        ("{run}", None, ("{run}", 0)),
        ("{run}/checkpoints/000003", None, ("{run}", 3)),
        ("{run}", "{run}", ("{run}", 0)),
    ],
)
def test_where_to_resume(tmp_path, resume, out, expected):
    (tmp_path / "checkpoints").mkdir()
    place = type(tmp_path)
    out = None if out is None else place(out.format(run=tmp_path))
    found = restart.locate(resume.format(run=tmp_path), out)
    assert found == (place(expected[0].format(run=tmp_path)), expected[1])


@pytest.mark.parametrize(
    ("resume", "out", "says"),
    [("auto", None, "--out"), ("/nowhere", None, "no checkpoints"), ("{run}", "/x", "leave out")],
)
def test_where_not_to_resume(tmp_path, resume, out, says):
    (tmp_path / "checkpoints").mkdir()
    out = None if out is None else type(tmp_path)(out)
    with pytest.raises(ConfigError, match=says):
        restart.locate(resume.format(run=tmp_path), out)


# -- the server's part ----------------------------------------------------------------------------


class Kept:
    """A writer that keeps what it is given."""

    def __init__(self):
        self.parts, self.heads = {}, {}

    def write(self, number, state):
        self.parts[number] = state

    def write_head(self, number, left):
        self.heads[number] = left

    def wait(self):
        pass


def served(n, plan, lockstep=False, **options):
    run = Lockstep(n, **options)
    kept = Kept()
    run.loop._cuts = ServerCuts(plan, kept, lockstep, 0, n, "aladdin", "")
    return run, kept


@settings(deadline=None, derandomize=True, max_examples=40)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 4]), st.floats(0.2, 1.0))
def test_no_push_is_lost_or_applied_twice_across_the_cut(seed, n, chance):
    """The part holds exactly what every worker had pushed when it made its own: whole numbers."""
    rng = np.random.default_rng(seed)
    run, kept = served(
        n, Plan(iterations=10), seed=seed, chance=chance, replies=False, count_leavers=False
    )
    pushed = {}
    samples = {}

    def step(worker):
        run.step(worker, rng.integers(-9, 9, 4).astype(float), samples=int(rng.integers(1, 5)))
        driver = run.drivers[worker][0]
        notice = run.world.workers[worker].notice
        if notice.cut > driver.port.cut:  # as WorkerCuts does
            driver.port.cut = notice.cut
            pushed[notice.cut, worker] = driver.algorithm.pending._r[:4].copy()
            clock = run.clocks[worker]
            samples[notice.cut, worker] = clock.own_samples - clock.samples

    for _ in range(150):
        step(int(rng.integers(n)))
        if rng.random() < 0.7:
            run.turn()
    run.finish()
    assert kept.parts or n == 4
    for number, part in kept.parts.items():
        if not all((number, worker) in pushed for worker in range(n)):
            continue  # somebody ended without making its part
        expected = sum(pushed[number, worker] for worker in range(n)) / n
        assert part["channels"][0]["params"][:4].tolist() == expected.tolist()
        assert part["worker_samples"] == [samples[number, worker] for worker in range(n)]
    assert np.array_equal(run.server, run.steps.sum(axis=0) / n)  # and the run itself is as ever


def test_a_worker_that_ends_without_its_part_is_named_and_its_pushes_are_in():
    run, kept = served(2, Plan(iterations=1), replies=False, count_leavers=False)
    run.step(0, 4.0)
    run.step(1, 2.0)
    run.turn()  # calls for the first one
    assert run.world.workers[0].deliver() is None and run.world.workers[0].notice.cut == 1
    run.drivers[0][0].port.cut = 1
    run.step(0, 8.0)
    run.turn()
    run.step(1, 6.0)  # did not make its part, and ends
    run.finish(1)
    run.turn()
    run.finish(0)
    assert kept.heads[1] == [1]
    assert kept.parts[1]["channels"][0]["params"][:4].tolist() == [(4.0 + 2.0 + 6.0) / 2] * 4


def test_in_lockstep_all_make_their_part_after_the_same_step():
    run, _ = served(2, Plan(iterations=2), True, replies=False)
    for _ in range(4):
        run.step(0, 1.0)
        run.step(1, 1.0)
        run.turn()
    run.world.workers[1].deliver()
    notice = run.world.workers[1].notice
    assert notice.cut == 1
    assert notice.cut_at == 2 + LEAD


def test_preemption_waits_for_the_part_and_then_stops_everybody():
    run, kept = served(2, Plan(), replies=False)
    run.step(0, 1.0)
    run.step(1, 1.0)
    run.loop.preempt()
    run.turn()
    for worker in range(2):
        run.world.workers[worker].deliver()
        assert run.world.workers[worker].notice.cut == 1
        assert not run.world.workers[worker].notice.stop
        run.drivers[worker][0].port.cut = 1
        run.step(worker, 1.0)
    run.turn()
    assert kept.parts[1]["channels"][0]["params"][:4].tolist() == [1.0] * 4
    assert run.loop.preempted
    run.world.workers[0].deliver()
    assert run.world.workers[0].notice.stop == 2


def test_a_model_goes_on_from_its_state():
    run, kept = served(2, Plan(iterations=1), replies=False, push="gradient")
    for _ in range(6):
        for worker in range(2):
            run.step(worker, 1.0)
            run.world.workers[worker].deliver()
            run.drivers[worker][0].port.cut = run.world.workers[worker].notice.cut
        run.turn()
    part = kept.parts[max(kept.parts)]["channels"][0]
    other, _ = served(2, Plan(), replies=False, push="gradient")
    model = other.loop.models[0]
    model.restore(from_plain(part))
    assert model.version == part["version"] > 0
    assert np.array_equal(model.frame.params, part["params"].numpy())
    assert model.rules.state_dict() == part["rules"]


def test_waiting_waits_for_everything(tmp_path):
    one = writer(tmp_path, 0)
    for number in range(1, 4):
        one.write(number, {"x": torch.zeros(1000)})
    one.wait()
    assert checkpoint.numbers(tmp_path) == [1, 2, 3]


def test_a_state_of_another_version_is_one_line():
    class Inner(Stateful):
        STATE = ("age",)
        age = 3

    class Outer(Stateful):
        STATE = ("made", "inner")

        def __init__(self):
            self.made, self.inner = 5, Inner()

    one = Outer()
    state = one.state_dict()
    one.load_state_dict(state)
    del state["inner"]["age"]
    with pytest.raises(CheckpointError, match=r"another version of the algorithm \(it lacks age\)"):
        one.load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"lacks made, inner"):
        one.load_state_dict({})
