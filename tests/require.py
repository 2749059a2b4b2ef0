"""What a test needs beyond Python: where it is missing, the test is left out and says why.

With ``ALADDIN_REQUIRE=all`` in the environment nothing may be left out: the test fails instead.
"""

from __future__ import annotations

import os
import shutil
from typing import NoReturn

import pytest

PREFIX = "left out: "
PACKAGES = {"cc": "gcc", "ip": "iproute2", "sbatch": "slurm-client", "scontrol": "slurm-client"}
"""Debian's package of a program, where its name is another one."""


def left_out(reason: str) -> NoReturn:
    """Skip the running test, or fail it when nothing may be left out."""
    __tracebackhide__ = True
    if os.environ.get("ALADDIN_REQUIRE") == "all":
        pytest.fail(f"{PREFIX}{reason} (ALADDIN_REQUIRE=all)", pytrace=False)
    pytest.skip(PREFIX + reason)


def program(*names: str) -> None:
    """Go on only if all these programs are on the PATH."""
    __tracebackhide__ = True
    for name in names:
        if shutil.which(name) is None:
            left_out(f"no {name} (apt-get install {PACKAGES.get(name, name)})")


def root() -> None:
    """Go on only as root."""
    __tracebackhide__ = True
    if os.geteuid() != 0:
        left_out("needs root")
