"""Workers that can wait in the middle of a step: threads that take turns with the events.

Only one thread runs at any time, the one that was handed the turn, so that a run depends on nothing
but its seed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from aladdin_mpi.simulation.events import Events

__all__ = ["NeverWaits", "Process"]


class _Cancelled(BaseException):
    """Ends a process from outside."""


class Process:
    """One worker's course of events.

    Parameters
    ----------
    events : Events
    body : callable
        What it does; it may call :meth:`sleep` and :meth:`wait_until`.

    Attributes
    ----------
    blocked_s : float
        [s] of virtual time spent in :meth:`wait_until`.
    """

    def __init__(self, events: Events, body: Callable[[], None]) -> None:
        self._events, self._body = events, body
        self._turn, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._waits = self._cancelled = self.ended = False
        self._error: BaseException | None = None
        self.blocked_s = 0.0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        events.at(events.now, self._resume)

    # -- events -----------------------------------------------------------------------------------

    def wake(self) -> None:
        """What it may be waiting for has changed."""
        if self._waits:
            self._resume()

    def cancel(self) -> None:
        """End it, wherever it is."""
        if not self.ended:
            self._cancelled = True
            self._turn.release()
            self._thread.join()

    def _resume(self) -> None:
        self._turn.release()
        self._back.acquire()
        if self._error is not None:
            raise self._error

    # -- the process itself -----------------------------------------------------------------------

    def sleep(self, seconds: float) -> None:
        """Let so much virtual time pass."""
        self._events.at(self._events.now + seconds, self._resume)
        self._hand_back()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Let virtual time pass until the condition holds; it is looked at after each
        :meth:`wake`.
        """
        began_s = self._events.now
        while not condition():
            self._waits = True
            self._hand_back()
            self._waits = False
        self.blocked_s += self._events.now - began_s

    def _hand_back(self) -> None:
        self._back.release()
        self._take()

    def _take(self) -> None:
        self._turn.acquire()
        if self._cancelled:
            raise _Cancelled

    def _run(self) -> None:
        try:
            self._take()
            self._body()
        except _Cancelled:
            pass
        except BaseException as error:
            self._error = error
        self.ended = True
        self._back.release()


class NeverWaits:
    """In place of a :class:`Process`, of a worker whose algorithm does not wait: a thread that
    hands its turn over twice per step takes longer than a small model's gradient.
    """

    def wake(self) -> None:
        """Nothing is waited for."""

    def cancel(self) -> None:
        """There is nothing to be ended."""

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Returns: the condition holds."""
        assert condition(), "an algorithm that does not wait has waited"
