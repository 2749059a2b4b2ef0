"""One rank's failure ends the job: printed first, never swallowed, never a hang.

A user's mistake is one line; a bug is its traceback.  The hooks work however the script was
started.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType

from aladdin_mpi.errors import AladdinError, launch_rank, launched_together

__all__ = ["Guard", "guard"]

USER_ERROR, BUG = 2, 1
_SILENT_WAIT_S, _OTHERS_WAIT_S = 3.0, 1.5


class Guard:
    """Ends the job when this rank fails.

    Attributes
    ----------
    who : str
        How a message begins; empty before the ranks are known.
    """

    def __init__(self) -> None:
        self.who = ""
        self._abort: Callable[[int], None] | None = None
        self._at_failure: Callable[[], None] = lambda: None
        self._armed = False
        self._installed = False
        self._first = True
        self._previous = sys.excepthook

    def install(self) -> None:
        """Take over uncaught exceptions of all threads; once."""
        if not self._installed:
            self._installed = True
            self._previous = sys.excepthook
            sys.excepthook = self._on_exception
            threading.excepthook = lambda args: self._on_exception(
                args.exc_type, args.exc_value or args.exc_type(), args.exc_traceback
            )
            atexit.register(self._on_exit)

    def arm(self, who: str, abort: Callable[[int], None], first: bool = True) -> None:
        """From now on a failure ends the whole job through ``abort(code)``.

        A mistake that all workers make is printed by the ``first``, which ends the others.
        """
        self.who, self._abort, self._armed, self._first = who, abort, True, first

    def before_failing(self, call: Callable[[], None]) -> None:
        """Have ``call()`` save what can be saved first."""
        self._at_failure = call

    def disarm(self) -> None:
        """The rank has ended in order."""
        self._armed = False

    def fail(self, error: BaseException) -> None:
        """Print the error and end the job; does not return while armed."""
        self._on_exception(type(error), error, error.__traceback__)

    def _on_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        code = BUG
        if isinstance(error, AladdinError):
            code = USER_ERROR
            if error.silent or (not self._armed and launch_rank() != 0):
                time.sleep(_SILENT_WAIT_S if self._armed else 0.2)
            else:
                if not self._first:
                    time.sleep(_OTHERS_WAIT_S)
                words = ("aladdin-mpi: error:", self.who, str(error))
                print(" ".join(word for word in words if word), file=sys.stderr, flush=True)
        elif isinstance(error, KeyboardInterrupt):
            code = 130
        else:
            text = "".join(traceback.format_exception(kind, error, trace))
            print(f"{self.who}\n{text}" if self.who else text, file=sys.stderr, flush=True)
        self._end(code)

    def _end(self, code: int) -> None:
        if not self._armed or self._abort is None:
            if code == BUG and launched_together():
                # The others wait in MPI_Init for this rank.  Launchers end a job when a rank is
                # killed by a signal, but not all of them when it merely exits.
                sys.stdout.flush()
                os.kill(os.getpid(), signal.SIGKILL)
            if threading.current_thread() is threading.main_thread():
                sys.exit(code)
            return
        saver = threading.Thread(target=self._at_failure, daemon=True)
        saver.start()
        saver.join(5.0)
        self._abort(code)

    def _on_exit(self) -> None:
        if self._armed:
            print(
                f"aladdin-mpi: error: {self.who} the script ended without aladdin_mpi.finish(): "
                "the job ends; call it when training is over, on every worker",
                file=sys.stderr,
                flush=True,
            )
            self._end(BUG)


guard = Guard()
"""The guard of this process."""
