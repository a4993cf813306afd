"""`hetopt doctor`: what would stop a launch, here or on EC2."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from hetopt.backends.ec2.renter.doctor import Check


def doctor(
    plan: Path | None = typer.Argument(None, help="Also look at the quotas that this plan needs."),
    region: str | None = typer.Option(None, "--region", help="Region. Default: the plan's, or AWS_DEFAULT_REGION."),
    bucket: str | None = typer.Option(None, "--bucket", help="Bucket. Default: hetopt-ACCOUNT-REGION."),
    instance_profile: str | None = typer.Option(None, "--instance-profile", help="The machines' role."),
    json_: bool = typer.Option(False, "--json", help="Print what was found as JSON."),
) -> None:
    """Look for what would stop a launch: torch, credentials, clock, region, bucket, roles, permissions, quotas.

    Nothing is made or changed. It exits with 4 if something would stop a launch.
    """
    from dataclasses import asdict

    from hetopt.api.account import checks as look
    from hetopt.api.account import worst
    from hetopt.cli import render

    checks: list[Check] = []
    marks = {"good": "✓", "bad": "✗", "unknown": "?"}
    for check in look(plan, region=region, bucket=bucket, instance_profile=instance_profile):
        checks.append(check)
        if not json_:
            hint = f" → {check.hint}" if check.hint else ""
            render.bullet(f"{check.name}: {check.said}{hint}", mark=marks[check.verdict])
    if json_:
        render.print_json([asdict(check) for check in checks])
    if worst(checks) == "bad":
        raise typer.Exit(4)
