"""Run every stage of the tests, each under a time limit, and say what was left out and why.

Needs only the standard library; ``make test`` calls it. Horovod is built for the first MPI, if this
machine can build it (a build takes minutes; ``make horovod MPI=...`` makes the other). Tests marked
``first_mpi`` run with that one only. The stages, and what they may take on two cores, in minutes,
of less than 60 in all (``LIMITS_S`` is where something must hang):

    lint      1    ruff check, ruff format --check, mypy
    unit      9    tests/unit, no launcher, on several cores
    launch    15   tests/launch: tests that start mpiexec themselves, with each MPI (the second: 6)
    mpi       2    tests/mpi on 2, 3 and 5 ranks, with each MPI
    cluster   2    tests/cluster on virtual hosts, with each MPI; needs root and iproute2
    slurm     5    tests/slurm on a Slurm of virtual hosts, with each MPI; needs that and Slurm
    bench     5    make bench-quick: a few experiments on virtual hosts, with the first MPI
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import launching

ROOT = Path(__file__).resolve().parent.parent
STAGES = ("lint", "unit", "launch", "mpi", "cluster", "slurm", "bench")
WITH_MPI = STAGES[2:]
RANKS = (2, 3, 5)
LIMITS_S = {
    "environment": 900,
    "horovod": 900,
    "lint": 300,
    "unit": 1200,
    "launch": 1500,
    "mpi": 300,
    "cluster": 900,
    "slurm": 900,
    "bench": 600,
}
SLURM_PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged")
BUDGET_S = 4800
PREFIX = "left out: "
NO_GPU = "no GPU"
"""What a reason begins with that counts as no failure, whatever is required: it is hardware."""
LACKING = 3
"""Exit status of .ci/horovod_build.py when this machine lacks something for the build."""


@dataclass
class Result:
    """What a stage came to.

    ``failures`` and ``left_out`` hold what it was and why.
    """

    stage: str
    mpi: str = ""
    passed: int = 0
    failures: list[tuple[str, str]] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)
    seconds: float = 0.0


def read_junit(path: Path, result: Result) -> None:
    """Add the tests of a pytest report in JUnit's form to a result."""
    failed: dict[str, str] = {}
    names: dict[str, None] = {}
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        # A test that fails once more in its teardown has two entries.
        name = f"{case.get('file') or case.get('classname')}::{case.get('name')}"
        names[name] = None
        for child in case:
            if child.tag in ("failure", "error"):
                failed.setdefault(name, first_line(child.get("message") or child.tag))
            elif child.tag == "skipped":
                reason = child.get("message") or "no reason given"
                result.left_out.append((name, reason.removeprefix(PREFIX)))
    skipped = {name for name, _ in result.left_out}
    result.passed += sum(name not in failed and name not in skipped for name in names)
    result.failures += failed.items()


def first_line(text: str, width: int = 100) -> str:
    """Return the first line of a text that is not empty, cut to a width."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= width else line[: width - 1] + "…"


def grouped(entries: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Join the tests of one file that were left out for the same reason."""
    groups: dict[tuple[str, str], list[str]] = {}
    for what, why in entries:
        groups.setdefault((what.split("::")[0], why), []).append(what)
    return [
        (names[0] if len(names) == 1 else f"{file} ({len(names)} tests)", why)
        for (file, why), names in groups.items()
    ]


