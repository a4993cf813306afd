"""A cluster on paper: workers with known lines, noise and changes of speed, watched by a policy period by period."""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

from hetopt.core.batch_partition import WorkerTime, solve_shares
from hetopt.trainer.policies.policy import BatchObservation


@dataclass
class VirtualCluster:
    """Worker i takes ``(fixed_s[i] + per_sample_s b) / speeds[i]`` a step, give or take ``noise`` of it (normal).

    ``changes`` gives new speeds from a step on.
    """

    speeds: tuple[float, ...]
    fixed_s: tuple[float, ...] = ()
    per_sample_s: float = 0.01
    noise: float = 0.0
    seed: int = 0
    changes: Mapping[int, tuple[float, ...]] = field(default_factory=dict)

    def __post_init__(self):
        self.fixed_s = self.fixed_s or (0.0,) * len(self.speeds)
        self.random = random.Random(self.seed)
        self.step = 0

    def time_s(self, rank, share):
        """Compute time of a step without noise."""
        return (self.fixed_s[rank] + self.per_sample_s * share) / self.speeds[rank]

    def efficiency(self, shares):
        """The slowest worker's time under the best shares over its time under these, both without noise."""
        workers = [
            WorkerTime(fixed_s=fixed_s / speed, per_sample_s=self.per_sample_s / speed)
            for fixed_s, speed in zip(self.fixed_s, self.speeds, strict=True)
        ]
        ideal_s = solve_shares(workers, sum(shares)).compute_s
        return ideal_s / max(self.time_s(rank, share) for rank, share in enumerate(shares))

    def period(self, shares, steps, epoch):
        """What is gathered over so many steps."""
        times = [[] for _ in shares]
        for _ in range(steps):
            self.speeds = self.changes.get(self.step, self.speeds)
            for rank, share in enumerate(shares):
                factor = max(0.1, self.random.gauss(1, self.noise)) if self.noise else 1.0
                times[rank].append(self.time_s(rank, share) * factor)
            self.step += 1
        medians = [statistics.median(own) for own in times]
        return BatchObservation(
            local_batch_sizes=tuple(shares),
            compute_s=tuple(medians),
            spread_s=tuple(
                1.4826 * statistics.median(abs(time_s - median) for time_s in own)
                for own, median in zip(times, medians, strict=True)
            ),
            steps=steps,
            epoch=epoch,
        )


@dataclass
class History:
    """Shares and efficiency in each period, and periods after which shares changed."""

    shares: list[tuple[int, ...]] = field(default_factory=list)
    efficiency: list[float] = field(default_factory=list)
    changed: list[int] = field(default_factory=list)


def watch(policy, cluster, shares, *, periods, steps=20):
    """Run ``policy`` over so many periods, each an epoch too, from ``shares``."""
    state, history = policy.initial(), History()
    for period in range(periods):
        observation = cluster.period(shares, steps, epoch=period + 1)
        history.shares.append(tuple(shares))
        history.efficiency.append(cluster.efficiency(shares))
        state, decision = policy.decide(state, observation)
        if decision.changed:
            history.changed.append(period)
        shares = decision.local_batch_sizes
    return history
