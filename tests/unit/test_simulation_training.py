"""Training in virtual time: invariants of the algorithms, and the command."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result

from aladdin_mpi.algorithms import REGISTRY, find
from aladdin_mpi.algorithms.base import Server, Topology
from aladdin_mpi.cli.main import main
from aladdin_mpi.core.flat import FlatBuffers, FlatParams
from aladdin_mpi.core.schedule import Schedule
from aladdin_mpi.core.wire import FrameLayout
from aladdin_mpi.errors import ConfigError
from aladdin_mpi.messages import ChannelSpec, Push
from aladdin_mpi.runtime.globals import GlobalModel
from aladdin_mpi.simulation import training
from aladdin_mpi.simulation.answers import ALGORITHMS
from aladdin_mpi.simulation.events import Events
from aladdin_mpi.simulation.globals import GlobalParameters, Message, SgdOptions
from aladdin_mpi.simulation.replicas import Task, fetch
from aladdin_mpi.simulation.setting import Setting
from aladdin_mpi.simulation.training import Trained, train
from aladdin_mpi.simulation.turns import Process
from aladdin_mpi.workload.arrays import ArrayDataset

pytestmark = pytest.mark.timeout(120)

SAMPLES, FEATURES, CLASSES, BATCH = 640, 12, 4, 8
OPTIONS = {"arsgd": {"backend": "mpi"}, "diloco": {"period": 5}, "gosgd": {"p": 0.5}}
"""Options with which a short run shows something."""


def dataset(seed: int, size: int) -> ArrayDataset:
    """Four blobs."""
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(7).normal(size=(CLASSES, FEATURES))
    y = rng.integers(0, CLASSES, size)
    x = centres[y] + 0.7 * rng.normal(size=(size, FEATURES))
    return ArrayDataset(x.astype(np.float32), y)


TRAIN, TEST = dataset(0, SAMPLES), dataset(1, 200)


def build() -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return torch.nn.Sequential(
            torch.nn.Linear(FEATURES, 16), torch.nn.ReLU(), torch.nn.Linear(16, CLASSES)
        )


def task(epochs: float = 2.0, lr: float = 0.02, **changes: Any) -> Task:
    return Task(build, TRAIN, TEST, BATCH, epochs, Schedule(lr, scaling="none"), **changes)


def setting(n: int, overload: float = 0.5, **changes: Any) -> Setting:
    payload = 1e5
    values: dict[str, Any] = {"distribution": "normal", "spread": 0.1} | changes
    return Setting(n, 0.1, payload, n * payload / (overload * 0.1), **values)


def run(name: str, n: int, overload: float = 0.5, epochs: float = 2.0, **options: Any) -> Trained:
    algorithm = find(name)
    config = algorithm.config(**{**OPTIONS.get(name, {}), **options})
    return train(setting(n, overload), algorithm, config, task(epochs))


def plain_sgd(epochs: int, lr: float) -> np.ndarray:
    """torch's SGD on the same batches in the same order; the flat vector."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    params = FlatParams(model.named_parameters(), [list(model.parameters())])
    for epoch in range(epochs):
        order = np.random.default_rng([0, epoch]).permutation(SAMPLES)
        for start in range(0, SAMPLES, BATCH):
            x, y = fetch(TRAIN, order[start : start + BATCH])
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return params.gathered().copy()


# -- algorithms -----------------------------------------------------------------------------------


def test_one_worker_makes_the_steps_of_plain_sgd_to_the_bit() -> None:
    assert np.array_equal(run("arsgd", 1).params, plain_sgd(2, 0.02))


def test_one_worker_of_aladdin_is_plain_sgd_to_the_bit_but_for_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without replies the worker's steps are its own; x̃ adds differences, each rounded once."""
    own: list[np.ndarray] = []
    final = training._Training.final

    def keep(self: Any) -> np.ndarray:
        own.append(self.replicas[0].params.gathered().copy())
        return final(self)

    monkeypatch.setattr(training._Training, "final", keep)
    found = run("aladdin", 1, replies=False)
    expected = plain_sgd(2, 0.02)
    assert np.array_equal(own[-1], expected)
    np.testing.assert_allclose(found.params, expected, atol=1e-5)


