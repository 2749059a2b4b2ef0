"""Build Horovod for the MPI of a virtual environment, install it there and try it out.

Needs only the standard library here, and a C++ compiler and ``make`` on the machine. The wheel is
kept in a cache, one for each Python, torch and MPI; a second call finds a stamp and changes
nothing.

    python .ci/horovod_build.py --mpi mpich
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from environment import ROOT, WHEELS_ONLY, SetupError, pip_environment, run, say

VERSION = "0.28.1"
CMAKE = (3, 21)
"""The first CMake that takes its toolchain file from the environment."""
MAX_JOBS = 4
"""A compiler takes up to 1 GB for a file that includes torch."""
TOOLCHAIN = ROOT / ".ci" / "horovod-toolchain.cmake"
CACHE = ROOT / ".cache" / "horovod"
STAMP = "horovod-stamp.json"
LACKING = 3
"""Exit status when this machine lacks something for the build."""
CHECK_LIMIT_S = 120

SETTINGS = {
    "HOROVOD_WITH_PYTORCH": "1",
    "HOROVOD_WITH_MPI": "1",
    "HOROVOD_CPU_OPERATIONS": "MPI",
    "HOROVOD_WITHOUT_GLOO": "1",
    "HOROVOD_WITHOUT_NVTX": "1",
    "HOROVOD_WITHOUT_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
}
# Horovod imports distutils, which Python 3.12 and later have from setuptools only.
REQUIREMENTS = ("cffi", "cloudpickle", "packaging", "psutil", "pyyaml", "setuptools")
BUILD_REQUIREMENTS = ("wheel",)

# What could lead Horovod's build to another MPI, or to libraries that are not wanted.
MISLEADING = ("MPI_HOME", "CCL_ROOT", "CMAKE_GENERATOR", "MAKELEVEL", "MFLAGS", "PYTHONHOME")

PROBE = """\
import importlib.metadata, json, sysconfig
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
import torch
try:
    horovod = importlib.metadata.version("horovod")
except importlib.metadata.PackageNotFoundError:
    horovod = ""
vendor, version = MPI.get_vendor()
print(json.dumps([sysconfig.get_config_var("SOABI"), torch.__version__, vendor,
                  ".".join(map(str, version)), horovod]))
"""

IMPORT = """\
import horovod.torch as hvd
if not hasattr(hvd, "init"):
    raise ImportError("its extension for torch was not built")
"""

# Rank 0 stays outside, and the other two are numbered backwards.
ALLREDUCE = """\
import torch
from mpi4py import MPI
import horovod.torch as hvd
world = MPI.COMM_WORLD
part = world.Split(int(world.rank > 0), -world.rank)
if world.rank > 0:
    hvd.init(comm=part)
    place = hvd.rank(), hvd.size()
    total = hvd.allreduce(torch.full((1000,), float(world.rank)), op=hvd.Sum)
    if place != (2 - world.rank, 2) or not bool((total == 3).all()):
        raise RuntimeError(f"rank and size {place}, sum {total[0]:g} where 3 is right")
    hvd.shutdown()
world.Barrier()
"""

LAUNCH = f"""\
import sys
import launching
try:
    launching.mpirun(3, [sys.executable, "-m", "mpi4py", sys.argv[1]], timeout={CHECK_LIMIT_S})
except launching.RunFailed as failure:
    sys.exit(str(failure))
