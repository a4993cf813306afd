"""`hetopt profile --explore`: whole steps of more and more workers, measured where it tells most for its money."""

from __future__ import annotations

import datetime
import importlib.util
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hetopt.api.options import Ec2, Local, Measurement, Ssh
from hetopt.api.probes import BOOT_S, ProbeRun, local_probes, own_probes, probe_usd, read_sample, rented_probes
from hetopt.api.profiling import measured as measurement
from hetopt.backends.backend import Launcher
from hetopt.backends.ec2.renter.backend import Ec2Probes, spent_usd
from hetopt.backends.ec2.renter.ordering import Orders, image_kind
from hetopt.backends.ec2.renter.request import connect
from hetopt.backends.host.bundle import make_bundle
from hetopt.backends.on_this_machine import SshProbes, ready
from hetopt.backends.prediction import STARTUP_S
from hetopt.backends.processes import LocalLauncher
from hetopt.backends.ssh.checking import Inventory
from hetopt.core import formatting
from hetopt.core.errors import BadInput, BudgetStop, CloudRefused, RunFailed
from hetopt.core.events.log import EVENTS_FILE, read_log
from hetopt.core.hosts import read_hosts
from hetopt.core.interruption import Reporter, usable_processors
from hetopt.core.plain_text import typed
from hetopt.core.profile import LOCAL, Profile
from hetopt.core.run_folder import RunFolders, runs_home
from hetopt.core.search_path import install_command
from hetopt.core.step_samples import Configuration, StepSample
from hetopt.optimizer.exploring import suggest
from hetopt.optimizer.market.catalog import Catalog, load_catalog
from hetopt.optimizer.recommendation import places

