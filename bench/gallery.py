"""The pictures of docs/gallery, from real runs.

    python bench/gallery.py --out docs/gallery --runs runs/gallery

Runs that are there already are not made again.  All ranks share this machine's cores; where
computing is emulated (speed-up), the picture's title says so.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from launching import mpirun

CNN = (
    "--dataset", "fashion-mnist", "--model", "cnn", "--batch-size", "64", "--lr", "0.05",
    "--momentum", "0.9", "--weight-decay", "1e-4", "--log-variance", "20",
)  # fmt: skip
DIGITS = (
    "--dataset", "digits", "--model", "mlp", "--batch-size", "16", "--lr", "0.05", "--momentum",
    "0.9", "--epochs", "12",
)  # fmt: skip
SLEEP = (
    "--dataset", "synthetic:3x32x32:10:8000", "--model", "cnn", "--emulate-compute", "20",
    "--max-iterations", "100", "--epochs", "100",
)  # fmt: skip
SERVED = ("aladdin", "bsp", "asp", "easgd")
FIVE = (*SERVED, "ad-psgd", "arsgd")

Runs = dict[str, tuple[int, tuple[str, ...]]]


def planned() -> dict[str, Runs]:
    """Picture: its runs by name, each with its number of workers and options."""
    return {
        "one": {
            f"cnn-{name}": (4, (*CNN, "--epochs", "1", "--algorithm", name)) for name in FIVE
        },
        "accuracy": {
            f"digits-{name}": (4, (*DIGITS, "--algorithm", name)) for name in FIVE
        },
        "speedup": {
            f"sleep-{name}-{n}": (n, (*SLEEP, "--algorithm", name))
            for name in ("aladdin", "bsp") for n in (1, 2, 4)
        },
        "heterogeneity": {
            f"slow-{name}-{factor}": (
                4, (*DIGITS, "--algorithm", name, "--slow-worker", f"3:{factor}")
            )
            for name in ("aladdin", "bsp", "ad-psgd") for factor in (1, 10)
        },
        "period": {
            f"period-{p}": (4, (*DIGITS, "--period", str(p))) for p in (1, 2, 4, 8, 16)
        },
        "ablation": {
            "full": (4, DIGITS), "no-replies": (4, (*DIGITS, "--no-replies")),
            "no-lag": (4, (*DIGITS, "--no-lag-compensation")),
            "gradients": (4, (*DIGITS, "--push", "gradient")),
        },
    }  # fmt: skip


def make(runs: Runs, base: Path) -> list[Path]:
    """Run what is not there yet."""
    folders = []
    for name, (workers, options) in runs.items():
        folder = base / name
        folders.append(folder)
        if folder.exists():
            continue
        algorithm = options[options.index("--algorithm") + 1] if "--algorithm" in options else ""
        served = algorithm in ("", *SERVED)
        click.echo(f"{name} …", err=True)
        argv = [sys.executable, "-m", "aladdin_mpi", "train", *options, "--progress", "off",
                "--out", str(folder)]  # fmt: skip
        mpirun(workers + served, argv, timeout=600)
    return folders


@click.command(help=__doc__)
@click.option("--out", type=click.Path(path_type=Path), default=Path("docs/gallery"))
@click.option("--runs", type=click.Path(path_type=Path), default=Path("runs/gallery"))
def main(out: Path, runs: Path) -> None:
    from aladdin_mpi.analysis import figures, load_run, metrics
    from aladdin_mpi.analysis.report import page, screen

    out.mkdir(parents=True, exist_ok=True)
    plan = planned()
    loaded = {
        picture: [load_run(folder) for folder in make(found, runs)]
        for picture, found in plan.items()
    }
    drawn = {
        "time_split": figures.time_split(loaded["one"]),
        "communication": figures.communication(loaded["one"]),
        "staleness": figures.staleness(loaded["one"][:4]),
        "accuracy": figures.accuracy(loaded["accuracy"]),
        "speedup": figures.speedup(loaded["speedup"]),
        "heterogeneity": figures.heterogeneity(loaded["heterogeneity"]),
        "period": figures.period(loaded["period"]),
        "ablation": figures.ablation(loaded["ablation"]),
    }
    drawn["speedup"].axes[0].set_title("emulated computing, 20 ms", fontsize=10)
    for name, figure in drawn.items():
        figure.savefig(out / f"{name}.svg", bbox_inches="tight", metadata={"Date": None})
    with (out / "report.txt").open("w", encoding="utf-8") as file:
        Console(file=file, width=80).print(screen(loaded["one"][0]))
    (out / "report.html").write_text(page(loaded["one"][0]), encoding="utf-8")
    click.echo("| run | sum of the parts over the step | other |")
    click.echo("|---|---|---|")
    for run in loaded["one"]:
        table = metrics.split(run)
        ratio = table[metrics.PARTS].sum(axis=1) / table["step"]
        click.echo(f"| {run.algorithm} | {ratio.min():.4f} to {ratio.max():.4f} | "
                   f"{metrics.shares(run)['other']:.2%} |")  # fmt: skip


if __name__ == "__main__":
    main()
