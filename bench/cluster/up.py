"""Virtual hosts for as long as a command runs: up, run, down.

    python bench/cluster/up.py --hosts 5 --rate 200mbit -- aladdin-mpi train --dataset digits
    python bench/cluster/up.py --hosts 2 --rate 100mbit --on h1 -- ping -c 3 h2

As root.  The command is started on all hosts by the environment's MPI, ``--ranks`` on each, with
rank 0 on h1; with ``--on`` it runs once, on that host.  What it prints is shown when it has ended.
Hosts have networks, names, mounts and shared memory of their own, and this machine's files.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "tests")]

import launching  # noqa: E402
from virtual_hosts import NEEDED_PROGRAMS, UNITS, VirtualHosts, end_orderly  # noqa: E402


def known_rate(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    """``tc``'s way to write a rate."""
    if value is None:
        return None
    try:
        good = value[-4:] in UNITS and float(value[:-4]) > 0
    except ValueError:
        good = False
    if not good:
        raise click.BadParameter(f"{value}: expected a number and {', '.join(UNITS)}: 200mbit")
    return value


@click.command(help=__doc__, context_settings={"ignore_unknown_options": True})
@click.option("--hosts", "count", default=2, show_default=True, type=click.IntRange(1, 200))
@click.option("--rate", callback=known_rate, help="Of every link, each way; no limit if left out.")
@click.option("--ranks", default=1, show_default=True, type=click.IntRange(1), help="Of a host.")
@click.option("--on", "host", help="Run the command once, on this host.")
@click.option("--timeout", default=3600.0, show_default=True, help="Seconds.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def main(
    count: int, rate: str | None, ranks: int, host: str | None, timeout: float,
    command: tuple[str, ...],
) -> None:  # fmt: skip
    missing = [name for name in NEEDED_PROGRAMS if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        raise click.ClickException(f"needs root, and iproute2 (missing: {missing or 'nothing'})")
    end_orderly()
    own = Path(sys.prefix) / "bin" / command[0]
    argv = [str(own) if own.exists() else command[0], *command[1:]]
    with VirtualHosts(count, rate) as hosts:
        if host is not None and host not in hosts.names:
            raise click.ClickException(f"--on {host}: expected one of {', '.join(hosts.names)}")
        try:
            if host is not None:
                hosts.run(host, argv, timeout=timeout)
            else:
                click.echo(hosts.mpirun(argv, timeout=timeout, ranks_per_host=ranks), nl=False)
        except launching.RunFailed as error:
            click.echo(error.run.stdout, nl=False)
            raise click.ClickException(str(error).split("\n")[0]) from None
        except (OSError, subprocess.SubprocessError) as error:
            raise click.ClickException(str(error)) from None


if __name__ == "__main__":
    main()
