"""How the ranks were started, and whether that fits the MPI library: pure functions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from aladdin_mpi.cli.findings import Finding, Level

__all__ = ["family", "judge_slurm", "judge_start", "judge_transport", "launcher_hint", "slurm_mpi"]

MPICH_LIKE = {"MPICH", "Intel MPI"}
STARTED = {
    "OMPI_COMM_WORLD_SIZE": "Open MPI's mpiexec",
    "PMI_SIZE": "MPICH's mpiexec or srun --mpi=pmi2",
    "SLURM_STEP_NUM_TASKS": "srun",
}
"""Variable with the number of ranks that were started: by whom."""


def family(text: str) -> str:
    """The MPI that a library or a launcher belongs to, by its name and version."""
    if re.search(r"open\s*mpi|OpenRTE|prte", text, re.IGNORECASE):
        return "Open MPI"
    if re.search(r"intel", text, re.IGNORECASE):
        return "Intel MPI"
    return "MPICH" if re.search(r"mpich|hydra", text, re.IGNORECASE) else "unknown"


def slurm_mpi(environ: Mapping[str, str]) -> str:
    """The ``srun --mpi`` type, as far as the variables of a task tell."""
    if "PMIX_NAMESPACE" in environ:
        return "pmix"
    return "pmi2" if "PMI_RANK" in environ or "PMI_FD" in environ else "none"


def judge_slurm(environ: Mapping[str, str], library: str) -> Iterator[Finding]:
    """The job, and whether srun's ``--mpi`` type fits the MPI library; nothing outside Slurm."""
    if "SLURM_JOB_ID" not in environ:
        return
    parts = [f"job {environ['SLURM_JOB_ID']}"]
    for name, text in (("SLURM_JOB_NUM_NODES", "node(s)"), ("SLURM_NTASKS", "task(s)"),
                       ("SLURM_CPUS_PER_TASK", "core(s) per task")):  # fmt: skip
        if name in environ:
            parts.append(f"{environ[name]} {text}")
    step = "SLURM_STEP_NUM_TASKS" in environ and environ.get("SLURM_STEP_ID", "").isdecimal()
    if not step or any(name in environ for name in ("HYDI_CONTROL_FD", "PRTE_LAUNCHED")):
        yield Finding(Level.OK, "Slurm", ", ".join(parts), same=parts[0])
        return
    kind, needs = slurm_mpi(environ), _slurm_type(library)
    parts.append(f"srun --mpi={kind}")
    if needs and kind not in needs and int(environ["SLURM_STEP_NUM_TASKS"] or 1) > 1:
        advice = f"{family(library)} needs srun --mpi={' or '.join(needs)} (srun --mpi=list)"
        yield Finding(Level.WARNING, "Slurm", ", ".join(parts), advice, same=parts[0])
    else:
        yield Finding(Level.OK, "Slurm", ", ".join(parts), same=parts[0])


def _slurm_type(library: str) -> tuple[str, ...]:
    return {"MPICH": ("pmi2", "pmix"), "Intel MPI": ("pmi2", "pmix"), "Open MPI": ("pmix",)}.get(
        family(library), ()
    )


def judge_start(size: int, library: str, environ: Mapping[str, str]) -> Finding:
    """Whether all that a launcher started found together: a launcher of another MPI, or a wrong
    ``srun --mpi``, starts ranks that each believe to be alone.
    """
    for variable, launcher in STARTED.items():
        meant = environ.get(variable, "")
        if size == 1 and meant.isdecimal() and int(meant) > 1:
            mpi = family(library)
            types = " or ".join(_slurm_type(library)) or "TYPE"
            advice = f"use the mpiexec of {mpi}; under Slurm srun --mpi={types} (srun --mpi=list)"
            text = f"{launcher} started {meant} processes ({variable}={meant}), but with {mpi} "
            text += "each is alone"
            return Finding(Level.ERROR, "launcher", text, advice)
    by = next((text for name, text in STARTED.items() if name in environ), "unknown")
    return Finding(Level.OK, "launcher", f"{size} ranks, started by {by}")


def launcher_hint(library: str, environ: Mapping[str, str]) -> str:
    """What is suspect before MPI starts, since MPI may end the process there; empty: nothing."""
    mine = family(library)
    theirs = "MPICH" if "HYDI_CONTROL_FD" in environ else ""
    theirs = "Open MPI" if "PRTE_LAUNCHED" in environ else theirs
    if not theirs or mine == "unknown" or mine == theirs or {mine, theirs} == MPICH_LIKE:
        return ""
    return f"the launcher is of {theirs}, the library is {mine}: use the mpiexec of {mine}"


def judge_transport(
    library: str, environ: Mapping[str, str], hosts: int, infiniband: bool
) -> Iterator[Finding]:
    """Open MPI's one-sided communication by UCX has failed over TCP between hosts."""
    if family(library) == "Open MPI" and hosts > 1 and not infiniband:
        if "ucx" not in environ.get("OMPI_MCA_osc", "ucx").partition("^")[0]:
            return
        text = f"{hosts} hosts without InfiniBand: UCX's windows may end with an endpoint timeout"
        yield Finding(Level.WARNING, "MPI transport", text, "mpiexec --mca osc ^ucx")
