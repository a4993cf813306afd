"""`hetopt profile --explore`: whole steps of more and more workers, measured where it tells most for its money."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hetopt.api.measuring import measured as made
from hetopt.backends.backend import Launcher
from hetopt.backends.ec2.renter.bundle import make_bundle
from hetopt.backends.emulation.backend import RehearsalLauncher
from hetopt.backends.emulation.description import parse_hosts
from hetopt.backends.emulation.namespaces import why_not
from hetopt.backends.prediction.hosting import STARTUP_S, ThisMachine
from hetopt.backends.probe_runs import ProbeRun, local_probes, own_probes, read_sample, rehearsed_probes
from hetopt.backends.processes import LocalLauncher
from hetopt.backends.ssh.backend import SshProbes, ready
from hetopt.backends.ssh.inventory import Inventory
from hetopt.core import formatting
from hetopt.core.errors import BadInput
from hetopt.core.events.fold import RunFold
from hetopt.core.events.log import EVENTS_FILE
from hetopt.core.events.reader import read_log
from hetopt.core.hosts import read_hosts
from hetopt.core.profile import LOCAL, Profile, Provisioned
from hetopt.core.reporter import Reporter
from hetopt.core.step_samples import Configuration, StepSample
from hetopt.optimizer.exploring import Exploration, Measured, Stopped
from hetopt.optimizer.fit import fit
from hetopt.optimizer.market.catalog import load_catalog
from hetopt.optimizer.recommendation import own_machines
from hetopt.optimizer.step_time.probes import PROBE_STEPS

STAND_IN_USD_PER_HOUR = 0.10
"""Of a machine that is not in the catalogue: about what two cloud processors with 4 GB cost. Nothing is paid here, but
a price says how much of it a probe is worth."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where probes run.

    Attributes:
        probes: all that may be made.
        price_usd: of all probes of a layout, by its configuration and, where it is known, the time of a step.
        measure: all probes of a layout, within so many USD: what they brought and cost.
    """

    probes: Sequence[ProbeRun]
    price_usd: Callable[[Configuration, float | None], float]
    measure: Callable[[Sequence[ProbeRun], float], Measured]


def explore(measured: Profile, place: Place, *, budget_usd: float, tell: Reporter) -> Profile:
    """The profile with the steps of the layouts that were worth measuring.

    Raises:
        BadInput: there is nothing to explore.
    """
    by_layout: dict[object, list[ProbeRun]] = {}
    for probe in place.probes:
        by_layout.setdefault(probe.configuration.layout, []).append(probe)
    found: list[StepSample] = list(measured.samples)
    launches: list[Provisioned] = list(measured.provisioned)
    begun_s, spent_usd = time.monotonic(), 0.0

    def measure(asked: Configuration) -> Measured:
        tell(f"{_layout(asked)}: measuring", None)
        return place.measure(by_layout[asked.layout], budget_usd - spent_usd)

    search = Exploration(
        candidates=[probe.configuration for probe in place.probes],
        price_usd=place.price_usd,
        budget_usd=budget_usd,
        catalog=load_catalog().instance_types,
    )
    for event in search.run([], measure):
        if isinstance(event, Stopped):
            tell.note(f"explored for {formatting.usd(event.spent_usd)} of {formatting.usd(budget_usd)}: {event.reason}")
            break
        found += event.measured.samples
        types = tuple(dict.fromkeys(node.type for node in event.configuration.nodes))
        launches += [
            Provisioned(run=f"probe-{len(launches)}", types=types, took_s=round(took_s, 1))
            for took_s in event.measured.startups_s
        ]
        spent_usd += event.measured.usd
        steps = ", ".join(formatting.duration(sample.step_time_s) for sample in event.measured.samples)
        tell.note(
            f"{_layout(event.configuration)}: steps of {steps} for {formatting.usd(event.measured.usd)} "
            f"({event.reason})"
        )
    return measured.model_copy(
        update={
            "samples": tuple(found),
            "provisioned": tuple(launches),
            "profiling_s": measured.profiling_s + time.monotonic() - begun_s,
            "profiling_usd": measured.profiling_usd + spent_usd,
        }
    )


def _layout(asked: Configuration) -> str:
    workers, nodes = asked.workers, len(asked.nodes)
    told = f"{workers} {'worker' if workers == 1 else 'workers'} on {nodes} {'host' if nodes == 1 else 'hosts'}"
    types = [node.type for node in asked.nodes if node.type != LOCAL and "=" not in node.type]
    return told + (f" ({', '.join(types)})" if types else "")


def check_place(on: str, hosts: str | None, types: Sequence[str], inventory: Path | str | None = None) -> None:
    """Refuse what cannot be explored, before anything is measured.

    Raises:
        BadInput: there is no such place, or it is not described, or this machine cannot rehearse.
    """
    if on not in ("local", "rehearsal", "ssh", "ec2"):
        places = 'choose `on="local"`, `on="rehearsal"`, `on="ssh"` or `on="ec2"`'
        raise BadInput(f"{on!r} cannot be explored.", hint=places)
    if (on == "ssh") != (inventory is not None):
        raise BadInput(
            '`inventory` names the hosts that `on="ssh"` explores.',
            hint="hetopt profile TASK --explore --on ssh --inventory hosts.toml --probe-budget 0.10",
        )
    if (on == "ec2") != bool(types):
        raise BadInput(
            '`types` names the machines that `on="ec2"` explores.',
            hint="hetopt profile TASK --explore --on ec2 --types c7i.large,g5.xlarge --probe-budget 0.50",
        )
    if on != "rehearsal" and hosts is not None:
        raise BadInput("`hosts` describes a rehearsed cluster.", hint='choose `on="rehearsal"` with it')
    if on == "rehearsal":
        if hosts is None:
            raise BadInput(
                '`on="rehearsal"` explores a cluster that is described.',
                hint="for example `hosts=speed=1,rate=100mbit x4; speed=0.5,rate=100mbit x4`",
            )
        parse_hosts(hosts)
        reason = why_not()
        if reason is not None:
            raise BadInput(f"no cluster can be rehearsed here: {reason}.", hint='choose `on="local"`')


def place_here(measured: Profile, *, hosts: str | None, workers: int | None, tell: Reporter) -> Place:
    """Processes of this machine, or described hosts, which are rehearsed.

    Raises:
        BadInput: hosts that this machine cannot hold.
    """
    machine = ThisMachine.seen()
    launcher: Launcher
    if hosts is None:
        launcher, probes = LocalLauncher(), local_probes(measured, workers or max(2, machine.processors))
    else:
        launcher, probes = RehearsalLauncher(), rehearsed_probes(fit(measured), machine, parse_hosts(hosts))
    name = measured.devices[0].type
    price = None if name == LOCAL else load_catalog().price(name, "on-demand")
    hourly = STAND_IN_USD_PER_HOUR if price is None else price.usd_per_hour
    started_s = measured.startup_s or STARTUP_S
    return _place(launcher, probes, lambda asked: hourly * len(asked.nodes), tell, startup_s=started_s, is_here=True)


def place_on_hosts(measured: Profile, *, inventory: Path | str, tell: Reporter) -> Place:
    """Hosts of one's own, each alone and the first two, three and more together; their samples name them.

    Raises:
        BadInput: the inventory cannot be read, or the task does not travel.
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
        startup_s=own_machines.STARTUP_S,
    )


