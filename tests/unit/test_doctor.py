"""The doctor's judgement, with made-up facts; what it tries out on files; its watchdog."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from aladdin_mpi.cli import judging, launchers, machine
from aladdin_mpi.cli.findings import Finding, Level, merge
from aladdin_mpi.cli.judging import Place
from aladdin_mpi.record.filesystem import try_folder

MPICH = "MPICH Version: 5.0.2"
OPEN_MPI = "Open MPI v5.0.11, package: Open MPI user@localhost"
WHO = ["rank 0 on node1", "rank 1 on node1", "rank 2 on node2", "rank 3 on node7"]


def version(what: str, text: str) -> Finding:
    return Finding(Level.OK, what, text, same=text)


def test_equal_ranks_are_one_line() -> None:
    assert list(merge([[version("torch", "2.13")]] * 4, WHO)) == [version("torch", "2.13")]


def test_the_odd_rank_is_named() -> None:
    ranks = [[version("torch", text)] for text in ("2.13", "2.13", "2.13", "2.12")]
    usual, odd = merge(ranks, WHO)
    assert usual.found == "2.13"
    assert odd.found == "rank 3 on node7: 2.12, all others 2.13"
    assert odd.level is Level.WARNING and odd.advice


def test_rank_0_may_be_the_odd_one() -> None:
    ranks = [
        [version("MPI library", text)] for text in ("MPICH 4", "MPICH 5", "MPICH 5", "MPICH 5")
    ]
    usual, odd = merge(ranks, WHO)
    assert usual.found == "MPICH 5"
    assert odd.found == "rank 0 on node1: MPICH 4, all others MPICH 5"
    assert odd.level is Level.ERROR


def test_of_two_ranks_the_second_differs() -> None:
    _, odd = merge([[version("numba", "1")], [version("numba", "2")]], WHO[:2])
    assert odd.found == "rank 1 on node1: 2, all others 1"


def test_what_may_differ_is_compared_by_its_level() -> None:
    fine = [Finding(Level.OK, "shared memory", f"{size} GiB") for size in (3, 4, 5)]
    full = Finding(Level.WARNING, "shared memory", "0 GiB", "make room")
    (first,) = merge([[f] for f in fine], WHO[:3])
    assert first.found == "3 GiB"
    _, odd = merge([[f] for f in [*fine, full]], WHO)
    assert odd == Finding(
        Level.WARNING, "shared memory", "rank 3 on node7: 0 GiB, all others 3 GiB", "make room"
    )


def test_what_only_some_ranks_say_is_said_with_their_names() -> None:
    left = Finding(Level.WARNING, "left by killed jobs", "2 file(s)", "remove them")
    (only,) = merge([[], [], [left], []], WHO)
    assert only.found == "rank 2 on node2: 2 file(s)"


@pytest.mark.parametrize(
    ("library", "environ", "level", "words"),
    [
        (OPEN_MPI, {"PMI_SIZE": "4"}, Level.ERROR, "srun --mpi=pmix"),
        (MPICH, {"OMPI_COMM_WORLD_SIZE": "4"}, Level.ERROR, "mpiexec of MPICH"),
        (MPICH, {"SLURM_STEP_NUM_TASKS": "4"}, Level.ERROR, "srun --mpi=pmi2"),
        (MPICH, {"PMI_SIZE": "1"}, Level.OK, ""),
        (MPICH, {}, Level.OK, ""),
    ],
)
def test_singletons_are_an_error(
    library: str, environ: dict[str, str], level: Level, words: str
) -> None:
    finding = launchers.judge_start(1, library, environ)
    assert finding.level is level and words in finding.advice
    assert launchers.judge_start(4, library, environ).level is Level.OK


def test_the_mpi_type_of_srun() -> None:
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}
    (wrong,) = launchers.judge_slurm({**step, "PMI_RANK": "0", "PMI_FD": "9"}, OPEN_MPI)
    assert wrong.level is Level.WARNING
    assert "srun --mpi=pmi2" in wrong.found and "srun --mpi=pmix" in wrong.advice
    (right,) = launchers.judge_slurm({**step, "PMIX_NAMESPACE": "x"}, OPEN_MPI)
    assert right.level is Level.OK and right.found == "job 7, srun --mpi=pmix"
    (none,) = launchers.judge_slurm(step, MPICH)
    assert none.level is Level.WARNING and "--mpi=none" in none.found
    (by_mpiexec,) = launchers.judge_slurm({**step, "HYDI_CONTROL_FD": "7"}, MPICH)
    assert by_mpiexec.level is Level.OK
    assert list(launchers.judge_slurm({}, MPICH)) == []


def test_a_suspect_launcher_is_named_before_mpi_starts() -> None:
    assert "use the mpiexec of MPICH" in launchers.launcher_hint(MPICH, {"PRTE_LAUNCHED": "1"})
    assert "use the mpiexec of Open MPI" in launchers.launcher_hint(
        OPEN_MPI, {"HYDI_CONTROL_FD": "1"}
    )
    assert launchers.launcher_hint(MPICH, {"HYDI_CONTROL_FD": "1"}) == ""
    assert launchers.launcher_hint("Intel(R) MPI Library", {"HYDI_CONTROL_FD": "1"}) == ""
    assert launchers.launcher_hint(OPEN_MPI, {}) == ""


def test_thread_levels() -> None:
    def judge(level: str) -> Finding:
        probed = {"library": MPICH, "threads": level == "MULTIPLE", "thread_level": level}
        return next(
            f for f in judging.judge_mpi({**probed, "unified": True}, "") if "thr" in f.what
        )

    assert judge("MULTIPLE").level is Level.OK
    assert judge("SERIALIZED").level is Level.WARNING
    assert judge("FUNNELED").level is Level.ERROR


def test_windows_and_progress() -> None:
    assert judging.judge_windows(True, []).level is Level.OK
    assert judging.judge_windows(False, []).level is Level.ERROR
    lost = judging.judge_windows(True, WHO[3:])
    assert lost.level is Level.ERROR and WHO[3] in lost.found
    fast = judging.judge_progress([0, 0.001, 0.002, 0.003], 1.0, WHO)
    assert "after 3 ms at most" in fast.found and not fast.advice
    slow = judging.judge_progress([0, 0.001, 0.002, 0.9], 1.0, WHO)
    assert slow.found.endswith("calls MPI: rank 3 on node7") and slow.advice


def test_open_mpi_over_tcp() -> None:
    def judge(*facts: object) -> list[Finding]:
        return list(launchers.judge_transport(*facts))  # type: ignore[arg-type]

    (warning,) = judge(OPEN_MPI, {}, 2, False)
    assert warning.level is Level.WARNING and "--mca osc ^ucx" in warning.advice
    assert judge(OPEN_MPI, {"OMPI_MCA_osc": "^ucx"}, 2, False) == []
    assert judge(OPEN_MPI, {"OMPI_MCA_osc": "rdma"}, 2, False) == []
    assert judge(OPEN_MPI, {}, 1, False) == judge(OPEN_MPI, {}, 2, True) == []
    assert judge(MPICH, {}, 2, False) == []


def test_cores_of_ranks_that_share() -> None:
    both = (0, 1)
    (enough,) = judging.judge_cores([Place("a", both), Place("a", both), Place("b", both)], WHO[:3])
    assert enough.level is Level.OK and enough.found == "1 at least"
    (bound,) = judging.judge_cores([Place("a", (0,)), Place("a", (0,))], WHO[:2])
    assert bound.level is Level.WARNING and bound.found.startswith("only 0.5 for rank 0")
    cores = tuple(range(8))
    _, many = judging.judge_cores([Place("a", cores, 4), Place("a", cores, 8)], WHO[:2])
    assert WHO[1] in many.found and WHO[0] not in many.found
    assert many.advice.endswith("OMP_NUM_THREADS=4")


def test_gpus_and_horovod() -> None:
    assert judging.judge_gpus([], None).found == "no GPU"
    assert "this MPI reads their" in judging.judge_gpus(["H100"] * 2, True).found
    assert "does not say" in judging.judge_gpus(["H100"], None).found
    absent = judging.judge_horovod({"problem": "Horovod is not installed: make horovod"}, "")
    assert absent.level is Level.OK
    broken = judging.judge_horovod({"problem": "Horovod cannot be loaded (x)"}, "")
    assert broken.level is Level.WARNING
    gloo = {"problem": "", "version": "0.28.1", "backends": ["gloo"]}
    assert judging.judge_horovod(gloo, "").level is Level.WARNING
    assert judging.judge_horovod({**gloo, "backends": ["mpi"]}, "").level is Level.OK
    assert judging.judge_horovod({}, "no answer within 1 s").level is Level.WARNING


def test_output_folders() -> None:
    fine = {
        "folder": "/x", "type": "xfs", "free_bytes": 2**40, "problem": "", "locking": True,
        "mode": "swmr", "read_while_written": True,
    }  # fmt: skip
    assert judging.judge_folder(fine, "").level is Level.OK
    nfs = judging.judge_folder({**fine, "type": "nfs4", "mode": "flush", "locking": False}, "")
    assert nfs.level is Level.WARNING and "no SWMR, no locking" in nfs.found and nfs.advice
    full = judging.judge_folder({**fine, "free_bytes": 1}, "")
    assert full.level is Level.WARNING and "make room" in full.advice
    refused = judging.judge_folder({**fine, "problem": "Permission denied"}, "")
    assert refused.level is Level.ERROR and "Permission denied" in refused.found
    assert judging.judge_folder({}, "no answer within 1 s").level is Level.ERROR


def test_a_folder_is_tried_out_and_left_as_it_was(tmp_path: Path) -> None:
    tried = try_folder(tmp_path / "new" / "run")
    assert tried["folder"] == str(tmp_path) and tried["problem"] == ""
    assert tried["read_while_written"] is True
    assert list(tmp_path.iterdir()) == []


def test_settings_leave_out_what_the_launcher_sets() -> None:
    environ = {"UCX_TLS": "tcp", "OMPI_MCA_num_procs": "3", "OMPI_MCA_osc": "^ucx", "HOME": "/"}
    assert machine.settings(environ).found == "OMPI_MCA_osc=^ucx UCX_TLS=tcp"
    assert machine.settings({}).found == "none"


WATCHED = """
import os, sys, time
from aladdin_mpi.cli.watchdog import Watchdog
watchdog = Watchdog(0.5, "rank 3 on node7", speaks=False)
watchdog.stage("waiting" if sys.argv[1] == "wait" else "the window test")
if sys.argv[1] in ("hang", "wait"): time.sleep(60)
if sys.argv[1] == "crash": os._exit(16)
watchdog.stop()
print("through")
"""


@pytest.mark.parametrize(
    ("how", "status", "words"),
    [
        ("hang", -9, "rank 3 on node7: not through within 0.5 s: the window test ->"),
        ("wait", -9, ""),  # the one that is waited for says it
        ("crash", 16, "rank 3 on node7: ended in the window test"),
        ("fine", 0, "through"),
    ],
)
def test_watchdog(how: str, status: int, words: str) -> None:
    root = Path(__file__).resolve().parents[2]
    argv = [sys.executable, "-c", WATCHED, how]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=root, timeout=50)
    assert done.returncode == status, done.stderr
    assert words in done.stdout
    assert len(done.stdout.splitlines()) == bool(words)
