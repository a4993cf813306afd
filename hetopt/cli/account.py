"""`hetopt doctor`, `setup` and `attach`: what an AWS account must have, what would stop a launch, and its runs.

`hetopt hosts check` asks the same of machines of one's own: what would keep them from training together.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetopt.api.options import Ec2
from hetopt.cli import parse, render
from hetopt.cli.help_screen import OneScreen, OneScreenGroup
from hetopt.cli.options import Json, with_options
from hetopt.core.errors import BadInput

if TYPE_CHECKING:
    from hetopt.api.hosts import HostFound
    from hetopt.backends.ec2.renter.doctor import Check

MARKS = {"good": "✓", "bad": "✗", "unknown": "?"}


@with_options(Ec2, leave_out=("data", "unprobed", "accept_risk", "accept_fewer"))
def doctor(
    plan: Annotated[Path | None, typer.Argument(help="Also look at all that its launch needs.")] = None,
    region: Annotated[str | None, typer.Option(help="Region. Default: the plan's.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")] = False,
    **typed: Any,
) -> None:
    """Look for what would stop a launch: here, in the account, and, with a plan, in each call that rents it.

    Nothing is made or changed. What your account may run is kept for plans. It exits with 4 if something would stop a
    launch. Give it the options that you will launch with.

    \b
      hetopt doctor
      hetopt doctor plan.json
    """

    from hetopt.api import account as accounts

    checks: list[Check] = []
    for check in accounts.checks(plan, region=region, options=Ec2(**typed)):
        checks.append(check)
        if not json_:
            hint = f" → {check.hint}" if check.hint else ""
            render.bullet(f"{check.name}: {check.said}{hint}", mark=MARKS[check.verdict])
    if json_:
        render.print_json([asdict(check) for check in checks])
    wrong = [check.name for check in checks if check.verdict == "bad"]
    if wrong and not json_:
        render.line(f"{len(wrong)} of {len(checks)} would stop a launch: {'; '.join(wrong)}")
    if accounts.worst(checks) == "bad":
        raise typer.Exit(4)


def setup(
    print_policy: bool = typer.Option(False, "--print-policy", help="Print all policies as one JSON object."),
    create_bucket: bool = typer.Option(False, "--create-bucket", help="Make the bucket: private, encrypted, TLS only."),
    region: str = typer.Option("us-east-1", help="Where the machines will be."),
    account: str | None = typer.Option(None, help="Account number. Default: that of the credentials."),
    bucket: str | None = typer.Option(None, help="Bucket. Default: hetopt-ACCOUNT-REGION."),
    role: str | None = typer.Option(None, help="The machines' role and instance profile. Default: hetopt-node."),
    types: str | None = typer.Option(None, help="Allow only these instance types, with commas between."),
    yes: bool = typer.Option(False, "--yes", "-y", help="Do not ask before the bucket is made."),
) -> None:
    """Print the policies that launches on EC2 need, or make the bucket of your runs.

    --print-policy prints the least that hetopt needs: a policy for the person who launches, and role, trust and
    policy for the machines, with the commands that apply them. hetopt makes no role by itself.

    \b
      hetopt setup --print-policy
      hetopt setup --create-bucket
    """

    from hetopt.api.account import Setup

    if not print_policy and not create_bucket:
        raise BadInput(
            "hetopt setup makes nothing by itself: it prints policies, or makes the bucket of your runs.",
            hint="`hetopt setup --print-policy`, then `hetopt setup --create-bucket`",
        )
    wanted = Setup.of(region=region, account=account, bucket=bucket, role=role)
    if create_bucket:
        asks = not yes and sys.stdin.isatty()
        if asks and not typer.confirm(f"Make the bucket {wanted.bucket}?", default=True, err=True):
            raise typer.Exit(0)
        for done in wanted.make_bucket():
            render.note(done)
    if print_policy:
        render.print_json(wanted.policies(types or ()))


def attach(
    run: str = typer.Argument(..., help="Full name of the run, as `hetopt gc --on ec2` lists it."),
    region: str = typer.Option("us-east-1", help="Where its machines are."),
    bucket: str | None = typer.Option(None, help="Its bucket. Default: hetopt-ACCOUNT-REGION."),
) -> None:
    """Fetch what is known of a run on EC2, so that `status`, `logs` and `stop` work here too.

    It takes the same credentials, and changes nothing.

    \b
      hetopt attach 20261120-131649
    """
    from hetopt.api import account

    account.attach(run, region=region, bucket=bucket)
    render.line(f"{run} is known here now; look at it with `hetopt status {run}`")


app = typer.Typer(
    name="hosts",
    cls=OneScreenGroup,
    help="""Machines of your own, reached by ssh or Slurm.

    \b
      hetopt hosts check hosts.toml
      hetopt hosts check --hosts alice@box1,bob@box2
      hetopt hosts slurm -o nodes.toml
    """,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.command("check", cls=OneScreen)
def check(
    inventory: Annotated[
        Path | None,
        typer.Argument(help="File of hosts, see examples/hosts.toml. Default: hosts.toml here.", show_default=False),
    ] = None,
    hosts: Annotated[
        str | None, typer.Option("--hosts", help="Hosts instead of a file: alice@box1,bob@box2:2222.")
    ] = None,
    plan: Annotated[
        Path | None, typer.Option("--plan", help="Also whether they can hold what this plan's job needs of each.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Look for what keeps your machines from training together. Nothing is changed.

    \b
      hetopt hosts check
      hetopt hosts check --hosts alice@box1,bob@box2
    \f
    A line for each, and what to do. All are asked at once, by the ssh of this machine with your own configuration,
    keys, agent and jump hosts. It is never asked for a password, and accepts no key that is not known. Looked at:
    whether each is reached, its Python and what training needs of it, disk, clock, GPUs and driver, whether two names
    are one machine, whether each reaches all others, and the rate of the links in both
    directions.

    It exits with 6 if something would keep them from training.
    """
    from hetopt.api import hosts as owned

    checked = owned.check(inventory, hosts, plan)
    if as_json:
        render.print_json([_facts(host) for host in checked])
    else:
        show(checked, for_plans=inventory is not None or hosts is None)
    if any(host.verdict == "bad" for host in checked):
        raise typer.Exit(6)