def summary(results: Sequence[Result], require_all: bool) -> tuple[str, bool]:
    """Return the closing text, and whether everything went well."""
    rows = [("stage", "MPI", "passed", "failed", "left out", "seconds")]
    for r in results:
        counts = (str(r.passed), str(len(r.failures)), str(len(r.left_out)), f"{r.seconds:.0f}")
        rows.append((r.stage, r.mpi or "-", *counts))
    widths = [max(len(row[column]) for row in rows) for column in range(6)]
    lines = [""]
    for row in rows:
        cells = [row[i].ljust(widths[i]) if i < 2 else row[i].rjust(widths[i]) for i in range(6)]
        lines.append("  ".join(cells))
    failures = [(label(r), what, why) for r in results for what, why in r.failures]
    left_out = [(label(r), what, why) for r in results for what, why in grouped(r.left_out)]
    if failures:
        lines += ["", "failed:"]
        lines += [f"  {stage}: {what}: {why}" for stage, what, why in failures]
    missing = any(not why.startswith(NO_GPU) for _, _, why in left_out)
    if left_out:
        lines += ["", "left out, and why:"]
        lines += [f"  {stage}: {what}: {why}" for stage, what, why in left_out]
        if require_all and missing:
            lines += ["With REQUIRE=all, nothing may be left out: this run has failed."]
    passed = sum(r.passed for r in results)
    skipped = sum(len(r.left_out) for r in results)
    lines += ["", f"{passed} passed, {len(failures)} failed, {skipped} skipped"]
    well = not failures and passed > 0 and not (require_all and missing)
    return "\n".join(lines), well


def label(result: Result) -> str:
    """Return a stage's name with its MPI."""
    return f"{result.stage} ({result.mpi})" if result.mpi else result.stage


