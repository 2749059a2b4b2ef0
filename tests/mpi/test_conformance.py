"""The conformance scenarios over MPI: the same training as between threads, ranks as workers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NoReturn

import numpy as np
import pytest
import teams
from devices import stand_in
from mpi4py import MPI
from teams import CLOSE, TARGET, Case, Training, mixed, serve, steady, towards, toy, train

from aladdin_mpi.algorithms import REGISTRY
from aladdin_mpi.algorithms.base import Topology
from aladdin_mpi.comm.peers import PeerLink
from aladdin_mpi.comm.receiver import ServerLink
from aladdin_mpi.comm.relay import RelayLink
from aladdin_mpi.comm.roles import find_roles, server_groups
from aladdin_mpi.comm.sender import WorkerLink
from aladdin_mpi.record.recorder import MemoryFile, Recorder
from aladdin_mpi.runtime.relay import RelayLoop

pytestmark = pytest.mark.timeout(60)
on_three = pytest.mark.ranks(exactly=3)

NAMES = sorted(REGISTRY)
SERVED = [name for name in NAMES if REGISTRY[name].topology is Topology.SERVER]


def fail(error: BaseException) -> NoReturn:
    raise AssertionError(f"the communication thread failed: {error!r}") from error


def run(
    comm: MPI.Intracomm, training: Training, nodes: Sequence[Sequence[int]] = ()
) -> np.ndarray | None:
    """Train over all ranks; this worker's final parameters, None on other ranks.

    Given the ranks of each of some ``nodes``, those with three or more that do not serve have a
    relay.
    """
    if training.row.topology is Topology.SERVER:
        rounds = "synchronous" in training.row.traits
        roles = find_roles(comm, training.servers, False, bool(nodes), rounds, nodes or None)
        own, among = comm.Dup(), comm.Split(0 if roles.worker >= 0 else 1, comm.rank)
        groups, workers = server_groups(comm, roles), roles.workers
        if roles.server >= 0:
            link = ServerLink(own, groups[roles.server], workers, roles.relays, roles.routes)
            serve(link, len(workers), training, len(roles.relays))
            link.free()
            return None
        if roles.relay >= 0:
            relay = RelayLink(own, roles.servers, groups, workers, roles.relay, roles.routes)
            update = getattr(training.config(), "push", "") == "update"
            applies = "server_applies" in training.row.traits
            answers = "waits_for_answers" in training.row.traits
            recorder = Recorder(MemoryFile())
            RelayLoop(relay, len(workers), rounds, applies, answers, update, recorder).serve()
            relay.free()
            return None
        relay_of = roles.routes.relay_of[roles.worker]
        worker = WorkerLink(
            own, roles.servers, groups, roles.worker, len(workers), fail, among, roles.routes,
            roles.relays[relay_of] if relay_of >= 0 else -1,
        )  # fmt: skip
        return train(worker, len(workers), training).final
    return train(PeerLink(comm.Dup(), fail), comm.size, training).final


def alike(comm: MPI.Intracomm, final: np.ndarray | None) -> np.ndarray:
    """Everybody's parameters, which must be the same."""
    found = [x for x in comm.allgather(final) if x is not None]
    assert all(np.array_equal(x, found[0]) for x in found)
    return found[0]


@on_three
@pytest.mark.parametrize("name", NAMES)
def test_converges_and_all_end_alike(comm: MPI.Intracomm, name: str) -> None:
    final = alike(comm, run(comm, toy(name, towards, iterations=lambda worker: 100)))
    assert np.abs(final - TARGET).max() < CLOSE.get(name, 0.15)


@on_three
@pytest.mark.parametrize("name", NAMES)
def test_one_that_ends_early_holds_nobody_up(comm: MPI.Intracomm, name: str) -> None:
    final = run(comm, toy(name, towards, iterations=lambda worker: 3 + 12 * worker))
    assert np.isfinite(alike(comm, final)).all()


@on_three
@pytest.mark.parametrize(
    "name", [n for n in NAMES if "synchronous" in REGISTRY[n].traits] + ["ssp"]
)
def test_synchronous_ones_make_the_steps_of_sgd_on_the_joined_batch(
    comm: MPI.Intracomm, name: str
) -> None:
    options = {"staleness": 0} if name == "ssp" else {}
    final = alike(comm, run(comm, toy(name, mixed, iterations=lambda worker: 20, options=options)))
    n = comm.size - (REGISTRY[name].topology is Topology.SERVER)
    x = np.zeros(4)
    for iteration in range(20):
        x -= 0.1 * sum(mixed(w, x, iteration) for w in range(n)) / n
    np.testing.assert_allclose(final, x, rtol=2e-5, atol=1e-6)


@on_three
@pytest.mark.parametrize(
    "name", [n for n in NAMES if "keeps_the_mean" in REGISTRY[n].traits and n != "aladdin"]
)
def test_communication_keeps_the_mean(comm: MPI.Intracomm, name: str) -> None:
    final = alike(comm, run(comm, toy(name, steady, iterations=lambda worker: 12)))
    steps = [-0.1 * steady(w, TARGET, k) for w in range(comm.size) for k in range(12)]
    np.testing.assert_allclose(final, np.sum(steps, axis=0) / comm.size, rtol=1e-4, atol=1e-4)