@app.command("slurm", cls=OneScreen)
def slurm(
    partition: Annotated[str | None, typer.Option(help="Only nodes of this partition. Default: all.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write them to this file. Default: print them.")
    ] = None,
) -> None:
    """List the nodes of a Slurm cluster as a file of hosts. Nothing is changed there.

    \b
      hetopt hosts slurm -o nodes.toml
    \f
    It has what `sinfo` says of each: CPUs, memory and GPUs. Slurm does not know what an hour costs and how fast the
    network is: write usd_per_hour and network_mbit above the tables, for all nodes.
    """
    from hetopt.api import hosts as owned

    text = owned.of_slurm(partition)
    if output is None:
        render.line(text.rstrip("\n"))
    else:
        parse.save(output, text)


def show(checked: Sequence[HostFound], *, for_plans: bool) -> None:
    """Print a line for each checked host or its troubles, and with ``for_plans`` the settings that plans need.

    What is said of several hosts in the same words is said once.

    Args:
        checked: hosts with what was found of each.
        for_plans: whether to print the settings that plans need of each host.
    """

    hosts: dict[tuple[str, str], list[str]] = {}
    for host in checked:
        for line in _lines(host):
            hosts.setdefault(line, []).append(host.name)
    for (mark, text), names in hosts.items():
        render.bullet(f"{', '.join(names)}: {text}", mark=mark)
    for host in checked if for_plans else ():
        if host.for_plans:
            render.note(f"for plans, add to [{host.name}]:")
        for wanted in host.for_plans:
            render.note(f"  {wanted.setting} = {wanted.value:g}  # {wanted.source}")


def _lines(host: HostFound) -> Iterator[tuple[str, str]]:
    """Yield a mark and a sentence for a host's facts and each of its troubles; of a bad host for bad troubles alone."""
    from hetopt.api.hosts import in_words

    worst = [trouble for trouble in host.troubles if trouble.verdict == host.verdict]
    if host.verdict != "bad":
        yield MARKS["good"], in_words(host)
        worst = list(host.troubles)
    for trouble in worst:
        yield MARKS[trouble.verdict], f"{trouble.said} → {trouble.hint}"


def _facts(host: HostFound) -> dict[str, Any]:

    return {
        "name": host.name,
        "verdict": host.verdict,
        "troubles": [asdict(trouble) for trouble in host.troubles],
        "for_plans": [asdict(setting) for setting in host.for_plans],
        "rates_bits_per_s": {name: {"to": to, "back": back} for name, (to, back) in host.rates.items()},
        "seen": None if host.seen is None else host.seen.model_dump(mode="json"),
    }
