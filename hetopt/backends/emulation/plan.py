"""Maps a plan, or hosts that a person describes, onto a miniature of the cluster on this machine, and predicts it.

A machine of the plan computes a share of ``b`` samples in ``t(b)`` and sends at ``R``; its host in the miniature takes
``F t(b)`` and sends at ``R / F``. Every step of the miniature then takes F times as long, computation and communication
alike. F is the least factor at which the real computation of all workers fits into the time that they declare, which is
what the planner took for each machine, without the scatter of single steps. Not imitated: the latency of a message (the
box has its own, larger than a data centre's), and the bus between the workers of one machine.

A job that cannot be trained here has a stand-in task in its place. Where the job's gradient has ``G`` bytes and the
stand-in's ``g``, links are ``G / g`` times as slow, so that a step exchanges for as long as the job's does: the
cluster's time is kept, and nothing of what is learned.

People write hosts as ``speed=1, rate=100mbit x2; speed=0.25, rate=25mbit, workers=2``, and changes, one a line in a
schedule, as ``30s h2 speed=0.25 rate=10mbit``, ``step 500 * rate=10mbit``, ``step 40 h3 dies``, ``70s h3 returns``,
``50s h2 notice``, ``20s h1 cut``, ``25s h1 heals``. Times and link rates there are the cluster's.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from hetopt.backends.emulation.namespaces import (
    BOX_BITS_PER_S,
    IN_TRAINING,
    STEERED,
    STEERED_LOG_SD,
    box_link,
    check_size,
)
from hetopt.backends.prediction import (
    AGENT_S,
    WORKER_S,
    ExchangeGroup,
    PlacedRun,
    SmallWorkers,
    begun_shares,
    least_factor,
    predict_exchange,
    predict_run,
    rounded_up,
)
from hetopt.core import formatting
from hetopt.core.batch_partition import WorkerTime, solve_shares
from hetopt.core.comm.composition import METHODS
from hetopt.core.errors import BadInput
from hetopt.core.grammar import DURATION, NUMBER, RATE, Item, arguments, fields, record, repeated, split
from hetopt.core.plain_text import known
from hetopt.core.profile import LOCAL, Device, Profile, StepTime
from hetopt.core.run_spec import (
    EVERY_HOST,
    GRADIENT_BYTES,
    PARAMETERS,
    SHAPES,
    STAND_IN,
    Change,
    DeclaredTime,
    EmulatedHost,
    RunSpec,
    ScaledEmulation,
    WorkerSpec,
)
from hetopt.optimizer.fit import fit, times_as_long
from hetopt.optimizer.plan import Plan, Prediction
from hetopt.optimizer.step_time.model import learned_shape
from hetopt.optimizer.step_time.own_work import FORETOLD_LOG_SD

HEADROOM = 1.4
"""Factor of declared time over the end of the real computation: what is left of the processors goes to the exchange, to
the other processes of the run, and to moments in which the machine is slower than it was."""

MOST_FOR_LINKS = 3.0
"""Largest factor on the time factor that the computation demands, to which it may be raised for the sake of fast links.
"""

BUILD_S = 1.0
"""Seconds until the conductor has built the network."""

REHEARSED_LOG_SD = 0.03
"""Standard deviation of the log of (true / predicted) computing time of a rehearsal: declared times are kept to the
millisecond; what is left is how punctually a worker wakes up."""


Limited = TypeVar("Limited", EmulatedHost, Change)


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The factors between a cluster and its scaled emulation (miniature), for computing times and for links.

    Attributes:
        time: factor by which computation takes longer than in the cluster.
        links: factor by which links are slower than in the cluster.
        fastest_bits_per_s: rate of the fastest link here; faster ones get it.
    """

    time: float
    links: float
    fastest_bits_per_s: float = math.inf

    def rate(self, bits_per_s: float) -> float:
        """Return the rate (bits/s) in the emulation of a link that has ``bits_per_s`` in the cluster."""
        return min(bits_per_s / self.links, self.fastest_bits_per_s)

    def of(self, limited: Limited) -> Limited:
        """Return a copy of a host, or of a change of one, with its link's rate in the emulation; no rate stays None."""
        rate = limited.rate_bits_per_s
        return limited.model_copy(update={"rate_bits_per_s": None if rate is None else self.rate(rate)})

    def declare(self, host: WantedHost, samples: int) -> DeclaredTime:
        """Return the computing time that each worker of ``host`` imitates in the emulation, exact for ``samples``.

        Declared times know no floor and no micro-batches. The fixed part is raised so that ``samples`` take as long as
        they should.
        """
        time = host.time
        return DeclaredTime(
            fixed_s=self.time * max(time.fixed_s, time.time_s(samples) - time.per_sample_s * samples),
            per_sample_s=self.time * time.per_sample_s,
        )


