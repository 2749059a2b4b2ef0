"""The conformance scenarios over MPI: the same training as between threads, ranks as workers."""

from __future__ import annotations

from typing import NoReturn

import numpy as np
import pytest
import teams
from mpi4py import MPI
from teams import CLOSE, TARGET, Case, Training, mixed, serve, steady, towards, toy, train

from aladdin_mpi.algorithms import REGISTRY
from aladdin_mpi.algorithms.base import Topology
from aladdin_mpi.comm.peers import PeerLink
from aladdin_mpi.comm.receiver import ServerLink
from aladdin_mpi.comm.roles import find_roles, server_groups
from aladdin_mpi.comm.sender import WorkerLink

pytestmark = pytest.mark.timeout(60)
on_three = pytest.mark.ranks(exactly=3)

NAMES = sorted(REGISTRY)
SERVED = [name for name in NAMES if REGISTRY[name].topology is Topology.SERVER]


def fail(error: BaseException) -> NoReturn:
    raise AssertionError(f"the communication thread failed: {error!r}") from error


def run(comm: MPI.Intracomm, training: Training) -> np.ndarray | None:
    """Train over all ranks; this worker's final parameters, None on a server."""
    if training.row.topology is Topology.SERVER:
        own, roles = comm.Dup(), find_roles(comm, training.servers)
        among = comm.Split(0 if roles.worker >= 0 else 1, comm.rank)
        groups, workers = server_groups(comm, roles), list(roles.workers)
        if roles.server >= 0:
            link = ServerLink(own, groups[roles.server], workers)
            serve(link, len(workers), training)
            link.free()
            return None
        worker = WorkerLink(own, roles.servers, groups, roles.worker, len(workers), fail, among)
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


@pytest.mark.ranks(exactly=5)
@pytest.mark.parametrize("servers", [2, 3])
@pytest.mark.parametrize("name", SERVED)
def test_several_servers(comm: MPI.Intracomm, name: str, servers: int) -> None:
    case = Case(name, servers)
    final = alike(comm, run(comm, case.toy(iterations=lambda worker: 60 + 40 * worker)))
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
