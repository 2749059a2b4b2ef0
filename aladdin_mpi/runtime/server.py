"""A server's loop: poll, merge, reply, acknowledge; never wait.

It knows nothing of MPI: a link (``comm.receiver`` or ``comm.inprocess``) brings pushes and takes
replies.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aladdin_mpi.algorithms.base import Server
from aladdin_mpi.errors import CheckpointError, NonFiniteError
from aladdin_mpi.messages import (
    ChannelSpec,
    Notice,
    Phase,
    Push,
    Reply,
    Request,
    RequestKind,
    Send,
    Stop,
)
from aladdin_mpi.record.schema import EventKind, Row
from aladdin_mpi.runtime.globals import GlobalModel
from aladdin_mpi.runtime.links import Recording, ServerEnd, ServerLinkLike
from aladdin_mpi.runtime.progress import Progress
from aladdin_mpi.runtime.servercuts import ServerCuts

__all__ = ["ServerLoop"]

_BUSY_S, _ACTIVE_S, _IDLE_S = 0.0002, 0.001, 0.005
_BURST_S = 0.005
_BEAT_S = 1.0
_WORKING = (Phase.DATA, Phase.COMPUTE, Phase.STEP)


@dataclass
class _Worker:
    """What the server knows of a worker."""

    heard: float
    request: Request | None = None
    stepped: float = 0.0
    steps: int = -1
    step_s: float = 0.0
    samples: int = 0
    told: float = 0.0
    stalled: float = 0.0
    gone: bool = False


@dataclass
class _Relay:
    """What the server knows of a relay."""

    heard: float
    stalled: bool = False


class _Channel:
    """One optimizer's global model and the replies that it owes."""

    def __init__(self, end: ServerEnd, model: GlobalModel, num_workers: int) -> None:
        self.end, self.model = end, model
        self.numbers = [0] * num_workers
        self.owed: dict[int, Send] = {}
        self.copies: list[int] = []  # workers that asked for a copy
        self.sent: dict[int, tuple[float, Row]] = {}  # replies under way