@dataclass(frozen=True, kw_only=True)
class Rehearsal(PlacedRun):
    """A run mapped onto a scaled emulation of its cluster on this machine, with its prediction and scale.

    Attributes:
        scale: factors between the cluster and the emulation.
    """

    scale: Scale


def rehearse(
    plan: Plan,
    processors: int,
    described: Sequence[EmulatedHost] | None = None,
    changes: Sequence[Change] = (),
    *,
    stands_in: bool = False,
) -> Rehearsal:
    """Map a plan's run onto an emulation of its machines, or of ``described`` hosts, on this machine, and predict it.

    Global batch, compression, goal, policy and seed are kept. Without a description the shares are the plan's own, and
    the rates of ``changes`` are those of the cluster, scaled like its links. Described hosts compute at their speed
    relative to one worker of this machine; their rates, and those of the changes, are taken as they are. Nothing is
    started.

    Args:
        plan: plan to rehearse.
        processors: processors that this machine's processes may use.
        described: hosts in the place of the plan's machines; None: the plan's machines.
        changes: scheduled changes of hosts.
        stands_in: whether a small task stands in for the job, so that it need not be trained here; only the plan's
            machines can be rehearsed then.

    Raises:
        BadInput: fewer samples than workers, a share below one sample, hosts that this machine cannot hold, a
            compression that cannot serve so many workers, hosts described for a stand-in, or a plan that does not say
            how fast its machines are.
    """
    if stands_in and described is not None:
        raise BadInput(
            "described hosts are as fast as this machine trains the job, and a stand-in trains in its place.",
            hint="leave `hosts` out: the plan's machines are rehearsed",
        )
    wanted, slower = plan, links_slower(plan) if stands_in else 1.0
    if stands_in:
        plan = with_stand_in(plan, processors)
    model, batch = fit(plan.profile, plan.run.precision), plan.chosen.global_batch_size
    planned = planned_hosts(wanted) if described is None else ()
    count = sum(host.workers for host in described or (planned_host.host for planned_host in planned))
    here = SmallWorkers.of(model, processors, count)
    if batch < here.workers:
        raise BadInput(
            f"the global batch size must be at least {here.workers}, one sample a worker, got {batch}.",
            hint="use fewer workers, or plan with a larger `batch_size`",
        )
    if described is None:
        hosts, best = planned, tuple(samples for group in plan.chosen.groups for samples in group.local_batch_sizes)
    else:
        hosts = described_hosts(described, here.alone)
        # Equal shares are equal whatever the best ones are, of which a slow host may have none.
        anyhow = (batch - here.workers + 1, *(1 for _ in range(here.workers - 1)))
        best = anyhow if plan.run.batch_policy == "uniform" else best_shares(hosts, batch)
    shares = begun_shares(plan.run, best, least=plan.profile.job.least_local_batch_size)
    factor = fitting_factor(hosts, shares, changes, here)
    if described is None:
        scale, notes = _scale_plan(hosts, factor, slower)
        notes = [*([remark(wanted)] if stands_in else []), *notes]
    else:
        scale = Scale(time=factor, links=1.0)
        sample = formatting.duration(scale.time * here.alone.per_sample_s)
        notes = [
            f"At speed 1 a sample takes {sample}, {scale.time:g} times as long as one worker of this machine needs "
            f"alone: {here.workers} workers fit on {here.processors} processors that way. Link rates are as described."
        ]
    run = miniature_run(plan.run, hosts, shares, changes, here, scale)
    computed = zip(_workers(hosts), shares, strict=True)
    # All do the optimizer's step at once, after the exchange.
    update_s = here.fitted.optimizer_s * here.crowding
    updated_s = [scale.time * host.time.time_s(samples) + update_s for host, samples in computed]
    prediction, assumed = _predict(plan, run, here, [scale.of(host.host) for host in hosts], updated_s)
    return Rehearsal(run=run, prediction=prediction, scale=scale, notes=(*notes, *assumed))


