"""The deadline policy of least expected cost: dynamic programming over work and time left, averaged over a belief.

For one pair of rates (`_pool_capacity.Capacity`) the cheapest way to end in time solves

    V(time, work, state) = min over choices of  price * duration + E[V(time - duration, work - progress, next state)]

where a step of running does a step of work, waiting none, and a changeover takes its time and does none. A choice that
could miss the deadline if spot were lost at once is not open. The rates are not known, so that costs of the choices are
averaged over the belief that what was seen leaves, as if it were settled in the next moment (QMDP: Littman et al.
1995). What a look would tell beyond that is worth nothing here: capacity is seen whatever is chosen.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from benchmarks._deadline_policies import Assignment, Choice, Choices, Moment, slack_s
from benchmarks._pool_capacity import Array, Capacity, Seen

STEPS_TO_DEADLINE = 320
_IMPOSSIBLE = 1e9
_SECONDS_PER_HOUR = 3600.0

Single = NDArray[np.float32]


class State(IntEnum):
    """Capacity of the pool, and what the run is on."""

    UP_SPOT = 0
    UP_ON_DEMAND = 1
    UP_IDLE = 2
    DOWN_ON_DEMAND = 3
    DOWN_IDLE = 4


@dataclass(frozen=True, kw_only=True)
class _Chain:
    """Probabilities of a pool to have capacity after a step and after a changeover, for each pair of rates."""

    up_after_up: Array
    up_after_down: Array
    up_after_up_changed: Array
    up_after_down_changed: Array
    kept_changed: Array

    @classmethod
    def of(cls, capacity: Capacity, step_s: float, changeover_s: float) -> _Chain:
        loss, back = (rate / _SECONDS_PER_HOUR for rate in (capacity.loss_per_hour, capacity.back_per_hour))
        share, both = back / (loss + back), loss + back

        def up(seconds: float) -> tuple[Array, Array]:
            """Of a two-state chain; while running, spot must have stayed all the time, which is `kept`."""
            fading = np.exp(-both * seconds)
            return share + (1 - share) * fading, share * (1 - fading)

        after_up, after_down = up(changeover_s)
        return cls(
            up_after_up=np.exp(-loss * step_s),
            up_after_down=-np.expm1(-back * step_s),
            up_after_up_changed=after_up,
            up_after_down_changed=after_down,
            kept_changed=np.exp(-loss * changeover_s),
        )


Lookup = Callable[[State], Array]


@dataclass(frozen=True, kw_only=True)
class Values:
    """Least expected cost in USD for each pair of rates, ``cost[time][pair, state, work]`` in steps of ``step_s``.

    ``steps_to_change`` is the changeover in steps, rounded up.
    """

    assignment: Assignment
    step_s: float
    steps_to_change: int
    cost: Single
    chain: _Chain

    @classmethod
    def solve(cls, assignment: Assignment, capacity: Capacity) -> Values:
        """Backward from the deadline; every pair and every amount of work at a time."""
        # A whole number of steps to a changeover where that is fine enough; a changeover takes one step at least.
        coarse = assignment.deadline_s / STEPS_TO_DEADLINE
        change = max(1, int(assignment.changeover_s / coarse))
        step = max(coarse, assignment.changeover_s / change)
        times, works = math.floor(assignment.deadline_s / step), math.ceil(assignment.work_s / step)
        chain = _Chain.of(capacity, step, change * step)
        pairs = len(capacity.weight)
        cost = np.full((times + 1, pairs, len(State), works + 1), _IMPOSSIBLE, dtype=np.float32)
        cost[:, :, :, 0] = 0.0
        values = cls(assignment=assignment, step_s=step, steps_to_change=change, cost=cost, chain=chain)
        work = np.arange(1, works + 1)
        for time in range(1, times + 1):

            def now(back: int, done: int, time: int = time) -> Lookup:
                """Costs ``back`` steps of time and ``done`` steps of work later; impossible after the deadline."""
                if time < back:
                    return lambda state: np.full((pairs, works), _IMPOSSIBLE)
                return lambda state: cost[time - back, :, state, 1 - done : works + 1 - done].astype(np.float64)

            run, wait, changed = now(1, 1), now(1, 0), now(change, 0)
            slack = time - work
            may_lose, may_try, may_wait = slack >= change, slack >= 2 * change, slack >= change + 1
            for up in (True, False):
                spot, spot_new, demand, demand_new, idle = values._costs(
                    up, run, wait, changed, lambda one: one[:, None]
                )
                demand = np.where(slack >= 0, demand, _IMPOSSIBLE)
                demand_new = np.where(may_lose, demand_new, _IMPOSSIBLE)
                idle = np.where(may_wait, idle, _IMPOSSIBLE)
                if up:
                    spot = np.where(may_lose, spot, _IMPOSSIBLE)
                    spot_new = np.where(may_try, spot_new, _IMPOSSIBLE)
                    best = {
                        State.UP_SPOT: np.minimum(np.minimum(spot, demand_new), idle),
                        State.UP_ON_DEMAND: np.minimum(np.minimum(demand, spot_new), idle),
                        State.UP_IDLE: np.minimum(np.minimum(demand_new, spot_new), idle),
                    }
                else:
                    best = {
                        State.DOWN_ON_DEMAND: np.minimum(demand, idle),
                        State.DOWN_IDLE: np.minimum(demand_new, idle),
                    }
                for kind, least in best.items():
                    cost[time, :, kind, 1:] = np.minimum(least, _IMPOSSIBLE)
        return values

    def _costs(
        self, up: bool, run: Lookup, wait: Lookup, changed: Lookup, spread: Callable[[Array], Array]
    ) -> tuple[Array, Array, Array, Array, Array]:
        """Costs of going on with spot, changing to spot, going on on demand, changing to that, and waiting."""
        hours, change_hours = (
            seconds / _SECONDS_PER_HOUR for seconds in (self.step_s, self.steps_to_change * self.step_s)
        )
        spot_usd, demand_usd = self.assignment.spot_usd_per_hour, self.assignment.on_demand_usd_per_hour
        chain = self.chain

        def mean(chance: Array, ahead: Lookup, likely: State, other: State) -> Array:
            share = spread(chance)
            return share * ahead(likely) + (1 - share) * ahead(other)

        stays = chain.up_after_up if up else chain.up_after_down
        later = chain.up_after_up_changed if up else chain.up_after_down_changed
        return (
            hours * spot_usd + mean(chain.up_after_up, run, State.UP_SPOT, State.DOWN_IDLE),
            change_hours * spot_usd + mean(chain.kept_changed, changed, State.UP_SPOT, State.DOWN_IDLE),
            hours * demand_usd + mean(stays, run, State.UP_ON_DEMAND, State.DOWN_ON_DEMAND),
            change_hours * demand_usd + mean(later, changed, State.UP_ON_DEMAND, State.DOWN_ON_DEMAND),
            mean(stays, wait, State.UP_IDLE, State.DOWN_IDLE),
        )

    def of_choices(self, moment: Moment) -> Array:
        """Expected cost of each choice for each run and pair of rates, shape (choices, runs, pairs)."""
        times = len(self.cost) - 1
        works = self.cost.shape[-1] - 1
        work = np.clip(np.ceil(moment.left_s / self.step_s - 1e-9), 1, works).astype(np.intp)
        slack = slack_s(self.assignment, moment) + moment.until_next_s
        # Slack is rounded down, work up: what the table calls possible is possible.
        time = np.clip(work + np.floor(slack / self.step_s + 1e-9).astype(np.intp), 1, times)

        def later(back: int, done: int) -> Lookup:
            when, left = np.maximum(time - back, 0), work - done
            return lambda state: self.cost[when, :, state, left].astype(np.float64)

        lookups = later(1, 1), later(1, 0), later(self.steps_to_change, 0)
        either = [self._costs(up, *lookups, lambda one: one[None, :]) for up in (True, False)]
        spot, spot_new, demand, demand_new, idle = (
            np.where(moment.available[:, None], with_capacity, without)
            for with_capacity, without in zip(*either, strict=True)
        )
        on_spot, on_demand = (moment.running[:, None] == choice for choice in (Choice.SPOT, Choice.ON_DEMAND))
        return np.stack([np.where(on_spot, spot, spot_new), np.where(on_demand, demand, demand_new), idle])


class ExpectedCost:
    """Chooses what costs least over the belief; the table is made once, for one assignment.

    With `Capacity.known` it is the best policy for a pool of these rates; with `Capacity.unknown` it learns.
    """

    def __init__(self, assignment: Assignment, capacity: Capacity, *, dispersion: float = 1.0) -> None:
        self.capacity = capacity
        self._dispersion = dispersion
        self._values = Values.solve(assignment, capacity)

    def expected_usd(self, seen: Seen) -> Array:
        """What the whole assignment costs on average, before its first look; one figure for each entry of ``seen``."""
        loss, back = self.capacity.loss_per_hour, self.capacity.back_per_hour
        at_start = self._values.cost[-1, :, :, -1]
        either = back * at_start[:, State.UP_IDLE] + loss * at_start[:, State.DOWN_IDLE]
        weights = self.capacity.weights(seen, dispersion=self._dispersion)
        return np.asarray(weights @ (either / (loss + back)), dtype=np.float64)

    def choose(self, assignment: Assignment, moment: Moment) -> Choices:
        """The cheapest choice that cannot miss the deadline; on demand where none is left."""
        if assignment != self._values.assignment:
            raise ValueError("the policy was made for another assignment")
        weights = self.capacity.weights(moment.seen, dispersion=self._dispersion)
        costs = (self._values.of_choices(moment) * weights).sum(axis=2)
        slack, change = slack_s(assignment, moment), assignment.changeover_s
        may_lose = slack >= change
        needed = np.where(moment.running == Choice.SPOT, change, 2 * change)
        costs[Choice.SPOT] = np.where(moment.available & (slack >= needed), costs[Choice.SPOT], np.inf)
        costs[Choice.WAIT] = np.where(may_lose, costs[Choice.WAIT], np.inf)
        return np.asarray(costs.argmin(axis=0), dtype=np.intp)
