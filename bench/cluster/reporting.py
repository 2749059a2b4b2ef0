"""Tables and figures of the experiments about time, from their CSV file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import click
import pandas as pd
from rivals import ALGORITHMS, ALONE

__all__ = ["figures", "links", "quick", "settings"]

MOST = 8
MARKERS = "osD^vPX*<>hp"


def _frame(rows: Sequence[Mapping[str, str]], experiment: str) -> pd.DataFrame:
    """Its rows, with numbers as numbers, and a step over its computing."""
    frame = pd.DataFrame([row for row in rows if row["experiment"] == experiment])
    if len(frame):
        words = ("mpi", "experiment", "algorithm")
        numbers = [name for name in frame.columns if name not in words]
        frame = frame.astype(dict.fromkeys(numbers, float))
    return frame


def _cell(values: pd.Series, digits: int = 3) -> str:
    """Median, and the range where there are several."""
    if not len(values):
        return "–"
    text = f"{values.median():.{digits}f}"
    if len(values) > 1:
        text += f" ({values.min():.{digits}f} to {values.max():.{digits}f})"
    return text


def _table(head: Iterable[str], lines: Iterable[Iterable[str]]) -> None:
    head = list(head)
    click.echo("\n| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|")
    for line in lines:
        click.echo("| " + " | ".join(line) + " |")


def _base(frame: pd.DataFrame) -> float:
    """Steps per second of one worker that only computes."""
    alone = frame[(frame.algorithm == ALONE) & (frame.workers == 1)]
    if not len(alone):
        alone = frame[(frame.algorithm == ALONE) & (frame.slow == 1)]
    return float((alone.steps_per_s / alone.workers).median())


def _names(frame: pd.DataFrame) -> list[str]:
    return [name for name in ALGORITHMS if (frame.algorithm == name).any()]


def _columns(
    frame: pd.DataFrame, by: str, values: Sequence[float], measure: Callable[..., str]
) -> list[list[str]]:
    """A line per algorithm, a cell per value of a column."""
    return [
        [
            name,
            *(measure(frame[(frame.algorithm == name) & (frame[by] == value)]) for value in values),
        ]
        for name in _names(frame)
    ]


def links(rows: Sequence[Mapping[str, str]]) -> None:
    """Print what ``links`` has found so far."""
    frame = _frame(rows, "links")
    if not len(frame):
        return
    base = _base(frame)
    frame["speedup"] = frame.steps_per_s / base
    many = frame[(frame.workers == MOST) & (frame.slow == 1)]
    ratios = sorted(many.ratio.unique())
    head = ["", *(f"ratio {ratio:g}" for ratio in ratios)]
    click.echo(
        f"\n{MOST} workers, rounds: {int(frame['round'].max()) + 1}; one worker that only "
        f"computes makes {base:.3f} steps/s"
    )
    click.echo("\nA worker's step over its computing:")
    over = many.assign(over=many.step_ms / (1e3 / base))
    _table(head, _columns(over, "ratio", ratios, lambda f: _cell(f.over)))
    click.echo(f"\nSpeed-up over one worker, of {MOST}:")
    _table(head, _columns(many, "ratio", ratios, lambda f: _cell(f.speedup, 2)))
    alone = many[many.algorithm == ALONE].groupby(["ratio", "round"]).steps_per_s.median()
    joined = many.join(alone.rename("alone"), on=["ratio", "round"])
    click.echo("\nSteps per second over the same job's with pushes off:")
    _table(
        head, _columns(joined, "ratio", ratios, lambda f: _cell(f.steps_per_s / f.alone))
    )  # fmt: skip
    click.echo("\nThe shortest step that the links allow, over the step (1: nothing is lost):")

    def share(found: pd.DataFrame) -> str:
        if not len(found):
            return "–"
        bound = ALGORITHMS[found.algorithm.iloc[0]].bound(MOST, float(found.ratio.iloc[0]))
        return _cell(found.steps_per_s * bound / (MOST * base), 2)

    _table(head, _columns(many, "ratio", ratios, share))
    click.echo("\nThe same where an all-reduce begins with the backward pass, not with the step:")

    def later(found: pd.DataFrame) -> str:
        if not len(found):
            return "–"
        rival, ratio = ALGORITHMS[found.algorithm.iloc[0]], float(found.ratio.iloc[0])
        whole = max(1.0, rival.begins + rival.bound(MOST, ratio) * (rival.bound(MOST, ratio) > 1))
        return _cell(found.steps_per_s * whole / (MOST * base), 2)

    reduced = many[many.algorithm.map(lambda name: ALGORITHMS[name].begins > 0)]
    _table(head, _columns(reduced, "ratio", ratios, later))
    click.echo(
        "\nThe step of a closed queue, over the step, where workers wait for a server's answer:"
    )

    def queued(found: pd.DataFrame) -> str:
        step = ALGORITHMS[found.algorithm.iloc[0]].queue
        assert step is not None
        return _cell(found.steps_per_s * step(MOST, float(found.ratio.iloc[0])) / (MOST * base), 2)

    asking = many[many.algorithm.map(lambda name: ALGORITHMS[name].queue is not None)]
    _table(head, _columns(asking, "ratio", ratios, queued))
    click.echo("\nShare of its rate that the fullest link carries, in / out; cores idle:")

    def used(found: pd.DataFrame) -> str:
        if not len(found):
            return "–"
        middle = found.median(numeric_only=True)
        return f"{middle.in_share:.2f} / {middle.out_share:.2f}; {middle.idle:.0%}"

    _table(head, _columns(many, "ratio", ratios, used))
    _slow(frame)
    _by_workers(frame)
    _split(frame)


def _slow(frame: pd.DataFrame) -> None:
    found = frame[(frame.workers == MOST) & (frame.slow > 1)]
    factors = sorted(found.slow.unique())
    if not factors:
        return
    ratio = float(found.ratio.iloc[0])
    usual = frame[(frame.workers == MOST) & (frame.slow == 1) & (frame.ratio == ratio)]
    middle = usual.groupby("algorithm").steps_per_s.median()
    found = found.assign(
        line=found.steps_per_s
        / (found.algorithm.map(middle) * (MOST - 1 + 1 / found.slow) / MOST)
    )  # fmt: skip
    click.echo(f"\nOne worker k times slower, ratio {ratio:g}: speed-up over one worker")
    head = ["", *(f"×{factor:g}" for factor in factors)]
    _table(head, _columns(found, "slow", factors, lambda f: _cell(f.speedup, 2)))
    click.echo("\nThe same over the wait-free line S(1) (n − 1 + 1/k)/n:")
    _table(head, _columns(found, "slow", factors, lambda f: _cell(f.line)))


def _by_workers(frame: pd.DataFrame) -> None:
    found = frame[frame.slow == 1]
    counts = sorted(found.workers.unique())
    for ratio in sorted(found.ratio.unique()):
        click.echo(f"\nSpeed-up over one worker that only computes, ratio {ratio:g}:")
        part = found[found.ratio == ratio]
        lines = _columns(part, "workers", counts, lambda f: _cell(f.speedup, 2))
        _table(
            ["", *(f"{n:g} workers" for n in counts)], [line for line in lines if "–" not in line]
        )


def _split(frame: pd.DataFrame) -> None:
    """What blocks inside a library's backward pass is nowhere else: it counts as waiting."""
    click.echo("\nWhere a step goes [ms]: computing / pushing and mixing / waiting and the rest:")
    part = frame[(frame.slow == 1) & (frame.ratio == frame.ratio.max())]
    counts = sorted(part.workers.unique())
    slept = float(part[part.algorithm == ALONE].compute_ms.median())

    def cell(found: pd.DataFrame) -> str:
        if not len(found):
            return "–"
        m = found.median(numeric_only=True)
        computing, own = min(m.compute_ms, slept), m.push_ms + m.mix_ms
        return f"{computing:.0f} / {own:.1f} / {max(m.step_ms - computing - own, 0):.0f}"

    lines = _columns(part, "workers", counts, cell)
    _table([f"ratio {part.ratio.max():g}", *(f"{n:g} workers" for n in counts)], lines)


