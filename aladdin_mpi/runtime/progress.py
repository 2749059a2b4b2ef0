"""What the user sees while a run goes on: a bar, or a line now and then."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable

from tqdm import tqdm

from aladdin_mpi.core.memory import needs

__all__ = ["Progress", "choose"]

OVERLOAD_SHOWN = 1.1
"""Iterations per push from which the overload is shown."""

OVERLOAD_ADVISED, FULL_S = 1.5, 10
"""Iterations per push, for so many seconds without a break, that there is advice for."""

_LINE_S = 10.0


def choose(mode: str) -> str:
    """``bar``, ``lines`` or ``off`` for a ``--progress`` that may be ``auto``.

    A launcher hands output on through pipes, so that not the stream but the controlling terminal
    tells whether somebody watches.
    """
    if mode != "auto":
        return mode
    if sys.stderr.isatty():
        return "bar"
    try:
        os.close(os.open("/dev/tty", os.O_WRONLY | os.O_NOCTTY))
    except OSError:
        return "lines"
    return "bar"


def _size(nbytes: float) -> str:
    """A number of bytes for people."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.3g} GiB"


class Progress:
    """The progress of a run, shown by the server on standard error.

    Parameters
    ----------
    mode : {'bar', 'lines', 'off', 'auto'}
    total : int
        Samples of the whole run; 0 where unknown.
    who : str
        How a message begins, such as ``rank 0 (server):``.
    advice : callable, optional
        ``advice(overload)``: what to do about a link that stays full, a line.
    """

    def __init__(
        self, mode: str, total: int, who: str, advice: Callable[[float], str] | None = None
    ) -> None:
        self._mode, self._total, self._who = choose(mode), total, who
        self._advice, self._full_s = advice, 0
        self._loss = self._accuracy = self._overload = math.nan
        self._started = self._last_line = time.monotonic()
        self._samples = 0
        self._bar: tqdm | None = None
        if self._mode == "bar":
            self._bar = tqdm(
                total=total or None, unit="samples", unit_scale=True, ncols=100,
                mininterval=0.5, file=sys.stderr,
            )  # fmt: skip

    def say(self, text: str) -> None:
        """A line that the user must see."""
        line = f"{self._who} {text}"
        if self._bar is not None:
            tqdm.write(line, file=sys.stderr)
        else:
            print(line, file=sys.stderr, flush=True)

    def opened(
        self, push_bytes: int, frame_bytes: int, slots: int, senders: int, relayed: int = 0
    ) -> None:  # fmt: skip
        """Say what memory a channel takes (:func:`~aladdin_mpi.core.memory.needs`)."""
        if self._mode == "off":
            return
        taken = needs(push_bytes, frame_bytes, slots, senders, relayed)
        relay = f", relay up to {_size(taken.relay)}" if relayed else ""
        whose = "sender" if relayed else "worker"
        self.say(
            f"{_size(push_bytes)} a push, {slots} slot(s) for each of {senders} {whose}(s); "
            f"memory: server up to {_size(taken.server)}{relay}, worker up to {_size(taken.worker)}"
        )

    def loss(self, value: float) -> None:
        """A worker's training loss."""
        self._loss = value if math.isnan(self._loss) else self._loss + 0.05 * (value - self._loss)

    def evaluation(self, epoch: float, loss: float, accuracy: float) -> None:
        """A result on the global model."""
        self._accuracy = accuracy
        if self._mode == "lines":
            self.say(f"epoch {epoch:.2f}: test loss {loss:.4f}, test accuracy {accuracy:.4f}")

    def update(self, samples: int, overload: float, active: int) -> None:
        """Samples consumed so far, the link's overload, workers still training; every second."""
        if not math.isnan(overload):
            self._overload = overload
            self._full_s = self._full_s + 1 if overload > OVERLOAD_ADVISED else 0
            if self._full_s == FULL_S and self._advice is not None and self._mode != "off":
                self.say(self._advice(overload))
                self._advice = None
        note = []
        if not math.isnan(self._loss):
            note.append(f"loss {self._loss:.3f}")
        if not math.isnan(self._accuracy):
            note.append(f"accuracy {self._accuracy:.4f}")
        if self._overload > OVERLOAD_SHOWN:
            note.append(f"link overloaded ×{self._overload:.1f}")
        note.append(f"{active} worker(s)")
        text = ", ".join(note)
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(samples - self._samples)
        elif self._mode == "lines" and samples and time.monotonic() - self._last_line >= _LINE_S:
            self._last_line = time.monotonic()
            rate = samples / (self._last_line - self._started)
            share = f" ({samples / self._total:.0%})" if self._total else ""
            self.say(f"{samples} samples{share}, {rate:.0f}/s, {text}")
        self._samples = samples

    def close(self) -> None:
        """End the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
