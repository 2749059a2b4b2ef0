"""ALADDIN with a fault, to show that the tests would notice it."""

from __future__ import annotations

from dataclasses import replace

from aladdin_mpi.algorithms import aladdin
from aladdin_mpi.messages import Action, Merge, Push


class Dropping(aladdin.Server):
    """Replies, but merges nothing."""

    def on_push(self, push: Push) -> list[Action]:
        return [action for action in super().on_push(push) if not isinstance(action, Merge)]


DROPPING = replace(aladdin.ALGORITHM, server=Dropping)