def settings(rows: Sequence[Mapping[str, str]]) -> None:
    """Print what ``settings`` has found so far."""
    frame = _frame(rows, "settings")
    if not len(frame):
        return
    click.echo(f"\nALADDIN's settings, {MOST} workers: step [ms], link in, coalesced, staleness")
    ratios = sorted(frame.ratio.unique())

    def cell(found: pd.DataFrame) -> str:
        m = found.median(numeric_only=True)
        return f"{m.step_ms:.1f}; {m.in_share:.2f}; {m.coalesced:.2f}; {m.staleness:.1f}"

    _table(
        ["", *(f"ratio {ratio:g}" for ratio in ratios)],
        [
            [name, *(cell(frame[(frame.algorithm == name) & (frame.ratio == r)]) for r in ratios)]
            for name in frame.algorithm.unique()
        ],
    )


def quick(rows: Sequence[Mapping[str, str]]) -> None:
    """Print a short run."""
    frame = _frame(rows, "quick")
    _table(
        ["", "workers", "ratio", "step, ms", "steps/s", "link in", "cores idle"],
        [
            [
                row.algorithm, f"{row.workers:g}", f"{row.ratio:g}", f"{row.step_ms:.1f}",
                f"{row.steps_per_s:.2f}", f"{row.in_share:.2f}", f"{row.idle:.0%}",
            ]
            for row in frame.itertuples()
        ],
    )  # fmt: skip


