"""A run on one screen, or as a page with pictures."""

from __future__ import annotations

import html
import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure
from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from aladdin_mpi.analysis import figures, metrics
from aladdin_mpi.analysis.load import Run
from aladdin_mpi.record import schema

__all__ = ["page", "screen", "write_csv"]


@dataclass(frozen=True)
class _Section:
    """A heading, a table of texts, and lines below it; the first row is the table's head."""

    title: str
    rows: list[tuple[str, ...]]
    lines: list[str]


def _sections(run: Run, one_worker: Run | None) -> Iterator[_Section]:
    """What a report says, for the terminal and the page alike."""
    view = metrics.overview(run, one_worker)
    yield _Section("What ran where", _what(run), _where(run))
    yield _Section("Result", _result(run, view), [])
    if len(run.steps):
        yield _split(run)
    if len(run.sends) or len(run.merges):
        yield _Section("Servers and links", *_links(run))
    lines = [metrics.slowest(run)[1]] if len(run.steps) else []
    yield _Section("The slowest", [], lines)
    wrong = metrics.problems(run)
    yield _Section("Anything wrong", [], wrong or ["nothing was noted"])


def _what(run: Run) -> list[tuple[str, ...]]:
    config = run.config
    own = config.get("algorithm_options") or {}
    shown = ", ".join(f"{name} {value}" for name, value in own.items() if value is not None)
    rows: list[tuple[str, ...]] = [
        ("algorithm", f"{run.algorithm}  ({shown})" if shown else run.algorithm)
    ]
    if "model" in config:
        trained = f"{config['model']} on {config.get('dataset')}, batches of {config['batch_size']}"
        rate = f"{config['optimizer']}, η {config['lr']:g}, momentum {config['momentum']:g}"
        rows.append(("training", f"{trained}, {config['epochs']:g} epochs; {rate}"))
    if config.get("emulate_compute"):
        rows.append(("compute", f"EMULATED: a sleep of {config['emulate_compute']:g} ms"))
    if slow := config.get("slow_worker"):
        rows.append(("slow on purpose", ", ".join(f"worker {i} ×{f:g}" for i, f in slow.items())))
    versions = run.versions
    if versions:
        mpi = " ".join(versions.get("mpi", "?").splitlines()[0].replace("Version:", "").split())
        rows.append(("software", f"aladdin_mpi {versions.get('aladdin_mpi')}, torch "
                                 f"{versions.get('torch')}, {mpi}"))  # fmt: skip
    return [("", ""), *rows]


def _where(run: Run) -> list[str]:
    hosts: dict[str, list[str]] = {}
    for log in run.latest:
        who = f"worker {log.worker}" if log.worker >= 0 else str(log.attributes["role"])
        if log.state != "ended":
            who += f" ({log.state})"
        hosts.setdefault(str(log.attributes["host"]), []).append(who)
    return [f"{host}: {_joined(who)}" for host, who in hosts.items()]


def _joined(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 12 else f"{', '.join(names[:10])}, … ({len(names)})"


def _result(run: Run, view: metrics.Overview) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("", "")]
    if math.isnan(view.accuracy):
        rows.append(("test accuracy", "not evaluated"))
    else:
        rows.append(("test accuracy", f"{view.accuracy:.4f} (loss {view.loss:.4f})"))
    rows.append((
        "training",
        f"{view.duration_s:.1f} s, {view.iterations} iterations, {view.samples} samples on "
        f"{view.num_workers} worker(s)",
    ))  # fmt: skip
    if len(run.parts) > 1:
        found = metrics.spans(run)
        gaps = (found["begin"].to_numpy()[1:] - found["end"].to_numpy()[:-1]).tolist()
        text = ", ".join(f"{gap:.0f} s" for gap in gaps)
        rows.append(("started", f"{len(run.parts)} times; between last and first step: {text}"))
    rate = f"{view.samples_per_s:.0f} samples/s"
    if not math.isnan(view.speedup):
        rate += f", {view.speedup:.2f} times one worker's"
    rows.append(("throughput", rate))
    if view.pushes:
        rows.append((
            "pushes",
            f"{view.pushes}; {view.iterations_per_push:.2f} iterations each, {view.coalesced:.1%} "
            "of the iterations coalesced",
        ))  # fmt: skip
    if not math.isnan(view.staleness_mean):
        rows.append((
            "staleness",
            f"{view.staleness_mean:.1f} merges on the mean, 95 % at most {view.staleness_95:.0f}",
        ))  # fmt: skip
    return rows


def _split(run: Run) -> _Section:
    table = metrics.split(run)
    rows: list[tuple[str, ...]] = [("worker", "step", *metrics.PARTS, "samples/s")]
    rates = metrics.throughput(run)
    for worker, row in table.iterrows():
        rows.append((
            str(worker), f"{1e3 * row['step']:.2f}",
            *(f"{1e3 * row[part]:.2f}" for part in metrics.PARTS), f"{rates[worker]:.0f}",
        ))  # fmt: skip
    if len(rows) > 18:
        rows = [*rows[:9], ("…", *[""] * (len(rows[0]) - 1)), *rows[-8:]]
    shares = metrics.shares(run)
    rows.append(("all", "100 %", *(f"{shares[part]:.1%}" for part in metrics.PARTS),
                 f"{rates.sum():.0f}"))  # fmt: skip
    emulated = (run.steps["emulated"] == 1).any()
    lines = (
        ["part of the time was slept: compute or a slow worker was emulated"] if emulated else []
    )
    return _Section("A worker's step, ms", rows, lines)