"""


class Lacking(SetupError):
    """What this machine lacks for building Horovod."""


class Facts(NamedTuple):
    """What an environment holds; ``horovod`` is empty where there is none."""

    abi: str
    torch: str
    mpi: str
    mpi_version: str
    horovod: str


def family(vendor: str) -> str:
    """Return ``mpich`` or ``openmpi`` for what mpi4py calls them; other names as they are."""
    return {"MPICH": "mpich", "Open MPI": "openmpi"}.get(vendor, vendor)


def recipe() -> str:
    """Return a digest of how Horovod is built."""
    settings = json.dumps(SETTINGS, sort_keys=True).encode()
    return hashlib.sha256(settings + TOOLCHAIN.read_bytes()).hexdigest()[:8]


def cache_key(facts: Facts, digest: str) -> str:
    """Return the name of the folder for the wheel that fits an environment."""
    parts = (VERSION, facts.abi, f"torch{facts.torch}", facts.mpi + facts.mpi_version, digest)
    return re.sub(r"[^\w.+-]", "_", "-".join(parts))


def last_line(text: str) -> str:
    """Return the last line of a text that is not empty."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def cmake_version(text: str) -> tuple[int, int]:
    """Return the version in what ``cmake --version`` prints; (0, 0) if there is none."""
    found = re.search(r"cmake version (\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def need_tools(env: Mapping[str, str]) -> None:
    """Go on only if there is a C++ compiler and ``make``."""
    path = env.get("PATH")
    named = shlex.split(env.get("CXX", ""))[:1]
    compilers = named or ["c++", "g++", "clang++"]
    if not any(shutil.which(name, path=path) for name in compilers):
        what = f"CXX={named[0]} is not there" if named else "no C++ compiler"
        raise Lacking(f"{what} (apt-get install g++)")
    if shutil.which("make", path=path) is None:
        raise Lacking("no make (apt-get install make)")


def build_environment(base: Mapping[str, str], place: Path, jobs: int) -> dict[str, str]:
    """Return the variables for the build: as if the environment were activated."""
    env = {
        key: value
        for key, value in base.items()
        if key not in MISLEADING and not key.startswith("HOROVOD_")
    }
    env["PATH"] = os.pathsep.join([str(place / "bin"), env.get("PATH", os.defpath)])
    env["CMAKE_TOOLCHAIN_FILE"] = str(TOOLCHAIN)
    env["MAKEFLAGS"] = f"-j{jobs}"
    return env | SETTINGS


class Horovod:
    """Horovod in one virtual environment.

    Parameters
    ----------
    place : Path
        The environment's folder.
    mpi : str
        The MPI that it should hold, ``mpich`` or ``openmpi``.
    cache : Path
        Folder for the source and the wheels.
    """

    def __init__(self, place: Path, mpi: str, cache: Path) -> None:
        self.place = place
        self.python = place / "bin" / "python"
        self.stamp = place / STAMP
        self.mpi = mpi
        self.cache = cache
        jobs = min(len(os.sched_getaffinity(0)), MAX_JOBS)
        self.env = build_environment(pip_environment(), place, jobs)

    def make(self) -> None:
        """Build, install and try it, or find that nothing is to be done."""
        start = time.monotonic()
        facts = self.facts()
        key = cache_key(facts, recipe())
        if facts.horovod == VERSION and self.stamped() == key:
            say(f"horovod: {self.place.name} is up to date")
            return
        self.stamp.unlink(missing_ok=True)
        wheel = self.cached(key) or self.build(key, facts)
        say(f"horovod: installing {wheel.name}")
        self.pip("install", "-q", WHEELS_ONLY, *REQUIREMENTS)
        self.pip("install", "-q", "--no-index", "--no-deps", "--force-reinstall", str(wheel))
        try:
            self.check()
        except SetupError:
            shutil.rmtree(wheel.parent)  # the next call builds it anew
            raise
        self.stamp.write_text(json.dumps({"key": key}, indent=1), encoding="utf-8")
        say(f"horovod: {self.place.name} ready after {time.monotonic() - start:.0f} s")

    def facts(self) -> Facts:
        """Return what the environment holds; it must be the MPI that is asked for."""
        if not self.python.exists():
            raise SetupError(f"there is no environment {self.place.name}: make horovod makes it")
        probe = self.child("-c", PROBE)
        if probe.returncode:
            raise SetupError(f"{self.place.name} lacks torch or MPI: {last_line(probe.stderr)}")
        abi, torch, vendor, version, horovod = json.loads(last_line(probe.stdout))
        facts = Facts(abi, torch, family(vendor), version, horovod)
        if facts.mpi != self.mpi:
            raise SetupError(f"{self.place.name} holds {facts.mpi} and not {self.mpi}")
        return facts

    def stamped(self) -> str:
        """Return the key of the wheel that was installed and found to work, if any."""
        try:
            return str(json.loads(self.stamp.read_text(encoding="utf-8"))["key"])
        except (OSError, ValueError, KeyError, TypeError):
            return ""

    def cached(self, key: str) -> Path | None:
        """Return the wheel in the cache, if there is one."""
        return next(iter((self.cache / key).glob("horovod-*.whl")), None)

    def build(self, key: str, facts: Facts) -> Path:
        """Build the wheel and return its place in the cache."""
        need_tools(self.env)
        if shutil.which("mpicxx", path=self.env["PATH"]) is None:
            raise Lacking(f"no mpicxx of {facts.mpi} {facts.mpi_version}")
        self.pip("install", "-q", WHEELS_ONLY, *REQUIREMENTS, *BUILD_REQUIREMENTS)
        self.need_cmake()
        source = self.source()
        say(
            f"horovod: building {VERSION} for {facts.mpi} {facts.mpi_version} and "
            f"torch {facts.torch} ({self.env['MAKEFLAGS']}); this takes some minutes"
        )
        with tempfile.TemporaryDirectory(prefix="build-", dir=self.cache) as temporary:
            folder = Path(temporary)
            options = ["--no-deps", "--no-build-isolation", "--no-cache-dir"]
            try:
                self.pip("wheel", "-q", *options, "-w", str(folder / key), str(source))
            except SetupError as error:
                raise SetupError("the build failed; its output is above") from error
            shutil.rmtree(self.cache / key, ignore_errors=True)
            (folder / key).replace(self.cache / key)
        wheel = self.cached(key)
        if wheel is None:
            raise SetupError("pip wheel left no wheel")
        return wheel

    def need_cmake(self) -> None:
        """Install a CMake in the environment unless there is one that is recent enough."""
        try:
            shown = subprocess.run(
                ["cmake", "--version"], env=self.env, capture_output=True, text=True
            ).stdout
        except OSError:
            shown = ""
        if cmake_version(shown) < CMAKE:
            wanted = ".".join(map(str, CMAKE))
            try:
                self.pip("install", "-q", WHEELS_ONLY, f"cmake>={wanted}")
            except SetupError as error:
                raise Lacking(
                    f"no CMake {wanted} or later, and pip installs none (apt-get install cmake)"
                ) from error

    def source(self) -> Path:
        """Return Horovod's source, from the cache or downloaded."""
        archive = self.cache / f"horovod-{VERSION}.tar.gz"
        if archive.exists():
            return archive
        self.cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="source-", dir=self.cache) as temporary:
            options = ["--no-deps", "--no-build-isolation", "--no-binary", "horovod"]
            try:
                self.pip("download", "-q", *options, "-d", temporary, f"horovod=={VERSION}")
                (Path(temporary) / archive.name).replace(archive)
            except (SetupError, OSError) as error:
                raise Lacking(f"pip finds no source of Horovod {VERSION}") from error
        return archive

    def check(self) -> None:
        """Load Horovod in a fresh process, and add up a tensor over a part of a job's ranks."""
        loaded = self.child("-c", IMPORT)
        if loaded.returncode:
            raise SetupError(f"Horovod cannot be loaded: {last_line(loaded.stderr)}")
        with tempfile.TemporaryDirectory(prefix="horovod-") as temporary:
            program = Path(temporary) / "allreduce.py"
            program.write_text(ALLREDUCE, encoding="utf-8")
            job = self.child("-c", LAUNCH, str(program))
        if job.returncode:
            print(job.stderr, file=sys.stderr, flush=True)
            raise SetupError(f"a job with Horovod fails with {self.mpi}; its output is above")

    def child(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the environment's Python."""
        env = {key: value for key, value in os.environ.items() if key != "PYTHONHOME"}
        paths = [str(ROOT / "tests"), env.get("PYTHONPATH", "")]
        env["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        env.update(ALADDIN_MPI=self.mpi, OMP_NUM_THREADS="1")
        return subprocess.run(
            [str(self.python), *arguments],
            env=env,
            cwd=self.place,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )

    def pip(self, *arguments: str) -> None:
        """Run the environment's pip."""
        run([self.python, "-m", "pip", *arguments], self.env)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments, make Horovod, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--mpi", choices=["mpich", "openmpi"], default="mpich")
    parser.add_argument("--env", type=Path, help="the environment (default: .venv-<mpi>)")
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder for source and wheels")
    parser.add_argument("--reason-file", type=Path, help="file for what this machine lacks")
    options = parser.parse_args(argv)
    place: Path = options.env or ROOT / f".venv-{options.mpi}"
    try:
        Horovod(place.absolute(), options.mpi, options.cache.absolute()).make()
    except SetupError as error:
        print(f"horovod: {error}", file=sys.stderr)
        if not isinstance(error, Lacking):
            return 1
        if options.reason_file:
            options.reason_file.write_text(str(error), encoding="utf-8")
        return LACKING
    except KeyboardInterrupt:
        print("horovod: stopped", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