class ServerLoop:
    """Serve until every worker has said goodbye.

    Parameters
    ----------
    link : ServerLinkLike
    num_workers : int
    make_rules : callable
        ``make_rules(spec) -> Server``, a fresh state of the algorithm for a channel.
    recorder : Recording
    progress : Progress
        What the user sees.
    on_nonfinite : {'skip', 'stop'}
    stall_s : float
        [s] of silence after which a worker is named.
    cuts : ServerCuts, optional
        Makes checkpoints.
    relays : int
        How many there are.
    resumed : dict, optional
        The server's part of the checkpoint that the run goes on from.
    """

    def __init__(
        self,
        link: ServerLinkLike,
        num_workers: int,
        make_rules: Callable[[ChannelSpec], Server],
        recorder: Recording,
        progress: Progress,
        on_nonfinite: str = "skip",
        stall_s: float = 10.0,
        cuts: ServerCuts | None = None,
        resumed: dict[str, Any] | None = None,
        relays: int = 0,
    ) -> None:
        now = time.monotonic()
        self._link, self._num_workers, self._make_rules = link, num_workers, make_rules
        self._recorder, self._progress = recorder, progress
        self._on_nonfinite, self._stall_s = on_nonfinite, stall_s
        self._workers = [_Worker(now, stepped=now) for _ in range(num_workers)]
        self._relays = [_Relay(now) for _ in range(relays)]
        self._channels: dict[int, _Channel] = {}
        self._registering: Counter[int] = Counter()
        self._samples = 0
        self._stop = 0
        self._cuts, self._resumed = cuts, resumed
        self._polls = self._empty = self._iterations = self._pushes = 0
        self._busy_s = self._gap_s = 0.0
        self._last_poll = self._last_active = now
        self._second = now
        if resumed is not None:
            for worker, samples in zip(self._workers, resumed["worker_samples"], strict=True):
                worker.samples = samples
            self._samples = sum(resumed["worker_samples"])

    @property
    def models(self) -> list[GlobalModel]:
        """The global models, one per channel."""
        return [channel.model for channel in self._channels.values()]

    @property
    def samples(self) -> int:
        """Samples of all workers in merged pushes."""
        return self._samples

    def serve(self) -> None:
        """Run until every worker has left; then everybody has the final parameters."""
        while not all(worker.gone for worker in self._workers):
            self.turn()
        self._hand_out()
        while self._relays and not self._link.progress():  # before they hear that all is over
            time.sleep(_BUSY_S)
        over = self._notice(0)._replace(active=0)
        for relay in range(len(self._relays)):
            self._link.notify_relay(relay, over)
        self._link.close()
        self._flush_replies(final=True)

    # -- one turn of the loop ---------------------------------------------------------------------

    def turn(self) -> None:
        """Poll once and deal with what has come; sleeps a little where nothing has."""
        now = time.monotonic()
        self._gap_s = max(self._gap_s, now - self._last_poll)
        self._last_poll = now
        sends_idle = self._link.progress()
        found = False
        for request in self._link.requests():
            self._on_request(request)
            found = True
        for channel in self._channels.values():
            arrivals = channel.end.arrivals()
            if arrivals:
                found = True
                self._take(channel, [arrival.frame for arrival in arrivals])
            if channel.owed or channel.copies:
                self._reply(channel)
        self._polls += 1
        if found:
            self._last_active = time.monotonic()
            self._busy_s += self._last_active - now
        else:
            self._empty += 1
        if now - self._second >= 1.0:
            self._each_second(now)
        if not found:
            quiet = now - self._last_active
            if not sends_idle or quiet < _BURST_S:
                time.sleep(_BUSY_S)
            else:
                time.sleep(_ACTIVE_S if quiet < 1.0 else _IDLE_S)

    def _take(self, channel: _Channel, frames: list) -> None:
        """Merge what has come, one by one while a checkpoint is under way."""
        cuts = self._cuts
        if cuts is None or not cuts.concerned(frames):
            self._merge(channel, frames)
            self._call()
            return
        for frame in frames:
            cuts.before(channel.end.index, channel.model, frame)
            self._merge(channel, [frame])
        if cuts.after({index: one.model for index, one in self._channels.items()}):
            self._everybody(Stop.PREEMPTED, -1, "stopped, with a checkpoint, to be started again")

    def _call(self) -> None:
        """Call for a checkpoint if one is due; where another server calls, ask it to stop if this
        one was told so (workers hand it on).
        """
        cuts = self._cuts
        if cuts is None:
            return
        asked = cuts.preempt and not cuts.leads and not self._stop
        if asked:
            self._stop = int(Stop.PREEMPTED)
        if asked or cuts.call():
            self._tell_all()

    def _merge(self, channel: _Channel, frames: list) -> None:
        model = channel.model
        handled, sends, passes = model.handle(frames)
        now = time.monotonic()
        channel.owed.update(sends)
        for push, staleness, version, bad, frees in handled:
            worker = self._workers[push.worker]
            worker.samples += push.samples
            worker.heard = now
            self._samples += push.samples
            self._iterations += push.iterations
            self._pushes += 1
            if self._cuts is not None:
                self._cuts.merged(channel.end.index, push)
            self._link.notify(
                push.worker,
                self._notice(push.worker, channel.end.index, push.sequence, version, staleness),
            )
            worker.told = now
            if frees is not None:
                notice = self._notice(push.worker, channel.end.index, frees[1])
                self._link.notify_relay(frees[0], notice)
            self._recorder.add(
                "arrivals",
                (now, channel.end.index, push.worker, push.sequence, push.iterations, push.samples,
                 staleness, push.version, version, push.wants_reply, push.loss, bad),
            )  # fmt: skip
            if not math.isnan(push.loss):
                self._progress.loss(push.loss)
            if bad:
                self._on_bad(push)
        self._reply(channel)  # after the acknowledgements: they are small, and would wait behind it
        for count, merge_s, nbytes, version, messages in passes:
            row = (now, channel.end.index, version, count, merge_s, nbytes, messages)
            self._recorder.add("merges", row)

    def _on_bad(self, push: Push) -> None:
        text = f"worker {push.worker}: push {push.sequence} is not finite"
        self._event(EventKind.NONFINITE_MERGE, push.worker, push.sequence, text)
        if self._on_nonfinite == "stop":
            raise NonFiniteError(
                f"{text}: training has diverged; lower --lr, or skip such pushes with "
                "--on-nonfinite skip"
            )
        self._progress.say(f"{text}: not merged (--on-nonfinite skip)")

    def _reply(self, channel: _Channel) -> None:
        model, end = channel.model, channel.end
        self._flush_replies()
        for sender in dict.fromkeys(end.sender_of[worker] for worker in channel.owed):
            frame = end.reply_frame(sender)
            if frame is None:
                continue  # the last one is on its way: x̃ is copied when this one can go
            copy_s = model.copy_to(frame)
            replies = []
            for worker in [w for w in channel.owed if end.sender_of[w] == sender]:
                send = channel.owed.pop(worker)
                channel.numbers[worker] += 1
                reply = Reply(
                    channel.numbers[worker], model.version, model.last_merged[worker], send.alpha,
                    send.clock,
                )  # fmt: skip
                replies.append((worker, reply))
            end.send_replies(sender, replies)
            now = time.monotonic()
            for worker, reply in replies:
                row = (
                    now, end.index, worker, reply.number, reply.version, reply.alpha,
                    reply.sequence, copy_s,
                )  # fmt: skip
                channel.sent[worker] = (now, row)
        for worker in list(channel.copies):
            frame = end.copy_frame(worker)
            if frame is not None:
                channel.copies.remove(worker)
                model.copy_to(frame)
                end.send_copy(worker, Reply(0, model.version, model.last_merged[worker], 1.0))

    def _flush_replies(self, final: bool = False) -> None:
        """Log the replies that have left."""
        now = time.monotonic()
        for channel in self._channels.values():
            for worker, (started, row) in list(channel.sent.items()):
                done = channel.end.reply_done(worker)
                if done or final:
                    del channel.sent[worker]
                    self._recorder.add("replies", (*row, now - started if done else math.nan))

    # -- requests, heartbeats, stalls -------------------------------------------------------------

    def _on_request(self, request: Request) -> None:
        now = time.monotonic()
        if request.worker >= self._num_workers:
            self._relays[request.worker - self._num_workers].heard = now
            if request.kind is RequestKind.PREEMPT:
                self.preempt()
            return
        worker = self._workers[request.worker]
        worker.heard, worker.request = now, request
        working = request.phase in _WORKING
        if request.steps != worker.steps or not working:
            if worker.steps >= 0 and request.steps > worker.steps:
                worker.step_s = (now - worker.stepped) / (request.steps - worker.steps)
            worker.steps, worker.stepped = request.steps, now
        match request.kind:
            case RequestKind.REGISTER:
                self._registering[request.channel] += 1
                if self._registering[request.channel] == self._num_workers:
                    self._open(request.channel)
            case RequestKind.FETCH:
                self._channels[request.channel].copies.append(request.worker)
            case RequestKind.EVALUATION:
                self._progress.evaluation(*request.values[:3])
            case RequestKind.STOP:
                self._everybody(Stop.ASKED, request.worker, "asked to stop")
            case RequestKind.PREEMPT:
                self.preempt()
            case RequestKind.LENGTH:
                if self._cuts is not None:
                    self._cuts.length = int(request.values[0])
            case RequestKind.BYE:
                worker.gone = True
                active = sum(not w.gone for w in self._workers)
                self._event(EventKind.LEAVE, request.worker, active, "has ended")

    @property
    def preempted(self) -> bool:
        """The run was stopped to be started again."""
        return self._stop == Stop.PREEMPTED

    def preempt(self) -> None:
        """Stop with a checkpoint, so that the run can be started again."""
        if self._cuts is not None:
            self._cuts.preempt = True

    def _everybody(self, stop: Stop, worker: int, text: str) -> None:
        """Have everybody end."""
        self._stop = int(stop)
        self._event(EventKind.STOP, worker, self._samples, text)
        self._tell_all()

    def _tell_all(self) -> None:
        now = time.monotonic()
        for index in range(self._num_workers):
            self._beat(index, now, force=True)

    def _open(self, index: int) -> None:
        end = self._link.open_channel(index)
        rules = self._make_rules(end.spec)
        model = GlobalModel(end.spec, end.initial, rules, self._num_workers, self._link.progress)
        if self._resumed is not None:
            parts = self._resumed["channels"]
            if len(self._channels) >= len(parts):
                raise CheckpointError(
                    f"--resume: the checkpoint has {len(parts)} part(s) on this server, this run "
                    "more; resume with the same model, --max-shard-bytes and --shard-by"
                )
            model.restore(parts[len(self._channels)])
        self._channels[index] = _Channel(end, model, self._num_workers)
        self._progress.opened(
            end.push_layout.frame_bytes, end.layout.frame_bytes, end.slots, len(set(end.sender_of)),
            end.relayed,
        )  # fmt: skip

    def _notice(
        self, worker: int, channel: int = 0, sequence: int = 0, version: int = 0, staleness: int = 0
    ) -> Notice:
        own = self._workers[worker].samples
        active = sum(not w.gone for w in self._workers)
        cut, at = (self._cuts.number, self._cuts.at) if self._cuts is not None else (0, 0)
        return Notice(
            channel, sequence, version, staleness, self._samples, own, active, self._stop, cut, at
        )

    def _beat(self, index: int, now: float, force: bool = False) -> None:
        worker = self._workers[index]
        due = now - worker.told >= _BEAT_S and self._link.may_beat(index)
        if (due or force) and not worker.gone:
            self._link.notify(index, self._notice(index))
            worker.told = now

    def _each_second(self, now: float) -> None:
        overload = self._iterations / self._pushes if self._pushes else math.nan
        self._recorder.add(
            "polls",
            (now, self._polls, self._empty, self._busy_s, self._gap_s, overload, self._samples),
        )
        active = sum(not w.gone for w in self._workers)
        self._progress.update(self._samples, overload, active)
        self._polls = self._empty = self._iterations = self._pushes = 0
        self._busy_s = self._gap_s = 0.0
        self._second = now
        self._call()
        for index, worker in enumerate(self._workers):
            self._beat(index, now)
            if not worker.gone:
                self._check_stall(index, worker, now)
        for index, relay in enumerate(self._relays):
            late = now - relay.heard
            if (late >= self._stall_s) != relay.stalled:
                relay.stalled = not relay.stalled
                what = f"has said nothing for {late:.0f} s" if relay.stalled else "goes on"
                kind = EventKind.STALL if relay.stalled else EventKind.STALL_END
                self._event(kind, -1, late, f"relay {index} {what}")
                self._progress.say(f"relay {index} {what}")

    def _check_stall(self, index: int, worker: _Worker, now: float) -> None:
        """Name a worker that is silent, or makes no step for much longer than it usually takes."""
        request = worker.request
        silent = now - worker.heard
        working = request is not None and request.phase in _WORKING
        still = now - worker.stepped if working else 0.0
        late = max(silent, still if still > max(self._stall_s, 5 * worker.step_s) else 0.0)
        if late >= self._stall_s and not worker.stalled:
            worker.stalled = now - late
            phase = Phase(request.phase).name.lower() if request else "start"
            what = "has said nothing" if silent >= self._stall_s else "has made no step"
            text = f"worker {index} {what} for {late:.0f} s; it was in phase '{phase}'"
            self._event(EventKind.STALL, index, late, text)
            self._progress.say(text)
        elif late < self._stall_s and worker.stalled:
            took = now - worker.stalled
            worker.stalled = 0.0
            self._event(EventKind.STALL_END, index, took, "goes on")
            self._progress.say(f"worker {index} goes on after {took:.0f} s")

    def _event(self, kind: EventKind, worker: int, value: float, text: str) -> None:
        self._recorder.add(
            "events", (time.monotonic(), int(kind), worker, value, text.encode()[:120])
        )

    def _hand_out(self) -> None:
        """Send the final parameters to every worker, from where they lie."""
        for channel in self._channels.values():
            channel.owed.clear()
            channel.end.send_to_all(channel.model.frame, Reply(0, channel.model.version, 0, 1.0))
        self._progress.update(self._samples, math.nan, 0)
