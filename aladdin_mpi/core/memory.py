"""What memory a channel takes, by its ranks' roles; see ``docs/scaling.md`` for the terms."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Needs", "needs"]


class Needs(NamedTuple):
    """[bytes] at most, beside parameters, gradients and the optimizer's state.

    Attributes
    ----------
    server, relay, worker : int
        In all.
    server_window, relay_window : int
        What of it is shared memory.
    """

    server: int
    relay: int
    worker: int
    server_window: int
    relay_window: int


def needs(
    push_bytes: int, frame_bytes: int, slots: int, senders: int, relayed: int = 0
) -> Needs:  # fmt: skip
    """What a channel needs.

    A server has a ring of slots for each sender, the model, a reply for each, and, unless pushes
    are so large that they have one slot, a copy for one that evaluates.  A worker stages as many
    pushes as there are slots, receives as many replies, keeps as many snapshots (with a relay one
    more), has r, and, with more than one slot or a narrow encoding, a copy of the model to receive.
    A relay has the slots of its workers, stages messages, receives a reply and hands another on,
    and, where it narrows updates, has two vectors of what was given and sent.  A checkpoint is one
    more model at the server while it is made, pushed gradients are two.

    Parameters
    ----------
    push_bytes, frame_bytes : int
        Of a push as it reaches the server, and of one as float32.
    slots : int
        Pushes of a sender that may be on their way at once.
    senders : int
        Workers and relays that send to the server.
    relayed : int
        Workers of a relay; 0: there is none.
    """
    narrow = push_bytes < frame_bytes
    window, relay_window = senders * slots * push_bytes, relayed * slots * frame_bytes
    server = window + (1 + senders + (slots > 1 or relayed > 0)) * frame_bytes
    own_copy = slots > 1 or (narrow and not relayed)
    staged = slots * (frame_bytes + (push_bytes if narrow and not relayed else 0))
    worker = staged + (2 * slots + 1 + own_copy + (relayed > 0)) * frame_bytes
    relay = 0
    if relayed:
        relay = relay_window + slots * push_bytes + 2 * frame_bytes
        relay += (2 + slots) * frame_bytes if narrow else 0
    return Needs(server, relay, worker, window, relay_window)
