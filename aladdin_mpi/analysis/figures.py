"""Pictures of runs, in the forms in which the papers of this field show them.

Each function takes runs and returns a matplotlib figure.  Colours are those of Okabe and Ito, which
colour-blind people can tell apart; bars are hatched and lines marked, so that they can be told in
print, too.  Runs of one configuration with several seeds are drawn as their mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import cycle
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from aladdin_mpi.analysis import metrics
from aladdin_mpi.analysis.groups import group, labels, options, slow_down
from aladdin_mpi.analysis.load import Run

__all__ = [
    "ACROSS_RUNS",
    "ablation",
    "accuracy",
    "communication",
    "heterogeneity",
    "period",
    "servers_over_time",
    "speedup",
    "staleness",
    "step_times",
    "time_split",
]

ACROSS_RUNS = (
    "time_split", "accuracy", "speedup", "heterogeneity", "ablation", "period", "communication",
    "staleness",
)  # fmt: skip
"""Functions of this module that take any number of runs."""

COLOURS = {
    "compute": "#0072B2",
    "data": "#56B4E9",
    "optimizer": "#009E73",
    "push": "#E69F00",
    "mix": "#F0E442",
    "blocked": "#D55E00",
    "other": "#999999",
}
HATCHES = {
    "compute": "", "data": "..", "optimizer": "//", "push": "xx", "mix": "\\\\", "blocked": "++",
    "other": "",
}  # fmt: skip
LINES = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
MARKERS = "osD^vP*X"
DASHES = ["-", "--", "-.", ":"]
ORDER = ["compute", "data", "optimizer", "push", "mix", "blocked", "other"]
"""From the useful to the useless."""

WIDTH, HEIGHT = 6.4, 4.0
"""[inch] of a picture with one panel."""


def _figure(columns: int = 1, width: float = WIDTH, height: float = HEIGHT) -> tuple[Figure, list]:
    figure = Figure(figsize=(width * columns, height), layout="constrained")
    axes = [figure.add_subplot(1, columns, 1 + i) for i in range(columns)]
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="y", color="0.9", linewidth=0.8)
        ax.set_axisbelow(True)
    return figure, axes


def _styles() -> Any:
    return (
        {"color": colour, "marker": marker, "linestyle": dash, "markersize": 4, "linewidth": 1.5}
        for colour, marker, dash in zip(
            cycle(LINES), cycle(MARKERS), (d for d in cycle(DASHES) for _ in LINES), strict=False
        )
    )


def _legend(ax: Axes, count: int) -> None:
    """Beside the picture where there is much of it."""
    if count > 3:
        ax.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    elif count > 1:
        ax.legend(frameon=False, fontsize=9)


def _nothing(ax: Axes, text: str) -> None:
    ax.set_axis_off()
    ax.text(0.5, 0.5, text, ha="center", va="center", wrap=True, transform=ax.transAxes)


def time_split(runs: Sequence[Run]) -> Figure:
    """Where a worker's step goes, for each run; by the number of workers where there are several
    (as in Fig. 2 of Ko et al. 2021).
    """
    runs = sorted(runs, key=lambda run: (run.algorithm, run.num_workers))
    groups = group(runs)
    figure, (ax,) = _figure(width=max(WIDTH, 1.5 + 0.9 * len(groups)))
    bottom = np.zeros(len(groups))
    mean = [
        pd.concat([metrics.split(run) for run in members]).mean() for members in groups.values()
    ]
    x = np.arange(len(groups))
    for part in ORDER:
        height = np.array([1e3 * max(row[part], 0.0) for row in mean])
        ax.bar(
            x, height, 0.7, bottom, label=part, color=COLOURS[part], hatch=HATCHES[part],
            edgecolor="white", linewidth=0.5,
        )  # fmt: skip
        bottom += height
    ax.set_xticks(x, _wrapped(groups))
    ax.set_ylabel("mean time of a worker's step [ms]")
    handles, names = ax.get_legend_handles_labels()
    ax.legend(
        handles[::-1], names[::-1], frameon=False, fontsize=9, loc="center left",
        bbox_to_anchor=(1.0, 0.5),
    )  # fmt: skip
    return figure


def _wrapped(names: Any) -> list[str]:
    return [str(name).replace(", ", "\n") for name in names]


def step_times(run: Run) -> Figure:
    """How long each worker's steps took, over the run: the median and the 90 % of windows of it."""
    figure, (ax,) = _figure()
    steps = run.steps
    if not len(steps):
        _nothing(ax, "no steps were logged")
        return figure
    worker_of = {log.rank: log.worker for log in run.logs}
    begin = metrics.begin_s(run)
    ranks = [rank for rank, _ in steps.groupby(level="rank")]
    for rank, style in zip(ranks, _styles(), strict=False):
        rows = steps.loc[rank]
        windows = np.array_split(np.arange(len(rows)), min(60, len(rows)))
        at = [float(rows["start_s"].iloc[w].mean()) - begin for w in windows]
        times = [1e3 * np.quantile(rows["step_s"].iloc[w], [0.05, 0.5, 0.95]) for w in windows]
        low, middle, high = np.array(times).T
        ax.plot(at, middle, label=f"worker {worker_of[rank]}", **{**style, "marker": ""})
        ax.fill_between(at, low, high, color=style["color"], alpha=0.12, linewidth=0)
    ax.set_ylim(bottom=0)
    ax.set_xlabel("time since the first step [s]")
    ax.set_ylabel("step [ms], median and 5 to 95 %")
    _legend(ax, len(ranks))
    return figure


