"""What the simulator takes from a run's logs."""

from __future__ import annotations

import json
from pathlib import Path

import logs
import numpy as np
import pytest
import yaml
from click.testing import CliRunner, Result

from aladdin_mpi.cli.calibrate import calibrate
from aladdin_mpi.cli.main import main
from aladdin_mpi.errors import ConfigError, RecordError
from aladdin_mpi.simulation.setting import FRAMING_BYTES

pytestmark = pytest.mark.timeout(120)

COMPUTE_S, ACK_S, QUEUE_S, MERGE_S = 0.1, 0.004, 0.001, 0.002
RATE, PAYLOAD = 50e6, 1e6
FRAME = int(PAYLOAD) + FRAMING_BYTES


def write_run(folder: Path, steps: int = 50, slow: bool = False) -> None:
    """A server and two workers, of whose pushes every second pair shares the server's link."""
    config = {
        "algorithm": "aladdin", "algorithm_options": {"period": 8},
        "slow_worker": {1: 3.0} if slow else {},
    }  # fmt: skip
    text = yaml.safe_dump(config)
    i = np.arange(2 * steps)
    served = {
        "merges": logs.rows(
            "merges", 2 * steps, time_s=logs.CLOCK_S + 0.1 * i, channel=0, version=i, count=1,
            merge_s=MERGE_S, bytes=int(PAYLOAD),
        ),
        "arrivals": logs.rows(
            "arrivals", 2 * steps, time_s=logs.CLOCK_S + 0.1 * i, channel=0, worker=i % 2,
            staleness=3, iterations=1,
        ),
    }  # fmt: skip
    logs.write(folder, 0, served, config=text)
    i = np.arange(steps)
    alone_s = FRAME / RATE
    for worker in range(2):
        slowed = slow and worker == 1
        took = (COMPUTE_S + 0.01 * (-1.0) ** i) * (3 if slowed else 1)
        begin = logs.CLOCK_S + 0.2 * i + np.where(i % 2, 0.05 * worker, 0.0)
        tables = {
            "steps": logs.rows(
                "steps", steps, iteration=i, start_s=logs.CLOCK_S + 0.2 * i, channel=0,
                step_s=took + np.where(i < 5, 1.0, 0.0) + 0.05, blocked_s=0.05, compute_s=took,
                samples=32, iterations_in_push=1, coalesced=0, emulated=int(slowed),
            ),
            "sends": logs.rows(
                "sends", steps, sequence=i + 1, channel=0, queued_s=begin, queue_s=QUEUE_S,
                ack_s=ACK_S, put_s=alone_s * np.where(i % 2, 1, 2), bytes=FRAME, iterations=1,
                to=-1,
            ),
        }  # fmt: skip
        logs.write(folder, worker + 1, tables, config=text)


@pytest.mark.parametrize("slow", [False, True])
def test_what_a_log_tells(tmp_path: Path, slow: bool) -> None:
    write_run(tmp_path, slow=slow)
    found = calibrate(tmp_path)
    values = found.values
    assert (found.num_workers, found.servers, found.notes) == (2, 1, [])
    assert values["compute_s"] == pytest.approx(COMPUTE_S, rel=0.01)
    assert np.mean(values["measured_s"]) == pytest.approx(values["compute_s"])
    assert np.std(values["measured_s"]) == pytest.approx(0.01, rel=0.02)
    assert values["payload_bytes"] == PAYLOAD
    assert values["bytes_per_s"] == pytest.approx(RATE, rel=1e-3)  # also where two share it
    assert values["merge_bytes_per_s"] == pytest.approx(PAYLOAD / MERGE_S, rel=1e-5)
    assert values["overhead_s"] == pytest.approx(QUEUE_S + ACK_S - MERGE_S, rel=1e-4)
    assert values["period"] == 8
    assert values["slow"] == ({1: 3.0} if slow else {})
    measured = found.measured
    assert (measured.algorithm, measured.workers, measured.servers) == ("aladdin (run)", 2, 1)
    assert measured.staleness == 3 and measured.iterations_per_push == 1


def test_a_log_without_pushes_says_so(tmp_path: Path) -> None:
    for worker in range(2):
        i = np.arange(20)
        steps = logs.rows(
            "steps", 20, iteration=i, start_s=logs.CLOCK_S + 0.1 * i, step_s=0.1, blocked_s=0.02,
            samples=1,
        )  # fmt: skip
        logs.write(
            tmp_path, worker, {"steps": steps}, role="worker", worker=worker, world_size=2,
            config="algorithm: arsgd",
        )  # fmt: skip
    shown = call("--from-run", str(tmp_path))
    (line,) = shown.stderr.splitlines()
    assert shown.exit_code == 2 and "--payload and --rate must be given" in line
    shown = call("--from-run", str(tmp_path), "--payload", "8", "--rate", "1", "--json",
                 "--algorithm", "arsgd")  # fmt: skip
    found = json.loads(shown.stdout)
    assert found["outcomes"][1]["step_s"] == pytest.approx(0.08 + 8e6 / 125e6, rel=1e-5)


def call(*args: str) -> Result:
    return CliRunner().invoke(main, ["simulate", *args], prog_name="aladdin-mpi")


def test_the_command_puts_the_run_beside_its_simulation(tmp_path: Path) -> None:
    write_run(tmp_path)
    shown = call("--from-run", str(tmp_path), "--json", "--algorithm", "aladdin")
    assert shown.exit_code == 0, shown.output
    run, simulated = json.loads(shown.stdout)["outcomes"]
    assert (run["algorithm"], simulated["algorithm"]) == ("aladdin (run)", "aladdin")
    assert run["workers"] == simulated["workers"] == 2
    assert simulated["step_s"] == pytest.approx(COMPUTE_S, rel=0.03)
    other = call("--from-run", str(tmp_path), "--json", "--algorithm", "aladdin", "--workers", "8",
                 "--compute", "50")  # fmt: skip
    setting = json.loads(other.stdout)["setting"]
    assert (setting["compute_s"], setting["payload_bytes"]) == (0.05, PAYLOAD)
    assert json.loads(other.stdout)["outcomes"][1]["workers"] == 8


def test_a_run_that_is_too_short_or_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError):
        calibrate(tmp_path / "none")
    write_run(tmp_path, steps=8)
    with pytest.raises(ConfigError, match="train longer"):
        calibrate(tmp_path)
    shown = call("--from-run", str(tmp_path))
    assert shown.exit_code == 2 and len(shown.stderr.splitlines()) == 1
