"""What is simulated: workers and the times they compute, servers, links, payload."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import numpy as np

from aladdin_mpi.errors import ConfigError
from aladdin_mpi.messages import FRAME_HEADER_BYTES

__all__ = ["DISTRIBUTIONS", "FRAMING_BYTES", "IN_FLIGHT", "ComputeTimes", "Setting"]

DISTRIBUTIONS = ("constant", "normal", "lognormal", "exponential")
IN_FLIGHT = ("auto", "1", "2")

FRAMING_BYTES = FRAME_HEADER_BYTES + 64
"""[B] of a message beside its payload: header and trailer."""

ONE_SLOT_BYTES = 256 << 20
"""[B] of a push above which a worker has one slot in a server's mailbox, not two."""

SHORTEST = 0.1
"""Share of the mean below which no time is drawn from the normal distribution."""

_BLOCK = 128
_POSITIVE = ("compute_s", "payload_bytes", "bytes_per_s", "worker_bytes_per_s", "merge_bytes_per_s")
_NOT_NEGATIVE = ("latency_s", "reply_latency_s", "overhead_s", "spread")
_COUNTS = ("num_workers", "servers", "shards", "period")

_STEPS = 300_000
"""Of all workers together, where the number of iterations is not given: a few seconds."""


@dataclass(frozen=True)
class Setting:
    """One case.

    Attributes
    ----------
    num_workers, servers : int
    compute_s : float
        [s] mean time of an iteration without communication, of a worker that is not slowed.
    payload_bytes : float
        [B] of all parameters as they travel.
    bytes_per_s : float
        [B/s] of a server's link, each way.
    worker_bytes_per_s : float
        [B/s] of a worker's link, each way; NaN: as a server's.
    distribution : {'constant', 'normal', 'lognormal', 'exponential'}
        Of the times of iterations.  'exponential' is a fixed part and an exponential tail.
    spread : float
        Standard deviation of these times over their mean.
    measured_s : tuple of float
        [s] times to draw from instead, if there are any; ``compute_s`` is their mean.
    slow : mapping of int to float
        Factors by worker.
    latency_s, reply_latency_s : float
        [s] of a message to a server, or to another worker, and of a reply; NaN: the same.
    overhead_s : float
        [s] that a push takes beside transfer, latency and merge: polls, publishing, acknowledging.
    merge_bytes_per_s : float
        [B/s] payload that a server's core merges.
    shards : int
        Parts of the parameters; 0: one per server.
    period : int
        Iterations between two replies to a worker (ALADDIN's π).
    in_flight : {'auto', '1', '2'}
        Pushes of a worker on their way at once (ALADDIN).
    overlap : float
        Share of the computing, at its end, during which gradients travel already (BSP, ASP,
        AR-SGD).
    iterations : int
        Per worker, on average; the first quarter is not counted.  0: by the number of workers and
        the overload, 64 to 2000.
    seed : int

    Raises
    ------
    ConfigError
        A value is not allowed.
    """

    num_workers: int
    compute_s: float
    payload_bytes: float
    bytes_per_s: float
    servers: int = 1
    worker_bytes_per_s: float = math.nan
    distribution: str = "constant"
    spread: float = 0.0
    measured_s: tuple[float, ...] = ()
    slow: Mapping[int, float] = field(default_factory=dict)
    latency_s: float = 0.0
    reply_latency_s: float = math.nan
    overhead_s: float = 0.0
    merge_bytes_per_s: float = 10e9
    shards: int = 0
    period: int = 4
    in_flight: str = "auto"
    overlap: float = 0.0
    iterations: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if math.isnan(self.worker_bytes_per_s):
            object.__setattr__(self, "worker_bytes_per_s", self.bytes_per_s)
        if math.isnan(self.reply_latency_s):
            object.__setattr__(self, "reply_latency_s", self.latency_s)
        if self.shards == 0:
            object.__setattr__(self, "shards", self.servers)
        for spec in fields(self):
            value = getattr(self, spec.name)
            if spec.name in _POSITIVE and not (math.isfinite(value) and value > 0):
                raise _refused(spec.name, value, "must be above 0")
            if spec.name in _NOT_NEGATIVE and not (math.isfinite(value) and value >= 0):
                raise _refused(spec.name, value, "must be at least 0")
            if spec.name in _COUNTS and value < 1:
                raise _refused(spec.name, value, "must be at least 1")
        if self.distribution not in DISTRIBUTIONS:
            raise _refused(
                "distribution", self.distribution, "choose from " + ", ".join(DISTRIBUTIONS)
            )
        if self.distribution == "exponential" and self.spread > 1:
            raise _refused(
                "spread", self.spread, "must be at most 1 for --distribution exponential"
            )
        if self.in_flight not in IN_FLIGHT:
            raise _refused("in_flight", self.in_flight, "choose from " + ", ".join(IN_FLIGHT))
        if not 0 <= self.overlap <= 1:
            raise _refused("overlap", self.overlap, "must be from 0 to 1")
        if self.seed < 0:
            raise _refused("seed", self.seed, "must not be negative")
        if self.shards % self.servers:
            raise _refused(
                "shards", self.shards,
                f"must be a multiple of the servers, here {self.servers}, that hold as many each",
            )  # fmt: skip
        if not (self.iterations == 0 or self.iterations >= 8):
            raise _refused("iterations", self.iterations, "must be at least 8, or 0 for a default")
        for index, factor in self.slow.items():
            if not 0 <= index < self.num_workers or not 1 <= factor < math.inf:
                raise ConfigError(
                    f"--slow-worker {index}:{factor:g}: give INDEX:FACTOR, a worker from 0 to "
                    f"{self.num_workers - 1} and a factor of at least 1"
                )

    @property
    def num_iterations(self) -> int:
        """``iterations``, or the default."""
        if self.iterations:
            return self.iterations
        usual = min(400, max(64, _STEPS // self.num_workers))
        return max(usual, min(2000, math.ceil(12 * self.overload)))  # a send takes `overload`

    @property
    def _framing_bytes(self) -> float:
        return FRAMING_BYTES * self.shards / self.servers

    @property
    def push_bytes(self) -> float:
        """[B] of a push to one server."""
        return self.payload_bytes / self.servers + self._framing_bytes

    @property
    def reply_bytes(self) -> float:
        """[B] of a reply of one server."""
        return self.push_bytes

    @property
    def merge_s(self) -> float:
        """[s] of a pass over a server's part."""
        return self.payload_bytes / self.servers / self.merge_bytes_per_s

    @property
    def slots(self) -> int:
        """Pushes of a worker that a server has room for."""
        return 1 if self.push_bytes * self.servers / self.shards > ONE_SLOT_BYTES else 2

    @property
    def worker_overload(self) -> float:
        """Bytes of a push to all servers, over what a worker's link carries in an iteration."""
        return self.push_bytes * self.servers / (self.compute_s * self.worker_bytes_per_s)

    @property
    def overload(self) -> float:
        """Bytes that the workers would push if each pushed every iteration, over what the servers'
        links carry meanwhile.
        """
        rates = self.num_workers - len(self.slow) + sum(1 / f for f in self.slow.values())
        return rates * self.push_bytes / (self.compute_s * self.bytes_per_s)


def _refused(name: str, value: object, allowed: str) -> ConfigError:
    option = {
        "num_workers": "workers", "compute_s": "compute", "payload_bytes": "payload",
        "bytes_per_s": "rate", "worker_bytes_per_s": "worker-rate", "latency_s": "latency",
        "reply_latency_s": "reply-latency", "overhead_s": "overhead",
        "merge_bytes_per_s": "merge-rate",
    }.get(name, name.replace("_", "-"))  # fmt: skip
    return ConfigError(f"--{option} {value}: {allowed}")


class ComputeTimes:
    """The times [s] that the workers' iterations take, the same for every algorithm.

    Each worker has a stream of its own, by the seed and its index.
    """

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._rngs = [
            np.random.default_rng([setting.seed, worker]) for worker in range(setting.num_workers)
        ]
        self._drawn: list[list[float]] = [[] for _ in self._rngs]

    def next(self, worker: int) -> float:
        """The time of a worker's next iteration."""
        drawn = self._drawn[worker]
        if not drawn:
            drawn.extend(self.draw(worker, _BLOCK)[::-1].tolist())
        return drawn.pop()

    def draw(self, worker: int, count: int) -> np.ndarray:
        """``count`` times of a worker, shape (count,), float64 [s]."""
        s, rng = self._setting, self._rngs[worker]
        mean, deviation = s.compute_s, s.spread * s.compute_s
        if s.measured_s:
            times = rng.choice(np.asarray(s.measured_s), count)
        elif s.distribution == "constant" or deviation == 0:
            times = np.full(count, mean)
        elif s.distribution == "normal":
            times = np.maximum(rng.normal(mean, deviation, count), SHORTEST * mean)
        elif s.distribution == "lognormal":
            variance = math.log1p(s.spread**2)
            times = rng.lognormal(math.log(mean) - variance / 2, math.sqrt(variance), count)
        else:
            times = mean - deviation + rng.exponential(deviation, count)
        return times * s.slow.get(worker, 1.0)

    def blocks(self, iterations: int) -> np.ndarray:
        """The first iterations of all workers, shape (iterations, workers), float64 [s]."""
        count = -(-iterations // _BLOCK)
        found = [
            np.concatenate([self.draw(worker, _BLOCK) for _ in range(count)])
            for worker in range(self._setting.num_workers)
        ]
        return np.stack(found, axis=1)[:iterations]
