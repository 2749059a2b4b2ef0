"""Kernels on large vectors: GB/s, against a memory copy, NumPy and torch, one thread each.

Bytes are counted as the single pass needs them: one read for every array that is read, one write
for every array that is written, no write-allocate; ``np.copyto`` counts two. A rival's GB/s uses
the *same* bytes, whatever temporaries and passes it needs: ratios of GB/s are ratios of time. All
rivals of a row run in every round, in an order that rotates; figures are medians over the rounds,
ratios are medians of the ratios within a round, because the machine's speed drifts. NumPy and torch
look for NaN and infinities in the cheapest way, by a sum, and count only when that is not finite.
"""

from __future__ import annotations

import csv
import math
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import click
import numpy as np
import torch

from aladdin_mpi.core import kernels
from aladdin_mpi.core.vector import aligned_zeros

COPY, OURS, NUMPY, TORCH, PASSES = "copy", "ours", "numpy", "torch", "k passes"
COLUMNS = ["kernel", "moves", "ours_gb_per_s", "copy_gb_per_s", "numpy_gb_per_s", "torch_gb_per_s"]
COLUMNS += ["ours_to_copy", "ours_to_numpy", "ours_to_torch", "at_once_to_k_passes"]


class Row(NamedTuple):
    """One kernel and its rivals; ``moves`` reads and writes per element."""

    name: str
    moves: int
    rivals: Mapping[str, Callable[[], object]]


def count_numpy(p: np.ndarray) -> int:
    return 0 if math.isfinite(p.sum()) else p.size - int(np.count_nonzero(np.isfinite(p)))


def count_torch(p: torch.Tensor) -> int:
    return 0 if math.isfinite(p.sum()) else p.numel() - int(torch.isfinite(p).count_nonzero())


def merge_row(k: int, t: np.ndarray, payloads: list[np.ndarray]) -> Row:
    p, weights = payloads[:k], [1e-3] * k
    tt, tp = torch.from_numpy(t), [torch.from_numpy(a) for a in payloads[:k]]

    def with_numpy() -> None:
        for a, w in zip(p, weights, strict=True):
            np.add(t, w * a, out=t)

    def with_torch() -> None:
        for a, w in zip(tp, weights, strict=True):
            tt.add_(a, alpha=w)

    def passes() -> None:
        for a, w in zip(p, weights, strict=True):
            kernels.merge(t, (a,), (w,))

    rivals = {OURS: lambda: kernels.merge(t, p, weights), NUMPY: with_numpy, TORCH: with_torch}
    if k > 1:
        rivals[PASSES] = passes
    return Row(f"merge k={k}", k + 2, rivals)


def difference_row(x: np.ndarray, r: np.ndarray, out: np.ndarray) -> Row:
    tx, tr, tout = map(torch.from_numpy, (x, r, out))

    def with_numpy() -> int:
        np.subtract(x, r, out=out)
        np.copyto(r, x)
        return count_numpy(out)

    def with_torch() -> int:
        torch.sub(tx, tr, out=tout)
        tr.copy_(tx)
        return count_torch(tout)

    ours = {OURS: lambda: kernels.difference(x, r, out)}
    return Row("difference", 4, ours | {NUMPY: with_numpy, TORCH: with_torch})


def copy_row(dst: np.ndarray, src: np.ndarray) -> Row:
    tdst, tsrc = map(torch.from_numpy, (dst, src))

    def with_numpy() -> int:
        np.copyto(dst, src)
        return count_numpy(dst)

    def with_torch() -> int:
        tdst.copy_(tsrc)
        return count_torch(tdst)

    ours = {OURS: lambda: kernels.copy_checked(dst, src)}
    return Row("copy_checked", 2, ours | {NUMPY: with_numpy, TORCH: with_torch})


def take_row(p: np.ndarray, r: np.ndarray) -> Row:
    tp, tr = map(torch.from_numpy, (p, r))

    def with_numpy() -> int:
        x = p.copy()
        np.subtract(p, r, out=p)
        np.copyto(r, x)
        return count_numpy(p)

    def with_torch() -> int:
        x = tp.clone()
        tp.sub_(tr)
        tr.copy_(x)
        return count_torch(tp)

    ours = {OURS: lambda: kernels.take_difference(p, r)}
    return Row("take_difference", 4, ours | {NUMPY: with_numpy, TORCH: with_torch})


def mix_row(x: np.ndarray, target: np.ndarray, s: np.ndarray) -> Row:
    tx, tt, ts = map(torch.from_numpy, (x, target, s))

    def with_numpy() -> None:
        np.subtract(target, s, out=target)
        np.multiply(target, np.float32(0.5), out=target)
        np.add(x, target, out=x)

    def with_torch() -> None:
        tt.sub_(ts).mul_(0.5)
        tx.add_(tt)

    ours = {OURS: lambda: kernels.mix_lagged(x, target, s, 0.5)}
    return Row("mix_lagged", 5, ours | {NUMPY: with_numpy, TORCH: with_torch})


