"""What the findings of ``aladdin-mpi doctor`` mean: pure functions, facts in, findings out."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from aladdin_mpi.cli.findings import Finding, Level, name_ranks
from aladdin_mpi.cli.launchers import family

__all__ = [
    "Place",
    "judge_cores",
    "judge_folder",
    "judge_gpus",
    "judge_horovod",
    "judge_mpi",
    "judge_progress",
    "judge_windows",
]

LITTLE_DISK_BYTES = 2**30


class Place(NamedTuple):
    """Where a rank runs: host, the cores it may use, and OMP_NUM_THREADS (0: not set)."""

    host: str
    cores: tuple[int, ...]
    omp_threads: int = 0


def judge_mpi(probed: Mapping[str, Any], problem: str) -> Iterator[Finding]:
    """What the probe of the MPI library means; ``problem`` is empty where it ran to its end."""
    library = " ".join(str(probed["library"]).split())
    version = re.search(r"\d+\.\d+(\.\d+)?\S*", library)
    short = f"{family(library)} {version.group().rstrip(',') if version else ''}".strip()
    found = f"{short} ({probed['path']})" if probed.get("path") else short
    if re.search(r"Open MPI v4\.1\.4\b", library):
        yield Finding(
            Level.WARNING, "MPI library", found,
            "this version fails on one-sided communication with threads (Debian 12 ships it): "
            "use a newer one, or pip install mpich",
            same=short,
        )  # fmt: skip
    else:
        yield Finding(Level.OK, "MPI library", found, same=short)
    if problem:
        advice = (
            "try it alone: python -c 'from mpi4py import MPI'; a broken network setting can hang it"
        )
        yield Finding(Level.ERROR, "MPI start", problem, advice)
        return
    level = probed.get("thread_level", "")
    if level in ("SINGLE", "FUNNELED"):
        advice = "use an MPI built with threads: SERIALIZED is needed at least, MULTIPLE is better"
        yield Finding(Level.ERROR, "MPI threads", level, advice)
    elif not probed.get("threads"):
        advice = "use an MPI that was built with it"
        yield Finding(Level.WARNING, "MPI threads", level or "no THREAD_MULTIPLE", advice)
    elif level:
        yield Finding(Level.OK, "MPI threads", level, same=level)
    if "lost" in probed or not probed.get("unified"):
        yield judge_windows(
            bool(probed.get("unified")), ["this rank"] if probed.get("lost") else []
        )


def judge_windows(unified: bool, lost: Sequence[str]) -> Finding:
    """``lost`` are the ranks whose Put and Flush did not bring their word to rank 0."""
    if not unified:
        advice = "use another MPI: memory windows must be unified"
        return Finding(Level.ERROR, "MPI windows", "separate memory model", advice)
    if lost:
        text = f"what was put is not there after Flush: {name_ranks(lost)}"
        advice = "use another MPI or transport (Open MPI: --mca osc ^ucx; MPICH: UCX_TLS=tcp,self)"
        return Finding(Level.ERROR, "MPI windows", text, advice)
    return Finding(Level.OK, "MPI windows", "unified; Put and Flush arrive")


def judge_progress(waits_s: Sequence[float], busy_s: float, who: Sequence[str]) -> Finding:
    """Whether a Put arrives while rank 0 computes; rank 0's own wait is not looked at.

    It is no fault where it does not: the server calls MPI all the time.  But then a server that is
    held up (swapped out, stopped, sharing its core) holds up the workers' communication threads.
    """
    late = [name for name, wait in zip(who[1:], waits_s[1:], strict=True) if wait > busy_s / 2]
    worst = max(waits_s[1:], default=0.0)
    if not late:
        text = f"a put arrives while its target computes (after {worst * 1e3:.3g} ms at most)"
        return Finding(Level.OK, "MPI progress", text)
    text = f"a put waits until its target calls MPI: {name_ranks(late)}"
    advice = "fine for training as long as the server has a core of its own"
    return Finding(Level.OK, "MPI progress", text, advice)


def judge_gpus(gpus: Sequence[str], cuda: bool | None) -> Finding:
    """``gpus`` are the names of those that this rank sees; ``cuda`` what the MPI library says."""
    if not gpus:
        return Finding(Level.OK, "GPU", "no GPU", same="no GPU")
    says = {True: "reads", False: "does not read", None: "does not say whether it reads"}[cuda]
    text = f"{len(gpus)} x {gpus[0]}; this MPI {says} their memory"
    advice = "" if cuda else "not needed: parameters go through host memory"
    return Finding(Level.OK, "GPU", text, advice, same=text)


def judge_horovod(found: Mapping[str, Any], problem: str) -> Finding:
    """Horovod is optional: its absence is no fault."""
    if problem or not found:
        advice = "or do without: --backend mpi"
        return Finding(Level.WARNING, "Horovod", problem or "no answer", advice)
    if found["problem"]:
        missing = "not installed" in found["problem"]
        level = Level.OK if missing else Level.WARNING
        return Finding(level, "Horovod", found["problem"], "only --backend horovod needs it")
    backends = ", ".join(found["backends"]) or "none"
    text = f"{found['version']}, built with {backends}"
    if "mpi" not in found["backends"]:
        return Finding(Level.WARNING, "Horovod", text, "build it with MPI: make horovod", text)
    return Finding(Level.OK, "Horovod", text, same=text)


def judge_folder(tried: Mapping[str, Any], problem: str) -> Finding:
    """The file system of the output folder, as ``record.filesystem.try_folder`` found it."""
    if problem or not tried or tried["problem"]:
        text = problem or (tried and f"{tried['folder']}: {tried['problem']}") or "no answer"
        return Finding(Level.ERROR, "output folder", text, "name a folder that can be written")
    text = f"{tried['folder']}: {tried['type']}, {tried['free_bytes'] / 2**30:.1f} GiB free"
    advice = []
    if tried["mode"] != "swmr":
        advice.append("logs are flushed every second instead of SWMR: read them after the run")
    if not tried["locking"]:
        advice.append("logs are not locked: never two runs in one folder")
    if tried["free_bytes"] < LITTLE_DISK_BYTES:
        advice.append("make room, or choose another folder")
    works = [f"{'SWMR' if tried['mode'] == 'swmr' else 'no SWMR'}"]
    works.append("locking" if tried["locking"] else "no locking")
    if not tried["read_while_written"]:
        works.append("not readable while written")
        advice.append("follow the run by its progress line")
    level = Level.WARNING if advice else Level.OK
    return Finding(level, "output folder", f"{text}; {', '.join(works)}", "; ".join(advice))


def judge_cores(places: Sequence[Place], who: Sequence[str]) -> Iterator[Finding]:
    """Whether the ranks of each host have cores enough for themselves and for their threads."""
    starved: list[str] = []
    threads: list[str] = []
    share = min(_share(place, places) for place in places)
    for name, place in zip(who, places, strict=True):
        mine = _share(place, places)
        if mine < 1:
            starved.append(name)
        elif place.omp_threads > max(1.0, mine):
            threads.append(name)
    text = f"{share:.3g} at least" if share >= 1 else f"only {share:.2g} for {name_ranks(starved)}"
    if starved:
        advice = (
            "fewer ranks per host, or another binding (mpiexec --bind-to none, srun "
            "--cpus-per-task): ranks that share a core wait for one another"
        )
        yield Finding(Level.WARNING, "cores per rank", text, advice)
    else:
        yield Finding(Level.OK, "cores per rank", text)
    if threads:
        text = f"OMP_NUM_THREADS is above the cores per rank: {name_ranks(threads)}"
        advice = f"unset it, or OMP_NUM_THREADS={max(1, int(share))}"
        yield Finding(Level.WARNING, "threads per rank", text, advice)


def _share(place: Place, places: Sequence[Place]) -> float:
    """Cores that a rank has for itself: each of its cores counts by how many ranks may use it."""
    here = [set(other.cores) for other in places if other.host == place.host]
    return sum(1 / sum(core in other for other in here) for core in place.cores)
