"""``kill -9`` of all ranks: what was logged more than a second ago is there."""

from pathlib import Path

import pytest
from killing import kill_one_run

pytestmark = pytest.mark.timeout(240)


def test_logs_survive_a_kill(tmp_path: Path) -> None:
    kill_one_run(tmp_path / "run", after_s=1.3)
