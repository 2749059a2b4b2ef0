"""The mailbox protocol, checked exhaustively by spin, and faults that the check must find.

The model says what it covers: aladdin_mpi/comm/mailbox.pml.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import require

MODEL = Path(__file__).resolve().parents[2] / "aladdin_mpi" / "comm" / "mailbox.pml"
MAX_DEPTH = 10_000  # the longest run of the model has about 200 steps
MAX_MEMORY_MB = 2000
INCOMPLETE = ("max search depth too small", "Search not completed", "out of memory", "memory limit")
NOT_REACHED = re.compile(r"mailbox\.pml:\d+, state \d+, \"(.*)\"")

# The fault, and a piece of what spin says when it finds it.
FAULTS = {
    "NO_FLUSH": "assertion violated (window[o].payload",
    "REUSE_BEFORE_ACK": "assertion violated (window[o].sequence",
    "STAGING_REUSED": "assertion violated (window[o].payload",
    "WIDE_RECORD": "assertion violated (window[o].record",
    "NO_SYNC": "assertion violated (early",
    "ACK_BEFORE_MERGE": "assertion violated (window[o].payload",
    "BOX_OVERWRITTEN": "assertion violated (reply",
    "SERVER_FLUSH": "invalid end state",
}


def run(command: list[str], folder: Path) -> str:
    """Run a program that must succeed, and return what it printed."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def check(
    folder: Path,
    *defines: str,
    build: tuple[str, ...] = ("-O0", "-DSAFETY"),
    search: tuple[str, ...] = ("-w20",),
) -> str:
    """Check the model and return the report of the search.

    Parameters
    ----------
    folder : Path
        An empty folder for the generated checker.
    defines : str
        What is defined in the model.
    build, search : tuple of str
        Options of the compiler and of the checker: what kind of search it is. Most searches are
        short beside an optimizing compilation.
    """
    require.program("spin", "cc")
    said = run(["spin", "-a", *[f"-D{name}" for name in defines], str(MODEL)], folder)
    assert "Error" not in said, said
    memory = f"-DMEMLIM={MAX_MEMORY_MB}"
    run(["cc", "-w", *build, memory, "-o", "pan", "pan.c"], folder)
    report = run(["./pan", f"-m{MAX_DEPTH}", *search], folder)
    assert "Full statespace search for:" in report, report
    return report


def num_errors(report: str) -> int:
    """Return the number of errors in a report."""
    found = re.search(r"errors: (\d+)", report)
    assert found is not None, report
    return int(found.group(1))


def assert_holds(report: str) -> None:
    """Assert that the search was complete and found nothing."""
    assert num_errors(report) == 0, report
    for warning in INCOMPLETE:
        assert warning not in report, report


@pytest.mark.timeout(300)
@pytest.mark.parametrize("slots", [1, 2])
def test_protocol_holds(tmp_path: Path, slots: int) -> None:
    report = check(tmp_path, f"SLOTS={slots}", build=("-O2", "-DSAFETY"), search=("-w24",))
    assert_holds(report)
    assert re.search(r"assertion violations\s+\+", report), report
    assert re.search(r"invalid end states\s+\+", report), report
    # Nothing holds only because it never happens: all but the ends of endless loops is reached.
    assert set(NOT_REACHED.findall(report)) == {"-end-"}, report


@pytest.mark.timeout(120)
def test_server_can_always_make_its_next_step(tmp_path: Path) -> None:
    # enabled() in a claim does not go together with partial order reduction.
    report = check(
        tmp_path, "NO_WAIT_CLAIM", "ITERATIONS=3", build=("-O2", "-DSAFETY", "-DNOREDUCE")
    )
    assert_holds(report)


@pytest.mark.timeout(120)
def test_every_run_ends(tmp_path: Path) -> None:
    report = check(
        tmp_path, "ITERATIONS=2", build=("-O0", "-DNP", "-DNOREDUCE"), search=("-l", "-w20")
    )
    assert_holds(report)
    assert re.search(r"non-progress cycles\s+\+", report), report


@pytest.mark.timeout(120)
@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_found(tmp_path: Path, fault: str) -> None:
    report = check(tmp_path, f"FAULT_{fault}")
    assert num_errors(report) >= 1, report
    assert FAULTS[fault] in report, report


@pytest.mark.timeout(120)
def test_waiting_server_is_found_where_it_waits(tmp_path: Path) -> None:
    report = check(
        tmp_path,
        "NO_WAIT_CLAIM",
        "FAULT_SERVER_FLUSH",
        build=("-O0", "-DSAFETY", "-DNOREDUCE"),
    )
    assert num_errors(report) >= 1, report
    assert "end_poll" in report, report


def test_every_fault_of_the_model_is_tried() -> None:
    assert set(re.findall(r"\bFAULT_(\w+)", MODEL.read_text(encoding="utf-8"))) == set(FAULTS)