STAND_IN_USD_PER_HOUR = 0.10
"""Price in USD an hour of a machine that is not in the catalogue: about what two cloud processors with 4 GB cost.
Nothing is paid here, but a price says how much of it a probe is worth."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """The machines that run probes: the probes that they can run, their price, and how a probe is measured.

    Attributes:
        probes: all probe runs that may be made, one for each layout of machines.
        usd_per_hour: returns the USD an hour of all machines of a configuration.
        startup_s: seconds from the request of the machines to the first step of a probe.
        measure: runs a probe within so many USD; returns its step sample and its cost in USD.
    """

    probes: Sequence[ProbeRun]
    usd_per_hour: Callable[[Configuration], float]
    startup_s: float
    measure: Callable[[ProbeRun, float], tuple[StepSample, float]]

    def price_usd(self, asked: Configuration, step_time_s: float | None) -> float:
        """Return the predicted cost in USD of one probe, start-up included.

        Args:
            asked: configuration to probe.
            step_time_s: predicted seconds of a step; None: not known, so that only the start-up is priced.
        """
        return probe_usd(self.usd_per_hour(asked), self.startup_s, step_time_s)


def explore(measured: Profile, place: Place, budget_usd: float, *, tell: Reporter) -> Profile:
    """Run probes of more and more workers while one is worth its price; return the profile with their step samples.

    The returned profile also counts the time and cost of the probes. A probe that fails ends exploring, and earlier
    ones are kept.

    Args:
        measured: profile of the job.
        place: machines to run probes on.
        budget_usd: the most that all probes may cost.
        tell: receives what is measured, and a remark on each result.

    Raises:
        BadInput: there is no configuration to explore.
        RunFailed, CloudRefused, BudgetStop: the first probe fails, or its machines cannot be had.
    """
    samples: list[StepSample] = []
    begun_s, spent_usd = time.monotonic(), 0.0
    next_probe = partial(
        suggest,
        candidates=[probe.configuration for probe in place.probes],
        price_usd=place.price_usd,
        budget_usd=budget_usd,
        catalog=load_catalog().instance_types,
    )
    while not isinstance(suggested := next_probe(samples, spent_usd), str):
        asked = suggested.configuration
        tell(f"{_layout(asked)}: measuring", None)
        run = next(probe for probe in place.probes if probe.configuration == asked)
        try:
            sample, usd = place.measure(run, budget_usd - spent_usd)
        except (BudgetStop, CloudRefused, RunFailed) as refused:
            if not samples:
                raise
            # What was measured so far is worth keeping.
            suggested = f"{refused.message} {refused.hint or ''}".strip()
            break
        samples.append(sample)
        spent_usd += usd
        took = formatting.duration(sample.step_time_s)
        tell.note(f"{_layout(asked)}: steps of {took} for {formatting.usd(usd)} ({suggested.reason})")
        if sample.layout != asked.layout:
            suggested = "a probe brought no step of its layout"
            break
    tell.note(f"explored for {formatting.usd(spent_usd)} of {formatting.usd(budget_usd)}: {suggested}")
    return measured.model_copy(
        update={
            "samples": (*measured.samples, *samples),
            "profiling_s": measured.profiling_s + time.monotonic() - begun_s,
            "profiling_usd": measured.profiling_usd + spent_usd,
        }
    )


def _layout(asked: Configuration) -> str:
    """Return a configuration in words: workers, hosts and, of other machines than this one, their types."""
    text = f"{formatting.counted(asked.workers, 'worker')} on {formatting.counted(len(asked.nodes), 'host')}"
    types = [node.type for node in asked.nodes if node.type != LOCAL]
    return text + (f" ({', '.join(types)})" if types else "")


def check_place(task: str, asked: Measurement) -> None:
    """Refuse options of exploring that cannot work, before anything is measured: place, inventory, types and data.

    Args:
        task: name of the task, as of `hetopt.profile`.
        asked: options of measuring.

    Raises:
        BadInput: exploring knows no such place, the inventory or the types belong to another place or are missing, or,
            on ec2, boto3 is missing or the task or its data cannot reach rented machines.
    """
    on = asked.explore_on
    if on not in (Local.PLACE, Ssh.PLACE, Ec2.PLACE):
        raise BadInput(
            f"{on!r} cannot be explored.", hint='choose `explore_on="local"`, `explore_on="ssh"` or `explore_on="ec2"`'
        )
    if (on == Ssh.PLACE) != (asked.inventory is not None):
        raise BadInput(
            '`inventory` names the hosts that `explore_on="ssh"` explores.',
            hint="hetopt profile TASK --explore --on ssh --inventory hosts.toml --probe-budget 0.10",
        )
    if (on == Ec2.PLACE) != bool(asked.types):
        raise BadInput(
            '`types` names the machines that `explore_on="ec2"` explores.',
            hint="hetopt profile TASK --explore --on ec2 --types c7i.large,g5.xlarge --probe-budget 0.50",
        )
    if on == Ec2.PLACE:
        _check_ec2(task, asked.data, asked.ec2_data)


def place_of(measured: Profile, task: str, asked: Measurement, tell: Reporter) -> Place:
    """Return the machines that explore a measured job: rented ones (ec2), the user's own (ssh), or this one (local).

    Hosts of an inventory are asked over ssh; nothing is rented yet.

    Args:
        measured: profile of the job.
        task: name of the task, as of `hetopt.profile`.
        asked: options of measuring.
        tell: receives what goes on.

    Raises:
        BadInput: the inventory, a type, the task or its data cannot be used there.
        RunFailed: no host of the inventory can take part.
    """
    if asked.explore_on == Ec2.PLACE:
        return place_on_ec2(measured, task=task, types=asked.types, region=asked.region, data=asked.ec2_data, tell=tell)
    if asked.inventory is not None:
        return place_on_hosts(measured, inventory=asked.inventory, tell=tell)
    return place_here(measured, workers=asked.workers, tell=tell)


def place_here(measured: Profile, *, workers: int | None, tell: Reporter) -> Place:
    """Return the probes by worker processes on this machine, priced by its instance type, else 0.10 USD an hour.

    Args:
        measured: profile of the job.
        workers: most worker processes of a probe; None: one a usable processor, at least 2.
        tell: receives what goes on.

    Raises:
        BadInput: the profile names an instance type that the catalogue does not have.
    """
    name = measured.devices[0].type
    price = None if name == LOCAL else load_catalog().price(name, "on-demand")
    hourly = STAND_IN_USD_PER_HOUR if price is None else price.usd_per_hour
    return _place(
        LocalLauncher(),
        local_probes(measured, workers or max(2, usable_processors())),
        lambda asked: hourly * len(asked.nodes),
        tell,
        startup_s=measured.startup_s or STARTUP_S,
    )


def place_on_hosts(measured: Profile, *, inventory: Path | str, tell: Reporter) -> Place:
    """Return the probes on the user's own hosts: each alone, then the first 2, 3, 4, 6 and so on together.

    All hosts are asked over ssh at once; a host that cannot take part is reported and left out. Samples name the hosts
    as machine types. A host whose cost is not known is priced at 0.10 USD an hour.

    Args:
        measured: profile of the job.
        inventory: file of the hosts.
        tell: receives what goes on.

    Raises:
        BadInput: the inventory cannot be read, or the task's code cannot be sent to hosts.
        RunFailed: no host can take part.
    """
    bundle = make_bundle(measured.job.task, rented=False)
    tell("asking the hosts", None)
    asked = Inventory(hosts=read_hosts(Path(inventory)), bundle_sha256=bundle.sha256)
    launcher = SshProbes(inventory=ready(asked), bundle=bundle)
    for reason in launcher.inventory.left_out.values():
        tell.note(f"{reason} It is not measured.")
    hosts = launcher.inventory.fit()
    hourly = {host.name: host.cost_usd_per_hour or STAND_IN_USD_PER_HOUR for host in hosts}
    return _place(
        launcher,
        own_probes(measured, hosts),
        lambda asked: sum(hourly[node.type] for node in asked.nodes),
        tell,
        startup_s=places.STARTUP_S,
    )


def _place(
    launcher: Launcher,
    probes: Sequence[ProbeRun],
    usd_per_hour: Callable[[Configuration], float],
    tell: Reporter,
    *,
    startup_s: float,
) -> Place:
    """Return a place with these probes, each of which costs what its machines cost for the time that it takes.

    Args:
        launcher: runs the probes.
        probes: probes that can be run there.
        usd_per_hour: as of `Place`.
        tell: receives what goes on.
        startup_s: as of `Place`.
    """

    def measure(run: ProbeRun, left_usd: float) -> tuple[StepSample, float]:
        """Run a probe; return its step sample and what its machines cost meanwhile, USD. Errors are as of `_run`."""
        begun_s = time.monotonic()
        sample = _run(launcher, run, tell)
        return sample, usd_per_hour(run.configuration) * (time.monotonic() - begun_s) / 3600

    return Place(probes=probes, usd_per_hour=usd_per_hour, startup_s=startup_s, measure=measure)


def _run(launcher: Launcher, probe: ProbeRun, tell: Reporter, **where: Any) -> StepSample:
    """Run one probe and return its step sample; ``where``: the folder of a rented one, and the command to end it.

    Raises:
        RunFailed: the probe fails, is stopped from outside, or measures no step.
        HetoptError: the launcher cannot start it.
    """
    with measurement(launcher, probe.spec, {}, what="a probe", reporter=tell, **where) as folder:
        return read_sample(probe, read_log(folder / EVENTS_FILE))


def _check_ec2(task: str, data: Path | str | None, ec2_data: str | None) -> None:
    """Refuse a task whose code or data rented machines cannot get, before anything is measured.

    ``data``: folder here; ``ec2_data``: its copy in S3; None: there is none.

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
    """Return the probes on rented EC2 machines of some types, priced at the catalogue's spot prices; rent nothing yet.

    Args:
        measured: profile of the job, taken on this machine.
        task: name of the task, as of `hetopt.profile`.
        types: instance types that may be probed.
        region: AWS region to rent in.
        data: S3 address of the task's data, ``s3://BUCKET/PREFIX``; None: the task reads no files.
        tell: receives what goes on.

    Raises:
        BadInput: the catalogue has no such type or no price of it, a type cannot train, the task's code cannot be sent
            to machines, or boto3 is not installed.
    """
    catalog = load_catalog(region)
    probes = rented_probes(measured, list(map(catalog.instance_type, dict.fromkeys(types))), image_kind)
    launcher = Ec2Probes(
        home=runs_home().parent,
        tell=tell.note,
        orders=Orders(edge=connect(region), catalog=catalog, options=Ec2()),
        bundle=make_bundle(task),
        data=data,
        gradient_bytes=measured.job.gradient_bytes,
    )
    hourly = _spot_usd_per_hour(catalog, types)

    def measure(run: ProbeRun, left_usd: float) -> tuple[StepSample, float]:
        """Rent a probe's machines for at most ``left_usd``; return its step sample and what was spent, USD.

        A new run folder keeps the order, so that `hetopt gc` finds what may be left.

        Raises:
            BadInput: the folder cannot be made.
            RunFailed: the probe fails, or measures no step.
            HetoptError: the machines cannot be rented, such as a `CloudRefused`.
        """
        # Whatever happens, `hetopt gc` knows of a run's folder.
        folder = RunFolders(home=runs_home()).create("probe", datetime.datetime.now(datetime.UTC), secret=True)
        command = f"hetopt gc --on ec2 --run {folder.name} --remove"
        return _run(replace(launcher, budget_usd=left_usd), run, tell, folder=folder, command=command), spent_usd(
            folder
        )

    return Place(
        probes=probes,
        usd_per_hour=lambda asked: sum(hourly[node.type] for node in asked.nodes),
        startup_s=BOOT_S,
        measure=measure,
    )


def _spot_usd_per_hour(catalog: Catalog, types: Sequence[str]) -> dict[str, float]:
    """Return USD an hour by instance type: spot, or on demand (the most it can be) where no spot price is known.

    Raises:
        BadInput: the catalogue has neither price of a type.
    """
    prices = {name: catalog.price(name, "spot") or catalog.price(name, "on-demand") for name in types}
    if unknown := [name for name, price in prices.items() if price is None]:
        raise BadInput(f"no price of {', '.join(unknown)} is known in {catalog.region}.", hint="name another type")
    return {name: price.usd_per_hour for name, price in prices.items() if price is not None}
