"""`hetopt doctor`, `setup` and `attach`: what an AWS account must have, what would stop a launch, and its runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetopt.api.options import Ec2
from hetopt.cli.options import with_options

if TYPE_CHECKING:
    from hetopt.backends.ec2.renter.doctor import Check


@with_options(Ec2, leave_out=("data", "unprobed", "accept_risk", "accept_fewer", "canary"))
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
    from dataclasses import asdict

    from hetopt.api.account import checks as look
    from hetopt.api.account import worst
    from hetopt.cli import render

    checks: list[Check] = []
    marks = {"good": "✓", "bad": "✗", "unknown": "?"}
    for check in look(plan, region=region, options=Ec2(**typed)):
        checks.append(check)
        if not json_:
            hint = f" → {check.hint}" if check.hint else ""
            render.bullet(f"{check.name}: {check.said}{hint}", mark=marks[check.verdict])
    if json_:
        render.print_json([asdict(check) for check in checks])
    wrong = [check.name for check in checks if check.verdict == "bad"]
    if wrong and not json_:
        render.line(f"{len(wrong)} of {len(checks)} would stop a launch: {'; '.join(wrong)}")
    if worst(checks) == "bad":
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
    """Say what must be in place before the first launch on EC2.

    --print-policy prints the least that hetopt needs: a policy for whoever launches, and role, trust and policy for the
    machines, with the commands that apply them. hetopt makes no role by itself.

    \b
      hetopt setup --print-policy
      hetopt setup --create-bucket
    """
    import sys

    from hetopt.api.account import Setup
    from hetopt.cli import render
    from hetopt.core.errors import BadInput

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
    from hetopt.cli import render

    account.attach(run, region=region, bucket=bucket)
    render.line(f"{run} is known here now; look at it with `hetopt status {run}`")
