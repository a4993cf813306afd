"""`hetopt doctor`: what would stop a launch, here or on EC2."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from hetopt.backends.ec2.renter.doctor import Check


def doctor(
    plan: Path | None = typer.Argument(None, help="Also look at all that its launch needs."),
    plan_: Path | None = typer.Option(None, "--plan", help="The same.", hidden=True),
    region: str | None = typer.Option(None, "--region", help="Region. Default: the plan's."),
    bucket: str | None = typer.Option(None, "--bucket", help="Bucket. Default: hetopt-ACCOUNT-REGION."),
    instance_profile: str | None = typer.Option(None, "--instance-profile", help="The machines' role."),
    subnets: list[str] = typer.Option([], "--subnet", help="A subnet of the machines; repeatable."),
    security_group: str | None = typer.Option(None, "--security-group", help="The machines' group."),
    public_ip: bool = typer.Option(True, "--public-ip/--no-public-ip", help="Whether they are on the Internet."),
    json_: bool = typer.Option(False, "--json", help="Print what was found as JSON."),
) -> None:
    """Look for what would stop a launch: here, in the account, and, with a plan, in each call that rents it.

    Nothing is made or changed. What your account may run is kept for plans. It exits with 4 if something would stop a
    launch.

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
    looked = look(
        plan or plan_,
        region=region,
        bucket=bucket,
        instance_profile=instance_profile,
        subnets=subnets,
        security_group=security_group,
        public_address=public_ip,
    )
    for check in looked:
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