def _links(run: Run) -> tuple[list[tuple[str, ...]], list[str]]:
    lines = []
    for rank, row in metrics.servers(run).iterrows():
        lines.append(
            f"server, rank {rank}: {row['merges_per_s']:.0f} pushes merged per second "
            f"({row['pushes_per_pass']:.2f} in a pass), {row['MB_in_per_s']:.1f} MB/s in, "
            f"{row['MB_out_per_s']:.1f} MB/s out, busy {row['busy_share']:.0%}, longest gap "
            f"between two polls {1e3 * row['gap_s']:.0f} ms"
        )
    for rank, row in metrics.relays(run).iterrows():
        lines.append(
            f"relay, rank {rank}: {row['messages_per_s']:.0f} messages per second with "
            f"{row['pushes_per_message']:.2f} pushes each, {row['MB_out_per_s']:.1f} MB/s to the "
            f"servers, merging {row['merge_share']:.0%} of the time"
        )
    table = metrics.senders(run)
    rows: list[tuple[str, ...]] = []
    if len(table):
        rows.append(("worker", "sends/s", "MB/s", "in transfer", "queued", "transfer", "ack"))
        for worker, row in table.iloc[:16].iterrows():
            rows.append((
                str(worker), f"{row['sends_per_s']:.1f}", f"{row['MB_per_s']:.1f}",
                f"{row['transfer_share']:.0%}",
                *(_milliseconds(row[name]) for name in ("queue_s", "put_s", "ack_s")),
            ))  # fmt: skip
    return rows, lines


def _milliseconds(seconds: float) -> str:
    return "–" if math.isnan(seconds) else f"{1e3 * seconds:.2f} ms"


def screen(run: Run, one_worker: Run | None = None) -> Group:
    """The report for a terminal (rich)."""
    parts: list[Text | Table | Padding] = [Text(f"Run {run.name}", style="bold")]
    for section in _sections(run, one_worker):
        parts.append(Text(f"\n{section.title}", style="bold"))
        if section.rows:
            parts.append(_rich_table(section.rows))
        parts += [Padding(line, (0, 0, 0, 2)) for line in section.lines]
    return Group(*parts)


def _rich_table(rows: Sequence[tuple[str, ...]]) -> Table:
    head, *body = rows
    numbers = any(head)
    gap = 1 if numbers else 2
    table = Table(box=None, padding=(0, gap, 0, 0), show_header=numbers, header_style="dim")
    table.add_column("  " + head[0], no_wrap=True)
    for name in head[1:]:
        table.add_column(
            name, justify="right" if numbers else "left", no_wrap=numbers, overflow="fold"
        )
    for row in body:
        table.add_row("  " + row[0], *row[1:])
    return table


def pictures(run: Run) -> Iterator[tuple[str, Figure]]:
    """A caption and a figure each, of what the run logged."""
    if len(run.steps):
        yield "Where a worker's step goes", figures.time_split([run])
        yield "How long each worker's steps took", figures.step_times(run)
    if len(metrics.evaluations(run)):
        yield "Test accuracy of the global model", figures.accuracy([run])
    if len(run.arrivals):
        yield "Staleness of the pushes when they were merged", figures.staleness([run])
    if len(run.polls):
        yield "Servers", figures.servers_over_time(run)
    if len(run.spreads):
        yield "Communication, and how far the workers are apart", figures.communication([run])


_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem;
       color: #222; background: #fff; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .15rem .8rem .15rem 0; text-align: left; vertical-align: top; }
table.numbers th, table.numbers td { text-align: right; }
table.numbers th { font-weight: 600; border-bottom: 1px solid #ccc; }
div.wide { overflow-x: auto; }
figure { margin: 1rem 0; } figcaption { font-weight: 600; margin-bottom: .3rem; }
figure svg { max-width: 100%; height: auto; }
pre { background: #f5f5f5; padding: .8rem; overflow-x: auto; }
"""


def page(run: Run, one_worker: Run | None = None) -> str:
    """The report as one HTML page that needs nothing else: pictures are inside, as SVG."""
    title = html.escape(f"Run {run.name}")
    body = [f"<h1>{title}</h1>"]
    for section in _sections(run, one_worker):
        body.append(f"<h2>{html.escape(section.title)}</h2>")
        if section.rows:
            body.append(_html_table(section.rows))
        body += [f"<p>{html.escape(line)}</p>" for line in section.lines]
    for number, (caption, figure) in enumerate(pictures(run)):
        svg = _svg(figure, number)
        body.append(f"<figure><figcaption>{html.escape(caption)}</figcaption>{svg}</figure>")
    texts = [str(log.attributes["config"]) for log in run.latest if log.attributes["config"]]
    if texts:
        body.append(f"<h2>Configuration</h2><pre>{html.escape(texts[0])}</pre>")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{title}</title><style>{_STYLE}</style></head>\n'
        f"<body>\n{chr(10).join(body)}\n</body></html>\n"
    )


def _html_table(rows: Sequence[tuple[str, ...]]) -> str:
    head, *body = rows
    numbers = any(head)
    lines = []
    if numbers:
        lines.append("".join(f"<th>{html.escape(name)}</th>" for name in head))
    lines += ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in body]
    inside = "".join(f"<tr>{line}</tr>\n" for line in lines)
    kind = ' class="numbers"' if numbers else ""
    return f'<div class="wide"><table{kind}>{inside}</table></div>'


_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))


def _svg(figure: Figure, number: int) -> str:
    """The picture's text for inside a page; names within it are this picture's own."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": f"figure {number}", "svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", metadata=_NO_METADATA)
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def write_csv(run: Run, folder: Path) -> list[Path]:
    """One CSV per table that has rows, with the rank as its first column; returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name in schema.TABLES:
        table = run.table(name)
        if len(table):
            path = folder / f"{name}.csv"
            table.reset_index("row", drop=True).to_csv(path)
            written.append(path)
    return written
