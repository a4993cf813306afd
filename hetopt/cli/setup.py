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

    \b
      hetopt setup --print-policy
      hetopt setup --create-bucket
    """
    import sys

    from hetopt.api.account import Setup
    from hetopt.cli import render
    from hetopt.core.errors import BadInput

    if not print_policy and not create_bucket:
        raise BadInput("say what to do.", hint="`hetopt setup --print-policy`, then `hetopt setup --create-bucket`")
    wanted = Setup.of(region=region, account=account, bucket=bucket, role=role)
    if create_bucket:
        asks = not yes and sys.stdin.isatty()
        if asks and not typer.confirm(f"Make the bucket {wanted.bucket}?", default=True, err=True):
            raise typer.Exit(0)
        for done in wanted.make_bucket():
            render.note(done)
    if print_policy:
        render.print_json(wanted.policies(types or ()))
