"""Rules for tests that run on every rank: ``mpiexec -n 3 python -m pytest tests/mpi``.

- Every rank runs the same tests. After each phase of a test (set-up, call, teardown) the ranks
  compare how it went, so that all of them fail together, and the report of rank 0 names the rank
  that failed with its traceback. ``together(function)`` does so in the middle of a test.
- Nobody waits for ever: when a rank has failed and another does not come to compare, or when a
  test takes longer than its limit (60 s, or its ``timeout`` mark), every rank prints where it is
  and the job is aborted.
- Only rank 0 reports; the output of the others is shown at the end if something failed.
- ``@pytest.mark.ranks(at_least=2)`` says at which world sizes a test makes sense.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import NoReturn, TextIO, TypeVar

import numpy as np
import pytest
from _pytest.config import create_terminal_writer
from mpi4py import MPI

T = TypeVar("T")

LIMIT_S = float(os.environ.get("ALADDIN_MPI_TEST_LIMIT", "60"))
GRACE_S = float(os.environ.get("ALADDIN_MPI_TEST_GRACE", "10"))
"""How long a rank that has failed waits for the others to come and compare."""

PASSED, SKIPPED, FAILED = range(3)

COMM = MPI.COMM_WORLD.Dup()
RANK, SIZE = COMM.rank, COMM.size
FOLDER = pytest.StashKey[Path]()


class Guard:
    """Ends the job when a test takes too long, after every rank has printed where it is."""

    def __init__(self) -> None:
        self.stderr: TextIO = sys.stderr
        self.timer: threading.Timer | None = None

    def arm(self, name: str, limit_s: float) -> None:
        """Start the time of a test."""
        self.timer = threading.Timer(limit_s, self.expire, (name, limit_s))
        self.timer.daemon = True
        self.timer.start()
        # Written in C: fires even if a thread is stuck in MPI without having released the GIL.
        faulthandler.dump_traceback_later(limit_s + 15, exit=True, file=self.stderr)

    def disarm(self) -> None:
        """Stop the time."""
        faulthandler.cancel_dump_traceback_later()
        if self.timer is not None:
            self.timer.cancel()

    def expire(self, name: str, limit_s: float) -> None:
        """Say where this rank is, and end the job."""
        self.abort(f"{name} has not ended after {limit_s:g} s", stacks=True)

    def abort(self, text: str, stacks: bool = False) -> NoReturn:
        """Print, give the other ranks a moment to print as well, and end the job."""
        print(f"\nrank {RANK} of {SIZE}: {text}", file=self.stderr, flush=True)
        if stacks:
            faulthandler.dump_traceback(file=self.stderr, all_threads=True)
        time.sleep(1.0)
        MPI.COMM_WORLD.Abort(1)
        os._exit(1)


GUARD = Guard()


def compare(error: BaseException | None, what: str, source: Path) -> list[tuple[int, str]]:
    """Tell the other ranks how it went; return rank and text of those it went otherwise for.

    Collective. Empty when it went well everywhere, or everywhere was skipped.
    """
    skip = pytest.skip.Exception, pytest.xfail.Exception
    mine = PASSED if error is None else SKIPPED if isinstance(error, skip) else FAILED
    outcomes = np.empty(SIZE, dtype=np.int64)
    request = COMM.Iallgather(np.array([mine], dtype=np.int64), outcomes)
    text = "" if error is None else describe(error, source)
    deadline = time.monotonic() + (GRACE_S if mine == FAILED else float("inf"))
    pause = 1e-4
    while not request.Test():
        if time.monotonic() > deadline:
            GUARD.abort(f"{what} failed here, and another rank is still waiting in it:\n{text}")
        time.sleep(pause)
        pause = min(2 * pause, 5e-3)
    if mine != FAILED and (outcomes == mine).all():
        return []
    texts: list[str] = COMM.allgather(text)
    return [(rank, texts[rank]) for rank in range(SIZE) if outcomes[rank] != PASSED]


def describe(error: BaseException, source: Path) -> str:
    """Return the traceback of an error, from the test's own file inwards."""
    start = error.__traceback__
    while start is not None and start.tb_frame.f_code.co_filename != str(source):
        start = start.tb_next
    shown = traceback.format_exception(type(error), error, start or error.__traceback__)
    return "".join(shown).rstrip()


def fail_together(error: BaseException | None, unequal: list[tuple[int, str]]) -> None:
    """Fail on a rank where it went well itself."""
    if unequal and (error is None or isinstance(error, pytest.skip.Exception)):
        pytest.fail("\n".join(f"rank {rank}: {text}" for rank, text in unequal), pytrace=False)