class Suite:
    """The stages that were chosen, run one after the other."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.end = time.monotonic() + options.budget
        self.environments: dict[str, Path] = dict(options.env)
        self.results: list[Result] = []

    def run(self) -> None:
        """Run the stages; results are kept as they come, for a summary after an interrupt."""
        chosen: list[str] = self.options.only
        mpis: list[str] = self.options.mpis
        with_mpi = [stage for stage in chosen if stage in WITH_MPI]
        for mpi in mpis if with_mpi else mpis[:1]:
            if mpi not in self.environments:
                self.make_environment(mpi)
                if with_mpi and mpi == mpis[0] and mpi in self.environments:
                    self.make_horovod(mpi)
        first = mpis[0]
        if "lint" in chosen:
            self.lint(first)
        if "unit" in chosen:
            self.pytest("unit", first, "unit", show_mpi=False)
        for mpi in mpis:
            if "launch" in chosen:
                self.pytest("launch", mpi, "launch")
            if "mpi" in chosen:
                for n in RANKS:
                    self.pytest("mpi", mpi, f"mpi -n {n}", ranks=n)
            if "cluster" in chosen:
                self.cluster(mpi)
            if "slurm" in chosen:
                self.slurm(mpi)
        if "bench" in chosen:
            self.bench(first)

    def make_environment(self, mpi: str) -> None:
        """Make the virtual environment of an MPI."""
        result = self.begin("environment", mpi)
        argv = [sys.executable, str(ROOT / ".ci" / "environment.py"), "--mpi", mpi]
        argv += ["--extras", "dev", *self.options.environment_options]
        status, why = self.command("environment", argv, dict(os.environ))
        if status == 0:
            self.environments[mpi] = ROOT / f".venv-{mpi}"
        else:
            result.failures.append((f".venv-{mpi}", why))
        self.finish(result)

    def make_horovod(self, mpi: str) -> None:
        """Build Horovod and install it in an environment, unless this machine lacks a compiler."""
        result = self.begin("horovod", mpi)
        with tempfile.TemporaryDirectory(prefix="suite-") as temporary:
            reason = Path(temporary) / "reason"
            argv = [sys.executable, str(ROOT / ".ci" / "horovod_build.py"), "--mpi", mpi]
            argv += ["--env", str(self.environments[mpi]), "--reason-file", str(reason)]
            status, why = self.command("horovod", argv, dict(os.environ))
            if status == LACKING and reason.exists():
                result.left_out.append(("Horovod", first_line(reason.read_text(encoding="utf-8"))))
            elif status:
                result.failures.append(("make horovod", why))
        self.finish(result)

    def lint(self, mpi: str) -> None:
        """Run the static checks."""
        result = self.begin("lint")
        checks = (["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"])
        for tool, *arguments in checks:
            what = " ".join([tool, *arguments])
            if mpi not in self.environments:
                result.left_out.append((what, "its environment could not be made"))
                continue
            argv = [str(self.python(mpi)), "-m", tool, *arguments]
            print("+", what, flush=True)
            status, why = self.command("lint", argv, self.variables(mpi))
            if status:
                result.failures.append((what, why))
            else:
                result.passed += 1
        self.finish(result)

    def cluster(self, mpi: str) -> None:
        """Run the tests on virtual hosts, where that is possible at all."""
        lacking = self.no_hosts()
        if lacking:
            self.leave_out("cluster", mpi, "tests/cluster", lacking)
        else:
            self.pytest("cluster", mpi, "cluster")

    def no_hosts(self) -> str:
        """Why there can be no virtual hosts here; empty where there can."""
        if os.geteuid() != 0:
            return "needs root"
        return "" if shutil.which("ip") else "needs the command ip (iproute2)"

    def bench(self, mpi: str) -> None:
        """Run a few experiments on virtual hosts, where that is possible at all."""
        what = "bench/cluster/experiments.py quick"
        lacking = self.no_hosts()
        if mpi not in self.environments:
            lacking = "its environment could not be made"
        if lacking:
            self.leave_out("bench", mpi, what, lacking)
        else:
            result = self.begin("bench", mpi)
            script = ROOT / "bench" / "cluster" / "experiments.py"
            with tempfile.TemporaryDirectory(prefix="suite-") as folder:
                argv = [str(self.python(mpi)), str(script), "quick", "--out", folder]
                status, why = self.command("bench", argv, self.variables(mpi))
            if status:
                result.failures.append((what, why))
            else:
                result.passed += 1
            self.finish(result)

    def slurm(self, mpi: str) -> None:
        """Run the tests on a Slurm, where that is possible at all."""
        path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
        missing = [name for name in ("ip", *SLURM_PROGRAMS) if not shutil.which(name, path=path)]
        if os.geteuid() != 0:
            self.leave_out("slurm", mpi, "tests/slurm", "needs root")
        elif missing:
            self.leave_out("slurm", mpi, "tests/slurm", f"needs {', '.join(missing)}")
        else:
            self.pytest("slurm", mpi, "slurm")

    def pytest(
        self, stage: str, mpi: str, name: str, ranks: int = 0, show_mpi: bool = True
    ) -> None:
        """Run the tests of a folder, under mpiexec if a number of ranks is given."""
        shown = mpi if show_mpi else ""
        folder: Path = self.options.tests / stage
        what = f"tests/{stage}"
        if mpi not in self.environments:
            self.leave_out(name, shown, what, "its environment could not be made")
            return
        if not list(folder.rglob("test_*.py")):
            self.leave_out(name, shown, what, "holds no tests")
            return
        result = self.begin(name, shown)
        with tempfile.TemporaryDirectory(prefix="suite-") as temporary:
            report = Path(temporary) / "junit.xml"
            python = str(self.python(mpi))
            argv = [python, "-m", "pytest", str(folder), "-q", f"--junitxml={report}"]
            argv += ["-o", "junit_family=xunit1", "-p", "no:cacheprovider"]
            if stage == "unit":
                argv += ["-n", str(min(4, len(os.sched_getaffinity(0))))]
            if mpi != self.options.mpis[0]:
                argv += ["-m", "not first_mpi"]
            if ranks:
                argv.append("--color=no")  # Open MPI gives its ranks a terminal
                argv = [python, str(ROOT / "tests" / "launching.py"), "-n", str(ranks), *argv]
            status, why = self.command(stage, argv, self.variables(mpi))
            if report.exists():
                read_junit(report, result)
                if status and not result.failures:
                    result.failures.append((what, why))
            else:
                result.failures.append((what, f"ended without a report, {why}"))
        self.finish(result)

    def python(self, mpi: str) -> Path:
        """Return the interpreter of an environment."""
        return self.environments[mpi] / "bin" / "python"

    def variables(self, mpi: str) -> dict[str, str]:
        """Return the environment variables of a stage: as if its environment were activated."""
        place = self.environments[mpi]
        env = {k: v for k, v in os.environ.items() if k not in ("PYTHONHOME", "MAKEFLAGS")}
        env["PATH"] = os.pathsep.join([str(place / "bin"), env.get("PATH", os.defpath)])
        env["VIRTUAL_ENV"] = str(place)
        env["ALADDIN_MPI"] = mpi
        if self.options.require == "all":
            env["ALADDIN_REQUIRE"] = "all"
        return env

    def command(self, stage: str, argv: list[str], env: dict[str, str]) -> tuple[int, str]:
        """Run a command under the stage's limit; return its status and that in words."""
        limit = min(LIMITS_S[stage] * self.options.slower, self.end - time.monotonic())
        if limit <= 0:
            return 1, f"no time is left of {self.options.budget:.0f} s for all stages"
        with launching.Started(argv, env=env, cwd=ROOT) as started:
            status = started.wait(limit)
        if status is None:
            return 1, f"stopped at its time limit of {limit:.0f} s"
        return status, f"exit status {status}"

    def begin(self, stage: str, mpi: str = "") -> Result:
        """Announce a stage and start its time."""
        result = Result(stage, mpi, seconds=-time.monotonic())
        self.results.append(result)
        print(f"\n=== {label(result)}", flush=True)
        return result

    def finish(self, result: Result) -> None:
        """Stop the time of a stage."""
        result.seconds += time.monotonic()

    def leave_out(self, stage: str, mpi: str, what: str, why: str) -> None:
        """Note a stage that was left out as a whole."""
        self.results.append(Result(stage, mpi, left_out=[(what, why)]))
        print(f"\n=== {label(self.results[-1])}: left out: {why}", flush=True)