def lazy_row(x: np.ndarray, g: np.ndarray, v: np.ndarray) -> Row:
    lr, momentum, decay, scale = 1e-3, 0.9, 1e-4, 0.25
    tx, tg, tv = map(torch.from_numpy, (x, g, v))

    def with_numpy() -> None:
        d = scale * g + decay * x
        np.multiply(v, momentum, out=v)
        np.add(v, d, out=v)
        np.subtract(x, lr * v, out=x)
        g.fill(0)

    def with_torch() -> None:
        tg.mul_(scale).add_(tx, alpha=decay)
        tv.mul_(momentum).add_(tg)
        tx.add_(tv, alpha=-lr)
        tg.zero_()

    ours = {OURS: lambda: kernels.lazy_update(x, g, v, lr, momentum, decay, scale)}
    return Row("lazy_update", 6, ours | {NUMPY: with_numpy, TORCH: with_torch})


def count_row(p: np.ndarray) -> Row:
    tp = torch.from_numpy(p)
    rivals = {
        OURS: lambda: kernels.count_nonfinite(p),
        NUMPY: lambda: count_numpy(p),
        TORCH: lambda: count_torch(tp),
    }
    return Row("count_nonfinite", 1, rivals)


def measure(row: Row, copy: Callable[[], object], rounds: int) -> dict[str, np.ndarray]:
    """[s] of each rival in each round."""
    rivals = {COPY: copy, **row.rivals}
    names = list(rivals)
    times: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(-1, rounds):  # one round that is not counted
        for name in names[round_ % len(names) :] + names[: round_ % len(names)]:
            began = time.perf_counter()
            rivals[name]()
            if round_ >= 0:
                times[name].append(time.perf_counter() - began)
    return {name: np.array(values) for name, values in times.items()}


def summary(row: Row, times: dict[str, np.ndarray], bytes_per_move: int) -> dict[str, object]:
    def speed(name: str) -> np.ndarray:
        moves = 2 if name == COPY else row.moves
        return moves * bytes_per_move / times[name] / 1e9

    line: dict[str, object] = {"kernel": row.name, "moves": row.moves}
    for name in (OURS, COPY, NUMPY, TORCH):
        line[f"{name}_gb_per_s"] = round(float(np.median(speed(name))), 1)
        if name != OURS:
            line[f"ours_to_{name}"] = round(float(np.median(speed(OURS) / speed(name))), 2)
    if PASSES in times:
        gain = float(np.median(times[PASSES] / times[OURS]))
        line["at_once_to_k_passes"] = round(gain, 2)
    return line


@click.command()
@click.option("--size", default=20_000_000, show_default=True, help="Elements of a vector.")
@click.option("--dtype", type=click.Choice(["float32", "float64"]), default="float32")
@click.option("--rounds", default=9, show_default=True, help="Rounds that are counted.")
@click.option("--csv", "csv_file", type=click.Path(dir_okay=False, writable=True))
def main(size: int, dtype: str, rounds: int, csv_file: str | None) -> None:
    """Measure the kernels; every ratio above 1 is in our favour."""
    torch.set_num_threads(1)
    click.echo(f"warm-up {kernels.warm_up():.2f} s")
    rng = np.random.default_rng(0)
    arrays = [aligned_zeros(size, np.dtype(dtype).type) for _ in range(9)]
    for array in arrays:
        rng.random(out=array, dtype=np.dtype(dtype))
    x, r, out, s = arrays[:4]
    rows = [merge_row(k, arrays[0], arrays[1:]) for k in (1, 2, 4, 8)]
    rows += [difference_row(x, r, out), copy_row(out, x), take_row(out, r), mix_row(x, out, s)]
    rows += [lazy_row(x, r, s), count_row(x)]
    widths = [max(len(name), 19 if name == "kernel" else 5) for name in COLUMNS]
    click.echo(f"{size} {dtype}, {rounds} rounds, 1 thread; moves = reads + writes per element")
    click.echo("  ".join(name.ljust(width) for name, width in zip(COLUMNS, widths, strict=True)))
    lines = []
    for row in rows:
        times = measure(row, lambda: np.copyto(arrays[-1], arrays[-2]), rounds)
        lines.append(summary(row, times, size * np.dtype(dtype).itemsize))
        cells = [str(lines[-1].get(name, "")) for name in COLUMNS]
        click.echo("  ".join(c.ljust(width) for c, width in zip(cells, widths, strict=True)))
    if csv_file:
        with open(csv_file, "w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(lines)


if __name__ == "__main__":
    main()
