"""`hetopt doctor`: what would stop a launch, here or on EC2."""

from __future__ import annotations

from collections.abc import Iterator
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

    from hetopt.backends.ec2.renter.doctor import worst
    from hetopt.cli import render

    checks: list[Check] = []
    marks = {"good": "✓", "bad": "✗", "unknown": "?"}
    for check in _checks(plan, region, bucket, instance_profile):
        checks.append(check)
        if not json_:
            hint = f" → {check.hint}" if check.hint else ""
            render.bullet(f"{check.name}: {check.said}{hint}", mark=marks[check.verdict])
    if json_:
        render.print_json([asdict(check) for check in checks])
    if worst(checks) == "bad":
        raise typer.Exit(4)


def _checks(path: Path | None, region: str | None, bucket: str | None, instance_profile: str | None) -> Iterator[Check]:
    import os
    import time
    from random import Random

    from hetopt.backends.ec2.renter import doctor
    from hetopt.backends.ec2.renter.edge import BotoEdge, Retrying
    from hetopt.backends.ec2.renter.ordering import PROFILE_NAME, region_of, roles_of
    from hetopt.core.errors import BadInput
    from hetopt.optimizer.market.catalog import load_catalog
    from hetopt.optimizer.plan import Plan

    plan = None if path is None else Plan.load(path)
    yield _torch()
    configured = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
    place = region or (region_of(plan) if plan is not None else configured)
    try:
        boto = BotoEdge(place)
    except BadInput as error:
        yield doctor.Check(name="boto3", verdict="bad", said=error.message.rstrip("."), hint=error.hint)
        return
    edge = Retrying(inner=boto, sleep=time.sleep, random=Random(), attempts=2)
    profile = instance_profile or PROFILE_NAME
    asked = 0
    for check in doctor.account_checks(edge, place, bucket, profile, lambda: boto.clock_offset_s):
        yield check
        asked += 1
    if plan is not None and asked > 1:
        catalog = load_catalog(place)
        yield from doctor.role_checks(edge, catalog, roles_of(plan, catalog))


def _torch() -> Check:
    import importlib.metadata

    from hetopt.backends.ec2.renter.doctor import Check
    from hetopt.core.extras import install_command

    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        said = "torch is not installed here: profiles and local runs need it, planning and renting do not"
        return Check(name="torch", verdict="unknown", said=said, hint=install_command("train"))
    return Check(name="torch", verdict="good", said=version)