def figures(rows: Sequence[Mapping[str, str]], folder: Path) -> None:
    """Draw the speed-up by ratio and by slow worker, and where a step goes."""
    from matplotlib.figure import Figure

    frame = _frame(rows, "links")
    _draw_split(frame, folder / "split.svg")
    frame["speedup"] = frame.steps_per_s / _base(frame)
    usual = frame[frame.slow == 1]
    ratios = sorted(usual.ratio.unique())
    figure = Figure(figsize=(4.2 * (len(ratios) + 1), 3.8), layout="constrained")
    axes = figure.subplots(1, len(ratios) + 1)
    for ax, ratio in zip(axes, ratios, strict=False):
        ax.plot([1, MOST], [1, MOST], color="0.6", linewidth=1, linestyle=":", label="ideal")
        for number, name in enumerate(_names(usual)):
            part = usual[(usual.algorithm == name) & (usual.ratio == ratio)]
            middle = part.groupby("workers").speedup.median()
            marker = MARKERS[number % len(MARKERS)]
            ax.plot(middle.index, middle, marker=marker, label=name, color=f"C{number}")
        ax.set_title(f"payload / (rate × computing) = {ratio:g}", fontsize=10)
        ax.set_xlabel("workers")
        ax.set_xticks([1, 2, 4, 8])
        ax.set_ylim(bottom=0)
    axes[0].set_ylabel("speed-up in steps per second")
    slow = frame[(frame.workers == MOST) & (frame.ratio == frame[frame.slow > 1].ratio.max())]
    for number, name in enumerate(_names(usual)):
        middle = slow[slow.algorithm == name].groupby("slow").speedup.median()
        if len(middle) > 1:
            axes[-1].plot(
                middle.index, middle, marker=MARKERS[number % len(MARKERS)], color=f"C{number}"
            )
    axes[-1].set_xscale("log")
    axes[-1].set_xlabel("how many times slower one of 8 workers computes")
    axes[-1].set_ylim(bottom=0)
    axes[0].legend(fontsize=7)
    figure.savefig(folder / "links.svg")


def _draw_split(frame: pd.DataFrame, path: Path) -> None:
    from matplotlib.figure import Figure

    usual = frame[frame.slow == 1]
    slept = float(usual[usual.algorithm == ALONE].compute_ms.median())
    counts = [n for n in sorted(usual.workers.unique()) if n > 1]
    ratios = sorted(usual.ratio.unique())
    figure = Figure(figsize=(4.4 * len(ratios), 2.6 * len(counts)), layout="constrained")
    axes = figure.subplots(len(counts), len(ratios), squeeze=False, sharex="col")
    for row, workers in zip(axes, counts, strict=True):
        for ax, ratio in zip(row, ratios, strict=True):
            part = usual[(usual.workers == workers) & (usual.ratio == ratio)]
            middle = part.groupby("algorithm").median(numeric_only=True)
            middle = middle.reindex([n for n in _names(part) if n != ALONE])
            own = middle.push_ms + middle.mix_ms
            computing = middle.compute_ms.clip(upper=slept)
            left = 0 * own
            for label, width, colour in (
                ("computing (slept)", computing, "C0"),
                ("pushing and mixing", own, "C1"),
                ("waiting", (middle.step_ms - computing - own).clip(lower=0), "C3"),
            ):
                ax.barh(middle.index, width, left=left, color=colour, label=label)
                left = left + width
            ax.invert_yaxis()
            ax.tick_params(labelsize=7)
            ax.set_title(f"{workers:g} workers, ratio {ratio:g}", fontsize=9)
    for ax in axes[-1]:
        ax.set_xlabel("a step [ms]")
    axes[0][0].legend(fontsize=7)
    figure.savefig(path)
