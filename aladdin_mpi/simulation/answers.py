"""What a user asks: how many servers does this model need on these links, and which algorithm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from aladdin_mpi.errors import ConfigError
from aladdin_mpi.simulation.outcome import Outcome
from aladdin_mpi.simulation.rounds import simulate_arsgd, simulate_bsp, simulate_sgp
from aladdin_mpi.simulation.served import simulate_aladdin, simulate_asp
from aladdin_mpi.simulation.setting import Setting

__all__ = ["ALGORITHMS", "SERVED", "advice", "enough_servers", "servers_to_try", "sweep"]

ALGORITHMS: dict[str, Callable[[Setting], Outcome]] = {
    "aladdin": simulate_aladdin,
    "asp": simulate_asp,
    "bsp": simulate_bsp,
    "arsgd": simulate_arsgd,
    "sgp": simulate_sgp,
}
SERVED = ("aladdin", "asp", "bsp")

ALIKE = 0.95
"""Share of the quickest one's speed-up from which on another algorithm is named beside it."""


def enough_servers(setting: Setting) -> int:
    """The fewest servers whose links carry a push of every iteration."""
    servers = 1
    while replace(setting, servers=servers, shards=0).overload > 1:
        if servers > 64 * setting.num_workers:
            raise ConfigError(
                f"--rate {setting.bytes_per_s * 8e-9:g}: no number of servers carries a push of "
                "every iteration; messages take longer than computing"
            )
        servers += 1
    return servers


def servers_to_try(setting: Setting) -> list[int]:
    """1, 2, 4, … up to the number that is enough, but no more than there are workers."""
    most = min(enough_servers(setting), setting.num_workers)
    found = [1]
    while found[-1] < most:
        found.append(min(2 * found[-1], most))
    return found


def sweep(
    base: Setting, workers: Sequence[int], servers: Sequence[int], algorithms: Sequence[str]
) -> list[Outcome]:
    """Simulate every case.

    Parameters
    ----------
    base : Setting
        All but the numbers of workers and servers.
    workers, servers : sequence of int
        Without ``servers``, :func:`servers_to_try`.
    algorithms : sequence of str
        Of :data:`ALGORITHMS`; those without servers are simulated once per number of workers.

    Raises
    ------
    ConfigError
    """
    found = []
    for n in workers:
        setting = replace(base, num_workers=n)
        tried = servers or servers_to_try(setting)
        for name in algorithms:
            for count in tried if name in SERVED else tried[:1]:
                shards = base.shards if base.shards > base.servers else 0
                found.append(ALGORITHMS[name](replace(setting, servers=count, shards=shards)))
    return found


def advice(base: Setting, outcomes: Sequence[Outcome]) -> list[str]:
    """The answers, a line each."""
    lines = []
    for n in dict.fromkeys(o.workers for o in outcomes):
        setting = replace(base, num_workers=n, servers=1, shards=0)
        here = [o for o in outcomes if o.workers == n]
        if any(o.servers for o in here):
            lines.append(_servers_line(setting, here) + _worker_text(setting))
        best = max(here, key=lambda o: o.speedup)
        alike: dict[str, Outcome] = {}  # each with as few servers as will do
        for o in sorted(here, key=lambda o: o.servers):
            if o.speedup >= ALIKE * best.speedup:
                alike.setdefault(o.algorithm, o)
        named = [
            f"{name}{f' with {_servers(o.servers)}' if o.servers else ''} ({o.speedup:.3g})"
            for name, o in sorted(alike.items(), key=lambda item: -item[1].speedup)
        ]
        lines.append(f"{n} workers: most iterations (speed-up): {', '.join(named)}")
    return lines


def _servers_line(setting: Setting, outcomes: Sequence[Outcome]) -> str:
    n, enough = setting.num_workers, enough_servers(setting)
    if enough == 1:
        return (
            f"{n} workers: one server is enough: a push of every iteration takes "
            f"{setting.overload:.0%} of its link"
        )
    text = (
        f"{n} workers: one server's link carries one push in {setting.overload:.3g}, {enough} "
        "servers carry all of them"
    )
    coalesced = [o for o in outcomes if o.algorithm == "aladdin" and o.servers < enough]
    if coalesced:
        fewest = min(coalesced, key=lambda o: o.servers)
        text += (
            f"; with {_servers(fewest.servers)} aladdin waits for nothing, and puts "
            f"{fewest.iterations_per_push:.3g} iterations into a push"
        )
    return text


def _worker_text(setting: Setting) -> str:
    if setting.worker_overload <= 1:
        return ""
    return (
        f"; but a worker's own link carries one push in {setting.worker_overload:.3g}, whatever "
        "the number of servers"
    )


def _servers(count: int) -> str:
    return f"{count} server" if count == 1 else f"{count} servers"