def agreed(item: pytest.Item, phase: str) -> Generator[None, object, object]:
    """Run one phase of a test and let it fail on all ranks if it fails on one."""
    what = f"{phase} of {item.nodeid}"
    try:
        result = yield
    except (KeyboardInterrupt, pytest.exit.Exception):
        raise
    except BaseException as error:
        unequal = compare(error, what, item.path)
        others = "\n".join(f"rank {rank}: {text}" for rank, text in unequal if rank != RANK)
        if others:
            item.add_report_section(phase, "other ranks", others)
        fail_together(error, unequal)
        raise
    fail_together(None, compare(None, what, item.path))
    return result


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    """Compare after the fixtures were set up."""
    return (yield from agreed(item, "setup"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Compare after the test itself."""
    return (yield from agreed(item, "call"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    """Compare after the fixtures were torn down."""
    return (yield from agreed(item, "teardown"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Limit the time of a test."""
    mark = item.get_closest_marker("timeout")
    GUARD.arm(item.nodeid, float(mark.args[0]) if mark and mark.args else LIMIT_S)
    try:
        return (yield)
    finally:
        GUARD.disarm()


@pytest.hookimpl(optionalhook=True)
def pytest_timeout_set_timer() -> bool:
    """Take the place of pytest-timeout's own timer, which would stop one rank only."""
    return True


@pytest.hookimpl(optionalhook=True)
def pytest_timeout_cancel_timer() -> bool:
    """Counterpart of ``pytest_timeout_set_timer``."""
    return True


# ---------------------------------------------------------------------------------- fixtures


@pytest.fixture
def comm() -> Iterator[MPI.Intracomm]:
    """A communicator of all ranks for one test alone (not freed: that would be collective)."""
    yield MPI.COMM_WORLD.Dup()


@pytest.fixture
def together(request: pytest.FixtureRequest) -> Callable[[Callable[[], T]], T]:
    """``together(function)`` calls it on every rank, and raises on all if it raises on one."""

    def call(function: Callable[[], T]) -> T:
        what = f"a step of {request.node.nodeid}"
        try:
            result = function()
        except Exception as error:
            compare(error, what, request.path)
            raise
        fail_together(None, compare(None, what, request.path))
        return result

    return call


@pytest.fixture
def shared_path(tmp_path: Path) -> Path:
    """A temporary folder that is the same on all ranks (``tmp_path`` is each rank's own)."""
    return Path(COMM.bcast(str(tmp_path)))


# --------------------------------------------------------------------------------- selection


def applies(mark: pytest.Mark, size: int) -> bool:
    """Say whether a test with this ``ranks`` mark runs at a world size."""
    exactly = mark.kwargs.get("exactly", size)
    return exactly == size and (
        mark.kwargs.get("at_least", 1) <= size <= mark.kwargs.get("at_most", size)
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take out what makes no sense at this world size; without mpiexec, say what it needs."""
    kept, dropped = [], []
    for item in items:
        mark = item.get_closest_marker("ranks")
        if mark is None or applies(mark, SIZE):
            kept.append(item)
        elif SIZE == 1:
            needed = mark.kwargs.get("exactly", mark.kwargs.get("at_least", 2))
            item.add_marker(pytest.mark.skip(reason=f"needs mpiexec -n {needed}"))
            kept.append(item)
        else:
            dropped.append(item)
    items[:] = kept
    if dropped:
        config.hook.pytest_deselected(items=dropped)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Make sure that every rank runs the same tests in the same order."""
    names = [item.nodeid for item in session.items]
    if len(set(map(tuple, COMM.allgather(names)))) > 1:
        GUARD.abort(f"the ranks have not collected the same tests; here {len(names)}")


# ----------------------------------------------------------------------------------- reports


def pytest_configure(config: pytest.Config) -> None:
    """Find the true stderr behind pytest's capture, and draw the same examples on all ranks."""
    capture = config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled() if capture else contextlib.nullcontext():
        GUARD.stderr = os.fdopen(os.dup(2), "w")
    if RANK:
        config.option.xmlpath = None
    with contextlib.suppress(ImportError):
        from hypothesis import settings

        settings.register_profile("mpi", derandomize=True, deadline=None, database=None)
        settings.load_profile("mpi")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Send the report of every rank but the first to a file."""
    folder = Path(COMM.bcast(tempfile.mkdtemp(prefix="mpi-tests-") if RANK == 0 else None))
    session.config.stash[FOLDER] = folder
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if RANK and reporter is not None:
        file = (folder / f"rank-{RANK}.txt").open("w")
        reporter._tw = create_terminal_writer(session.config, file)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Show what the other ranks wrote, if something failed."""
    folder = config.stash.get(FOLDER, None)
    if folder is None or SIZE == 1:
        return
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if RANK and reporter is not None:
        reporter._tw.flush()
    GUARD.arm("the end of the tests", LIMIT_S)
    COMM.Barrier()
    if RANK == 0:
        if reporter is not None and (reporter.stats.keys() & {"failed", "error"}):
            for rank in range(1, SIZE):
                text = (folder / f"rank-{rank}.txt").read_text(errors="replace")
                print(f"----- report of rank {rank}\n{text}", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
    COMM.Barrier()  # Open MPI ends the job at the first rank that leaves with a non-zero status
    GUARD.disarm()