def _workers(hosts: Sequence[WantedHost]) -> list[WantedHost]:
    """Return the host of each worker, in order."""
    return [host for host in hosts for _ in range(host.host.workers)]


def fitting_factor(
    hosts: Sequence[WantedHost], shares: Sequence[int], changes: Sequence[Change], here: SmallWorkers
) -> float:
    """Return the least slowdown (>= 1) of a rehearsal at which real computing fits, also after ``changes`` of speed.

    It is rounded up to two digits.

    Args:
        hosts: hosts of the cluster, with their computing times.
        shares: local batch sizes, in the order of the hosts' workers.
        changes: scheduled changes.
        here: the workers on this machine.
    """
    wanted_s = []
    for host, samples in zip(_workers(hosts), shares, strict=True):
        speeds = [change.speed for change in changes if change.speed and change.host in (host.host.name, EVERY_HOST)]
        wanted_s.append(host.time.time_s(samples) / max([1.0, *(speed / host.host.speed for speed in speeds)]))
    work_s = [here.work_s(samples) for samples in shares]
    return rounded_up(least_factor(wanted_s, work_s, here.processors, HEADROOM))


def _scale_plan(hosts: Sequence[WantedHost], factor: float, slower: float) -> tuple[Scale, list[str]]:
    """Return the scale of computation and links of a rehearsed plan, and notes on what it means.

    Args:
        hosts: hosts of the cluster.
        factor: least factor on computing times; larger where links would else be too fast for this machine.
        slower: further factor on links, of a stand-in; 1: the job itself trains.
    """
    rates = sorted({host.host.rate_bits_per_s for host in hosts if host.host.rate_bits_per_s is not None})
    fastest = max(rates, default=0.0) / slower
    if factor < fastest / BOX_BITS_PER_S <= MOST_FOR_LINKS * factor:
        factor = rounded_up(fastest / BOX_BITS_PER_S)
    scale = Scale(time=factor, links=factor * slower, fastest_bits_per_s=BOX_BITS_PER_S)
    scaling = f"1 s of the cluster takes {factor:g} s here"
    if rates:
        become = ", ".join(
            f"{formatting.bit_rate(rate)} become {formatting.bit_rate(scale.rate(rate))}" for rate in rates
        )
        scaling += f"; links are {scale.links:,.3g} times slower: {become}"
    notes = [scaling + "."]
    if fastest / factor > BOX_BITS_PER_S:
        notes.append(
            f"Links of {formatting.bit_rate(fastest * slower)} would need {formatting.bit_rate(fastest / factor)} "
            f"here, more than this machine carries; they get {formatting.bit_rate(BOX_BITS_PER_S)}, so communication "
            "weighs more than it would."
        )
    return scale, notes


