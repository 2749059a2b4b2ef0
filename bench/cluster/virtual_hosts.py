"""Virtual hosts on one Linux machine, with links of a given rate between them, and MPI across them.

A virtual host is a set of namespaces: network, hostname, shared memory and mounts, so that it has
an address, ``/etc/hosts``, ``/sys`` and ``/dev/shm`` of its own; process numbers, files and the
clock are the machine's.  A process that only sleeps, its *keeper*, holds the namespaces open.  The
hosts are joined by a bridge in one more network namespace; token buckets at both ends of every
cable limit what a host sends and what it receives.  Nothing is changed outside these namespaces.

::

    with VirtualHosts(4, "200mbit") as hosts:
        hosts.mpirun([sys.executable, "program.py"], timeout=60)
        hosts.set_rate("10mbit", ["h3"])

Needs root, iproute2 (``ip``, ``tc``) and util-linux (``nsenter``, ``unshare``).
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import launching

__all__ = ["NEEDED_PROGRAMS", "VirtualHosts", "end_orderly"]

NEEDED_PROGRAMS = ("ip", "tc", "nsenter", "unshare")
STATE = Path("/run/aladdin-virtual-hosts")
"""A folder per set of hosts, ``<pid>.<start time>.<random>`` of the process that made it."""
BURST_S, QUEUE = 0.005, "100ms"
"""Of a token bucket: what it lets through at once, and how long it lets the rest wait."""
SEGMENT = 16384
"""[bytes] what TCP hands to a device at once; less than what a bucket lets through."""
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
SWITCH = "switch"

KEEPER = """
hostname "$1"
mount --bind "$2/hosts" /etc/hosts
mount -t sysfs sysfs /sys
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
ip link set lo up
touch "$2/$1.ready"
exec sleep infinity
"""

RSH = """#!/bin/sh
# Takes ssh's place for an MPI launcher: options HOST COMMAND, the words joined and read by a shell.
while [ "${{1#-}}" != "$1" ]; do shift; done
host=$1
shift
read -r pid start < {folder}/"$host".keeper
exec {nsenter} -t "$pid" -n -u -i -m --wd="$PWD" -- sh -c "$*"
"""


class Process(NamedTuple):
    """A process; its start time [clock ticks] tells it from a later one with the same number."""

    pid: int
    start: int

    @classmethod
    def of(cls, pid: int) -> Process:
        """Return the process that has this number now."""
        # The name, in brackets, may hold anything; the 22nd field is the 20th after it.
        return cls(pid, int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]))

    @property
    def alive(self) -> bool:
        try:
            return Process.of(self.pid) == self
        except OSError:
            return False


def network_of(pid: int | str) -> str:
    """Return the name of a process's network namespace; empty when the process has gone."""
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return ""


def inhabitants(networks: set[str]) -> list[int]:
    """Return the processes in these network namespaces."""
    numbers = [name for name in os.listdir("/proc") if name.isdigit()]
    return [int(number) for number in numbers if network_of(number) in networks]