def one_after_the_other(worker: int) -> int:
    """The iterations of each worker: they end early, and not together."""
    return 60 + 40 * worker


def slow(worker: int, iteration: int) -> None:
    """Worker 1 takes ten times as long."""
    time.sleep(2e-3 if worker == 1 else 2e-4)


@pytest.mark.ranks(exactly=5)
@pytest.mark.parametrize(("servers", "ranges"), [(2, False), (3, False), (1, True)])
@pytest.mark.parametrize("name", SERVED)
def test_several_servers_or_ranges(
    comm: MPI.Intracomm, name: str, servers: int, ranges: bool
) -> None:
    case = Case(name, servers, ranges)
    final = alike(comm, run(comm, case.toy(iterations=one_after_the_other, before_step=slow)))
    assert np.abs(final - case.target).max() < CLOSE.get(name, 0.15)


@pytest.mark.ranks(exactly=5)
@pytest.mark.parametrize("servers", [2, 3])
def test_bsp_gives_the_bits_of_one_server(comm: MPI.Intracomm, servers: int) -> None:
    n = comm.size - servers
    several = alike(comm, run(comm, Case("bsp", servers).toy(mixed, momentum=0.9)))
    one = teams.run(n, toy("bsp", mixed, momentum=0.9, size=several.size))[0].final
    assert np.array_equal(several, one)


@on_three
@pytest.mark.parametrize("wire", ["bfloat16", "float16", "topk:0.25"])
def test_narrow_pushes(comm: MPI.Intracomm, wire: str) -> None:
    training = toy("aladdin", towards, size=256, wire=wire, iterations=lambda worker: 100)
    final = alike(comm, run(comm, training))
    assert np.abs(final - np.resize(TARGET, 256)).max() < CLOSE["aladdin"]


ON_NODES = {
    "one node": (1, [[0, 1, 2, 3, 4]]),  # a server, a relay, three workers
    "beside one that has none": (1, [[0, 4], [1, 2, 3]]),  # worker 0 is alone
    "two servers": (2, [[0, 1, 2, 3, 4]]),
}
"""Servers, and the ranks of each node."""


@pytest.mark.ranks(exactly=5)
@pytest.mark.parametrize("where", ON_NODES)
@pytest.mark.parametrize("name", SERVED)
def test_merging_on_nodes(comm: MPI.Intracomm, name: str, where: str) -> None:
    servers, nodes = ON_NODES[where]
    case = Case(name, servers)
    training = case.toy(iterations=one_after_the_other, before_step=slow)
    final = alike(comm, run(comm, training, nodes))
    assert np.abs(final - case.target).max() < CLOSE.get(name, 0.15)


@pytest.mark.ranks(exactly=5)
@pytest.mark.parametrize("where", ON_NODES)
def test_bsp_gives_the_same_bits_where_nodes_merge(comm: MPI.Intracomm, where: str) -> None:
    servers, nodes = ON_NODES[where]
    merged = alike(comm, run(comm, Case("bsp", servers).toy(mixed, momentum=0.9), nodes))
    n = comm.size - servers - 1
    one = teams.run(n, toy("bsp", mixed, momentum=0.9, size=merged.size))[0].final
    assert np.array_equal(merged, one)


@pytest.mark.ranks(exactly=5)
@pytest.mark.parametrize("wire", ["bfloat16", "topk:0.25"])
def test_nodes_merge_before_they_narrow(comm: MPI.Intracomm, wire: str) -> None:
    training = toy("aladdin", towards, size=256, wire=wire, iterations=lambda worker: 400)
    final = alike(comm, run(comm, training, [[0, 1, 2, 3, 4]]))
    assert np.abs(final - np.resize(TARGET, 256)).max() < CLOSE["aladdin"]


@on_three
@pytest.mark.parametrize("name", ["bsp", "asp", "aladdin"])
def test_gradients_pushed_in_part(comm: MPI.Intracomm, name: str) -> None:
    options = {}
    if name == "aladdin":  # one push at a time: late replies let the paper's server run away
        options = {"preset": "paper", "server_momentum": 0.5, "coalesce": False, "in_flight": "1"}
    training = toy(
        name, towards, size=256, wire="dgc:0.1:20", lr=0.05, iterations=lambda worker: 200,
        options=options,
    )  # fmt: skip
    final = alike(comm, run(comm, training))
    assert np.abs(final - np.resize(TARGET, 256)).max() < CLOSE.get(name, 0.3)


@on_three
@pytest.mark.parametrize("chance", [0.02, 1.0])
def test_copies_that_are_late(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, chance: float
) -> None:
    """As from a GPU; nothing is sent before it is there, and no mix is pushed."""
    stand_in(monkeypatch, chance, seed=comm.rank)
    options = {"count_leavers": False, "staleness_aware": False}
    training = toy("aladdin", steady, options=options, lr=0.125, iterations=lambda worker: 40)
    final = alike(comm, run(comm, training))
    steps = [-0.125 * steady(w, TARGET, k) for w in range(comm.size - 1) for k in range(40)]
    np.testing.assert_allclose(final, np.sum(steps, axis=0) / (comm.size - 1), rtol=1e-5)
