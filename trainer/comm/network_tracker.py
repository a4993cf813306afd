"""Follows the network between the workers: measured once on the real group, then corrected by every exchange.

What *moves* is the link, which all collectives share: an exchange that shows a congested link also tells what the dense
all-reduce would cost on it now, though nobody has run one. Each exchange says one thing about several unknowns
(`hetopt.core.comm.network_state`), so they are followed with a Kalman filter.

**Alarm.** The filter follows slow drift. Two one-sided cumulative sums (Page 1954) of the standardised errors notice
jumps: two disturbed observations, or a single one that speaks for several exchanges. Then alpha and beta move to what
explains the observation exactly with the least change, a byte's time (`BETA_JUMP`) being likelier to have changed than
a message's (`ALPHA_JUMP`); what this one payload could not tell is left wide open: `NetworkState.relative_sd` says so.
When the link has been steady and a collective is hardly proven, however, it is the collective that was misjudged, and
only its own factors move: otherwise one bad choice would make all others look as bad.

**Watch.** While training goes on the network is watched by what is exchanged, by small sums, and anew once it has
jumped. What is exchanged tells little of what is not: few bytes do not feel a link that has become quicker. So the
workers sum a vector now and then that nobody needs, as large as costs next to nothing. And what one exchange says of a
network that has jumped fits many networks: it is measured again then, by a few sums.

It is sums that say whether the network has jumped. What takes longer than thought beside a sum that does not is the
collective's own affair, or that of the cores that workers share. Nothing but a quicker network, however, makes any
exchange much shorter than it was thought to be.

A measurement that finds the network as it was says that nothing has jumped: exchanges wait for something else beside
training, cores that workers share before all, and do so in whichever way they travel. That wait is told apart from then
on (`NetworkWatch.beside_s`). Taken for the network's, it would be found and forgotten with every measurement. An
exchange that is over sooner than all are said to wait refutes it.

The bisection and the steps of Gauss and Newton below are of our own: they are made of the filter's updates, and every
worker would import `scipy.optimize` for them, which takes a bare python's start 14 times.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hetopt.core.comm.cost import TRAINER, Algorithms, Operation, Primitive, Scope, Terms
from hetopt.core.comm.network_fit import fit_alpha_beta
from hetopt.core.comm.network_state import ALPHA, BETA, LinkState, NetworkState, Part, Parts

LINK_DRIFT = 0.01
"""Relative standard deviation of how far latency, and apart from it a byte's time, move between observations."""

FACTOR_DRIFT = 0.0005
"""The same of a primitive's factors: libraries hardly change while they run."""

ALPHA_JUMP, BETA_JUMP = 0.7, 1.5
"""How far, relatively, latency and a byte's time may have moved when the network has jumped."""

ANYWHERE_SD = 100.0
"""The same where that is about to be measured."""

MISJUDGED_SD = 0.1
"""Relative standard deviation of a primitive's factors after they had to move."""

DOUBTED_SD = 0.7
"""The same where it cannot be told whether they moved, or the link."""

LEAST_ERROR = 0.01
"""Relative error of a median of exchanges that no number of them undercuts."""

_ALIKE = 1e-6  # of the product of both
_LEAST_FACTOR = 0.01

TIMING_ERROR = 0.05
"""Relative error of one timing at the start that no agreement between them undercuts: training is not a timing."""

CLIP, SLACK, ALARM = 2.5, 1.0, 6.0
_LOUD_ALONE, _LOUD_TOGETHER = 5.0, 8.0  # below SLACK + ALARM, and above it
_MANY_EXCHANGES = 2  # so many in one observation have a lower median that one hiccup cannot move
_STEADY = 3  # observations that make a link steady, or prove a collective
_NOISE_WEIGHT = 0.1
_LEAST_SHARE = 0.002  # that latency, or bytes, have in the quickest, or slowest, timing; nothing could never grow
_GRACES_S = (0.0, 0.0003, 0.0005, 0.0007, 0.001, 0.0014, 0.002, 0.003)
_GRACE_COSTS = 0.5  # of relative errors, all timings together; less is what noise of a twentieth may explain
_LOST = 1.0  # a timing so far from everything says no more by being farther
_PASSES, _SETTLED = 20, 1e-3  # steps of the fit at most, and relative changes that are none
_FARTHEST = 30.0  # a part becomes no more than e^30 times slower or faster in a jump


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


