"""Where the spans of a timeline lie, in whole microseconds: pure functions of arrays."""

from __future__ import annotations

import numpy as np
import pandas as pd

__all__ = [
    "PARTS",
    "arrow",
    "in_turn",
    "lanes",
    "lay_steps",
    "micro",
    "passes_of_pushes",
    "stacked",
]

PARTS = ("other", "data", "compute", "optimizer", "push", "blocked", "mix")
"""The parts of a step in the order in which they are laid."""

ROUNDING_US = 5
"""[µs] by which the borders of neighbours may be wrong: float32 durations."""

LONGEST_S = 1e9


def micro(seconds: np.ndarray) -> np.ndarray:
    """[µs], int64."""
    return np.rint(np.asarray(seconds, np.float64) * 1e6).astype(np.int64)


def durations(values: object) -> np.ndarray:
    """[s], float64; unknown and impossible ones are 0."""
    return np.clip(np.nan_to_num(np.asarray(values, np.float64)), 0.0, LONGEST_S)


def lay_steps(steps: pd.DataFrame) -> np.ndarray:
    """Borders of the parts of each step of one worker, in order of their start.

    Returns
    -------
    ndarray of int64, shape (steps, 8)
        [µs] the beginnings of :data:`PARTS`, and the end.

    Notes
    -----
    The parts are laid back from the end, because that is where the algorithm's part lies; what is
    not accounted for is mostly the loop's own code between two steps, and comes first.  Where the
    parts are longer than the step (rounding) the first ones are cut.
    """
    start = steps["start_s"].to_numpy()
    end = start + durations(steps["step_s"])
    lengths = np.stack([durations(steps[f"{name}_s"]) for name in PARTS[1:]], axis=1)
    begins = end[:, None] - np.cumsum(lengths[:, ::-1], axis=1)[:, ::-1]
    first, last = micro(start), micro(end)
    last[:-1] = np.minimum(last[:-1], first[1:])
    last = np.maximum(last, first)
    borders = np.concatenate([first[:, None], micro(begins), last[:, None]], axis=1)
    return np.clip(borders, first[:, None], last[:, None])


def in_turn(start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Spans of one row, [µs], in order, so that they do not overlap: what reaches into the one
    before is cut.
    """
    end = np.maximum.accumulate(end)
    before = np.concatenate([start[:1], end[:-1]])
    return np.minimum(np.maximum(start, before), end), end


def stacked(time_s: np.ndarray, took_s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[s] start and end of spans one after the other, of which those with one time end at it."""
    if not len(time_s):
        return time_s, time_s
    new = np.concatenate([time_s[1:] != time_s[:-1], [True]])  # the last one of its group
    total = np.cumsum(took_s)
    at_last = total[new][np.cumsum(np.concatenate([[False], new[:-1]]))]
    end = time_s - (at_last - total)
    return end - took_s, end


def lanes(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """The lane of each span, from 0, so that spans of one lane overlap by rounding at most.

    ``start`` is in ascending order.
    """
    free: list[int] = []
    found = []
    for a, b in zip(start.tolist(), end.tolist(), strict=True):
        for lane, until in enumerate(free):
            if until <= a + ROUNDING_US:
                free[lane] = max(b, until)
                break
        else:
            lane = len(free)
            free.append(b)
        found.append(lane)
    return np.array(found, np.int64)


def arrow(
    start: np.ndarray, start_end: np.ndarray, tip: np.ndarray, tip_end: np.ndarray, at: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where arrows between two spans begin and end, [µs], inside of both.

    Parameters
    ----------
    start, start_end : ndarray
        The span that it comes from: as late in it as the tip allows.
    tip, tip_end : ndarray
        The span that it goes to.
    at : ndarray
        Where in it, if that is inside.

    Returns
    -------
    begin, end, good : ndarray
        ``good`` is False where the second span ends before the first one begins (clocks that are
        wrong), or where a span has no length.
    """
    end = np.clip(at, tip, np.maximum(tip, tip_end - 1))
    begin = np.maximum(start, np.minimum(start_end - 1, end))
    end = np.clip(np.maximum(end, begin), tip, np.maximum(tip, tip_end - 1))
    return begin, end, (begin <= end) & (start_end > start) & (tip_end > tip)


def passes_of_pushes(arrivals: pd.DataFrame, merges: pd.DataFrame) -> np.ndarray:
    """For each row of ``arrivals`` of one server, the row of ``merges`` that took it; −1: none.

    Notes
    -----
    What was merged in one go has one time in both tables, and its order.  Versions alone do not
    tell: where a gradient is applied at once, the pass is counted before the push.  Pushes that
    were not finite, and those without an iteration where the algorithm skips them, are in no pass.
    """
    found = np.full(len(arrivals), -1)
    if not len(arrivals) or not len(merges):
        return found
    keys = ["time_s", "channel"]
    calls = pd.concat([arrivals[keys], merges[keys]], ignore_index=True).groupby(keys).ngroup()
    of_push, of_pass = np.split(calls.to_numpy(), [len(arrivals)])
    num = int(calls.max()) + 1
    count = np.maximum(merges["count"].to_numpy(), 0)
    count[count > np.bincount(of_push, minlength=num)[of_pass]] = 0  # damaged, or rows are missing
    merged = np.bincount(of_pass, count, num).astype(np.int64)
    good = arrivals["nonfinite"].to_numpy() != 1
    some = good & (arrivals["iterations"].to_numpy() > 0)
    all_good = np.bincount(of_push[good], minlength=num) == merged
    all_some = np.bincount(of_push[some], minlength=num) == merged
    taken = np.where(all_good[of_push], good, some & all_some[of_push])

    by_call = np.argsort(of_pass, kind="stable")
    pass_of_place = np.repeat(by_call, count[by_call])  # pushes in order of calls and passes
    first_place = np.concatenate([[0], np.cumsum(merged)])[:-1]
    pushes = np.flatnonzero(taken)
    pushes = pushes[np.argsort(of_push[pushes], kind="stable")]
    calls_of = of_push[pushes]
    begins = np.flatnonzero(np.concatenate([[True], calls_of[1:] != calls_of[:-1]]))
    lengths = np.diff(np.concatenate([begins, [len(pushes)]]))
    place = np.arange(len(pushes)) - np.repeat(begins, lengths)
    found[pushes] = pass_of_place[first_place[calls_of] + place]
    return found
