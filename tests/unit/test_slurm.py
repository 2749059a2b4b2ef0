"""Jobs for Slurm as text, and the mistakes of ``aladdin-mpi slurm``; no Slurm is needed."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from aladdin_mpi.cli.main import main
from aladdin_mpi.cli.slurm_script import (
    CPU_DEFAULTS,
    EDGE,
    GPU_DEFAULTS,
    LAUNCHERS,
    MPIS,
    ScriptOptions,
    script,
)
from aladdin_mpi.errors import ConfigError

pytestmark = pytest.mark.timeout(120)

SLURM = Path(__file__).resolve().parents[2] / "slurm"


def sbatch(text: str) -> dict[str, str]:
    """The options that sbatch reads, without what is behind them."""
    found = re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?", text, re.MULTILINE)
    return dict(found)


def variables(text: str) -> dict[str, str]:
    top = text.partition(EDGE.strip())[0]
    return dict(re.findall(r"^(?:export )?(\w+)=(\S*)", top, re.MULTILINE))


def words(text: str) -> list[str]:
    """The arguments of the training, as bash takes them."""
    found = re.search(r"^TRAINING=\((.*?)\n\)", text, re.MULTILINE | re.DOTALL)
    assert found
    return shlex.split(found[1])


@pytest.mark.parametrize(
    ("name", "options"), [("train_cpu", CPU_DEFAULTS), ("train_gpu_ib", GPU_DEFAULTS)]
)
def test_the_repository_has_what_the_function_returns(name: str, options: ScriptOptions) -> None:
    written = (SLURM / f"{name}.sbatch").read_text(encoding="utf-8")
    assert written == script(options), "python -m aladdin_mpi.cli.slurm_script slurm"


@pytest.mark.parametrize("path", sorted(SLURM.glob("*.sbatch")), ids=lambda path: path.stem)
def test_scripts_are_good_bash_and_fit_a_terminal(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.startswith("#!/bin/bash\n# ")
    assert text.count("nothing to edit below") == 1
    assert max(map(len, text.splitlines())) <= 100
    bash = shutil.which("bash")
    if bash is not None:
        checked = subprocess.run([bash, "-n", path], capture_output=True, text=True, check=False)
        assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.parametrize("path", sorted(SLURM.glob("*.sbatch")), ids=lambda path: path.stem)
def test_trainings_go_on_after_an_interruption(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    if "TRAINING=" not in text:
        return
    options = sbatch(text)
    assert options["signal"] == "USR1@120", "without B:, so that the tasks get it"
    assert "requeue" in options and options["open-mode"] == "append"
    assert "--resume auto --checkpoint-minutes 10" in text
    assert "$status = 75" in text and "scontrol requeue" in text


def test_options_become_lines() -> None:
    text = script(
        ScriptOptions(
            nodes=3, tasks_per_node=8, cpus_per_task=2, time="1-00:00:00", job_name="x",
            account="lab", partition="fast", mpi="openmpi", launcher="mpirun",
            training=["--lr", "0.1", "--dataset", "it's here"],
        )
    )  # fmt: skip
    options = sbatch(text)
    wanted = {
        "nodes": "3", "ntasks-per-node": "8", "cpus-per-task": "2", "time": "1-00:00:00",
        "job-name": "x", "account": "lab", "partition": "fast",
    }  # fmt: skip
    assert {name: options[name] for name in wanted} == wanted
    assert options["signal"] == "B:USR1@120", "the steps of mpirun are its daemons"
    assert "gpus-per-node" not in options
    assert variables(text)["MPI"] == "openmpi" and variables(text)["LAUNCHER"] == "mpirun"
    assert words(text) == ["--lr", "0.1", "--dataset", "it's here"]


def test_without_account_and_partition_the_lines_wait_to_be_filled_in() -> None:
    text = script(CPU_DEFAULTS)
    assert "\n##SBATCH --account=...\n" in text and "\n##SBATCH --partition=...\n" in text
    assert not {"account", "partition"} & set(sbatch(text))


@pytest.mark.parametrize(("servers", "tasks"), [(1, "5"), (2, "6"), (0, "4")])
def test_servers_are_more_tasks_than_there_are_gpus(servers: int, tasks: str) -> None:
    text = script(ScriptOptions(gpus_per_node=4, tasks_per_node=4, servers=servers))
    assert sbatch(text)["ntasks-per-node"] == tasks
    assert sbatch(text)["gpus-per-node"] == "4"
    assert variables(text)["SERVERS"] == str(servers)


@pytest.mark.parametrize("mpi", MPIS)
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("gpus", [0, 2])
def test_all_kinds_differ_in_their_top_only(mpi: str, launcher: str, gpus: int) -> None:
    edge = EDGE.strip()
    text = script(ScriptOptions(mpi=mpi, launcher=launcher, gpus_per_node=gpus))
    rest = script(GPU_DEFAULTS if gpus else CPU_DEFAULTS).partition(edge)[2]
    assert text.partition(edge)[2] == rest


def test_long_arguments_are_wrapped_between_options() -> None:
    training = [part for i in range(30) for part in (f"--option-{i}", f"value {i}")]
    text = script(ScriptOptions(training=training))
    assert words(text) == training
    lines = text.splitlines()
    inside = lines[lines.index("TRAINING=(") + 1 : lines.index(")")]
    assert len(inside) > 1 and all(line.startswith("  --option-") for line in inside)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "nodes": ({"nodes": 0}, "--nodes 0: must be at least 1"),
    "tasks": ({"tasks_per_node": -1}, "--tasks-per-node -1: must be at least 1"),
    "one rank": (
        {"nodes": 1, "tasks_per_node": 1},
        "--tasks-per-node 1: on 1 node.* too few for 1 server.* and a worker",
    ),
    "cpus": ({"cpus_per_task": 0}, "--cpus-per-task 0: must be at least 1"),
    "gpus": ({"gpus_per_node": -1}, "--gpus-per-node -1: must be at least 0"),
    "uneven": ({"gpus_per_node": 4, "tasks_per_node": 6}, "--tasks-per-node 6: .* multiple"),
    "time": ({"time": "soon"}, "--time soon: Slurm reads"),
    "empty time": ({"time": ""}, "--time : Slurm reads"),
    "name": ({"job_name": "a b"}, "--job-name 'a b': must be one word"),
    "injected": ({"account": "x\n#SBATCH --nodes=9"}, "--account .*: must be one word"),
    "mpi": ({"mpi": "lam"}, "--mpi lam: choose from mpich, openmpi"),
    "launcher": ({"launcher": "ssh"}, "--launcher ssh: choose from srun, mpirun"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_values_are_refused(case: str) -> None:
    values, message = BAD[case]
    with pytest.raises(ConfigError, match=message):
        ScriptOptions(**values)


@pytest.mark.parametrize(
    "time", ["30", "30:00", "1:30:00", "2-0", "2-12:30", "2-12:30:00", "unlimited"]
)
def test_all_times_of_slurm_are_taken(time: str) -> None:
    assert sbatch(script(ScriptOptions(time=time)))["time"] == time


# -- the command ----------------------------------------------------------------------------------


def call(*args: str, path: str | None = None) -> Result:
    environ = {} if path is None else {"PATH": path}
    return CliRunner().invoke(main, ["slurm", *args], env=environ, prog_name="aladdin-mpi")


def mistake(result: Result) -> str:
    (line,) = result.stderr.splitlines()
    assert result.exit_code == 2 and result.stdout == ""
    return line.removeprefix("aladdin-mpi: error: ")


def test_the_command_prints_the_script() -> None:
    result = call("--gpus-per-node", "2", "--mpi", "openmpi", "--", "--algorithm", "asp")
    assert result.exit_code == 0, result.output
    expected = ScriptOptions(
        gpus_per_node=2, tasks_per_node=2, mpi="openmpi", training=["--algorithm", "asp"]
    )
    assert result.stdout == script(expected)
    assert call().stdout == script(CPU_DEFAULTS)


def test_an_algorithm_without_a_server_gets_no_task_for_one() -> None:
    text = call("--gpus-per-node", "2", "--", "--algorithm", "localsgd").stdout
    assert variables(text)["SERVERS"] == "0" and sbatch(text)["ntasks-per-node"] == "2"
    text = call("--gpus-per-node", "2", "--", "--servers", "3").stdout
    assert variables(text)["SERVERS"] == "3" and sbatch(text)["ntasks-per-node"] == "5"
    text = call("--gpus-per-node", "4", "--", "--merge-on-node").stdout
    assert variables(text)["SERVERS"] == "1" and sbatch(text)["ntasks-per-node"] == "6"
    text = call("--tasks-per-node", "5", "--", "--merge-on-node").stdout
    assert sbatch(text)["ntasks-per-node"] == "5", "on CPUs all ranks are counted"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nodes", "0"], "--nodes 0: must be at least 1"),
        (["--nodes", "x"], "Invalid value for '--nodes'"),
        (["--", "--epocs", "3"], "No such option '--epocs'"),
        (["--", "--lr", "-1"], "--lr -1: must be above 0"),
        (["--", "--algorithm", "none-such"], "--algorithm none-such: unknown"),
        (["--", "--period", "0"], "--period 0: must be at least 1"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str) -> None:
    assert mistake(call(*arguments)).startswith(message)


def fake(folder: Path, body: str) -> str:
    """A folder with an sbatch of our own; it is all that is on the PATH."""
    program = folder / "sbatch"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)
    return str(folder)


def test_without_sbatch_it_says_what_to_do(tmp_path: Path) -> None:
    assert "no sbatch on the PATH" in mistake(call("--submit", path=str(tmp_path)))


def test_what_sbatch_says_is_kept_in_the_line(tmp_path: Path) -> None:
    path = fake(tmp_path, "echo 'sbatch: error: no money\nleft' >&2; exit 1")
    assert "sbatch refuses (sbatch: error: no money left)" in mistake(call("--submit", path=path))
    assert "no number" in mistake(call("--submit", path=fake(tmp_path, "echo hello")))


def test_the_number_of_the_job_is_printed(tmp_path: Path) -> None:
    path = fake(tmp_path, f"/bin/cat > {tmp_path}/script; echo '17;cluster'")
    result = call("--submit", path=path)
    assert (result.exit_code, result.stdout, result.stderr) == (0, "17\n", "")
    assert (tmp_path / "script").read_text() == script(CPU_DEFAULTS)
