"""`hetopt profile --explore --on ec2`: short probes on rented machines, with a budget of their own."""

from __future__ import annotations

import datetime
import importlib.util
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from hetopt.api.exploring import Place
from hetopt.backends.ec2.renter import probing
from hetopt.backends.ec2.renter.bundle import make_bundle
from hetopt.backends.ec2.renter.edge import connect
from hetopt.backends.ec2.renter.launcher import Ec2Launcher
from hetopt.backends.ec2.renter.ordering import Wishes
from hetopt.backends.probe_runs import ProbeRun
from hetopt.core.commands import typed
from hetopt.core.errors import BadInput, BudgetStop, CloudRefused, RunFailed
from hetopt.core.extras import install_command
from hetopt.core.profile import Profile
from hetopt.core.reporter import Reporter
from hetopt.core.runs import RunFolders, runs_home
from hetopt.core.step_samples import Configuration
from hetopt.optimizer.cost.billing import load_billing
from hetopt.optimizer.exploring import Measured
from hetopt.optimizer.market.catalog import Catalog, load_catalog


def check(task: str, data: Path | str | None, ec2_data: str | None) -> None:
    """Refuse what rented machines cannot have, before anything is measured.

    Raises:
        BadInput: the task is in a module, its data is on this machine only, or boto3 is not installed.
    """
    if importlib.util.find_spec("boto3") is None:
        raise BadInput("renting needs boto3, which is not installed.", hint=install_command("aws"))
    make_bundle(task)
    if ec2_data is not None and not ec2_data.startswith("s3://"):
        raise BadInput(f"rented machines cannot read {ec2_data}.", hint="for example `ec2_data=s3://BUCKET/data/NAME`")
    if data is not None and ec2_data is None:
        raise BadInput(
            f"rented machines cannot read {data}.",
            hint=f"`aws s3 sync {typed(data)} s3://BUCKET/data/NAME`, then add `ec2_data=s3://BUCKET/data/NAME`",
        )


def place_on_ec2(
    measured: Profile, *, task: str, types: Sequence[str], region: str, data: str | None, tell: Reporter
) -> Place:
    """Rented machines of these types.

    Args:
        measured: the job, on this machine.
        task: as it was named.
        types: that may be probed.
        region: to rent in.
        data: where the task's data is, in S3.
        tell: says what goes on.

    Raises:
        BadInput: a type that there is not, or a task or data that machines cannot have.
    """
    catalog = load_catalog(region)
    probes = probing.rented_probes(measured, catalog, types)
    prober = probing.Prober(
        edge=connect(region),
        launcher=Ec2Launcher(home=runs_home().parent, tell=tell.note),
        catalog=catalog,
        billing=load_billing(),
        wishes=Wishes(),
        bundle=make_bundle(task),
        data=data,
        version=version("hetopt"),
        gradient_bytes=measured.job.gradient_bytes,
        clock=time.time,
        sleep=time.sleep,
    )
    hourly = _spot_usd_per_hour(catalog, types)
    made: list[ProbeRun] = []

    def price_usd(asked: Configuration, step_time_s: float | None) -> float:
        return probing.probe_price_usd(hourly, asked, step_time_s)

    def measure(runs: Sequence[ProbeRun], left_usd: float) -> Measured:
        samples, spent = [], 0.0
        for run in runs:
            try:
                sample, usd = prober.measure(run, _folder(), left_usd - spent)
            except (BudgetStop, CloudRefused, RunFailed) as refused:
                if not made:
                    raise
                # What was measured so far is worth keeping.
                tell.note(f"{refused.message} {refused.hint or ''}".strip())
                break
            samples.append(sample)
            made.append(run)
            spent += usd
        return Measured(samples=tuple(samples), usd=spent)

    return Place(probes=probes, price_usd=price_usd, measure=measure)


def _spot_usd_per_hour(catalog: Catalog, types: Sequence[str]) -> dict[str, float]:
    """By type; on demand where no spot price is known, which is the most that it can be."""
    found = {}
    for name in types:
        price = catalog.price(name, "spot") or catalog.price(name, "on-demand")
        if price is None:
            raise BadInput(f"no price of {name} is known in {catalog.region}.", hint="name another type")
        found[name] = price.usd_per_hour
    return found


def _folder() -> Path:
    """A run's folder: whatever happens, `hetopt gc` knows of it."""
    return RunFolders(home=runs_home()).create("probe", datetime.datetime.now(datetime.UTC), secret=True)
