"""`hetopt attach`: look after a run on EC2 that was launched from another machine."""

from __future__ import annotations

import typer


def attach(
    run: str = typer.Argument(..., help="Full name of the run, as `hetopt gc --on ec2` lists it."),
    region: str = typer.Option("us-east-1", "--region", help="Where its machines are."),
    bucket: str | None = typer.Option(None, "--bucket", help="Its bucket. Default: hetopt-ACCOUNT-REGION."),
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
