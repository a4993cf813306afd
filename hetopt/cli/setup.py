"""`hetopt setup`: what an administrator applies once, and the bucket; roles are never made silently."""

from __future__ import annotations

import typer


def setup(
    print_policy: bool = typer.Option(False, "--print-policy", help="Print all policies as one JSON object."),
    create_bucket: bool = typer.Option(False, "--create-bucket", help="Make the bucket: private, encrypted, TLS only."),
    region: str = typer.Option("us-east-1", "--region", help="Where the machines will be."),
    account: str | None = typer.Option(None, "--account", help="Account number. Default: that of the credentials."),
    bucket: str | None = typer.Option(None, "--bucket", help="Bucket. Default: hetopt-ACCOUNT-REGION."),
    role: str | None = typer.Option(
        None, "--role", help="The machines' role and instance profile. Default: hetopt-node."
    ),
    types: str | None = typer.Option(None, "--types", help="Allow only these instance types, with commas between."),
    yes: bool = typer.Option(False, "--yes", "-y", help="Do not ask before the bucket is made."),
) -> None:
    """Say what must be in place before the first launch on EC2.

    --print-policy prints the least that hetopt needs: a policy for whoever launches, and role, trust and policy for the
    machines, with the commands that apply them. hetopt makes no role by itself.
    """
    from hetopt.api.values import names
    from hetopt.backends.ec2.renter import account as account_
    from hetopt.backends.ec2.renter import permissions
    from hetopt.backends.ec2.renter.edge import connect
    from hetopt.backends.ec2.renter.ordering import PROFILE_NAME
    from hetopt.cli import render
    from hetopt.core.errors import BadInput

    if not print_policy and not create_bucket:
        raise BadInput("say what to do.", hint="`hetopt setup --print-policy`, then `hetopt setup --create-bucket`")
    if account is not None and not (account.isdigit() and len(account) == 12):
        raise BadInput(f"an account number has 12 digits, not {account!r}.", hint="`aws sts get-caller-identity`")
    if account is None:
        account = account_.identity(connect(region)).account_id
    name = bucket or account_.default_bucket(account, region)
    role = role or PROFILE_NAME
    if create_bucket:
        _make(name, region, account, yes=yes)
    if print_policy:
        allowed = sorted(names(types or ()))
        render.print_json(
            {
                "operator_policy": permissions.operator_policy(
                    account_id=account, region=region, bucket=name, role=role, types=allowed
                ),
                "node_trust": permissions.trust_policy(),
                "node_policy": permissions.node_policy(bucket=name),
                "commands": permissions.commands(role),
            }
        )


def _make(name: str, region: str, account: str, *, yes: bool) -> None:
    import sys

    from hetopt.backends.ec2.renter.edge import connect
    from hetopt.backends.ec2.renter.permissions import bucket_calls
    from hetopt.cli import render

    if not yes and sys.stdin.isatty() and not typer.confirm(f"Make the bucket {name}?", default=True, err=True):
        raise typer.Exit(0)
    edge = connect(region)
    for request in bucket_calls(name, region, account):
        edge(request)
        render.note(f"{request.api_name}: {request.purpose}")
