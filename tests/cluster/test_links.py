"""Workers never wait, over real links: a server and three workers, on hosts with 200 Mb/s links.

One training job is disturbed in four ways, one after the other, for 5 s each; then its logs are
read.  Limits are far from what is normal (a step of 0.1 s) and far from what a worker would show
that waits for another one (once for 5 s, or 0.5 s and more in every step), so that a machine that
is busy, or stands still for a second, does not matter.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import require
from disturbances import SCENARIOS, SERVER, Logs, Window, disturbed_run
from virtual_hosts import NEEDED_PROGRAMS, STATE, VirtualHosts

WORKERS, SECONDS, QUIET_S = 3, 5.0, 3.0
LONGEST_STEP_S = 2.5
NAMES = [scenario.name for scenario in SCENARIOS]

pytestmark = pytest.mark.timeout(200)


@pytest.fixture(scope="module", autouse=True)
def possible() -> None:
    """Leave the tests out where there can be no virtual hosts."""
    require.program(*NEEDED_PROGRAMS)
    require.root()
    tried = subprocess.run(
        ["unshare", "--net", "--uts", "--ipc", "--mount", "true"], capture_output=True, check=False
    )
    if tried.returncode:
        require.left_out("may not make namespaces (unshare); in a container: --privileged")


class Disturbed:
    """The windows of a run, and what was logged."""

    def __init__(self, windows: list[Window], logs: Logs) -> None:
        self.windows = {window.name: window for window in windows}
        self.logs = logs


@pytest.fixture(scope="module")
def disturbed(possible: None, tmp_path_factory: pytest.TempPathFactory) -> Disturbed:
    folder = tmp_path_factory.mktemp("disturbed")
    windows = disturbed_run(folder, workers=WORKERS, seconds=SECONDS, quiet_s=QUIET_S)
    return Disturbed(windows, Logs(folder, WORKERS))


def pieces(window: Window, length_s: float, skip_s: float = 0.5) -> Iterator[tuple[float, float]]:
    """Pieces of a window, one from every second on, without the window's edges."""
    begin = window.begin + skip_s
    while begin + length_s <= window.end:
        yield begin, begin + length_s
        begin += 1


@pytest.mark.parametrize("name", NAMES)
def test_the_victim_was_hit(disturbed: Disturbed, name: str) -> None:
    """Else the other tests would show nothing."""
    logs, window = disturbed.logs, disturbed.windows[name]
    inside = list(pieces(window, 1.0))
    assert len(inside) >= 4
    if name == "server stopped":
        assert sum(logs.merges_in(w, *second) for w in logs.workers for second in inside) == 0
    elif name == "worker stopped":
        assert logs.steps_in(window.victim, window)["step_s"].max() > SECONDS - 0.5
    elif name == "worker 10 times slower":
        assert np.median(logs.steps_in(window.victim, window)["step_s"]) > 0.9
    else:
        rows = logs.sends[window.victim]
        begun = (rows["queued_s"] > window.begin) & (rows["queued_s"] < window.end - 1)
        assert rows["put_s"][begun].max() > 0.5


@pytest.mark.parametrize("name", NAMES)
def test_no_other_worker_waits(disturbed: Disturbed, name: str) -> None:
    logs, window = disturbed.logs, disturbed.windows[name]
    for worker in logs.others(window):
        before, during = (
            logs.steps_in(worker, w)["step_s"] for w in (window.before(QUIET_S), window)
        )
        assert during.max() < LONGEST_STEP_S, f"worker {worker}"
        assert np.median(during) < 2 * np.median(before), f"worker {worker}"


@pytest.mark.parametrize("name", [s.name for s in SCENARIOS if s.victim != SERVER])
def test_the_others_are_merged_all_the_time(disturbed: Disturbed, name: str) -> None:
    logs, window = disturbed.logs, disturbed.windows[name]
    for worker in logs.others(window):
        counts = [logs.merges_in(worker, *piece) for piece in pieces(window, 2.0)]
        assert min(counts) > 0, f"worker {worker}: {counts}"
    assert logs.merges_per_s(window) > 0.33 * logs.merges_per_s(window.before(QUIET_S))