def miniature_run(
    run: RunSpec,
    hosts: Sequence[WantedHost],
    shares: Sequence[int],
    changes: Sequence[Change],
    here: SmallWorkers,
    scale: Scale,
) -> RunSpec:
    """Return the run specification of a rehearsal: imitated computing times, scaled link rates, scheduled changes.

    Args:
        run: run of the plan.
        hosts: hosts of the cluster, with their computing times.
        shares: local batch sizes, in the order of the hosts' workers.
        changes: scheduled changes, with rates of the cluster.
        here: the workers on this machine.
        scale: factors between the cluster and the emulation.
    """
    most = here.largest_batch
    return run.model_copy(
        update={
            "workers": tuple(
                WorkerSpec(
                    host=host.host.name,
                    type=host.type,
                    local_batch_size=samples,
                    declared=scale.declare(host, samples),
                    threads=1,
                    device="auto" if here.on_gpu else "cpu",
                    max_local_batch_size=most,
                )
                for host, samples in zip(_workers(hosts), shares, strict=True)
            ),
            "miniature": ScaledEmulation(
                hosts=tuple(scale.of(host.host) for host in hosts),
                time_factor=scale.links,
                changes=tuple(scale.of(change) for change in changes),
            ),
        }
    )


def _predict(
    plan: Plan, run: RunSpec, here: SmallWorkers, hosts: Sequence[EmulatedHost], compute_s: Sequence[float]
) -> tuple[Prediction, tuple[str, ...]]:
    """Predict the miniature: computation as declared, links as limited, everything else as this machine does it.

    Args:
        plan: plan for its goal and its profile.
        run: run of the miniature.
        here: its workers.
        hosts: hosts with the rates that their links have here.
        compute_s: seconds of each worker in a step.

    Returns:
        the prediction, and what was assumed of the exchange.
    """
    model, profile, several = here.model, plan.profile, len(hosts) > 1
    slowest = min(host.rate_bits_per_s or BOX_BITS_PER_S for host in hosts)

    limited = partial(box_link, rate_bits_per_s=slowest, workers_per_processor=here.workers / here.cpus)
    group = ExchangeGroup(
        model=model,
        workers=here.workers,
        link=limited if several else None,
        compressors={**model.reference.compressors, **here.fitted.compressors},
        overlap=learned_shape(model).overlap,
        # Workers that declare their time end one after the other: the last of them compresses when others have. But
        # all add up, and read, what has arrived at the same moment.
        crowding=IN_TRAINING,
        together=IN_TRAINING * here.crowding,
        steered_log_sd=STEERED_LOG_SD if several else FORETOLD_LOG_SD,
    )
    exchange = predict_exchange(run, group, compute_s=max(compute_s), to_target=plan.goal.ends == "target")
    if run.ratio_policy == "auto" and several:
        exchange = replace(exchange, exchange_s=STEERED * exchange.exchange_s, compress_s=STEERED * exchange.compress_s)
    # Evaluations are not paced. Each worker takes a part in proportion to its share, on a processor that it may have to
    # share in turn; they were measured on the whole host.
    samples = min(here.fitted.largest_measured, model.whole_host.largest_measured)
    slower = times_as_long(here.work_s, model.whole_host.time_s, samples)
    largest_part = max(worker.local_batch_size for worker in run.workers) / run.global_batch_size
    # All agents start at once, then all workers; each of both is one processor's work. The profile's start-up was that
    # of one agent and, after it, of workers with a processor each.
    worker_s = WORKER_S if profile.startup_s is None else max(0.0, profile.startup_s - AGENT_S)
    prediction = predict_run(
        model,
        plan,
        compute_s,
        exchange,
        compute_log_sd=REHEARSED_LOG_SD,
        evaluation_s=(profile.evaluation_s or 0.0) * slower * max(largest_part, 1 / here.processors),
        startup_s=BUILD_S + AGENT_S * max(1.0, len(hosts) / here.cpus) + worker_s * max(1.0, here.workers / here.cpus),
    )
    return prediction, exchange.notes