def _curve(ax: Axes, members: Sequence[Run], x: str, label: str, style: dict[str, Any]) -> bool:
    """The mean accuracy of runs that differ in the seed only; False where there is none."""
    tables = [metrics.evaluations(run) for run in members]
    tables = [table for table in tables if len(table) and table["accuracy"].notna().any()]
    if not tables:
        return False
    length = min(map(len, tables))
    at = np.mean([table[x].iloc[:length] for table in tables], axis=0)
    values = 100 * np.array([table["accuracy"].iloc[:length] for table in tables])
    seeds = f" ({len(tables)} seeds)" if len(tables) > 1 else ""
    ax.plot(at, values.mean(axis=0), label=label + seeds, **style)
    if len(tables) > 1:
        ax.fill_between(
            at, values.min(axis=0), values.max(axis=0), color=style["color"], alpha=0.15,
            linewidth=0,
        )  # fmt: skip
    return True


def accuracy(runs: Sequence[Run]) -> Figure:
    """Test accuracy of the global model against time and against epochs (Fig. 4)."""
    figure, axes = _figure(2, 5.2)
    groups = group(runs)
    texts = ("training time [s], without evaluations", "epochs of all workers together")
    for ax, x, text in zip(axes, ("time_s", "epoch"), texts, strict=True):
        drawn = [
            _curve(ax, members, x, label, style)
            for (label, members), style in zip(groups.items(), _styles(), strict=False)
        ]
        if not any(drawn):
            _nothing(ax, "no evaluations were logged")
            continue
        ax.set_xlabel(text)
        ax.set_ylabel("test accuracy [%]")
    _legend(axes[1], len(groups))
    return figure


def speedup(runs: Sequence[Run]) -> Figure:
    """Samples per second against the number of workers, over those of one worker (Fig. 5).

    Where no run has one worker, the smallest number's rate per worker stands for it; the label says
    so.
    """
    figure, (ax,) = _figure()
    rates: dict[str, dict[int, list[float]]] = {}
    for run, label in zip(runs, labels(runs, without=["workers"]), strict=True):
        if len(run.steps):
            rate = float(metrics.throughput(run).sum())
            rates.setdefault(label, {}).setdefault(run.num_workers, []).append(rate)
    most = max((n for found in rates.values() for n in found), default=1)
    ax.plot([1, most], [1, most], color="0.6", linewidth=1, linestyle=":", label="ideal")
    for (label, found), style in zip(rates.items(), _styles(), strict=False):
        numbers = sorted(found)
        base = float(np.mean(found[numbers[0]])) / numbers[0]
        note = "" if numbers[0] == 1 else f" (over 1/{numbers[0]} of {numbers[0]} workers)"
        values = [float(np.mean(found[n])) / base for n in numbers]
        ax.plot(numbers, values, label=label + note, **style)
    ax.set_xlabel("number of workers")
    ax.set_ylabel("speed-up in samples per second")
    ax.set_xticks(sorted({n for found in rates.values() for n in found} | {1}))
    ax.set_ylim(bottom=0)
    _legend(ax, len(rates) + 1)
    return figure


