"""The network between the workers: measured on the real group before the first step, and anew when it has changed.

**Fit.** All collectives share a link, so all timings together say what its latency and its time for a byte are; each
primitive by itself, how it differs from the table of algorithms (`hetopt.core.comm.network_state`).

**Watch.** What has changed shows in the time of whole steps: one way to exchange takes as long as it did, or something
else has happened. So a step that leaves its interval twice in a row calls for a few sums (`measured_again`), which give
the link anew. Few bytes do not feel a link that has become quicker, so where less is sent than there is, the link is
also measured now and then, for one part in a hundred of the time.

The steps of Gauss and Newton below are of our own: they are made of the updates of a Kalman filter, and every worker
would import `scipy.optimize` for them, which takes a bare python's start 14 times.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from hetopt.core.comm.cost import TRAINER, Algorithms, Operation, Primitive, Scope, Terms
from hetopt.core.comm.network_fit import fit_alpha_beta
from hetopt.core.comm.network_state import ALPHA, BETA, LinkState, NetworkState, Part

ANYWHERE_SD = 100.0
"""Relative standard deviation of what is about to be measured."""

_ALIKE = 1e-6  # of the product of both
_LEAST_FACTOR = 0.01

TIMING_ERROR = 0.05
"""Relative error of one timing at the start that no agreement between them undercuts: training is not a timing."""

CLIP = 2.5  # standard errors, beyond which a time counts for less
_LEAST_SHARE = 0.002  # that latency, or bytes, have in the quickest, or slowest, timing; nothing could never grow
_GRACES_S = (0.0, 0.0003, 0.0005, 0.0007, 0.001, 0.0014, 0.002, 0.003)
_GRACE_COSTS = 0.5  # of relative errors, all timings together; less is what noise of a twentieth may explain
_PASSES, _SETTLED = 20, 1e-3  # steps of the fit at most, and relative changes that are none


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """One operation that was timed by itself, on the slowest member."""

    operation: Operation
    time_s: float


def measured(samples: Sequence[Timed], *, algorithms: Algorithms = TRAINER) -> NetworkState:
    """The network as timed on the real group: each primitive at two or three payloads, in one scope or both.

    All primitives together say what the hop is; each by itself, how it differs. What is far beyond the largest payload
    is known the worse, so let that be near the gradient's size.

    Raises:
        ValueError: nothing was timed between two members or more, or a time is not positive.
    """
    links: dict[Scope, LinkState] = {}
    scopes: tuple[Scope, ...] = ("network", "host")
    for scope in scopes:
        own = [s for s in samples if s.operation.scope == scope and s.operation.members > 1]
        if own:
            links[scope] = _fitted(own, scope, algorithms)
    if not links:
        raise ValueError("a network is measured between at least two members")
    return NetworkState(links=links)


def measured_again(state: NetworkState, samples: Sequence[Timed]) -> NetworkState:
    """The network after a jump, from a few timings between machines: the link as they say, all else as it was.

    Latency and time of a byte are fitted by least squares with variances in proportion to the times. So the largest
    counts for most: a limited link lets the first bytes through at once (the burst of a token bucket), and small sums
    alone would pass it for a quicker one.
    """
    link = state.links["network"]
    rows = [state.parts([(1.0, [sample.operation])], TRAINER).rows["network"] for sample in samples]
    alpha, beta = _scales([(row[ALPHA] * link.values[ALPHA], row[BETA] * link.values[BETA]) for row in rows], samples)
    link = link.moved({ALPHA: (alpha, ANYWHERE_SD), BETA: (beta, ANYWHERE_SD)})
    # How sure that is. The largest come first: what surprises later counts for less.
    for sample in sorted(samples, key=lambda sample: sample.operation.payload_bytes, reverse=True):
        parts = state.model_copy(update={"links": {**state.links, "network": link}}).parts(
            [(1.0, [sample.operation])], TRAINER
        )
        sd_s = TIMING_ERROR * max(sample.time_s, parts.time_s)
        error_s = min(max(sample.time_s - parts.time_s, -CLIP * sd_s), CLIP * sd_s)
        link = parts.links["network"].conditioned(parts.rows["network"], error_s, sd_s**2)
    return state.model_copy(update={"links": {**state.links, "network": link}})


def _scales(parts_s: Sequence[tuple[float, float]], samples: Sequence[Timed]) -> tuple[float, float]:
    """Factors on both parts of the times that explain the samples; neither below zero."""
    times = [sample.time_s for sample in samples]
    aa, ab, bb = (
        sum(part[i] * part[j] / time_s for part, time_s in zip(parts_s, times, strict=True))
        for i, j in ((0, 0), (0, 1), (1, 1))
    )
    a, b = (sum(part[i] for part in parts_s) for i in (0, 1))
    determinant = aa * bb - ab * ab
    if determinant <= _ALIKE * aa * bb:  # one size of message cannot tell them apart
        scale = (a + b) / (aa + 2 * ab + bb)
        return scale, scale
    x, y = (a * bb - b * ab) / determinant, (aa * b - ab * a) / determinant
    if x <= 0:
        return _LEAST_FACTOR, b / bb
    return (x, y) if y > 0 else (a / aa, _LEAST_FACTOR)


def _fitted(samples: Sequence[Timed], scope: Scope, algorithms: Algorithms) -> LinkState:
    """The hop with the grace that explains the timings best, in one scope; none, unless one clearly does."""

    def unexplained(link: LinkState) -> float:
        expected = NetworkState(links={scope: link})
        ratios = [expected.expected_s([s.operation], algorithms=algorithms) / s.time_s for s in samples]
        return sum(abs(math.log(ratio)) for ratio in ratios) + _GRACE_COSTS * (link.grace_s > 0)

    longest_s = max(sample.time_s for sample in samples)
    graces_s = [grace_s for grace_s in _GRACES_S if grace_s < longest_s]
    # Where something is held at its least, the order matters: the largest come first, whose rate is felt.
    ordered = sorted(samples, key=lambda s: (-s.operation.payload_bytes, s.operation.primitive))
    return min((_with_grace(ordered, scope, algorithms, grace_s) for grace_s in graces_s), key=unexplained)


def _with_grace(samples: Sequence[Timed], scope: Scope, algorithms: Algorithms, grace_s: float) -> LinkState:
    """The hop, and how each primitive differs, if so much of the bytes' time is not felt."""
    primitives: list[Primitive] = [sample.operation.primitive for sample in samples]
    terms = [sample.operation.terms(algorithms) for sample in samples]
    times_s = [sample.time_s for sample in samples]
    exchanges: list[list[Part]] = [[part] for part in zip(primitives, terms, strict=True)]
    latency_s, byte_s = _line(terms, times_s)
    if grace_s > 0:
        # The longest timings tell the rate, whatever passes before it is felt.
        rates = [(s + grace_s - latency_s * own.messages) / own.traffic_bytes for s, own in _longest(samples, terms)]
        felt = [own.traffic_bytes * statistics.median(rates) > grace_s for own in terms]
        terms = [own if is_felt else replace(own, traffic_bytes=0.0) for own, is_felt in zip(terms, felt, strict=True)]
        latency_s, byte_s = _line(terms, [s + grace_s * is_felt for s, is_felt in zip(times_s, felt, strict=True)])
    prior = LinkState.guessed(latency_s, byte_s, grace_s).with_primitives(primitives)
    link = prior
    for _ in range(_PASSES):
        before, link = link, _fitted_around(link, prior, exchanges, times_s)
        if max(abs(new / old - 1) for new, old in zip(link.values, before.values, strict=True)) < _SETTLED:
            break
    return link


