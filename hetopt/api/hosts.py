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


def inventory(path: Path | str | None = None, hosts: str | None = None) -> tuple[Host, ...]:
    """Return the hosts of a file, or of a text such as ``alice@box1,bob@box2``.

    Args:
        path: of the file; absent, where no text is given: ``hosts.toml`` here.
        hosts: the text.

    Raises:
        BadInput: both are given, or one of them cannot be read.
    """
    if path is not None and hosts is not None:
        raise BadInput("`inventory` and `hosts` both name hosts.", hint="give one of them")
    return parse_hosts(hosts) if hosts is not None else read_hosts(Path(path if path is not None else USUAL_FILE))


def of_slurm(partition: str | None = None) -> str:
    """Return an inventory, in TOML, of the nodes of a Slurm cluster.

    Args:
        partition: of the nodes; absent: all.

    Raises:
        BadInput: there is no Slurm here, or there are no nodes.
    """
    return as_inventory(ask_nodes(partition).values())


def runs_left_in_slurm(*, remove: bool) -> list[str]:
    """Return the names of this machine's ended runs with jobs left in Slurm, and end those jobs if ``remove``.

    Args:
        remove: end those jobs.

    Raises:
        BadInput: there is no Slurm here.
    """
    known = {folder.name: folder for folder in RunFolders(home=runs_home()).all()}
    left = [run for run in runs_with_jobs() if run in known and not is_alive(known[run])]
    for run in left if remove else ():
        give_back(run)
    return left


def check(path: Path | str | None = None, hosts: str | None = None, plan: Path | None = None) -> tuple[HostFound, ...]:
    """Check over ssh whether an inventory's hosts can train together; nothing is written or changed on them.

    Args:
        path: as of `inventory`.
        hosts: as of `inventory`.
        plan: whose job they must be able to hold, too; None: any.

    Raises:
        BadInput: the inventory or the plan cannot be read, or the plan cannot run on these hosts.
    """
    return checked(inventory(path, hosts), None if plan is None else Plan.load(plan))