def heterogeneity(runs: Sequence[Run]) -> Figure:
    """Test accuracy against time where one worker is slower, a panel per slow-down (Fig. 6)."""
    factors = sorted({slow_down(run) for run in runs})
    figure, axes = _figure(len(factors), 4.4)
    count = 0
    for ax, factor in zip(axes, factors, strict=True):
        members = [run for run in runs if slow_down(run) == factor]
        groups = group(members)
        count = max(count, len(groups))
        drawn = [
            _curve(ax, found, "time_s", label, style)
            for (label, found), style in zip(groups.items(), _styles(), strict=False)
        ]
        if not any(drawn):
            _nothing(ax, "no evaluations were logged")
        ax.set_title("all alike" if factor == 1 else f"one worker ×{factor:g} slower", fontsize=10)
        ax.set_xlabel("training time [s]")
        ax.set_ylabel("test accuracy [%]")
    _legend(axes[-1], count)
    return figure


def ablation(runs: Sequence[Run]) -> Figure:
    """Test accuracy against epochs with parts of the algorithm switched off (Fig. 7), and the final
    one.
    """
    figure, (left, right) = _figure(2, 5.6)
    groups = group(runs)
    names: list[str] = []
    for (label, members), style in zip(groups.items(), _styles(), strict=False):
        if _curve(left, members, "epoch", label, style):
            finals = [100 * metrics.final_accuracy(run) for run in members]
            at = len(names)
            names.append(label)
            right.bar(at, np.mean(finals), 0.6, color=style["color"], edgecolor="white")
            if len(finals) > 1:
                right.errorbar(at, np.mean(finals), np.std(finals, ddof=1), color="k", capsize=3)
            right.text(at, np.mean(finals), f"{np.mean(finals):.1f}", ha="center", va="bottom")
    if not names:
        _nothing(left, "no evaluations were logged")
        _nothing(right, "")
        return figure
    left.set_xlabel("epochs of all workers together")
    left.set_ylabel("test accuracy [%]")
    _legend(left, min(len(names), 6))
    right.set_xticks(range(len(names)), names, fontsize=8, rotation=30, ha="right")
    low = min(bar.get_height() for bar in right.patches)
    right.set_ylim(max(0.0, low - 10), min(102.0, right.get_ylim()[1] + 1))
    right.set_ylabel("final test accuracy [%]")
    return figure


def period(runs: Sequence[Run]) -> Figure:
    """Final accuracy and throughput against the period π (Fig. 8)."""
    figure, axes = _figure(2, 5.2)
    found: dict[str, dict[int, list[Run]]] = {}
    for run, label in zip(runs, labels(runs, without=["period"]), strict=True):
        if "period" in options(run):
            found.setdefault(label, {}).setdefault(int(options(run)["period"]), []).append(run)
    for (label, by_period), style in zip(found.items(), _styles(), strict=False):
        periods = sorted(by_period)
        for ax, measure, scale in (
            (axes[0], metrics.final_accuracy, 100.0),
            (axes[1], lambda run: float(metrics.throughput(run).sum()), 1.0),
        ):
            values = [[scale * measure(run) for run in by_period[p]] for p in periods]
            spread = [np.std(v, ddof=1) if len(v) > 1 else 0.0 for v in values]
            ax.errorbar(
                periods, [np.mean(v) for v in values], spread, label=label, capsize=3, **style
            )
            ax.set_xscale("log", base=2)
            ax.set_xticks(periods, [str(p) for p in periods])
            ax.minorticks_off()
            ax.set_xlabel("period π [iterations]")
    if not found:
        _nothing(axes[0], "none of these runs has a period")
        _nothing(axes[1], "")
        return figure
    axes[0].set_ylabel("final test accuracy [%]")
    axes[1].set_ylabel("samples per second")
    axes[1].set_ylim(bottom=0)
    _legend(axes[0], len(found))
    return figure