def _fitted_around(
    at: LinkState, prior: LinkState, exchanges: Sequence[Sequence[Part]], times_s: Sequence[float]
) -> LinkState:
    """What the times say together where they change with the unknowns as they do at ``at``: a step of Gauss and Newton.

    All are told anew from the prior, so none is lost to what others said before it. A time that is farther off than
    noise explains counts for less (Huber 1964).
    """
    link = prior
    for exchange, time_s in zip(exchanges, times_s, strict=True):
        expected_s, row = at.time_s(exchange), at.row(exchange)
        sd_s = TIMING_ERROR * max(time_s, expected_s)
        sd_s *= math.sqrt(max(1.0, abs(time_s - expected_s) / (CLIP * sd_s)))
        said_s = expected_s + sum(slope * (link.values[i] - at.values[i]) for i, slope in row.items())
        link = link.conditioned(row, time_s - said_s, sd_s**2)
    return link


def _longest(samples: Sequence[Timed], terms: Sequence[Terms]) -> list[tuple[float, Terms]]:
    """The longest timing of each primitive."""
    found: dict[str, tuple[float, Terms]] = {}
    for sample, own in zip(samples, terms, strict=True):
        before = found.get(sample.operation.primitive)
        if before is None or before[0] < sample.time_s:
            found[sample.operation.primitive] = (sample.time_s, own)
    return list(found.values())


