"""The server's part of a checkpoint: a model that holds exactly what belongs to it.

When the first push comes that its worker made after its own part, the model is copied.  Pushes that
others made before theirs are merged into the copy, too; once every worker's later push (or its last
one) has come, the copy is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aladdin_mpi.core.wire import Frame
from aladdin_mpi.messages import Push
from aladdin_mpi.runtime import checkpoint
from aladdin_mpi.runtime.cuts import LEAD, Due, Plan
from aladdin_mpi.runtime.globals import GlobalModel
from aladdin_mpi.runtime.state import to_plain

__all__ = ["ServerCuts"]


class _Copy:
    """One channel's model as of a checkpoint, and the workers whose later push is awaited."""

    def __init__(self, model: GlobalModel, waiting: set[int]) -> None:
        self.model, self.waiting = model, waiting


class ServerCuts:
    """Calls for checkpoints and makes the server's part; one per server.

    Parameters
    ----------
    plan : Plan
    writer : checkpoint.Writer
    lockstep : bool
        All workers make as many steps, and their parts after the same one.
    first : int
        Number of the checkpoint that the run went on from; 0: none.
    num_workers : int
    description : str
        The algorithm and its options.

    Attributes
    ----------
    number, at : int
        The checkpoint called last, and after which step (0: the one at hand).
    length : int
        Samples of the data set; 0: unknown.
    preempt : bool
        The run is to stop with a checkpoint.
    """

    def __init__(
        self, plan: Plan, writer: checkpoint.Writer, lockstep: bool, first: int, num_workers: int,
        algorithm: str, description: str,
    ) -> None:  # fmt: skip
        self._plan, self._writer, self._lockstep = plan, writer, lockstep
        self._algorithm, self._description = algorithm, description
        self._due = Due(plan)
        self._num_workers = num_workers
        self.number, self.at, self.length = first, 0, 0
        self.preempt = False
        self._last_one = False
        self._made = [0] * num_workers
        self._left: set[int] = set()
        self._samples = [0] * num_workers  # of each worker, in merged pushes
        self._cut_samples = list(self._samples)
        self._copies: dict[int, _Copy] = {}  # by channel
        self.under_way = False

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self._samples = list(state["worker_samples"])
        self._made = list(state["made"])
        self._due.begin(self._epochs(), self._iterations())

    def _epochs(self) -> float:
        return sum(self._samples) / self.length if self.length else 0.0

    def _iterations(self) -> float:
        return sum(self._made) / self._num_workers

    def wait(self) -> None:
        """Until everything is on the disk."""
        self._writer.wait()

    def call(self) -> bool:
        """Whether a checkpoint is called for now; ``number`` and ``at`` then say which."""
        if self.under_way or self._last_one or len(self._left) == self._num_workers:
            return False
        if self._left and not self._plan.active:
            return False  # those that have ended left no part: the others soon end, too
        stop = self.preempt or self._due.out_of_time()
        if not (stop or self._due.now(self._epochs(), self._iterations())):
            return False
        self._last_one = stop
        self.under_way = True
        self.number += 1
        self.at = max(self._made) + LEAD if self._lockstep else 0
        self._copies.clear()
        return True

    def before(self, index: int, model: GlobalModel, frame: Frame) -> None:
        """A push has come while a checkpoint is under way, and is merged into ``model`` next."""
        push = model.read(frame)
        copy = self._copies.get(index)
        if push.cut == self.number:
            if copy is None:
                waiting = set(range(self._num_workers)) - self._left
                copy = self._copies[index] = _Copy(model.copy(), waiting)
                self._cut_samples = list(self._samples)
            copy.waiting.discard(push.worker)
        elif copy is not None:
            copy.model.handle([frame])
            self._cut_samples[push.worker] += push.samples
            if push.last:
                copy.waiting.discard(push.worker)

    def merged(self, push: Push) -> None:
        """A push was merged."""
        self._samples[push.worker] += push.samples
        self._made[push.worker] = max(self._made[push.worker], push.made)
        if push.last:
            self._left.add(push.worker)

    def after(self, models: Sequence[GlobalModel]) -> bool:
        """While one is under way: have the part written once it is whole.

        Returns whether the run is then to stop.
        """
        if len(self._copies) < len(models):
            if len(self._left) == self._num_workers:
                self.under_way = False  # all have ended before it was made
            return False
        if any(copy.waiting - self._left for copy in self._copies.values()):
            return False
        self.under_way = False
        channels = [self._copies[index].model.state() for index in range(len(models))]
        self._copies.clear()
        self._writer.write(self.number, {
            "role": "server", "algorithm": self._algorithm, "options": self._description,
            "num_workers": self._num_workers, "channels": to_plain(channels),
            "worker_samples": self._cut_samples, "made": list(self._made), "at": self.at,
        })  # fmt: skip
        self._writer.write_head(self.number, [1 + worker for worker in sorted(self._left)])
        return self._last_one
