"""What comes of a simulated case, and how it is counted."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass

from aladdin_mpi.simulation.setting import Setting

__all__ = ["Outcome", "Tally"]


@dataclass(frozen=True)
class Outcome:
    """One algorithm in one setting, after the first quarter; NaN where there is nothing to say.

    Attributes
    ----------
    algorithm : str
    workers, servers : int
        ``servers`` is 0 where the algorithm has none.
    step_s : float
        [s] mean of all workers' steps.
    steps_per_s : float
        [1/s] iterations of all workers together.
    speedup, efficiency : float
        ``steps_per_s`` over that of one worker alone, without communication and not slowed; and
        that over the number of workers.
    blocked : float
        Share of the workers' time, 0 to 1, in which they do not compute.
    link_in, link_out : float
        Share of a server's link that carries pushes, and replies; without servers, of a worker's
        link that carries what it receives and sends.
    iterations_per_push : float
    staleness, staleness_95 : float
        Merges between the version that a worker had and that of its push: mean, 95th percentile.
    reply_age : float
        Iterations that a worker makes from the push that a reply names until it mixes it in.
    overload : float
        Bytes of a push per iteration, over what the servers' links carry.
    """

    algorithm: str
    workers: int
    servers: int
    step_s: float
    steps_per_s: float
    speedup: float
    efficiency: float
    blocked: float
    link_in: float
    link_out: float
    iterations_per_push: float = math.nan
    staleness: float = math.nan
    staleness_95: float = math.nan
    reply_age: float = math.nan
    overload: float = math.nan

    def to_json(self) -> dict[str, str | int | float | None]:
        """Plain values; None for NaN."""
        return {
            name: None if isinstance(value, float) and math.isnan(value) else value
            for name, value in asdict(self).items()
        }


class Tally:
    """Counts the steps of all workers, and what else happens, in a window of virtual time."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        total = setting.num_workers * setting.num_iterations
        self.end_at = total
        self._begin_at = total // 4
        self.steps = 0
        self._began_s = self._ended_s = 0.0
        self._in_bytes = self._out_bytes = 0.0
        self._window_steps = 0
        self._took_s = self._computed_s = 0.0  # of the steps of all workers
        self.pushes = self.carried = 0
        self.staleness: Counter[int] = Counter()
        self.reply_ages = self.replies = 0

    def step(
        self, now_s: float, took_s: float, computed_s: float, in_bytes: float, out_bytes: float
    ) -> bool:
        """A step of ``took_s`` has ended; True: no further one counts.

        ``in_bytes`` and ``out_bytes`` are what the links have carried so far.
        """
        if self._over:
            return True
        self.steps += 1
        self._took_s += took_s
        self._computed_s += computed_s
        if self.steps == self._begin_at:
            self._began_s, self._took_s, self._computed_s = now_s, 0.0, 0.0
            self._in_bytes, self._out_bytes = in_bytes, out_bytes
            self._window_steps = self.pushes = self.carried = self.reply_ages = self.replies = 0
            self.staleness.clear()
            return False
        self._window_steps += 1
        if self.steps < self.end_at:
            return False
        self._ended_s = now_s
        self._in_bytes, self._out_bytes = in_bytes - self._in_bytes, out_bytes - self._out_bytes
        return True

    @property
    def _over(self) -> bool:
        return self.steps >= self.end_at

    def push(self, iterations: int) -> None:
        """A push has been handed over."""
        if not self._over:
            self.pushes += 1
            self.carried += iterations

    def merged(self, staleness: int) -> None:
        """A push has been merged."""
        if not self._over:
            self.staleness[staleness] += 1

    def mix(self, iterations: int) -> None:
        """A reply has been mixed in, so many steps after the push that it names."""
        if not self._over:
            self.replies += 1
            self.reply_ages += iterations

    def outcome(self, algorithm: str) -> Outcome:
        """The figures of the window."""
        s = self._setting
        took_s = self._ended_s - self._began_s
        rate = self._window_steps / took_s
        link = s.bytes_per_s * took_s
        counts = self.staleness
        total = sum(counts.values())
        return Outcome(
            algorithm, s.num_workers, s.servers,
            step_s=s.num_workers / rate, steps_per_s=rate, speedup=rate * s.compute_s,
            efficiency=rate * s.compute_s / s.num_workers,
            blocked=1 - self._computed_s / self._took_s,
            link_in=self._in_bytes / link, link_out=self._out_bytes / link,
            iterations_per_push=_ratio(self.carried, self.pushes),
            staleness=_ratio(sum(k * v for k, v in counts.items()), total),
            staleness_95=_percentile(counts, 0.95),
            reply_age=_ratio(self.reply_ages, self.replies),
            overload=s.overload,
        )  # fmt: skip


def _ratio(a: float, b: float) -> float:
    return a / b if b else math.nan


def _percentile(counts: Counter[int], share: float) -> float:
    """The smallest value that so large a share of those counted does not exceed."""
    left = share * sum(counts.values())
    for value in sorted(counts):
        left -= counts[value]
        if left <= 0:
            return float(value)
    return math.nan