def _place(
    launcher: Launcher,
    probes: Sequence[ProbeRun],
    usd_per_hour: Callable[[Configuration], float],
    tell: Reporter,
    *,
    startup_s: float,
    is_here: bool = False,
) -> Place:
    """Where probes are paid for by the time that they take; on other machines than this one starts are told too."""

    def price_usd(asked: Configuration, step_time_s: float | None) -> float:
        runs = sum(probe.configuration.layout == asked.layout for probe in probes)
        return usd_per_hour(asked) * runs * (startup_s + PROBE_STEPS * (step_time_s or 0.0)) / 3600

    def measure(runs: Sequence[ProbeRun], left_usd: float) -> Measured:
        begun_s = time.monotonic()
        samples, startups_s = zip(*(_run(launcher, run, tell) for run in runs), strict=True)
        spent = usd_per_hour(runs[0].configuration) * (time.monotonic() - begun_s) / 3600
        return Measured(samples=samples, usd=spent, startups_s=() if is_here else startups_s)

    return Place(probes=probes, price_usd=price_usd, measure=measure)


def _run(launcher: Launcher, probe: ProbeRun, tell: Reporter) -> tuple[StepSample, float]:
    """Make one probe; its steps, and seconds from the request to the first of them."""
    begun_s = time.time()
    with made(launcher, probe.spec, {}, what="a probe", told=tell) as folder:
        events = read_log(folder / EVENTS_FILE).events
        return read_sample(probe, events), RunFold.of(events, [begun_s]).startup_s or 0.0