def remove(folder: Path) -> None:
    """Kill all that runs on the hosts of a state folder, and forget them.

    Whom to kill is told by the namespaces of the keepers that still live: nobody else is hit, even
    if numbers have been used again.
    """
    keepers = []
    for path in folder.glob("*.keeper"):
        with contextlib.suppress(OSError, ValueError):
            keepers.append(Process(*map(int, path.read_text().split())))
    living = [keeper for keeper in keepers if keeper.alive]
    networks = {network_of(keeper.pid) for keeper in living} - {network_of("self"), ""}
    own = {keeper.pid for keeper in living}
    for _ in range(50):  # a second look finds what was started during the first
        found = [pid for pid in inhabitants(networks) if pid not in own]
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if not found:
            break
        time.sleep(0.02)
    for keeper in living:
        if keeper.alive and network_of(keeper.pid) in networks:
            os.kill(keeper.pid, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


def remove_leftovers() -> None:
    """Remove the hosts of processes that were killed before they could do it."""
    for folder in STATE.glob("*.*.*"):
        pid, start, _ = folder.name.split(".", 2)
        if not Process(int(pid), int(start)).alive:
            remove(folder)


def end_orderly() -> None:
    """Have SIGTERM end this process as an error does, so that its hosts are taken away."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))


class VirtualHosts:
    """Virtual hosts ``h1`` … ``hn``, up inside the ``with`` block.

    Parameters
    ----------
    n : int
        Number of hosts.
    rate : str, optional
        What every link carries in each direction, as ``tc`` writes it: ``"1gbit"``; None: no limit.

    Attributes
    ----------
    names : list of str
        The hosts.
    addresses : dict of str to str
        Their addresses.
    rsh : Path
        A script that launchers take for ssh.
    """

    def __init__(self, n: int, rate: str | None = None) -> None:
        self.names = [f"h{i}" for i in range(1, n + 1)]
        self.addresses = {host: f"10.77.0.{i}" for i, host in enumerate(self.names, 1)}
        self._rate = rate
        self._folder = Path()
        self._keepers: dict[str, subprocess.Popen[bytes]] = {}
        self.rsh = Path()

    def __enter__(self) -> VirtualHosts:
        try:
            self.up()
        except BaseException:
            self.down()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.down()

    # -- up and down ------------------------------------------------------------------------------

    def up(self) -> None:
        """Make the hosts; first remove what a killed process has left."""
        STATE.mkdir(mode=0o700, exist_ok=True)
        remove_leftovers()
        me = Process.of(os.getpid())
        self._folder = Path(tempfile.mkdtemp(prefix=f"{me.pid}.{me.start}.", dir=STATE))
        pairs = self.addresses.items()
        lines = ["127.0.0.1 localhost", *(f"{address} {host}" for host, address in pairs)]
        (self._folder / "hosts").write_text("\n".join(lines) + "\n")
        self.rsh = self._folder / "rsh"
        nsenter = shlex.quote(shutil.which("nsenter") or "nsenter")
        self.rsh.write_text(RSH.format(folder=shlex.quote(str(self._folder)), nsenter=nsenter))
        self.rsh.chmod(0o755)
        for name in (SWITCH, *self.names):
            self._keep(name)
        for name in (SWITCH, *self.names):
            self._await(name)
        cables = ["link add bridge0 type bridge", "link set bridge0 up"]
        for host in self.names:
            pid = self._keepers[host].pid
            cables += [f"link add {host} type veth peer name eth0 netns {pid}"]
            cables += [f"link set {host} master bridge0 up gso_max_size {SEGMENT}"]
        self._batch(SWITCH, "ip", cables)
        for host, address in self.addresses.items():
            lines = [f"addr add {address}/24 dev eth0", f"link set eth0 up gso_max_size {SEGMENT}"]
            self._batch(host, "ip", lines)
        if self._rate is not None:
            self.set_rate(self._rate)

    def _keep(self, name: str) -> None:
        """Start a host's keeper."""
        with open(self._folder / f"{name}.log", "wb") as log:
            argv = ["unshare", "--net", "--uts", "--ipc", "--mount"]
            argv += ["sh", "-ec", KEEPER, "keeper", name, str(self._folder)]
            keeper = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self._keepers[name] = keeper
        process = Process.of(keeper.pid)
        (self._folder / f"{name}.keeper").write_text(f"{process.pid} {process.start}\n")

    def _await(self, name: str, limit_s: float = 20.0) -> None:
        """Wait until a host's namespaces are ready."""
        end = time.monotonic() + limit_s
        while not (self._folder / f"{name}.ready").exists():
            ended = self._keepers[name].poll() is not None
            if ended or time.monotonic() > end:
                log = (self._folder / f"{name}.log").read_text(errors="replace").strip()
                raise OSError(f"virtual host {name} could not be made: {log or 'no answer'}")
            time.sleep(0.01)

    def down(self) -> None:
        """Kill all that runs on the hosts, and take them away; may be called again."""
        if self._folder.name:
            remove(self._folder)
        for keeper in self._keepers.values():
            with contextlib.suppress(OSError):
                keeper.kill()  # one whose namespaces were never made
            keeper.wait()
        self._keepers.clear()
        self._folder = Path()

    # -- links ------------------------------------------------------------------------------------

    def _batch(self, name: str, tool: str, lines: Sequence[str]) -> None:
        """Run commands of ``ip`` or ``tc`` in a host's network."""
        command = ["nsenter", "-t", str(self._keepers[name].pid), "-n", "--", tool, "-batch", "-"]
        text = "\n".join(lines) + "\n"
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(f"{tool} on {name}: {done.stderr.strip()}\n{text}")

    def set_rate(self, rate: str | None, hosts: Sequence[str] | None = None) -> None:
        """Limit, or with None free, links in both directions: those of some hosts, else all."""
        chosen = list(self.names if hosts is None else hosts)
        ends = [(host, "eth0") for host in chosen] + [(SWITCH, host) for host in chosen]
        for place in dict.fromkeys(name for name, _ in ends):
            devices = [device for name, device in ends if name == place]
            # "replace" first: there may be nothing to delete.
            limited = rate or "100gbit"
            number = float(limited[:-4]) * UNITS[limited[-4:]]
            burst = max(2.5 * SEGMENT, BURST_S * number / 8)
            bucket = f"tbf rate {limited} burst {burst:.0f} latency {QUEUE}"
            lines = [f"qdisc replace dev {device} root {bucket}" for device in devices]
            if rate is None:
                lines += [f"qdisc del dev {device} root" for device in devices]
            self._batch(place, "tc", lines)

    def link_bytes(self, host: str) -> tuple[int, int]:
        """Bytes that a host has received and sent so far."""
        folder = "/sys/class/net/eth0/statistics"
        argv = ["cat", f"{folder}/rx_bytes", f"{folder}/tx_bytes"]
        received, sent = self.run(host, argv, capture_output=True, text=True).stdout.split()
        return int(received), int(sent)

    # -- programs ---------------------------------------------------------------------------------

    def inside(self, host: str) -> list[str]:
        """Return what to put before a command so that it runs on a host, in this folder."""
        pid = str(self._keepers[host].pid)
        return ["nsenter", "-t", pid, "-n", "-u", "-i", "-m", f"--wd={os.getcwd()}", "--"]

    def run(self, host: str, argv: Sequence[str | Path], **options: Any) -> Any:
        """Run a command on a host; ``options`` are those of ``subprocess.run``."""
        return subprocess.run([*self.inside(host), *map(str, argv)], check=True, **options)

    def mpi_command(
        self, argv: Sequence[str | Path], ranks_per_host: int | Sequence[int] = 1
    ) -> list[str]:
        """Return the command that starts a program on all hosts, rank 0 on the first.

        ``ranks_per_host`` is one number for all of them, or one for each.
        """
        if isinstance(ranks_per_host, int):
            ranks_per_host = [ranks_per_host] * len(self.names)
        counts = list(ranks_per_host)
        ranks = str(sum(counts))
        hosts = ",".join(f"{host}:{count}" for host, count in zip(self.names, counts, strict=True))
        if launching.family() == "openmpi":
            options = ["--bind-to", "none", "--prtemca", "plm_ssh_agent", str(self.rsh)]
            options += ["--mca", "osc", "^ucx", "--host", hosts]
        else:
            options = ["-hosts", hosts]
        line = [launching.launcher(), *options, "-n", ranks, *map(str, argv)]
        return [*self.inside(self.names[0]), *line]

    @contextlib.contextmanager
    def start_mpi(
        self,
        argv: Sequence[str | Path],
        *,
        log: IO[str],
        ranks_per_host: int | Sequence[int] = 1,
        env: Mapping[str, str | None] | None = None,
    ) -> Iterator[launching.Started]:
        """Start a program on all hosts; all of it has ended when the ``with`` block is left."""
        extra: dict[str, str | None] = {}
        if launching.family() == "mpich":
            extra |= {"HYDRA_LAUNCHER": "ssh", "HYDRA_LAUNCHER_EXEC": str(self.rsh)}
        # One machine, so one cache of compiled kernels, whatever the hosts' names.
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        extra["NUMBA_CACHE_DIR"] = str(caches / "aladdin_mpi" / "virtual-hosts")
        environment = launching.environment({**extra, **(env or {})})
        line = self.mpi_command(argv, ranks_per_host)
        with launching.Started(line, env=environment, stdout=log, stderr=log) as started:
            yield started

    def mpirun(
        self,
        argv: Sequence[str | Path],
        *,
        timeout: float,
        ranks_per_host: int | Sequence[int] = 1,
        env: Mapping[str, str | None] | None = None,
    ) -> str:
        """Run a program on all hosts and return what it printed.

        Raises
        ------
        launching.RunFailed
            It ended with a non-zero exit status, or not within ``timeout`` [s].
        """
        begin = time.monotonic()
        with tempfile.TemporaryFile("w+") as log:
            with self.start_mpi(argv, log=log, ranks_per_host=ranks_per_host, env=env) as started:
                status = started.wait(timeout)
            log.seek(0)
            text = log.read()
        if status != 0:
            run = launching.CompletedRun(status or -9, text, "", time.monotonic() - begin)
            what = "not ended in time" if status is None else f"exit status {status}"
            raise launching.RunFailed(f"{what}: {shlex.join(map(str, argv))}", run, status is None)
        return text