STEP_S = 0.002
"""Seconds that a worker computes of the stand-in, and takes to update it: about as long on any processor of these
years. It decides nothing but how fast a cluster can be rehearsed: one whose steps take less is slowed down."""


def links_slower(plan: Plan) -> float:
    """Return the factor by which links are slowed for the stand-in to exchange as long as the plan's job."""
    return plan.profile.job.gradient_bytes / GRADIENT_BYTES


def with_stand_in(plan: Plan, processors: int) -> Plan:
    """Return the plan with a small stand-in task as its job, for as many steps on the same machines.

    Args:
        plan: whose job is replaced.
        processors: processors that this machine's processes may use.

    Raises:
        BadInput: what the plan's workers exchange depends on the shapes of the job's parameters.
    """
    compression = plan.run.compression
    if METHODS[compression.name].by_shape:
        raise BadInput(
            f"what {compression.name} sends depends on the shapes of parameters, and a stand-in has others.",
            hint='launch with `compression="dense"`',
        )
    steps = plan.run.stop.max_steps or math.ceil(plan.chosen.prediction.steps.value)
    run = plan.run.model_copy(
        update={
            "task": STAND_IN,
            "script": (),
            "data_dir": None,
            "precision": "fp32",
            "micro_batch_size": None,
            "learning_rate_scale": 1.0,
            "shard": None,
        }
    )
    changed = {"profile": _profile(plan.profile, processors), "run": run}
    return plan.model_copy(update=changed).adjusted(steps=steps)


def remark(plan: Plan) -> str:
    """Return the sentences that tell a person what a stand-in's times and losses mean."""
    job, slower = plan.profile.job, f"{links_slower(plan):,.3g}"
    return (
        f"The job ({job.task}) is not trained here: a gradient of {formatting.bytes_(GRADIENT_BYTES)} stands in for "
        f"{formatting.bytes_(job.gradient_bytes)}, over links {slower} times slower for that. Times are the cluster's; "
        "losses mean nothing."
    )


def _profile(described: Profile, processors: int) -> Profile:
    """Return the profile ``described`` with the stand-in as its job, and that job's step times here as its only device.

    Args:
        described: profile of the job that cannot be trained here.
        processors: number that this machine's processes may use.
    """
    job = described.job.model_copy(
        update={
            "task": STAND_IN,
            "script": (),
            "parameters": PARAMETERS,
            "gradient_bytes": GRADIENT_BYTES,
            "parameter_shapes": SHAPES,
            "least_local_batch_size": 1,
            "learning_rate_rule": "none",
        }
    )
    host = described.host.model_copy(update={"logical_cpus": processors})
    steps = tuple(
        StepTime(
            local_batch_size=size,
            step_time_s=STEP_S,
            samples_s=(STEP_S,),
            load_s=0.0,
            forward_s=STEP_S / 4,
            backward_s=STEP_S / 4,
            optimizer_s=STEP_S / 2,
        )
        for size in sorted({1, max(2, job.batch_size)})
    )
    device = Device(
        type=LOCAL,
        kind="cpu",
        workers_per_host=processors,
        threads_per_worker=1,
        step_times=steps,
        memory_limit_bytes=host.memory_bytes,
        compressors=described.devices[0].compressors,
    )
    return described.model_copy(
        update={
            "job": job,
            "host": host,
            "devices": (device,),
            "links": (),
            "samples": (),
            "evaluation_s": None,
            "startup_s": None,
            "yardstick_s": None,
        }
    )