def measured_again(state: NetworkState, samples: Sequence[Timed], *, algorithms: Algorithms = TRAINER) -> NetworkState:
    """The network after a jump, from a few timings between machines: the link as they say, all else as it was.

    Latency and time of a byte are fitted by least squares with variances in proportion to the times. So the largest
    counts for most: a limited link lets the first bytes through at once (the burst of a token bucket), and small sums
    alone would pass it for a quicker one.
    """
    link = state.links["network"]
    rows = [state.parts([(1.0, [sample.operation])], algorithms).rows["network"] for sample in samples]
    alpha, beta = _scales([(row[ALPHA] * link.values[ALPHA], row[BETA] * link.values[BETA]) for row in rows], samples)
    link = link.moved({ALPHA: (alpha, ANYWHERE_SD), BETA: (beta, ANYWHERE_SD)})
    state = state.model_copy(
        update={"links": {**state.links, "network": link}, "slower": 0.0, "faster": 0.0, "since_jump": 0}
    )
    # How sure that is. The largest come first: what surprises later counts for less.
    for sample in sorted(samples, key=lambda sample: sample.operation.payload_bytes, reverse=True):
        parts = state.parts([(1.0, [sample.operation])], algorithms)
        state = state.model_copy(update={"links": {**state.links, **_updated(parts, sample.time_s, TIMING_ERROR**2)}})
    return state


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


def observe(
    state: NetworkState,
    operations: Sequence[Operation],
    time_s: float,
    *,
    exchanges: int = 1,
    may_jump: bool = True,
    algorithms: Algorithms = TRAINER,
) -> NetworkState:
    """The network after one more observation.

    Args:
        state: before.
        operations: what each of the exchanges was made of.
        time_s: median time of the exchanges (of two, the shorter) on the worker that waited least, so that only the
            network is in it.
        exchanges: how many the median is over.
        may_jump: whether it can be the network that has jumped; False where others say so.
        algorithms: behind the collectives.

    Raises:
        ValueError: a time that is not positive and finite, or no exchange.
    """
    if not 0 < time_s < math.inf or exchanges < 1:
        raise ValueError(f"an observation is a positive time of at least one exchange, not {time_s} of {exchanges}")
    drifted = {scope: link.drifted(LINK_DRIFT, FACTOR_DRIFT) for scope, link in state.links.items()}
    state = state.model_copy(update={"links": drifted})
    parts = state.parts([(1.0, operations)], algorithms)
    if parts.time_s <= 0:
        return state  # a group of one exchanges nothing
    known = parts.variance / parts.time_s**2
    noise = state.noise / exchanges + LEAST_ERROR**2
    error = math.log(time_s / parts.time_s)
    standardised = error / math.sqrt(known + noise)
    loudest = _LOUD_TOGETHER if exchanges >= _MANY_EXCHANGES else _LOUD_ALONE
    # A hiccup makes an exchange longer. Nothing but a quicker network makes it shorter.
    said = min(max(standardised, -_LOUD_TOGETHER), loudest)
    slower, faster = state.slower, state.faster
    if may_jump:
        slower, faster = max(0.0, slower + said - SLACK), max(0.0, faster - said - SLACK)
    if may_jump and max(slower, faster) > ALARM:
        calm = {"slower": 0.0, "faster": 0.0}
        unproven = _unproven(parts)
        if unproven and state.since_jump >= _STEADY:
            links = {**state.links, **_misjudged(parts, time_s, unproven)}
            return state.model_copy(update={**calm, "links": links, "since_jump": state.since_jump + 1})
        links = {**state.links, **_jumped(parts, time_s, noise, unproven)}
        return state.model_copy(update={**calm, "links": links, "jumps": state.jumps + 1, "since_jump": 0})
    links = {**state.links, **_proven(_updated(parts, time_s, noise), parts)}
    if not may_jump:
        return state.model_copy(update={"links": links})
    # What errors leave over that the uncertainty of the network does not explain is the noise of single exchanges.
    seen = min(max(0.0, error * error - known) * exchanges, 4 * state.noise)
    changes = {"links": links, "slower": slower, "faster": faster, "since_jump": state.since_jump + 1}
    return state.model_copy(update={**changes, "noise": state.noise + _NOISE_WEIGHT * (seen - state.noise)})


