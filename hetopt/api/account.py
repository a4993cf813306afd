"""Your AWS account: what must be in place there, what would stop a launch, and runs that were launched elsewhere."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from hetopt.api.run import Run
from hetopt.backends.ec2.renter import doctor, permissions
from hetopt.backends.ec2.renter import ordering as accounts
from hetopt.backends.ec2.renter.backend import wishes_of
from hetopt.backends.ec2.renter.doctor import Check, worst
from hetopt.backends.ec2.renter.edge import BotoEdge, Retrying, connect
from hetopt.backends.ec2.renter.fetching import adopt
from hetopt.backends.ec2.renter.ordering import PROFILE_NAME, Orders, region_of
from hetopt.backends.ec2.renter.request import Edge
from hetopt.backends.options import Ec2
from hetopt.core.errors import BadInput, CloudRefused
from hetopt.core.option import names
from hetopt.core.paths import REGION_PATTERN, ROLE_PATTERN, inside, is_name, run_name, shown
from hetopt.core.run_folder import runs_home
from hetopt.core.search_path import install_command
from hetopt.optimizer.cost.billing import load_billing
from hetopt.optimizer.market.account_quotas import account_quotas_file, keep_quotas
from hetopt.optimizer.market.catalog import load_catalog
from hetopt.optimizer.market.quota import write_quotas
from hetopt.optimizer.plan import Plan

__all__ = ["Check", "Setup", "attach", "checks", "worst"]


def attach(run: str, *, region: str = "us-east-1", bucket: str | None = None) -> Run:
    """Fetch what is known of a run that was launched from another machine. It changes nothing.

    Args:
        run: its full name.
        region: where its machines are.
        bucket: its bucket. Absent: ``hetopt-ACCOUNT-REGION``.

    Raises:
        BadInput: it is known here already, or there is no such run.
        CloudRefused: it cannot be read.
    """
    folder = inside(runs_home(), run_name(run), what="run")
    if folder.exists():
        raise BadInput(f"{run} is known here.", hint=f"look at it with `hetopt status {run}`")
    edge = connect(region)
    who = accounts.identity(edge)
    place = bucket or accounts.default_bucket(who.account_id, region)
    adopt(edge, folder, bucket=place, account_id=who.account_id, now_s=time.time())
    return Run.in_folder(folder)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What an administrator applies once. hetopt makes no role by itself.

    Attributes:
        region: where machines will be.
        account: its number.
        bucket: where code, checkpoints and state go.
        role: of the machines, and their instance profile.
    """

    region: str
    account: str
    bucket: str
    role: str

    @classmethod
    def of(
        cls,
        *,
        region: str = "us-east-1",
        account: str | None = None,
        bucket: str | None = None,
        role: str | None = None,
    ) -> Setup:
        """With the usual names where none are given; the account is that of the credentials.

        Raises:
            BadInput: the account's number is none, or a name none of a region, a bucket or a role.
            CloudRefused: AWS does not say whose the credentials are.
        """
        if account is not None and not (account.isdigit() and len(account) == 12):
            raise BadInput(f"an account number has 12 digits, not {account!r}.", hint="`aws sts get-caller-identity`")
        # They become a part of policies, in which * is every one.
        if not is_name(REGION_PATTERN, region):
            raise BadInput(f"`region` must be one like us-east-1, got {shown(region)}.", hint="name one region")
        if bucket:
            accounts.check_bucket_name(bucket)
        if role and not is_name(ROLE_PATTERN, role):
            raise BadInput(
                f"`role` must be 1 to 64 letters, digits and +=,.@-_, got {shown(role)}.",
                hint="name a role without its path, or leave `role` out",
            )
        try:
            number = accounts.identity(connect(region)).account_id if account is None else account
        except CloudRefused as refused:
            beside = "; policies need no credentials where `account` names its number"
            raise CloudRefused(refused.message, hint=f"{refused.hint}{beside}") from refused
        place = bucket or accounts.default_bucket(number, region)
        return cls(region=region, account=number, bucket=place, role=role or PROFILE_NAME)

    def make_bucket(self) -> Iterator[str]:
        """Make the bucket: private, encrypted, TLS only. Each call is told once it was made.

        Raises:
            CloudRefused: it cannot be made.
        """
        edge = connect(self.region)
        for request in permissions.bucket_calls(self.bucket, self.region, self.account):
            edge(request)
            yield f"{request.api_name}: {request.purpose}"

    def policies(self, types: Sequence[str] | str = ()) -> dict[str, Any]:
        """The least that hetopt needs, as IAM reads it, and the commands that apply it.

        Args:
            types: allow only these instance types; none: all.

        Raises:
            BadInput: one of them is none.
        """
        only = sorted(names(types, "types"))
        if only:
            known = load_catalog(self.region)
            only = [known.instance_type(one).name for one in only]
        place = {"account": self.account, "region": self.region, "bucket": self.bucket, "role": self.role}
        return {
            **{name: permissions.policy(name, types=only, **place) for name in permissions.POLICIES},
            "commands": permissions.commands(self.role),
        }