def test_merges_go_on_after_the_server_was_stopped(disturbed: Disturbed) -> None:
    logs, window = disturbed.logs, disturbed.windows["server stopped"]
    for worker in logs.workers:
        assert logs.merges_in(worker, window.end, window.end + QUIET_S) > 0, f"worker {worker}"


def test_blocked_time_is_zero_in_every_step(disturbed: Disturbed) -> None:
    for rows in disturbed.logs.steps:
        assert len(rows) > 100
        assert (rows["blocked_s"] == 0).all()


def test_the_final_model_is_right(disturbed: Disturbed) -> None:
    """Each update moves it by an integer: one that is lost or merged twice is off by 1 or more."""
    logs = disturbed.logs
    expected = logs.expected()
    for worker in logs.workers:
        final = logs.final(worker)
        assert (np.rint(final) == expected).all(), f"worker {worker}"
        assert np.abs(final - expected).max() < 0.05  # rounding of float32, after mixes


def test_replies_are_mixed_in(disturbed: Disturbed) -> None:
    for rows in disturbed.logs.mixes:
        assert len(rows) > 10
        assert not rows["discarded"].any()


def test_workers_that_wait_are_noticed(tmp_path: Path) -> None:
    """The control: with coalescing off, a push waits for the last one, and so for the server."""
    windows = disturbed_run(
        tmp_path, workers=WORKERS, seconds=3.0, quiet_s=0.5, only=("server stopped",),
        options=("--no-coalesce",),
    )  # fmt: skip
    logs = Logs(tmp_path, WORKERS)
    for worker in logs.workers:
        rows = logs.steps_in(worker, windows[0])
        assert rows["step_s"].max() > 2.0
        assert rows["blocked_s"].max() > 2.0


def sleeping(hosts: VirtualHosts, host: str) -> subprocess.Popen[str]:
    """Start a program on a host; it is there when this returns."""
    argv = [*hosts.inside(host), "sh", "-c", "hostname; exec sleep 100"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == f"{host}\n"
    return process


def test_hosts_are_taken_away() -> None:
    with pytest.raises(ZeroDivisionError), VirtualHosts(2) as hosts:
        sleeper = sleeping(hosts, "h2")
        folder = hosts.rsh.parent
        raise ZeroDivisionError
    assert sleeper.wait(10) != 0
    assert not folder.exists()


def test_leftovers_of_a_killed_process_are_removed() -> None:
    """A folder whose owner has gone, with hosts that still run."""
    hosts = VirtualHosts(1)
    try:
        hosts.up()
        sleeper = sleeping(hosts, "h1")
        left = STATE / f"1.1.{hosts.rsh.parent.name}"  # no process 1 has started at tick 1
        hosts.rsh.parent.rename(left)
        with VirtualHosts(1):
            assert not left.exists()
            assert sleeper.wait(10) != 0
    finally:
        hosts.down()


SEND = """
import socket, sys, time
receiver = socket.create_server(("", 7000)) if sys.argv[1] == "receive" else None
print(flush=True)
if receiver is not None:
    connection, _ = receiver.accept()
    count = 0
    while part := connection.recv(1 << 16):
        begin = begin if count else time.monotonic()
        count += len(part)
    print(count / (time.monotonic() - begin))
else:
    with socket.create_connection((sys.argv[1], 7000)) as connection:
        connection.sendall(bytes(5_000_000))
"""


def test_links_have_their_rate() -> None:
    with VirtualHosts(2, "1gbit") as hosts:
        hosts.set_rate("100mbit", ["h2"])
        argv = [*hosts.inside("h2"), sys.executable, "-c", SEND, "receive"]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as receiver:
            assert receiver.stdout is not None
            receiver.stdout.readline()
            hosts.run("h1", [sys.executable, "-c", SEND, "h2"], stdout=subprocess.DEVNULL)
            rate = float(receiver.stdout.readline())
    assert 0.3 * 12.5e6 < rate < 1.3 * 12.5e6