def _unproven(parts: Parts) -> dict[Scope, list[int]]:
    """Where the factors of the exchange's primitives are that hardly ever took as long as was thought."""
    found: dict[Scope, list[int]] = {
        scope: [
            link.place(primitive)
            for primitive, proven in zip(link.primitives, link.proven, strict=True)
            if proven < _STEADY and primitive in parts.primitives[scope]
        ]
        for scope, link in parts.links.items()
    }
    return {scope: places for scope, places in found.items() if places}


def _proven(links: dict[Scope, LinkState], parts: Parts) -> dict[Scope, LinkState]:
    """The links after one more exchange that took about as long as was thought."""
    return {
        scope: link.model_copy(
            update={
                "proven": tuple(
                    count + (primitive in parts.primitives[scope])
                    for primitive, count in zip(link.primitives, link.proven, strict=True)
                )
            }
        )
        for scope, link in links.items()
    }


def _updated(parts: Parts, time_s: float, noise: float) -> dict[Scope, LinkState]:
    """Every link after a time with this relative variance; to each, the others' variance is noise.

    No observation counts for more than `CLIP` standard errors (Huber 1964).
    """
    # Noise is relative to the true time, which is nearer to what was seen where too little was expected.
    variance = parts.variance + noise * max(time_s, parts.time_s) ** 2
    limit_s = CLIP * math.sqrt(variance)
    error_s = min(max(time_s - parts.time_s, -limit_s), limit_s)
    return {
        scope: link.conditioned(parts.rows[scope], error_s, max(0.0, variance - link.variance(parts.rows[scope])))
        for scope, link in parts.links.items()
    }


def _misjudged(parts: Parts, time_s: float, unproven: Mapping[Scope, Sequence[int]]) -> dict[Scope, LinkState]:
    """The links once the unproven primitives explain the time, which leaves them no less than a tenth of their part."""
    unproven_s = sum(
        parts.rows[scope][i] * parts.links[scope].values[i]
        for scope, places in unproven.items()
        for p in places
        for i in (p, p + 1)
    )
    scale = max(time_s - (parts.time_s - unproven_s), 0.1 * time_s * unproven_s / parts.time_s) / unproven_s
    return {
        scope: link.moved({i: (scale, MISJUDGED_SD) for place in unproven.get(scope, ()) for i in (place, place + 1)})
        for scope, link in parts.links.items()
    }


