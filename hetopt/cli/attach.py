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
    """
    import time

    from hetopt.backends.ec2.renter import account
    from hetopt.backends.ec2.renter.edge import connect
    from hetopt.backends.ec2.renter.fetching import adopt
    from hetopt.backends.runs import runs_home
    from hetopt.cli import render
    from hetopt.core.errors import BadInput
    from hetopt.core.paths import inside, run_name

    folder = inside(runs_home(), run_name(run), what="run")
    if folder.exists():
        raise BadInput(f"{run} is known here.", hint=f"look at it with `hetopt status {run}`")
    edge = connect(region)
    who = account.identity(edge)
    place = bucket or account.default_bucket(who.account_id, region)
    adopt(edge, folder, bucket=place, account_id=who.account_id, now_s=time.time())
    render.line(f"{run} is known here now; look at it with `hetopt status {run}`")