_HOSTS_EXAMPLE = "for example 'speed=1,rate=100mbit x2; speed=0.25,rate=25mbit'"
_CHANGE_EXAMPLE = "for example '30s h2 speed=0.25 rate=10mbit' or 'step 40 h3 dies'"
_FATES = ("dies", "returns", "notice", "cut", "heals")
_WORDS = ", \t\n"
_CHANGED = {"speed": "speed", "rate": "rate_bits_per_s"}
_CHANGE = {"at": "at_s", "step": "at_step", "host": "host", **_CHANGED, **{fate: fate for fate in _FATES}}
_HOST = {**_CHANGED, "workers": "workers"}
_MOMENT = replace(DURATION, example="30s or 1.5m", scales={unit: s for unit, s in DURATION.scales.items() if unit})
_UNITS = {"speed": NUMBER, "rate_bits_per_s": RATE, "at_s": _MOMENT}


def parse_hosts(text: str) -> tuple[EmulatedHost, ...]:
    """Parse a description such as 'speed=1, rate=100mbit x2; speed=0.25' into hosts named h0, h1 and so on.

    Raises:
        BadInput: the text cannot be read or names no host, a value is impossible, or there are more hosts than
            addresses.
    """
    hosts: list[EmulatedHost] = []
    for described, copies in map(repeated, filter(None, split(text, ";", "a description of hosts"))):
        if copies == 0:
            raise BadInput(f"{described + ' x0'!r} asks for no host at all.", hint=_HOSTS_EXAMPLE)
        check_size(len(hosts) + copies)
        item = arguments(described, f"host {described!r}", separators=_WORDS)
        host = record(EmulatedHost, item, _HOST, units=_UNITS, defaults={"name": "h0"})
        hosts += [host.model_copy(update={"name": f"h{len(hosts) + n}"}) for n in range(copies)]
    if not hosts:
        raise BadInput("the description names no host.", hint=_HOSTS_EXAMPLE)
    return tuple(hosts)


def parse_changes(text: str, hosts: Collection[str]) -> tuple[Change, ...]:
    """Parse a schedule of changes, one a line such as '30s h2 speed=0.25'; what follows a ``#`` is a comment.

    Args:
        text: the schedule; empty: no changes.
        hosts: names of all hosts.

    Raises:
        BadInput: a line cannot be read, has no moment, or names a host that does not exist.
    """
    changes: list[Change] = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].strip()
        if not words:
            continue
        where = f"line {number} ({line.strip()!r})"
        change = _change(where, words, hosts)
        if change.at_s is None and change.at_step is None:
            raise BadInput(f"{where} does not say when.", hint=f"begin it with seconds or a step, {_CHANGE_EXAMPLE}")
        changes.append(change)
    return tuple(changes)


def parse_change(text: str, hosts: Collection[str]) -> Change:
    """Parse a change such as ``h2 speed=0.25`` or ``30s h2 dies``; without a moment it happens at once.

    Args:
        text: the change.
        hosts: names of all hosts.

    Raises:
        BadInput: the text cannot be read, says no change, or names a host that does not exist.
    """
    return _change(repr(text.strip()), text, hosts)


def _change(where: str, text: str, hosts: Collection[str]) -> Change:
    """Return the change that a line's words describe; ``where`` names the line in errors.

    Raises:
        BadInput: the words cannot be read, say nothing, or name no host of ``hosts``.
    """
    item = arguments(text, where, separators=_WORDS)
    words, moment = list(item.values), dict[str, str]()
    if words[:1] == ["step"]:
        moment["step"], words = "".join(words[1:2]), words[2:]
        if not moment["step"].isdecimal():
            raise BadInput(f"{where}: step must be a whole number, got {moment['step']!r}.", hint=_CHANGE_EXAMPLE)
    elif words and words[0][0] in "+-.0123456789":
        moment["at"], words = words[0], words[1:]
    if not words:
        raise BadInput(f"{where} names no host.", hint=_CHANGE_EXAMPLE)
    host, *fates = words
    if host != EVERY_HOST and host not in hosts:
        raise BadInput(f"{where} names the host {host!r}; there is {', '.join(hosts)}.", hint=_CHANGE_EXAMPLE)
    if not fates and not item.pairs:
        raise BadInput(f"{where} does not say what happens to {host}.", hint=_CHANGE_EXAMPLE)
    happens = {known(fate, (*_FATES, "speed=", "rate="), f"change in {where}"): "true" for fate in fates}
    fields(Item(where=where, pairs=item.pairs), _CHANGED)
    pairs = {**moment, "host": host, **happens, **item.pairs}
    return record(Change, Item(where=where, pairs=pairs), _CHANGE, units=_UNITS)