def _jumped(
    parts: Parts, time_s: float, noise: float, unproven: Mapping[Scope, Sequence[int]]
) -> dict[Scope, LinkState]:
    """The links after a jump: the one that the exchange spends most time on has moved.

    If collectives are unproven as well, it may be them: the link is thought to have moved, and both are in doubt.
    """
    scope = max(parts.seconds, key=lambda s: (parts.seconds[s], s))
    link, row, before_s = parts.links[scope], parts.rows[scope], parts.seconds[scope]
    # What the exchange spends elsewhere stays, but leaves this link no less than a tenth of its part.
    target_s = max(time_s - (parts.time_s - before_s), 0.1 * time_s * before_s / parts.time_s)
    latency_s, bytes_s = row[ALPHA] * link.values[ALPHA], row[BETA] * link.values[BETA]
    # The grace has not moved.
    up = _least_change(latency_s, bytes_s, target_s + latency_s + bytes_s - before_s)
    # Either of the two may have moved alone, so each must be able to explain all that has changed.
    changed_s = abs(target_s - before_s)
    moved = link.moved(
        {
            ALPHA: (up[ALPHA], max(ALPHA_JUMP, changed_s / (row[ALPHA] * link.values[ALPHA] * up[ALPHA]))),
            BETA: (up[BETA], max(BETA_JUMP, changed_s / (row[BETA] * link.values[BETA] * up[BETA]))),
            **{i: (1.0, DOUBTED_SD) for place in unproven.get(scope, ()) for i in (place, place + 1)},
        }
    )
    # The row of the factors is made of alpha and beta, which have moved.
    known = {i: slope if i in (ALPHA, BETA) else slope * up[i % 2] for i, slope in row.items()}
    return {**parts.links, scope: moved.conditioned(known, 0.0, noise * target_s**2)}


def _least_change(latency_s: float, byte_s: float, target_s: float) -> tuple[float, float]:
    """Factors of both parts that make them sum to the target, along the direction that is likeliest to first order."""
    whole_s = latency_s + byte_s
    direction = (ALPHA_JUMP**2 * latency_s / whole_s, BETA_JUMP**2 * byte_s / whole_s)

    def factors(way: float) -> tuple[float, float]:
        """So far along that direction; what has gone as far as may be leaves the rest to the other."""
        latency, byte = (min(max(way * one, -_FARTHEST), _FARTHEST) for one in direction)
        return math.exp(latency), math.exp(byte)

    high = min(_FARTHEST / min(filter(None, direction)), 1e9)
    low = -high
    for _ in range(80):
        middle = (low + high) / 2
        latency, byte = factors(middle)
        low, high = (middle, high) if latency_s * latency + byte_s * byte < target_s else (low, middle)
    return factors(low)


def _fitted(samples: Sequence[Timed], scope: Scope, algorithms: Algorithms) -> LinkState:
    """The hop with the grace that explains the timings best, in one scope; none, unless one clearly does."""

    def unexplained(link: LinkState) -> float:
        expected = NetworkState(links={scope: link})
        ratios = [expected.expected_s([s.operation], algorithms=algorithms) / s.time_s for s in samples]
        return sum(min(abs(math.log(ratio)), _LOST) for ratio in ratios) + _GRACE_COSTS * (link.grace_s > 0)

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


PROBE_SHARE = 0.01
"""Part of the time trained that probes may take."""

SHORTEST_PROBE_S, LONGEST_PROBE_S = 0.01, 0.05
"""That a probe takes: what is over sooner says more of processors than of the link. Messages alone may take longer."""

LEAST_PROBE_BYTES = 1024

MEASURED_AFTER = 30.0
"""Times of a measurement that must have passed since the last: a network that keeps jumping is only followed."""

LEAST_EXPOSED = 0.2
"""Where backward hides exchanges, what they add to the steps counts as time trained, and no less than this part of it:
little is to be had from knowing the network better, and were it slower, the steps would wait for it."""

MEASURED_ANYWAY_AFTER = 150.0
"""Times after which it is measured again though nothing has shown, where exchanges do not do it: probes are small."""

ANOTHER = 1.5
"""Times that the largest sum takes as long as was thought, or as short, in a network that has jumped unseen; and that
an exchange was thought to take longer than it does, where that tells of a quicker network."""

_LEAST_ALONE = 0.1
"""Part of the time of an exchange that is the network's, however long it may have waited for something else."""

FIRST_COST_S = 0.1
"""What a measurement takes, before there was one."""

TIMED_EACH, REPEATED_BELOW_S = 5, 0.05
"""Sums behind a timing, warm-up included, unless one of them takes so long."""

