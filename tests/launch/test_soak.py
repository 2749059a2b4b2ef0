"""100,000 small messages from three origins with random pauses: nothing lost, nothing twice."""

import json
import sys
from pathlib import Path

import pytest
from launching import mpirun

SCRIPTS = Path(__file__).parent / "scripts"
TESTS = Path(__file__).parents[1]
MESSAGES = 100_000
LIMIT_S = 240


@pytest.mark.timeout(LIMIT_S + 20)
def test_the_sum_of_all_messages_is_exact() -> None:
    argv = [sys.executable, "-m", "mpi4py", SCRIPTS / "soak.py", str(MESSAGES)]
    run = mpirun(4, argv, timeout=LIMIT_S, env={"PYTHONPATH": str(TESTS)})
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["messages"] == MESSAGES
    assert found["iterations_merged"] == found["iterations_made"] >= MESSAGES
    assert found["exact"] and found["sum"] > MESSAGES
