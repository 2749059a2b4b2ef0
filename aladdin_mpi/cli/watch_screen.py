"""The view of a run in progress as text: a screen for a terminal, a line for everything else."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from aladdin_mpi.analysis.watch import Event, ServerView, View, WorkerView

__all__ = ["line", "screen"]

STYLES = {
    "compute": ("c", "black on dodger_blue1"), "data": ("d", "black on sky_blue1"),
    "optimizer": ("o", "black on green3"), "push": ("p", "black on orange1"),
    "mix": ("m", "black on yellow1"), "blocked": ("b", "white on red3"),
    "other": (".", "white on grey39"),
}  # fmt: skip
"""Parts of a step from the useful to the useless: letters and colours, either of them is enough."""

BAR = (10, 50)
"""Columns of a worker's bar, at least and at most."""

OVERLOAD = 1.1
"""Iterations per push from which on the link is called overloaded."""


def screen(view: View, console: Console, height: int) -> RenderableType:
    """All of it, in at most ``height`` lines as far as workers can be left out."""
    above: list[RenderableType] = [*_head(view)]
    if view.evaluations:
        above += [Text(), _evaluations(view)]
    below = [*_servers(view), *_events(view)]
    taken = sum(len(console.render_lines(part)) for part in (*above, *below))
    room = max(3, height - taken - 5)  # a blank line, the head, the legend in two, "and more"
    if view.workers:
        above += [Text(), *_workers(view, console.width, room)]
    return Group(*above, *below)


def line(view: View) -> str:
    """The most important things."""
    words = [f"{span(view.at_s)}:"]
    if view.state != "running":
        words.append(f"the run has {view.state};")
    words += [f"{text}," for text in _how_far(view)]
    words.append(f"{view.iterations} iterations, {number(view.samples_per_s)} samples/s,")
    if math.isfinite(view.loss):
        words.append(f"training loss {view.loss:.4g},")
    if view.evaluations:
        last = view.evaluations[-1]
        words.append(f"test loss {last.loss:.4g}, accuracy {last.accuracy:.4f},")
    words += [f"{_served(server)}," for server in view.servers]
    words += [f"{_who(worker)} {worker.remark}," for worker in view.workers if worker.remark]
    words += [f"{note}," for note in view.notes]
    return " ".join(words).rstrip(",;")


def _head(view: View) -> Iterator[RenderableType]:
    colour = {"running": "green", "ended": "blue"}.get(view.state, "red")
    yield Text.assemble(
        (view.name, "bold"), f"  {view.algorithm}, {view.num_workers} worker(s)  ",
        (view.state, f"bold {colour}"), f" {'for' if view.state == 'running' else 'after'} ",
        span(view.at_s),
    )  # fmt: skip
    text = ", ".join(_how_far(view))
    if math.isfinite(view.share):
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_row(ProgressBar(total=1.0, completed=view.share, width=30), text)
        yield table
    elif text:
        yield Text(text)
    words = f"{number(view.samples_per_s)} samples/s"
    words += " on the whole" if view.state != "running" else ""
    words += f", {view.iterations} iterations, {view.samples} samples"
    if math.isfinite(view.loss):
        words += f", training loss {view.loss:.4g}"
    yield Text(words)


def _how_far(view: View) -> Iterator[str]:
    if math.isfinite(view.epoch):
        of = f" of {view.epochs:g}" if math.isfinite(view.epochs) else ""
        yield f"epoch {view.epoch:.1f}{of}" if view.epoch % 1 else f"epoch {view.epoch:.0f}{of}"
    if math.isfinite(view.share):
        yield f"{view.share:.0%}"
    if math.isfinite(view.left_s):
        yield f"about {span(view.left_s)} left"


def _evaluations(view: View) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("evaluated after", "epoch", "test loss", "accuracy"):
        table.add_column(name, justify="right")
    for row in view.evaluations:
        accuracy = f"{row.accuracy:.4f}" if math.isfinite(row.accuracy) else ""
        table.add_row(span(row.at_s), f"{row.epoch:.2f}", f"{row.loss:.4f}", Text(accuracy, "bold"))
    return table


