"""Runs of a deadline policy over a pool that has capacity or not, look by look: what each costs and when it ends."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from benchmarks._deadline_policies import Assignment, Choice, DeadlinePolicy, Moment
from benchmarks._pool_capacity import DISPERSION, Array, Capacity, Flags, Seen

_SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, kw_only=True)
class PolicyRuns:
    """Outcome of each run; arrays of shape (runs,).

    Attributes:
        cost_usd: of the machines.
        finished_s: from the start; infinite where the work was not done when the recording ended.
        on_demand_s, changeovers: how it was done.
    """

    cost_usd: Array
    finished_s: Array
    on_demand_s: Array
    changeovers: Array


def run_policy(
    policy: DeadlinePolicy,
    assignment: Assignment,
    available: Flags,
    look_s: float,
    *,
    seen: Seen | None = None,
    spot_usd_per_hour: Array | None = None,
) -> PolicyRuns:
    """Let the policy decide at every look.

    A run that is on spot when capacity goes is without machines from then on; its work until then is kept, as what is
    lost of it is part of the changeover. Machines are paid from the moment they are asked for.

    Args:
        policy: that decides.
        assignment: what is to be done.
        available: capacity at each look, shape (looks, runs); a machine that runs at a look runs until the next.
        look_s: between two looks.
        seen: of the pools before the start.
        spot_usd_per_hour: what spot really costs at each look, of the same shape; absent: as the assignment says.
    """
    looks, runs = available.shape
    left, cost, ended = np.full(runs, assignment.work_s), np.zeros(runs), np.full(runs, math.inf)
    on_demand, changes, changing = np.zeros(runs), np.zeros(runs), np.zeros(runs)
    running = np.full(runs, Choice.WAIT, dtype=np.intp)
    seen = seen or Seen.nothing(runs)
    demand_usd, spot_usd = assignment.on_demand_usd_per_hour, np.full(runs, assignment.spot_usd_per_hour)
    for look in range(looks):
        now = available[look]
        if look:
            seen = seen.then(available[look - 1], now, look_s / _SECONDS_PER_HOUR)
        busy = left > 1e-6
        if not busy.any():
            break
        running = np.where((running == Choice.SPOT) & ~now, Choice.WAIT, running)
        moment = Moment(
            elapsed_s=look * look_s,
            until_next_s=look_s,
            left_s=np.maximum(left, 1e-6),
            available=now,
            running=running,
            seen=seen,
        )
        chosen = policy.choose(assignment, moment)
        if (busy & (chosen == Choice.SPOT) & ~now).any():
            raise ValueError("the policy chose spot where there is none")
        changed = busy & (chosen != running) & (chosen != Choice.WAIT)
        changing = np.where(changed, assignment.changeover_s, changing)
        changes += changed
        running = chosen
        works = busy & (running != Choice.WAIT)
        spent = np.minimum(changing, look_s) * works
        progress = np.minimum(left, look_s - spent) * works
        paid = np.where(progress >= left, spent + progress, look_s) * works
        if spot_usd_per_hour is not None:
            spot_usd = spot_usd_per_hour[look]
        cost += paid * np.where(running == Choice.SPOT, spot_usd, demand_usd) / _SECONDS_PER_HOUR
        on_demand += paid * (running == Choice.ON_DEMAND)
        changing -= spent
        ended = np.where(works & (progress >= left), look * look_s + spent + progress, ended)
        left = left - progress
    return PolicyRuns(cost_usd=cost, finished_s=ended, on_demand_s=on_demand, changeovers=changes)


def imagined(
    capacity: Capacity,
    looks: int,
    look_s: float,
    runs: int,
    generator: np.random.Generator,
    *,
    dispersion: float = DISPERSION,
) -> Flags:
    """Capacity of pools with each pair of rates, shape (looks, pairs * runs), pairs by pairs.

    Stretches with and without capacity are as bursty as recorded ones: hyperexponential with balanced means, that is
    mostly short and sometimes long, with ``dispersion`` as the square of their coefficient of variation.
    """
    mostly = (1 + math.sqrt((dispersion - 1) / (dispersion + 1))) / 2
    rates = [np.repeat(rate, runs) / _SECONDS_PER_HOUR for rate in (capacity.back_per_hour, capacity.loss_per_hour)]
    ends = [
        [-np.expm1(-2 * share * rate * look_s) for share in (mostly, 1 - mostly)] for rate in rates
    ]  # chance that a stretch of either state (down, up) and kind (short, long) ends before the next look
    drawn = generator.random((looks + 1, 2, len(rates[0])))
    up = drawn[0, 0] < rates[0] / (rates[0] + rates[1])
    long = drawn[0, 1] < 0.5  # at any one time: short stretches are more, long ones take longer
    available = np.empty((looks, len(up)), dtype=np.bool_)
    for look in range(looks):
        available[look] = up
        ending = np.where(up, np.where(long, ends[1][1], ends[1][0]), np.where(long, ends[0][1], ends[0][0]))
        over = drawn[look + 1, 0] < ending
        long = np.where(over, drawn[look + 1, 1] >= mostly, long)
        up = up ^ over
    return available


@dataclass(frozen=True, kw_only=True)
class CostPromise:
    """What a policy may cost, for each pair of rates; from it the budget that holds with a confidence.

    Attributes:
        capacity: the belief before anything was seen.
        cost_usd: of imagined runs, shape (pairs, runs).
        dispersion: how bursty pools are taken to be; what was seen of one tells so much less.
    """

    capacity: Capacity
    cost_usd: Array
    dispersion: float = DISPERSION

    @classmethod
    def of(
        cls,
        policy: DeadlinePolicy,
        assignment: Assignment,
        capacity: Capacity,
        *,
        seed: int,
        runs: int = 100,
        look_s: float = 300.0,
        dispersion: float = DISPERSION,
    ) -> CostPromise:
        """Imagine runs of the policy in pools of each pair of rates."""
        looks = math.ceil(assignment.deadline_s / look_s) + 1
        available = imagined(capacity, looks, look_s, runs, np.random.default_rng(seed), dispersion=dispersion)
        cost = run_policy(policy, assignment, available, look_s).cost_usd
        return cls(capacity=capacity, cost_usd=cost.reshape(len(capacity.weight), runs), dispersion=dispersion)

    def budget_usd(self, seen: Seen, confidence: float) -> Array:
        """What each run stays within with that probability, after what was seen of its pool before; shape (runs,)."""
        weights = self.capacity.weights(seen, dispersion=self.dispersion)
        order = np.argsort(self.cost_usd, axis=None)
        each = np.repeat(weights / self.cost_usd.shape[1], self.cost_usd.shape[1], axis=1)[:, order]
        reached = (np.cumsum(each, axis=1) >= confidence - 1e-12).argmax(axis=1)
        return np.asarray(self.cost_usd.ravel()[order][reached], dtype=np.float64)