SPEED_DIGITS = 4
"""Digits of the relative speeds of a plan's hosts."""


@dataclass(frozen=True, kw_only=True)
class WantedHost:
    """A host of the cluster to be rehearsed: its description, machine type and computing time.

    Attributes:
        host: its name, workers, relative speed and link.
        type: device type that its workers stand for: a catalogue name, or 'local'.
        time: computing time of one of its workers in a step.
    """

    host: EmulatedHost
    type: str
    time: WorkerTime


def planned_hosts(plan: Plan) -> tuple[WantedHost, ...]:
    """Return a plan's machines as hosts h0, h1 and so on, group by group, as fast as the planner took them to be.

    A host's speed is that of one of its workers over the fastest worker's, each with an equal share of the batch.

    Raises:
        BadInput: the plan does not say how fast its machines were taken to be, or has more of them than there are
            addresses.
    """
    known = [(group, group.assumed) for group in plan.chosen.groups if group.assumed is not None]
    if len(known) < len(plan.chosen.groups):
        raise BadInput(
            "The plan does not say how fast its machines were taken to be: an older hetopt made it.",
            hint="make it again with `hetopt recommend`, or describe the hosts in `hosts`",
        )
    check_size(sum(group.machines for group, _ in known))
    workers = sum(len(group.local_batch_sizes) for group, _ in known)
    samples = max(1, plan.chosen.global_batch_size // workers)
    fastest_s = min(assumed.time_s(samples) for _, assumed in known)
    several = sum(group.machines for group, _ in known) > 1
    machines = [pair for pair in known for _ in range(pair[0].machines)]
    return tuple(
        WantedHost(
            host=EmulatedHost(
                name=f"h{number}",
                workers=group.workers_per_machine,
                speed=float(f"{fastest_s / assumed.time_s(samples):.{SPEED_DIGITS}g}"),
                rate_bits_per_s=8 * assumed.link_bytes_per_s if several else None,
            ),
            type=group.instance_type,
            time=assumed.time,
        )
        for number, (group, assumed) in enumerate(machines)
    )


def described_hosts(described: Sequence[EmulatedHost], alone: WorkerTime) -> tuple[WantedHost, ...]:
    """Return described hosts with their workers' computing times: ``alone`` over the host's speed.

    Args:
        described: the hosts, in order.
        alone: computing time of one worker of this machine with a processor to itself.
    """
    return tuple(
        WantedHost(
            host=host,
            type=LOCAL,
            time=replace(alone, fixed_s=alone.fixed_s / host.speed, per_sample_s=alone.per_sample_s / host.speed),
        )
        for host in described
    )


def best_shares(hosts: Sequence[WantedHost], batch: int) -> tuple[int, ...]:
    """Return the local batch sizes, by worker host by host, that sum to ``batch`` and end the slowest worker earliest.

    Raises:
        BadInput: a host is so slow that its best share is less than one sample.
    """
    workers = _workers(hosts)
    # Allowed to take nothing, a worker that is too slow for the others does just that.
    shares = solve_shares([replace(host.time, min_samples=0) for host in workers], batch).local_batch_sizes
    for host, samples in zip(workers, shares, strict=True):
        if samples < 1:
            raise BadInput(
                f"the local batch size of {host.host.name}, at speed {host.host.speed:g}, would be less than one "
                f"sample of a global batch of {batch}.",
                hint="leave it out, make it faster, or plan with a larger `batch_size`",
            )
    return shares
