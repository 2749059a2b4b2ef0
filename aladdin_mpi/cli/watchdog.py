"""A process that ends its parent after a time limit, and says where it was; also where it crashed.

Not a thread: a call of MPI that hangs may hold the interpreter's lock.  Started before MPI is
initialized, since a fork is dangerous afterwards.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time

__all__ = ["Watchdog"]

THROUGH = "through"


class Watchdog:
    """Ends this process ``limit_s`` from now, unless it is stopped before.

    Parameters
    ----------
    limit_s : float
        [s]
    who : str
        How the line that it prints begins.
    speaks : bool
        Whether it prints one even while this process only waits for others.
    """

    def __init__(self, limit_s: float, who: str, speaks: bool = True) -> None:
        argv = [sys.executable, "-I", __file__, str(os.getpid()), f"{limit_s:g}", who]
        argv += ["speaks"] if speaks else []
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, text=True)

    def stage(self, text: str) -> None:
        """What this process does from now on."""
        assert self._process.stdin is not None
        self._process.stdin.write(text + "\n")
        self._process.stdin.flush()

    def stop(self) -> None:
        """The danger is over."""
        assert self._process.stdin is not None
        self.stage(THROUGH)
        self._process.stdin.close()
        self._process.wait()


def _watch(parent: int, limit_s: float, who: str, speaks: bool) -> None:
    begin, stage = time.monotonic(), b"start"
    while (left := begin + limit_s - time.monotonic()) > 0:
        if select.select([0], [], [], left)[0]:
            text = os.read(0, 4096)
            if text:
                stage = text.splitlines()[-1]
                continue
            if stage != THROUGH.encode():  # MPI ends a process in the middle of a call
                print(f"error    {who}: ended in {stage.decode()}", flush=True)
            return
    if speaks or not stage.startswith(b"waiting"):  # not those who only wait for another
        print(
            f"error    {who}: not through within {limit_s:.3g} s: {stage.decode()} -> try one "
            "node, another transport, or a longer --timeout",
            flush=True,
        )
    time.sleep(1)  # for the launcher to pass it on, and for the other ranks' lines
    os.kill(parent, signal.SIGKILL)


if __name__ == "__main__":
    _watch(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3], len(sys.argv) > 4)