def checks(plan: Path | None = None, *, region: str | None = None, options: Ec2 | None = None) -> Iterator[Check]:
    """What would stop a launch, here or on EC2, one after the other. Nothing is made or changed there.

    What the account may run is kept for plans (`account_quotas_file`).

    Args:
        plan: also look at all that its launch needs: images, quotas, zones, prices, permissions.
        region: absent: the plan's, or that of the environment.
        options: what is to be launched with, as far as EC2 takes it.

    Raises:
        BadInput: the plan cannot be read, or an option is none.
    """
    wishes = wishes_of(options or Ec2())
    made = None if plan is None else Plan.load(plan)
    yield _torch()
    configured = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
    place = region or (region_of(made) if made is not None else configured)
    try:
        boto = BotoEdge(place)
    except BadInput as error:
        yield Check(name="boto3", verdict="bad", said=error.message.rstrip("."), hint=error.hint)
        return
    edge = Retrying(inner=boto, sleep=time.sleep, random=Random(), attempts=2)
    is_known = True
    for check in doctor.account_checks(
        edge, place, wishes.bucket, wishes.instance_profile, lambda: boto.clock_offset_s, wishes.network.subnets
    ):
        yield check
        is_known &= (check.name, check.verdict) != ("credentials", "bad")
    if is_known:
        yield _quotas(edge, place)
    if made is not None and is_known:
        orders = Orders(
            edge=edge,
            catalog=load_catalog(place),
            billing=load_billing(),
            wishes=wishes,
            version=importlib.metadata.version("hetopt"),
        )
        yield from doctor.plan_checks(orders, made, time.time())


def _quotas(edge: Edge, region: str) -> Check:
    """What the account may run in the region, kept for plans."""
    try:
        granted = doctor.account_quotas(edge)
        number = accounts.identity(edge).account_id
    except CloudRefused as refused:
        said = f"what the account may run cannot be read ({refused.message.rstrip('.')})"
        return Check(name="quotas", verdict="unknown", said=said, hint=refused.hint)
    keep_quotas(account_quotas_file(), number, region, granted, datetime.datetime.now(datetime.UTC))
    some = {bucket: vcpus for bucket, vcpus in granted.items() if vcpus}
    return Check(
        name="quotas",
        verdict="good" if some else "bad",
        said=f"vCPUs in {region}: {write_quotas(some) or 'none'}; `hetopt recommend` plans with them",
        hint=None if some else f"ask for some in the Service Quotas console of {region}, Amazon EC2",
    )


def _torch() -> Check:
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        said = "torch is not installed here: profiles and local runs need it, planning and renting do not"
        return Check(name="torch", verdict="unknown", said=said, hint=install_command("train"))
    return Check(name="torch", verdict="good", said=version)