def _line(terms: Sequence[Terms], times_s: Sequence[float]) -> tuple[float, float]:
    """Latency, and a byte's time, of one line through operations of all kinds.

    t / m = alpha + (x / m) beta: relative errors are what they were.
    """
    each_s = [time_s / own.messages for time_s, own in zip(times_s, terms, strict=True)]
    traffic = [own.traffic_bytes / own.messages for own in terms]
    line = fit_alpha_beta([round(size) for size in traffic], each_s)
    latency_s = max(line.latency_s, _LEAST_SHARE * min(each_s))
    return latency_s, max(1 / line.bytes_per_s, _LEAST_SHARE * max(each_s) / max(1.0, *traffic))


ANOTHER = 1.25
"""Times that a step takes as long as it did, or as short, when something has changed."""

IN_A_ROW = 2
"""Periods that show so: one may have been disturbed."""

MEASURED_AFTER, MEASURED_ANYWAY_AFTER = 10.0, 100.0
"""Times of what a measurement took that must have passed since the last: where something has changed, and without."""

SLOW = 0.5
"""Part of its step that an exchange takes longer where the period ends at once, so that the change is looked at."""

FIRST_COST_S = 0.1
"""What a measurement takes, before there was one."""

TIMED_EACH, REPEATED_BELOW_S = 5, 0.05
"""Sums behind a timing, warm-up included, unless one of them takes so long."""

PAUSE_S = 0.004
"""Before each, as computation is in training: a link that limits its rate then lets the first bytes pass at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Usual:
    """What a way to exchange is like: means over its steps, of a step and of what it waits for the exchange."""

    step_s: float
    sync_s: float
    steps: int

    def after(self, step_s: float, sync_s: float, steps: int) -> Usual:
        """With a period more."""
        weight = steps / (self.steps + steps)
        return Usual(
            step_s=self.step_s + weight * (step_s - self.step_s),
            sync_s=self.sync_s + weight * (sync_s - self.sync_s),
            steps=self.steps + steps,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkWatch:
    """What is known of the network, and whether it should be measured again; the same on every rank if fed the same.

    Attributes:
        network: as measured last.
        changes: how often the time of a step has changed.
        usual: what ways were like since then, by name.
        strikes: periods in a row whose steps took another time than is usual of their way.
        sends_all: everything was sent, at full length: no quicker network would change that.
        since_s: time trained since the last measurement.
        cost_s: of that.
    """

    network: NetworkState
    changes: int = 0
    usual: Mapping[str, Usual] = field(default_factory=dict)
    strikes: int = 0
    sends_all: bool = True
    since_s: float = 0.0
    cost_s: float = FIRST_COST_S

    def after(self, way: str, step_s: float, sync_s: float, *, steps: int, sends_all: bool) -> NetworkWatch:
        """After a period."""
        fresh = Usual(step_s=step_s, sync_s=sync_s, steps=steps)
        before = self.usual.get(way)
        # The first step of a way is slower than those that follow, and tells nothing alone.
        is_other = before is not None and before.steps > 1 and abs(math.log(step_s / before.step_s)) > math.log(ANOTHER)
        strikes = self.strikes + 1 if is_other else 0
        changed = strikes >= IN_A_ROW
        usual = fresh
        if before is not None and not changed:
            usual = before if is_other else before.after(step_s, sync_s, steps)
        return replace(
            self,
            changes=self.changes + changed,
            usual={**({} if changed else self.usual), way: usual},
            strikes=strikes,
            sends_all=sends_all,
            since_s=self.since_s + steps * step_s,
        )

    @property
    def is_suspect(self) -> bool:
        """Whether the last period was another than usual, and only the next will tell whether something has changed."""
        return 0 < self.strikes < IN_A_ROW

    @property
    def wants_measurement(self) -> bool:
        """Whether the network should be measured again, now."""
        if self.strikes >= IN_A_ROW:
            return self.since_s >= MEASURED_AFTER * self.cost_s
        return not self.sends_all and self.since_s >= MEASURED_ANYWAY_AFTER * self.cost_s

    def alarm_s(self, way: str) -> float | None:
        """A time of exchange that ends a period at once; None: nothing is known of the way."""
        usual = self.usual.get(way)
        return None if usual is None else usual.sync_s + SLOW * usual.step_s

    def measured(self, timings: Sequence[Timed]) -> NetworkWatch:
        """After it was; the same timings on all ranks."""
        times_s = [timing.time_s for timing in timings]
        before_s = PAUSE_S + min(times_s)
        return replace(
            self,
            network=measured_again(self.network, timings),
            strikes=0,
            since_s=0.0,
            cost_s=sum((before_s + time_s) * (1 if time_s >= REPEATED_BELOW_S else TIMED_EACH) for time_s in times_s),
        )
