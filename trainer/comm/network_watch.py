"""Watches the network while training goes on: by what is exchanged, by small sums, and anew once it has jumped.

What is exchanged tells little of what is not: few bytes do not feel a link that has become quicker. So the workers sum
a vector now and then that nobody needs, as large as costs next to nothing. And what one exchange says of a network that
has jumped fits many networks: it is measured again then, by a few sums.

It is sums that say whether the network has jumped. What takes longer than thought beside a sum that does not is the
collective's own affair, or that of the cores that workers share. Nothing but a quicker network, however, makes any
exchange much shorter than it was thought to be.

A measurement that finds the network as it was says that nothing has jumped: exchanges wait for something else beside
training, cores that workers share before all, and do so in whichever way they travel. That wait is told apart from then
on (`NetworkWatch.beside_s`). Taken for the network's, it would be found and forgotten with every measurement. An
exchange that is over sooner than all are said to wait refutes it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hetopt.core.comm.cost import TRAINER, Operation
from hetopt.core.comm.network_state import NetworkState
from hetopt.trainer.comm.network_tracker import Timed, measured_again, observe

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
