"""How people write down a rehearsed cluster and what happens to it.

Hosts: ``speed=1, rate=100mbit x2; speed=0.25, rate=25mbit, workers=2``. Changes, one a line in a schedule:
``30s h2 speed=0.25 rate=10mbit``, ``step 500 * rate=10mbit``, ``step 40 h3 dies``, ``70s h3 returns``,
``50s h2 notice``, ``20s h1 cut``, ``25s h1 heals``.

The hosts of a rehearsal as they are wanted, before anything is scaled: a plan's machines, or described hosts.

Times and link rates here are the cluster's; what they become on this machine is `rehearsal`'s business.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from hetopt.backends.emulation.namespaces import check_size
from hetopt.core.batch_partition import WorkerTime, solve_shares
from hetopt.core.errors import BadInput
from hetopt.core.grammar import DURATION, NUMBER, RATE, Item, arguments, fields, record, repeated, split
from hetopt.core.plain_text import known
from hetopt.core.profile import LOCAL
from hetopt.core.scaled_emulation import EVERY_HOST, Change, EmulatedHost
from hetopt.optimizer.plan import Plan

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
    """The hosts of a description, called h0, h1 and so on.

    Raises:
        BadInput: it cannot be read, a value is impossible, or there are more hosts than addresses.
    """
    hosts: list[EmulatedHost] = []
    for one, copies in map(repeated, filter(None, split(text, ";", "a description of hosts"))):
        if copies == 0:
            raise BadInput(f"{one + ' x0'!r} asks for no host at all.", hint=_HOSTS_EXAMPLE)
        check_size(len(hosts) + copies)
        item = arguments(one, f"host {one!r}", separators=_WORDS)
        host = record(EmulatedHost, item, _HOST, units=_UNITS, defaults={"name": "h0"})
        hosts += [host.model_copy(update={"name": f"h{len(hosts) + n}"}) for n in range(copies)]
    if not hosts:
        raise BadInput("the description names no host.", hint=_HOSTS_EXAMPLE)
    return tuple(hosts)


def parse_changes(text: str, hosts: Collection[str]) -> tuple[Change, ...]:
    """The changes of a schedule, one a line; ``#`` begins a comment.

    Args:
        text: the schedule.
        hosts: names of the hosts there are.

    Raises:
        BadInput: a line cannot be read, has no moment, or names a host that there is not.
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
    """One change, such as ``h2 speed=0.25``; without a moment it happens at once.

    Raises:
        BadInput: as for `parse_changes`.
    """
    return _change(repr(text.strip()), text, hosts)


def _change(where: str, text: str, hosts: Collection[str]) -> Change:
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
        raise BadInput(f"{where} names the host {host!r}; there is {_listed(hosts)}.", hint=_CHANGE_EXAMPLE)
    if not fates and not item.pairs:
        raise BadInput(f"{where} does not say what happens to {host}.", hint=_CHANGE_EXAMPLE)
    happens = {known(fate, (*_FATES, "speed=", "rate="), f"change in {where}"): "true" for fate in fates}
    fields(Item(where=where, pairs=item.pairs), _CHANGED)
    said = {**moment, "host": host, **happens, **item.pairs}
    return record(Change, Item(where=where, pairs=said), _CHANGE, units=_UNITS)


def _listed(hosts: Collection[str]) -> str:
    names = list(hosts)
    return ", ".join(names) if len(names) <= 8 else f"{names[0]} to {names[-1]}"


SPEED_DIGITS = 4


@dataclass(frozen=True, kw_only=True)
class WantedHost:
    """One host of the cluster that is rehearsed.

    Attributes:
        host: its name, workers, relative speed and link.
        type: what its workers stand for: a catalogue name, or 'local'.
        time: computation of one of its workers in a step.
    """

    host: EmulatedHost
    type: str
    time: WorkerTime


def planned_hosts(plan: Plan) -> tuple[WantedHost, ...]:
    """The machines of a plan, group by group: as fast, and as well connected, as the planner took them to be.

    Speeds are relative to the fastest host, for steps of as many samples as each would have if all had as many.

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
    """Hosts as they were described. At speed 1 a worker is as fast as one of this machine, alone on a processor.

    Args:
        described: the hosts, in order.
        alone: computation of one worker of this machine with a processor to itself.
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
    """Samples of each worker with which the slowest ends earliest, host by host.

    Raises:
        BadInput: fewer samples than workers, or a host so slow that its best share is none.
    """
    workers = [host for host in hosts for _ in range(host.host.workers)]
    check_batch(batch, len(workers))
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


def check_batch(batch: int, workers: int) -> None:
    """Refuse a batch that does not give every worker a sample.

    Raises:
        BadInput: so it is.
    """
    if batch < workers:
        raise BadInput(
            f"the global batch size must be at least {workers}, one sample a worker, got {batch}.",
            hint="use fewer workers, or plan with a larger `batch_size`",
        )