def _workers(view: View, width: int, room: int) -> Iterator[RenderableType]:
    shown = view.workers
    if len(shown) > room:  # those that are late first, then the slowest
        order = sorted(shown, key=lambda w: (not w.remark, -w.step_s if w.step_s else 0.0))
        shown = tuple(sorted(order[:room], key=lambda w: w.rank))
    hosts = len({worker.host for worker in view.workers}) > 1
    remarks = max((len(worker.remark) for worker in shown), default=0)
    names = max(len(worker.host) + 2 if hosts else 0 for worker in shown)
    bar = min(max(width - 40 - names - min(remarks, 30), BAR[0]), BAR[1])
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("worker", *(["host"] if hosts else [])):
        table.add_column(name, no_wrap=True)
    for name in ("steps", "step", "samples/s"):
        table.add_column(name, justify="right", no_wrap=True)
    title = "the last seconds"
    table.add_column(title if bar >= len(title) else "time", no_wrap=True)
    table.add_column("", no_wrap=True, overflow="ellipsis")
    for worker in shown:
        late = "bold red" if worker.state in ("training", "stopped") else "dim"
        table.add_row(
            f"{worker.worker}", *([worker.host] if hosts else []), f"{worker.iterations}",
            duration(worker.step_s), number(worker.samples_per_s), _bar(worker.parts, bar),
            Text(worker.remark, late),
        )  # fmt: skip
    yield table
    legend = Text()
    for name, (letter, style) in STYLES.items():
        legend.append(f" {letter} ", style).append(f" {name}  ")
    yield legend
    if len(shown) < len(view.workers):
        yield Text(f"and {len(view.workers) - len(shown)} more worker(s)", "dim")


def _bar(parts: dict[str, float], width: int) -> Text:
    """Letters in proportion; their number is exact, the largest remainders are rounded up."""
    exact = {name: parts.get(name, 0.0) * width for name in STYLES}
    counts = {name: math.floor(length) for name, length in exact.items()}
    missing = round(sum(exact.values())) - sum(counts.values())
    for name in sorted(exact, key=lambda name: counts[name] - exact[name])[: max(0, missing)]:
        counts[name] += 1
    bar = Text()
    for name, (letter, style) in STYLES.items():
        bar.append(letter * counts[name], style)
    return bar


def _servers(view: View) -> Iterator[Text]:
    for server in view.servers:
        text = Text()
        text.append("\nserver  ", "dim").append(_served(server))
        if server.overload > OVERLOAD:
            text.append("  link overloaded", "bold red")
        if server.remark:
            text.append(f"  {server.remark}", "bold red")
        yield text


def _served(server: ServerView) -> str:
    words = f"{number(server.pushes_per_s)} pushes/s in {number(server.passes_per_s)} merges/s"
    if math.isfinite(server.busy):
        words += f", busy {server.busy:.0%}"
    if math.isfinite(server.overload):
        words += f", {server.overload:.2f} iterations per push"
    return f"{words}, version {server.version}"


def _events(view: View) -> Iterator[Text]:
    events: Sequence[Event] = view.events
    for event in events:
        text = f"rank {event.rank}: {event.text}"
        yield Text.assemble(
            (f"{span(event.at_s)}  ", "dim"), text, no_wrap=True, overflow="ellipsis"
        )
    for note in view.notes:
        yield Text(note, "yellow", no_wrap=True, overflow="ellipsis")


def _who(worker: WorkerView) -> str:
    return f"worker {worker.worker}"


def number(value: float) -> str:
    """A rate with three digits."""
    return "?" if not math.isfinite(value) else f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """A short one."""
    if not math.isfinite(seconds):
        return ""
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def span(seconds: float) -> str:
    """A long one, to the second."""
    if not math.isfinite(seconds):
        return "?"
    whole = max(0, round(seconds))
    hours, minutes = whole // 3600, whole // 60 % 60
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {whole % 60:02} s" if minutes else f"{whole} s"