@pytest.mark.parametrize("name", ["aladdin", "asp", "bsp", "sgp"])
def test_one_worker_is_plain_sgd(name: str) -> None:
    np.testing.assert_allclose(run(name, 1).params, plain_sgd(2, 0.02), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_every_algorithm_learns_in_virtual_time(name: str) -> None:
    found = run(name, 3, 2.0, epochs=4.0)
    assert found.evaluations[-1].accuracy > 0.8  # a quarter by chance
    assert sum(found.iterations) == 4 * SAMPLES // BATCH
    assert found.thrown_away == 0
    assert [e.epoch for e in found.evaluations] == [1, 2, 3, 4]
    times = [e.time_s for e in found.evaluations]
    assert times == sorted(times) and times[0] > 0


@pytest.mark.parametrize("name", ["aladdin", "asp", "bsp", "arsgd", "sgp", "ad-psgd"])
def test_the_seed_decides(name: str) -> None:
    once, again = (run(name, 3, 2.0, epochs=1.0) for _ in range(2))
    assert np.array_equal(once.params, again.params)
    assert once.evaluations == again.evaluations and once.iterations == again.iterations


@pytest.mark.parametrize("name", ["bsp", "arsgd"])
def test_synchronous_ones_make_the_steps_of_the_joined_batch(name: str) -> None:
    joined = plain_sgd_on_joined_batches(4)
    np.testing.assert_allclose(run(name, 4).params, joined, rtol=1e-3, atol=1e-5)


def plain_sgd_on_joined_batches(n: int) -> np.ndarray:
    """The workers of a round take batches one after the other: n of them are one."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    params = FlatParams(model.named_parameters(), [list(model.parameters())])
    for epoch in range(2):
        order = np.random.default_rng([0, epoch]).permutation(SAMPLES)
        for start in range(0, SAMPLES, n * BATCH):
            x, y = fetch(TRAIN, order[start : start + n * BATCH])
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return params.gathered().copy()


@pytest.mark.parametrize("overload", [0.5, 4.0])
def test_the_global_model_is_the_mean_of_what_was_merged(
    overload: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """x̃ = x̃₀ + (1/n) Σ Δ over all pushes, and every iteration is in one of them."""
    total, carried, pushes = np.zeros(0), [0], [0]
    handle = GlobalParameters.handle

    def sum_up(self: GlobalParameters, message: Message) -> Any:
        nonlocal total
        total = message.payload.astype(np.float64) + (total if total.size else 0)
        carried[0] += message.push.iterations
        pushes[0] += 1
        return handle(self, message)

    monkeypatch.setattr(GlobalParameters, "handle", sum_up)
    found = run("aladdin", 4, overload, count_leavers=False)
    model = build()
    start = FlatParams(model.named_parameters(), [list(model.parameters())]).gathered()
    np.testing.assert_allclose(found.params, start + total / 4, atol=1e-5)
    assert carried[0] == sum(found.iterations)
    assert carried[0] / pushes[0] == pytest.approx(max(1, overload), rel=0.15)


@pytest.mark.parametrize("name", ["aladdin", "asp", "bsp", "arsgd", "sgp"])
@pytest.mark.parametrize("overload", [0.5, 4.0])
def test_training_takes_the_time_that_the_timing_says(name: str, overload: float) -> None:
    """The same policies: those of the algorithms' files, and those of the timing alone."""
    found = run(name, 4, overload, epochs=4.0).outcome
    alone = ALGORITHMS[name](setting(4, overload, merge_bytes_per_s=10e9, iterations=80))
    assert found.step_s == pytest.approx(alone.step_s, rel=0.03)
    assert found.link_in == pytest.approx(alone.link_in, rel=0.06)
    if found.servers:
        assert found.iterations_per_push == pytest.approx(alone.iterations_per_push, rel=0.05)
        assert found.staleness == pytest.approx(alone.staleness, rel=0.1)


def test_a_slow_worker_makes_fewer_iterations_and_holds_nobody_up() -> None:
    algorithm = find("aladdin")
    s = setting(4, slow={2: 10.0})
    found = train(s, algorithm, algorithm.config(), task())
    others = [count for worker, count in enumerate(found.iterations) if worker != 2]
    assert found.iterations[2] == pytest.approx(min(others) / 10, abs=2)


@pytest.mark.parametrize("name", ["bsp", "arsgd"])
def test_vectors_of_gradients_are_used_again(name: str) -> None:
    """The parameters remember every vector that gradients were put into."""
    algorithm = find(name)
    made = training._Training(
        setting(2), algorithm, algorithm.config(**OPTIONS.get(name, {})), task(1.0)
    )
    made.run()
    assert all(len(replica.params._homes) <= 2 for replica in made.replicas)


def test_too_little_data_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 8 are needed"):
        run("aladdin", 40, epochs=1.0)


# -- the server -----------------------------------------------------------------------------------


def pushes_of(name: str, n: int, size: int) -> list[tuple[Push, np.ndarray]]:
    """Made-up pushes in an order that every algorithm can take: rounds of all workers."""
    rng = np.random.default_rng(5)
    found = []
    for sequence in range(1, 7):
        for worker in rng.permutation(n).tolist():
            payload = rng.normal(size=size).astype(np.float32)
            if sequence == 3 and worker == 1:
                payload[2] = np.inf
            push = Push(worker, sequence, rates=(0.1,), wants_reply=True, active=n, loss=1.0)
            found.append((push, payload))
    return found


SERVED = [name for name in sorted(REGISTRY) if REGISTRY[name].topology is Topology.SERVER]


@pytest.mark.parametrize(
    ("name", "options"), [*((name, {}) for name in SERVED), ("aladdin", {"preset": "paper"})]
)
def test_the_server_does_what_the_real_one_does(name: str, options: dict[str, str]) -> None:
    n, size, sgd = 3, 32, SgdOptions(0.9, 1e-3)
    algorithm = REGISTRY[name]
    rules: list[Server] = []
    for _ in range(2):
        assert algorithm.server is not None
        rules.append(algorithm.server(algorithm.config(**options), n))
    x = torch.nn.Parameter(torch.linspace(-1, 1, size))
    params, buffers = FlatParams([("x", x)], [[x]]), FlatBuffers(None, set())
    ours = GlobalParameters(rules[0], params, buffers, n, sgd)
    spec = ChannelSpec(
        (), (), tuple(params.group_ranges()), size, 0, 0, "", sgd.momentum, sgd.weight_decay
    )
    layout = FrameLayout(size)
    first = layout.new_frame()
    np.copyto(first.params, params.gathered())
    theirs = GlobalModel(spec, first, rules[1], n, lambda: None)
    frames = {}
    for push, payload in pushes_of(name, n, size):
        frames[push.worker, push.sequence] = frame = layout.new_frame()
        np.copyto(frame.params, payload)
        frame.nonfinite = np.count_nonzero(~np.isfinite(payload))
        frame.write_push(push)
        empty = np.zeros(0, np.float32)
        handled, sends, _ = ours.handle(Message(push, payload, empty, np.zeros(0, np.int64)))
        expected, expected_sends, _ = theirs.handle([frame])
        assert [h[:3] for h in handled] == [(h.push, h.staleness, h.version) for h in expected]
        assert {send.worker: send for send in sends} == expected_sends
        assert np.array_equal(ours.x, theirs.frame.params)
        assert (ours.version, ours.last_merged) == (theirs.version, theirs.last_merged)


# -- turns ----------------------------------------------------------------------------------------


def test_processes_take_turns() -> None:
    events, seen = Events(), []

    def body(name: str, pause: float) -> None:
        for _ in range(3):
            processes[name].sleep(pause)
            seen.append((events.now, name))

    processes = {}
    for name, pause in (("a", 2.0), ("b", 3.0)):
        processes[name] = Process(events, lambda name=name, pause=pause: body(name, pause))
    events.run()
    assert seen == [(2, "a"), (3, "b"), (4, "a"), (6, "b"), (6, "a"), (9, "b")]
    assert all(process.ended for process in processes.values())


def test_a_process_that_fails_is_heard_of_and_the_others_can_be_ended() -> None:
    events = Events()

    def fail() -> None:
        raise ZeroDivisionError

    waiting = Process(events, lambda: waiting.wait_until(lambda: False))
    Process(events, fail)
    with pytest.raises(ZeroDivisionError):
        events.run()
    assert not waiting.ended
    waiting.cancel()
    assert waiting.ended


# -- the command ----------------------------------------------------------------------------------


def call(*args: str) -> Result:
    return CliRunner().invoke(main, ["simulate", *args], prog_name="aladdin-mpi")


TRAINED = (
    "--train", "--workers", "2", "--epochs", "2", "--lr", "0.05", "--batch-size", "16",
    "--algorithm", "aladdin", "--algorithm", "localsgd", "--compute", "50",
)  # fmt: skip


def test_the_command_trains(tmp_path: Path) -> None:
    path = tmp_path / "trained.csv"
    shown = call(*TRAINED, "--json", "--csv", str(path), "--set", "preset=paper", "--period", "2")
    assert shown.exit_code == 0, shown.output
    aladdin, local = json.loads(shown.stdout)["outcomes"]
    assert (aladdin["algorithm"], aladdin["servers"]) == ("aladdin", 1)
    assert (local["algorithm"], local["servers"]) == ("localsgd", 0)
    assert local["accuracy"] > 0.8 and len(local["evaluations"]) == 2
    assert aladdin["step_s"] == pytest.approx(0.05, rel=0.02)
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert float(rows[1]["accuracy"]) == local["accuracy"]
    assert "evaluations" not in rows[0]


def test_the_command_shows_a_table() -> None:
    shown = call(*TRAINED)
    assert shown.exit_code == 0, shown.output
    header, aladdin, local = shown.stdout.splitlines()
    assert "accuracy" in header and "thrown away" in header
    assert aladdin.split()[1] == "aladdin" and local.split()[1] == "localsgd"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--lr", "0.1"], "--lr 0.1: needs --train"),
        (["--set", "a=b"], "--set a=b: needs --train"),
        (["--algorithm", "easgd"], "--algorithm easgd: its timing is not modelled"),
        (["--train", "--algorithm", "none"], "--algorithm none: unknown"),
        (["--train", "--lr", "-1"], "--lr -1: must be above 0"),
        (["--train", "--dataset", "none"], "--dataset none"),
        (["--train", "--set", "period"], "--set period: give NAME=VALUE"),
        (["--train", "--set", "none=1"], "--set none=1: none of"),
        (["--train", "--period", "0"], "--period"),
        (["--train", "--algorithm", "arsgd", "--set", "adascale=yes"], "--set adascale"),
        (["--train", "--workers", "999"], "--epochs 5: gives each of 999 workers"),
    ],
)
def test_a_mistake_is_one_line(args: list[str], words: str) -> None:
    shown = call(*args)
    assert shown.exit_code == 2
    (line,) = shown.stderr.splitlines()
    assert words in line


# -- ranges of one server -------------------------------------------------------------------------


def test_ranges_that_take_turns_fill_the_link_with_fresher_pushes() -> None:
    row = find("aladdin")
    at_once, in_turns = (
        train(setting(4, 8.0, shards=shards), row, row.config(), task(4.0)).outcome
        for shards in (1, 8)
    )
    assert in_turns.iterations_per_push == pytest.approx(at_once.iterations_per_push, rel=0.15)
    assert in_turns.reply_age < 0.6 * at_once.reply_age


@pytest.mark.parametrize("name", ["bsp", "asp", "easgd"])
def test_ranges_of_algorithms_that_wait_are_the_whole_vector(name: str) -> None:
    row = find(name)
    one, many = (
        train(setting(2, 0.01, shards=s, distribution="constant"), row, row.config(), task())
        for s in (1, 4)
    )
    assert many.evaluations[-1].accuracy == pytest.approx(one.evaluations[-1].accuracy, abs=0.05)
    if name == "bsp":
        assert np.array_equal(one.params, many.params)