def names(allowed: Sequence[str]) -> type:
    """Return an argparse type for a list of names, with commas or blanks between them."""

    class Names(list[str]):
        def __init__(self, text: str) -> None:
            super().__init__(text.replace(",", " ").split() or allowed)
            for name in self:
                if name not in allowed:
                    raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(allowed)}")

    return Names


def given_environment(text: str) -> tuple[str, Path]:
    """Parse ``mpich=folder``."""
    mpi, _, folder = text.partition("=")
    if mpi not in launching.FAMILIES or not (Path(folder) / "bin" / "python").exists():
        raise argparse.ArgumentTypeError(f"{text!r}: expected mpich=FOLDER or openmpi=FOLDER")
    return mpi, Path(folder).absolute()


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the arguments ask for, print the summary and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--only", type=names(STAGES), default=list(STAGES), help="stages to run")
    mpis = list(launching.FAMILIES)
    parser.add_argument("--mpis", type=names(mpis), default=mpis, help="MPIs to run with")
    parser.add_argument("--require", choices=["", "all"], default="", help="all: no left-outs")
    parser.add_argument("--torch", default="", help="what pip installs as torch")
    parser.add_argument("--torch-index", default="", help="index-url for torch alone")
    parser.add_argument("--tests", type=Path, default=ROOT / "tests", help="folder of the tests")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="limit of all stages [s]")
    parser.add_argument("--slower", type=float, default=1.0, help="factor on the stages' limits")
    parser.add_argument(
        "--env", type=given_environment, action="append", default=[], metavar="MPI=FOLDER",
        help="use this environment, with everything in it, instead of making one",
    )  # fmt: skip
    options = parser.parse_args(argv)
    options.environment_options = []
    for name in ("torch", "torch_index"):
        if value := getattr(options, name):
            options.environment_options += [f"--{name.replace('_', '-')}", value]
    signal.signal(signal.SIGTERM, interrupt)
    suite = Suite(options)
    stopped = False
    start = time.monotonic()
    try:
        suite.run()
    except KeyboardInterrupt:
        stopped = True
        last = suite.results[-1] if suite.results else suite.begin("start")
        last.failures.append((label(last), "interrupted"))
        if last.seconds < 0:
            suite.finish(last)
    text, well = summary(suite.results, options.require == "all")
    print(f"\nall stages: {time.monotonic() - start:.0f} s\n{text}", flush=True)
    return 130 if stopped else int(not well)


def interrupt(number: int, frame: object) -> None:
    """Treat SIGTERM like Ctrl-C, so that what was started is ended."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