def communication(runs: Sequence[Run]) -> Figure:
    """Share of a worker's time that communication takes, and how far the workers' parameters are
    apart (Fig. 1).
    """
    figure, (left, right) = _figure(2, 5.2)
    groups = group(runs)
    x = np.arange(len(groups))
    bottom = np.zeros(len(groups))
    for part in ("push", "mix", "blocked"):
        height = np.array([
            100 * np.mean([metrics.shares(run)[part] for run in members])
            for members in groups.values()
        ])  # fmt: skip
        left.bar(
            x, height, 0.7, bottom, label=part, color=COLOURS[part], hatch=HATCHES[part],
            edgecolor="white",
        )  # fmt: skip
        bottom += np.nan_to_num(height)
    left.set_xticks(x, _wrapped(groups))
    left.set_ylabel("share of the workers' time [%]")
    left.legend(frameon=False, fontsize=9)
    drawn = 0
    for (label, members), style in zip(groups.items(), _styles(), strict=False):
        table = metrics.variance(members[0])
        if len(table):
            right.plot(
                table["iteration"], table["variance"], label=label, **{**style, "marker": ""}
            )
            drawn += 1
    if not drawn:
        _nothing(right, "the variance was not logged\n(--log-variance N)")
        return figure
    right.set_xlabel("iteration")
    right.set_ylabel("variance of a parameter over the workers")
    right.set_yscale("symlog", linthresh=1e-12) if _has_zero(right) else right.set_yscale("log")
    _legend(right, drawn)
    return figure


def _has_zero(ax: Axes) -> bool:
    return any((np.asarray(line.get_ydata()) <= 0).any() for line in ax.lines)


def staleness(runs: Sequence[Run]) -> Figure:
    """Staleness of the merged pushes: over the run, and how often each occurred."""
    figure, (left, right) = _figure(2, 5.2)
    drawn = 0
    for run, label, style in zip(runs, labels(runs), _styles(), strict=False):
        rows = run.arrivals[run.arrivals["staleness"] >= 0].sort_values("time_s")
        if not len(rows):
            continue
        drawn += 1
        windows = np.array_split(np.arange(len(rows)), min(60, len(rows)))
        values = rows["staleness"].to_numpy()
        at = rows["time_s"].to_numpy() - metrics.begin_s(run)
        left.plot(
            [at[w].mean() for w in windows], [values[w].mean() for w in windows], label=label,
            **{**style, "marker": ""},
        )  # fmt: skip
        counts = metrics.staleness(run)
        share = 100 * counts / counts.sum()
        right.step(share.index, share.to_numpy(), where="mid", color=style["color"], label=label)
    if not drawn:
        _nothing(left, "no staleness: there is no server")
        _nothing(right, "")
        return figure
    left.set_xlabel("time since the first step [s]")
    left.set_ylabel("mean staleness [merges]")
    left.set_ylim(bottom=0)
    right.set_xlabel("staleness [merges]")
    right.set_ylabel("share of the pushes [%]")
    _legend(left, drawn)
    return figure


def servers_over_time(run: Run) -> Figure:
    """Merges per second and how busy each server is, and iterations carried per push."""
    figure, (left, right) = _figure(2, 5.2)
    if not len(run.polls):
        _nothing(left, "there is no server")
        _nothing(right, "")
        return figure
    ranks = dict.fromkeys(log.rank for log in run.servers)
    for rank, style in zip(ranks, _styles(), strict=False):
        merges = run.merges[run.merges.index.get_level_values("rank") == rank]
        polls = run.polls[run.polls.index.get_level_values("rank") == rank]
        times = merges["time_s"] - metrics.begin_s(run)
        last = math.ceil(max(times.max() if len(merges) else 1, 1))
        counts, edges = np.histogram(times, last, (0, last), weights=merges["count"])
        name = f"rank {rank}"
        left.plot(edges[:-1], counts, label=f"{name}: pushes merged", **{**style, "marker": ""})
        right.plot(
            polls["time_s"] - metrics.begin_s(run),
            100 * polls["busy_s"],
            label=f"{name}: busy",
            **{**style, "marker": ""},
        )
    left.set_xlabel("time since the first step [s]")
    left.set_ylabel("pushes merged per second")
    left.set_ylim(bottom=0)
    right.set_xlabel("time since the first step [s]")
    right.set_ylabel("share of the server's time spent working [%]")
    right.set_ylim(0, None)
    _legend(left, len(ranks))
    return figure
