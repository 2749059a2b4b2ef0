"""A server's part of a checkpoint: a model that holds exactly what belongs to it.

When the first push comes that its worker made after its own part, the model is copied.  Pushes that
others made before theirs are merged into the copy, too; once every worker's later push (or its last
one) has come, the copy is written.  Where there are several servers, the first one calls, and a
worker's pushes tell the others; so one of those may be late, and have several parts under way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from aladdin_mpi.core.wire import Frame
from aladdin_mpi.messages import Push
from aladdin_mpi.runtime import checkpoint
from aladdin_mpi.runtime.cuts import LEAD, Due, Plan
from aladdin_mpi.runtime.globals import GlobalModel
from aladdin_mpi.runtime.state import to_plain

__all__ = ["ServerCuts"]

BEFORE = -1
"""The channel under which the samples from before a restart are counted."""


class _Copy:
    """One channel's model as of a checkpoint, the workers whose later push is awaited, and the
    samples of each worker that it contains.
    """

    def __init__(self, model: GlobalModel, waiting: set[int], samples: Sequence[int]) -> None:
        self.model, self.waiting, self.samples = model, waiting, list(samples)


class _Part:
    """The server's part of a checkpoint that is not whole yet."""

    def __init__(self, number: int, at: int) -> None:
        self.number, self.at = number, at
        self.copies: dict[int, _Copy] = {}  # by channel


class ServerCuts:
    """Makes a server's parts of checkpoints; the first server's calls for them.

    Parameters
    ----------
    plan : Plan
    writer : checkpoint.Writer
    lockstep : bool
        All workers make as many steps, and their parts after the same one.
    first : int
        Number of the checkpoint that the run went on from; 0: none.
    num_workers : int
    algorithm, description : str
        The algorithm; it and its options.
    leads : bool
        Calls for checkpoints; else hears of them by the pushes.

    Attributes
    ----------
    number, at : int
        The checkpoint called last, and after which step (0: the one at hand).
    length : int
        Samples of the data set; 0: unknown.
    preempt : bool
        The run is to stop with a checkpoint.
    leads : bool
    """

    def __init__(
        self, plan: Plan, writer: checkpoint.Writer, lockstep: bool, first: int, num_workers: int,
        algorithm: str, description: str, leads: bool = True,
    ) -> None:  # fmt: skip
        self._plan, self._writer, self._lockstep, self.leads = plan, writer, lockstep, leads
        self._algorithm, self._description = algorithm, description
        self._due = Due(plan)
        self._num_workers = num_workers
        self.number, self.at, self.length = first, 0, 0
        self.preempt = False
        self._last_one = False
        self._made = [0] * num_workers
        self._left: defaultdict[int, set[int]] = defaultdict(set)  # by channel: after a last push
        # by channel: samples of each worker in merged pushes; what a restart began with has none
        self._samples: defaultdict[int, list[int]] = defaultdict(lambda: [0] * num_workers)
        self._parts: list[_Part] = []  # under way, by number

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self._samples[BEFORE] = list(state["worker_samples"])
        self._made = list(state["made"])
        self._due.begin(self._epochs(), self._iterations())

    def _epochs(self) -> float:
        seen = sum(map(sum, self._samples.values()))
        return seen / self.length if self.length else 0.0

    def _iterations(self) -> float:
        return sum(self._made) / self._num_workers

    def wait(self) -> None:
        """Until everything is on the disk."""
        self._writer.wait()

    def call(self) -> bool:
        """Whether a checkpoint is called for now; ``number`` and ``at`` then say which."""
        if not self.leads or self._parts or self._last_one:
            return False
        left = self._gone()
        if len(left) == self._num_workers or (left and not self._plan.active):
            return False  # those that have ended left no part: the others soon end, too
        stop = self.preempt or self._due.out_of_time()
        if not (stop or self._due.now(self._epochs(), self._iterations())):
            return False
        self._last_one = stop
        self._begin(self.number + 1, max(self._made) + LEAD if self._lockstep else 0)
        return True

    def _gone(self) -> set[int]:
        """Workers that have sent their last push on every channel."""
        return set.intersection(*self._left.values()) if self._left else set()

    def _begin(self, number: int, at: int) -> None:
        self.number, self.at = number, at
        self._parts.append(_Part(number, at))

    def concerned(self, frames: Sequence[Frame]) -> bool:
        """Whether pushes have to be shown to :meth:`before` one by one: a checkpoint is under way,
        or, where another server leads, one of them tells of a new one.
        """
        if not self.leads:
            newest = max(int(frame.header["cut"][0]) for frame in frames)
            for number in range(self.number + 1, newest + 1):
                self._begin(number, 0)
        return bool(self._parts)

    def before(self, index: int, model: GlobalModel, frame: Frame) -> None:
        """A push has come while a checkpoint is under way, and is merged into ``model`` next."""
        pushes = model.read(frame)  # all of them made before, or all made after
        for part in self._parts:
            copy = part.copies.get(index)
            after = pushes[0].cut >= part.number
            if copy is None:
                if not after:
                    continue
                waiting = set(range(self._num_workers)) - self._left[index]
                copy = _Copy(model.copy(), waiting, self._samples[index])
                part.copies[index] = copy
            if not after:
                copy.model.handle([frame])
            for push in pushes:
                if not after:
                    copy.samples[push.worker] += push.samples
                if after or push.last:
                    copy.waiting.discard(push.worker)

    def merged(self, index: int, push: Push) -> None:
        """A push was merged."""
        self._samples[index][push.worker] += push.samples
        self._made[push.worker] = max(self._made[push.worker], push.made)
        left = self._left[index]
        if push.last:
            left.add(push.worker)

    def after(self, models: Mapping[int, GlobalModel]) -> bool:
        """While one is under way: have the part written once it is whole.

        ``models`` are those of all channels.  Returns whether the run is then to stop.
        """
        stop = False
        for part in list(self._parts):
            if len(part.copies) < len(models):
                if all(len(self._left[index]) == self._num_workers for index in models):
                    self._parts.remove(part)  # all have ended before it was made
            elif not any(copy.waiting - self._left[i] for i, copy in part.copies.items()):
                self._parts.remove(part)
                self._write(part, models)
                stop = self._last_one
        return stop

    def _write(self, part: _Part, models: Mapping[int, GlobalModel]) -> None:
        channels = [part.copies[index].model.state() for index in models]
        counts = [self._samples[BEFORE], *(copy.samples for copy in part.copies.values())]
        samples = [sum(own) for own in zip(*counts, strict=True)]
        self._writer.write(part.number, {
            "role": "server", "algorithm": self._algorithm, "options": self._description,
            "num_workers": self._num_workers, "channels": to_plain(channels),
            "worker_samples": samples, "made": list(self._made), "at": part.at,
        })  # fmt: skip
        if self.leads:
            self._writer.write_head(part.number, sorted(self._gone()))
