"""Machines that one owns: their inventory, and whether they could train together."""

from __future__ import annotations

from pathlib import Path

from hetopt.backends.on_this_machine import checked
from hetopt.backends.processes import is_alive
from hetopt.backends.slurm.jobs import as_inventory, ask_nodes, give_back, runs_with_jobs
from hetopt.backends.ssh.checking import HostFound, Trouble, in_words
from hetopt.core.errors import BadInput
from hetopt.core.hosts import Host, parse_hosts, read_hosts
from hetopt.core.run_folder import RunFolders, runs_home
from hetopt.optimizer.plan import Plan

__all__ = ["Host", "HostFound", "Trouble", "check", "in_words", "inventory", "of_slurm", "runs_left_in_slurm"]

USUAL_FILE = "hosts.toml"
"""The inventory file that is read, in the current folder, where none is named."""


def inventory(path: Path | str | None = None, hosts: str | None = None) -> tuple[Host, ...]:
    """Return the user's hosts from an inventory file, or from a text such as ``alice@box1,bob@box2``; ask none of them.

    Args:
        path: path of the file. None, with ``hosts`` None: ``hosts.toml`` in the current folder.
        hosts: the text; None: read the file.

    Raises:
        BadInput: both are given, the file cannot be read, or a host's description is not valid.
    """
    if path is not None and hosts is not None:
        raise BadInput("`inventory` and `hosts` both name hosts.", hint="give one of them")
    return parse_hosts(hosts) if hosts is not None else read_hosts(Path(path if path is not None else USUAL_FILE))


def of_slurm(partition: str | None = None) -> str:
    """Return an inventory file's text, in TOML, of the nodes that `sinfo` lists on this machine.

    Args:
        partition: list only the nodes of this Slurm partition; None: all nodes of the cluster.

    Raises:
        BadInput: Slurm is not installed here, or lists no nodes.
        RunFailed: `sinfo` fails or does not answer.
    """
    return as_inventory(ask_nodes(partition).values())


def runs_left_in_slurm(*, remove: bool) -> list[str]:
    """Return the names of ended runs of this machine that still have jobs in Slurm; empty: there are none.

    Args:
        remove: also cancel these jobs; else nothing changes.

    Raises:
        BadInput: Slurm is not installed here, or a run's folder cannot be read.
        RunFailed: `squeue` fails or does not answer.
    """
    known = {folder.name: folder for folder in RunFolders(home=runs_home()).all()}
    left = [run for run in runs_with_jobs() if run in known and not is_alive(known[run])]
    for run in left if remove else ():
        give_back(run)
    return left


def check(path: Path | str | None = None, hosts: str | None = None, plan: Path | None = None) -> tuple[HostFound, ...]:
    """Check over ssh whether an inventory's hosts can train together; nothing is written or changed on them.

    Args:
        path: inventory file, as of `inventory`.
        hosts: text of hosts, as of `inventory`.
        plan: file of a plan, whose job the hosts must be able to run, too; None: no job in particular.

    Returns:
        One result for each host, in order; a host that cannot be reached has that as its trouble.

    Raises:
        BadInput: the inventory or the plan cannot be read, or the plan cannot run on these hosts at all.
    """
    return checked(inventory(path, hosts), None if plan is None else Plan.load(plan))
