"""The asynchronous algorithms with servers as policies of time: ALADDIN and ASP.

No parameters move: a worker is what it waits for, a server what it answers and when.  The rules are
those of :mod:`aladdin_mpi.algorithms` and of the ports that they call:

- ALADDIN hands a push over at the end of a step unless as many are on their way as it allows: by
  ``auto`` one where a send takes longer than half a step, else two.  It asks for a reply once
  ``period`` iterations were made since it last asked and none is due, and mixes what has arrived.
- ASP pushes every step's gradient and waits for the answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

import numpy as np

from aladdin_mpi.simulation.events import Events
from aladdin_mpi.simulation.links import ServerLanes, WorkerLane
from aladdin_mpi.simulation.outcome import Outcome, Tally
from aladdin_mpi.simulation.setting import ComputeTimes, Setting

__all__ = ["SendTimes", "simulate_aladdin", "simulate_asp"]


PHASES = 1
"""Tells the random numbers of workers' first moments from those of their times."""


class SendTimes:
    """How a worker finds out whether the link is full: running means of its sends and its steps.

    The weights are those of the channel and of the driver of a step.
    """

    def __init__(self) -> None:
        self.send_s = self.step_s = 0.0
        self._sends = 0

    def sent(self, took_s: float) -> None:
        """A push was acknowledged."""
        self.send_s += (took_s - self.send_s) * (0.2 if self._sends else 1.0)
        self._sends += 1

    def stepped(self, took_s: float) -> None:
        """A step has ended."""
        self.step_s += (took_s - self.step_s) * (0.1 if self.step_s else 1.0)

    def limit(self, in_flight: str, slots: int) -> int:
        """Pushes to allow on their way."""
        if in_flight != "auto":
            return min(int(in_flight), slots)
        return 1 if self.send_s > 0.5 * self.step_s else slots


class _World:
    """Servers, and workers that compute one step after the other."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.events, self.tally = setting, Events(), Tally(setting)
        self.lanes = ServerLanes(self.events, setting)
        self.times = ComputeTimes(setting)
        self.version = 0

    def begin(self, index: int, start: Callable[[], None]) -> None:
        """Have a worker start at a random moment of a step, so that they are not in phase."""
        rng = np.random.default_rng([self.setting.seed, index, PHASES])
        self.events.at(self.setting.compute_s * rng.random(), start)

    def stepped(self, took_s: float, computed_s: float) -> None:
        """Count a step."""
        carried = self.lanes.inward.carried_bytes, self.lanes.outward.carried_bytes
        if self.tally.step(self.events.now, took_s, computed_s, *carried):
            self.events.stop()

    def merged(self, version: int) -> None:
        """Count a merge of a push whose worker had ``version``."""
        self.tally.merged(self.version - version)
        self.version += 1


class _AladdinWorker:
    __slots__ = (
        "acks", "asked_at", "began_s", "carried", "due", "index", "lane", "made", "reply", "sends",
        "since_ask", "under_way", "version", "world",
    )  # fmt: skip

    def __init__(self, world: _World, index: int) -> None:
        self.world, self.index = world, index
        self.lane = WorkerLane(world.lanes)
        self.sends = SendTimes()
        self.carried = self.since_ask = self.version = 0
        self.due = False
        self.under_way = 0
        self.acks: deque[tuple[float, float]] = deque()  # when it is known, when it was handed over
        self.reply: tuple[float, int] | None = None  # when it arrives, its version
        self.made = self.asked_at = 0
        self.began_s = 0.0
        world.begin(index, self.start)

    def start(self) -> None:
        took_s = self.world.times.next(self.index)
        events = self.world.events
        events.at(events.now + took_s, self.step, took_s)

    def step(self, computed_s: float) -> None:
        """A step's end: push unless too many are on their way, mix what has arrived, go on."""
        world, now = self.world, self.world.events.now
        setting = world.setting
        while self.acks and self.acks[0][0] <= now:
            known_s, handed_s = self.acks.popleft()
            self.under_way -= 1
            self.sends.sent(known_s - handed_s)
        self.carried += 1
        self.since_ask += 1
        if self.under_way < self.sends.limit(setting.in_flight, setting.slots):
            asks = self.since_ask >= setting.period and not self.due
            if asks:
                self.since_ask, self.due, self.asked_at = 0, True, self.made
            self.under_way += 1
            world.tally.push(self.carried)
            self.carried = 0
            self.lane.push(1.0, partial(self.merge, now, self.version, asks))
        if self.reply is not None and self.reply[0] <= now:
            self.version, self.reply, self.due = self.reply[1], None, False
            world.tally.mix(self.made - self.asked_at)
        self.made += 1
        took_s = now - self.began_s
        self.sends.stepped(took_s)
        self.began_s = now
        world.stepped(took_s, computed_s)
        self.start()

    def merge(self, handed_s: float, version: int, asks: bool) -> None:
        """The server has merged a push."""
        world, setting = self.world, self.world.setting
        world.merged(version)
        ack_s = world.events.now + setting.latency_s + setting.overhead_s / 2
        self.acks.append((ack_s, handed_s))
        if asks:
            world.lanes.reply(self.arrive, world.version)

    def arrive(self, version: int) -> None:
        """A reply has come."""
        self.reply = (self.world.events.now, version)


class _AspWorker:
    """Pushes a gradient each step and waits for the answer."""

    __slots__ = ("began_s", "computed_s", "index", "lane", "left", "version", "world")

    def __init__(self, world: _World, index: int) -> None:
        self.world, self.index = world, index
        self.lane = WorkerLane(world.lanes)
        self.version = 0
        self.start()

    def start(self) -> None:
        """The next step; its gradients travel from the time on when the first is there."""
        world, events = self.world, self.world.events
        self.computed_s = world.times.next(self.index)
        self.began_s = events.now
        events.at(events.now + (1 - world.setting.overlap) * self.computed_s, self.push)

    def push(self) -> None:
        """Send; the server merges and steps in two passes."""
        self.lane.push(2.0, self.found)

    def found(self) -> None:
        """The server has it all, but for what is not computed yet."""
        events, ended_s = self.world.events, self.began_s + self.computed_s
        if events.now < ended_s:
            events.at(ended_s, self.found)
            return
        self.world.merged(self.version)
        self.world.lanes.reply(self.go_on, self.world.version)

    def go_on(self, version: int) -> None:
        """The answer has arrived: the step ends, the next one begins."""
        self.version = version
        self.world.tally.push(1)
        self.world.stepped(self.world.events.now - self.began_s, self.computed_s)
        self.start()


def simulate_aladdin(setting: Setting) -> Outcome:
    """ALADDIN, by its default options but those that the setting names."""
    return _simulate(setting, "aladdin", _AladdinWorker)


def simulate_asp(setting: Setting) -> Outcome:
    """ASP."""
    return _simulate(setting, "asp", _AspWorker)


def _simulate(setting: Setting, name: str, make: Callable[[_World, int], object]) -> Outcome:
    world = _World(setting)
    for index in range(setting.num_workers):
        make(world, index)
    world.events.run()
    return world.tally.outcome(name)