PAUSE_S = 0.004
"""Before each, as computation is in training: a link that limits its rate then lets the first bytes pass at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkWatch:
    """What is known, and what is to be looked at next; the same on every rank if it is fed the same.

    Attributes:
        network: as tracked.
        workers: that sum.
        gradient_bytes: that no probe exceeds.
        unprobed_s: time trained since the last probe; where exchanges were hidden, what of it they added.
        is_silent: whether the exchanges of the last period tell nothing of how quick the network is.
        measured_jumps: of the network when it was last measured.
        since_s, cost_s: the same since the last measurement after a jump, or since the start, and what one took.
        timed: what was summed in it.
        beside_s: how much longer than alone an exchange takes beside training, whatever it sends.
        soonest_s: that an exchange was over on the network as it is now, waits and all.
        quiet: the network as it was last measured; None: before the first period.
        seen: the newest exchange that was nothing but sums, and what it took; None: there was none.
        jumps_before: of the network, before the last period.
    """

    network: NetworkState
    workers: int
    gradient_bytes: int
    unprobed_s: float = LONGEST_PROBE_S / PROBE_SHARE
    is_silent: bool = True
    measured_jumps: int = 0
    since_s: float = 0.0
    cost_s: float = FIRST_COST_S
    timed: tuple[Operation, ...] = ()
    beside_s: float = 0.0
    soonest_s: float = math.inf
    quiet: NetworkState | None = None
    seen: tuple[tuple[Operation, ...], float] | None = None
    jumps_before: int = 0

    def after(
        self,
        operations: Sequence[Operation],
        time_s: float | None,
        *,
        exchanges: int,
        probe_bytes: int,
        probe_s: float | None,
        period_s: float,
        exposed_s: float,
        hidden: bool = False,
    ) -> NetworkWatch:
        """After a period.

        Args:
            operations: of each of its exchanges.
            time_s: that the median exchange took; None: it was hidden, or there was none.
            exchanges: how many.
            probe_bytes: that were summed before it.
            probe_s: what that took; None: nothing was.
            period_s: all of it.
            exposed_s: of it, what the steps took for exchanging.
            hidden: the exchanges travelled under the backward pass, which hides what else they may have waited for.
        """
        network, unprobed_s = self.network, self.unprobed_s
        counted_s = max(exposed_s, LEAST_EXPOSED * period_s) if hidden else period_s
        quiet, jumps_before = self.quiet or network, network.jumps
        if probe_s is not None:
            unprobed_s = 0.0
            network = observe(network, [self._probe(probe_bytes)], probe_s)
        beside_s, soonest_s = self.beside_s, self.soonest_s
        if time_s is not None and not hidden:
            soonest_s = min(soonest_s, time_s)
            if time_s < beside_s:
                beside_s = max(0.0, time_s - network.expected_s(operations))
        if time_s is not None:
            alone_s = time_s if hidden else max(time_s - beside_s, _LEAST_ALONE * time_s)
            is_short = ANOTHER * time_s < network.expected_s(operations)  # waits and all
            may_jump = is_short or are_sums(operations)
            network = observe(network, operations, alone_s, exchanges=exchanges, may_jump=may_jump)
        return replace(
            self,
            network=network,
            quiet=quiet,
            beside_s=beside_s,
            soonest_s=soonest_s,
            seen=self.seen if time_s is None or hidden or not are_sums(operations) else (tuple(operations), time_s),
            jumps_before=jumps_before,
            unprobed_s=unprobed_s + counted_s,
            is_silent=time_s is None or not are_sums(operations),
            since_s=self.since_s + counted_s,
        )

    @property
    def wants_measurement(self) -> bool:
        """Whether the network should be measured again, now."""
        if self.network.jumps > self.measured_jumps:
            return self.since_s >= MEASURED_AFTER * self._next_cost_s
        return self.is_silent and self.since_s >= MEASURED_ANYWAY_AFTER * self.cost_s

    @property
    def _next_cost_s(self) -> float:
        """Of a measurement now: less than the last one took, if the network has become quicker since."""
        if not self.timed:
            return self.cost_s
        return min(self.cost_s, _cost_s([self.network.expected_s([operation]) for operation in self.timed]))

    def measured(self, timings: Sequence[Timed]) -> NetworkWatch:
        """After it was; the same timings on all ranks."""
        largest = max(timings, key=lambda timing: timing.operation.payload_bytes)
        quiet = self.quiet or self.network
        alarmed = self.network.jumps > self.measured_jumps
        still = measured_again(quiet, timings)
        if _is_alike(quiet, largest) and (waited_s := self._waited_s(still, alarmed=alarmed)) is not None:
            network = still.model_copy(update={"noise": self.network.noise, "jumps": self.jumps_before})
            beside_s, soonest_s = min(waited_s, self.soonest_s), self.soonest_s
        else:
            network = measured_again(self.network, timings)
            unseen = not alarmed and not _is_alike(self.network, largest)
            network = network.model_copy(update={"jumps": network.jumps + unseen})
            beside_s, soonest_s = (0.0, math.inf) if alarmed or unseen else (self.beside_s, self.soonest_s)
        return replace(
            self,
            network=network,
            quiet=network,
            beside_s=beside_s,
            soonest_s=soonest_s,
            seen=None,
            measured_jumps=network.jumps,
            since_s=0.0,
            cost_s=_cost_s([timing.time_s for timing in timings]),
            timed=tuple(timing.operation for timing in timings),
        )

    def _waited_s(self, still: NetworkState, *, alarmed: bool) -> float | None:
        """`beside_s` in a network that has not jumped; None: what was seen may be its bytes, of which sums tell less.

        What is timed is smaller than what is exchanged. Where bytes are most of that, it tells itself what they take.
        """
        if self.seen is None:
            return None if alarmed or self.beside_s == 0 else self.beside_s
        operations, time_s = self.seen
        alone_s = still.expected_s(operations)
        bytes_s = alone_s - still.expected_s([replace(operation, payload_bytes=1) for operation in operations])
        if bytes_s > time_s / 2:
            return None
        waited_s = max(0.0, time_s - alone_s)
        return waited_s if self.beside_s == 0 else (self.beside_s + waited_s) / 2

    def probe_bytes(self, operations: Sequence[Operation]) -> int:
        """Of the sum before a period of such exchanges; 0: they tell as much themselves, or it is too soon for one."""
        affordable_s, size = min(LONGEST_PROBE_S, PROBE_SHARE * self.unprobed_s), LEAST_PROBE_BYTES
        messages_s = self.network.expected_s([self._probe(size)])
        if PROBE_SHARE * self.unprobed_s < max(SHORTEST_PROBE_S, messages_s):
            return 0
        while 2 * size <= self.gradient_bytes and self.network.expected_s([self._probe(2 * size)]) <= affordable_s:
            size *= 2
        if self.is_silent or not are_sums(operations):
            return size
        told = sum(operation.terms(TRAINER).traffic_bytes for operation in operations)
        return size if told < self._probe(size).terms(TRAINER).traffic_bytes else 0

    def _probe(self, payload_bytes: int) -> Operation:
        return Operation(primitive="all_reduce", payload_bytes=payload_bytes, members=self.workers)


def are_sums(operations: Sequence[Operation]) -> bool:
    """Whether an exchange is nothing but what probes are, whose time is the link's affair alone."""
    return all(operation.primitive == "all_reduce" and not operation.sliced for operation in operations)


def _cost_s(times_s: Sequence[float]) -> float:
    """Of timing sums that take so long each: before each comes a pause, and a smallest sum to begin it together."""
    before_s = PAUSE_S + min(times_s)
    return sum((before_s + time_s) * (1 if time_s >= REPEATED_BELOW_S else TIMED_EACH) for time_s in times_s)


def _is_alike(network: NetworkState, timing: Timed) -> bool:
    """Whether a sum took about as long as this network would have it."""
    return abs(math.log(timing.time_s / network.expected_s([timing.operation]))) <= math.log(ANOTHER)
