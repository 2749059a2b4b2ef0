"""``aladdin-mpi doctor`` as one of several ranks: they check by themselves, then together.

The first half is every rank's own and needs no MPI; each check has a time limit, and so have all.
From then on a watchdog ends a rank that does not come through: nothing hangs.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aladdin_mpi.cli import checks, judging, launchers, machine
from aladdin_mpi.cli.findings import Finding, Level, merge
from aladdin_mpi.cli.watchdog import Watchdog
from aladdin_mpi.errors import launch_rank

__all__ = ["check_job"]

OWN_CHECKS = 3


def check_job(timeout_s: float, out: Path | None, show: Callable[[Finding], None]) -> Level:
    """All checks of a rank of a job; rank 0 shows them.  Returns the same on all ranks.

    Parameters
    ----------
    timeout_s : float
        For one check, and for what the ranks do together; ``OWN_CHECKS`` times that for all checks
        of a rank by itself, so that the others know how long to wait.
    """
    begin = time.monotonic()

    def left_s() -> float:
        return min(timeout_s, max(1.0, begin + OWN_CHECKS * timeout_s - time.monotonic()))

    who = f"rank {launch_rank()} on {platform.node()}"
    seen: list[str] = []
    mine = list(checks.basic(left_s, out, seen))
    limit_s = begin + (OWN_CHECKS + 1) * timeout_s - time.monotonic()
    watchdog = Watchdog(limit_s, who, speaks=launch_rank() == 0)
    try:
        return _together(watchdog, mine, seen, who, show)
    finally:
        watchdog.stop()


def _together(
    watchdog: Watchdog, mine: list[Finding], seen: list[str], who: str,
    show: Callable[[Finding], None],
) -> Level:  # fmt: skip
    watchdog.stage("the start of MPI")
    try:
        from aladdin_mpi.comm import probe

        found = probe.describe()
    except (ImportError, RuntimeError) as error:
        text = f"{who}: {' '.join(str(error).split())}"
        show(Finding(Level.ERROR, "MPI", text, checks.INSTALL_MPI))
        return Level.ERROR
    if hint := launchers.launcher_hint(found["library"], os.environ):
        watchdog.stage(f"the start of MPI -> {hint}")
    comm, more = probe.start()
    found |= more
    mine.append(Finding(Level.OK, "mpi4py", found["mpi4py"], same=found["mpi4py"]))
    mine += judging.judge_mpi({**found, "unified": True}, "")
    mine.append(judging.judge_gpus(seen, found["cuda"]))
    mine += launchers.judge_slurm(os.environ, found["library"])
    start = launchers.judge_start(found["size"], found["library"], os.environ)
    if start.level is Level.ERROR:  # every rank is alone and has found the same
        probe.stop()
        return _show_all([*mine, start], show if launch_rank() == 0 else None)
    watchdog.stage("waiting for the other ranks after the start of MPI")
    everybody = comm.gather((f"rank {comm.rank} on {platform.node()}", mine, machine.here()))
    unified, lost = probe.window_problem(comm, watchdog.stage)
    waits = probe.progress_waits(comm, stage=watchdog.stage)
    watchdog.stage("the end of MPI")
    level: Level = comm.bcast(
        _judge(everybody, found["library"], start, unified, lost, waits, show)
        if everybody
        else None
    )
    probe.stop()
    return level


def _judge(
    everybody: list[tuple[str, list[Finding], machine.Place]], library: str, start: Finding,
    unified: bool, lost: list[int], waits: list[float], show: Callable[[Finding], None],
) -> Level:  # fmt: skip
    from aladdin_mpi.comm.probe import BUSY_S

    who = [name for name, _, _ in everybody]
    findings: list[Any] = [start, *merge([findings for _, findings, _ in everybody], who)]
    hosts = len({place.host for _, _, place in everybody})
    findings += launchers.judge_transport(library, os.environ, hosts, machine.has_infiniband())
    findings.append(judging.judge_windows(unified, [who[rank] for rank in lost]))
    findings.append(judging.judge_progress(waits, BUSY_S, who))
    findings += judging.judge_cores([place for _, _, place in everybody], who)
    return _show_all(findings, show)


def _show_all(findings: list[Finding], show: Callable[[Finding], None] | None) -> Level:
    for finding in findings:
        if show is not None:
            show(finding)
    return max(finding.level for finding in findings)
