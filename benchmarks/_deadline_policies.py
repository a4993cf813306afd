"""When to leave spot for on-demand machines so that a deadline holds: the question, and the published rules as peers.

At every look a policy chooses for the next while: run on spot, run on demand, or wait. Each change to another machine
takes a changeover in which nothing is trained. All policies here keep the deadline as long as machines on demand can be
had; they differ in what that costs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks._pool_capacity import Array, Flags, Seen

Choices = NDArray[np.intp]


class Choice(IntEnum):
    """What to do until the next look."""

    SPOT = 0
    ON_DEMAND = 1
    WAIT = 2


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """What has to be done until when, and what machines cost.

    Attributes:
        work_s: training without any interruption.
        deadline_s: from the start of the run.
        changeover_s: from asking for machines until training goes on, what is lost of the work included.
        spot_usd_per_hour, on_demand_usd_per_hour: of the whole cluster.
    """

    work_s: float
    deadline_s: float
    changeover_s: float
    spot_usd_per_hour: float
    on_demand_usd_per_hour: float

    def __post_init__(self) -> None:
        """Refuse what cannot be done."""
        for name in ("work_s", "deadline_s", "changeover_s", "spot_usd_per_hour", "on_demand_usd_per_hour"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}, but must be a number above 0")
        if self.deadline_s < self.work_s + self.changeover_s:
            raise ValueError("the deadline is before the end of the quickest run")


@dataclass(frozen=True, kw_only=True)
class Moment:
    """One look at many runs of an assignment; arrays of shape (runs,).

    Attributes:
        elapsed_s: since the start.
        until_next_s: until the next look; a machine may be lost anywhere in between.
        left_s: work that is still to be done.
        available: whether the pool has spot machines.
        running: what each run is on (WAIT: nothing), after any loss.
        seen: of the pool since the start, and before it where that is known.
    """

    elapsed_s: float
    until_next_s: float
    left_s: Array
    available: Flags
    running: Choices
    seen: Seen


class DeadlinePolicy(Protocol):
    """Decides for all runs at a time, from what can be seen at the moment alone."""

    def choose(self, assignment: Assignment, moment: Moment) -> Choices:
        """A choice for each run. SPOT only where spot is available."""
        ...


def slack_s(assignment: Assignment, moment: Moment) -> Array:
    """Time that is left beyond the work that is left, after waiting for the next look."""
    return assignment.deadline_s - moment.elapsed_s - moment.until_next_s - moment.left_s


def must_switch(assignment: Assignment, moment: Moment) -> Flags:
    """Whether anything but machines on demand would risk the deadline: one changeover to them must always be left, and
    one more to get on spot."""
    needed = np.where(moment.running == Choice.SPOT, 1, 2) * assignment.changeover_s
    return np.asarray(slack_s(assignment, moment) < needed)


@dataclass(frozen=True, kw_only=True)
class SwitchWhenLate:
    """Spot or nothing as long as there is slack, then on demand until the end (the greedy rule of NSDI 2024)."""

    def choose(self, assignment: Assignment, moment: Moment) -> Choices:
        """On demand is never left again."""
        late = must_switch(assignment, moment) | (moment.running == Choice.ON_DEMAND)
        return np.where(late, Choice.ON_DEMAND, np.where(moment.available, Choice.SPOT, Choice.WAIT)).astype(np.intp)


@dataclass(frozen=True, kw_only=True)
class UniformProgress:
    """Work is done at an even pace at least (Wu et al., "Can't Be Late", NSDI 2024).

    Spot where there is any; where there is none, on demand as long as progress is behind ``elapsed * work / deadline``,
    and else nothing. On-demand machines are kept until progress is ahead by what two changeovers take.
    """

    def choose(self, assignment: Assignment, moment: Moment) -> Choices:
        """The rule with its safety net, `must_switch`."""
        pace = assignment.work_s / assignment.deadline_s
        done = assignment.work_s - moment.left_s
        behind = done < moment.elapsed_s * pace
        not_yet_ahead = done < (moment.elapsed_s + 2 * assignment.changeover_s) * pace
        stay = (moment.running == Choice.ON_DEMAND) & not_yet_ahead
        on_demand = must_switch(assignment, moment) | stay | (behind & ~moment.available)
        rest = np.where(moment.available, Choice.SPOT, Choice.WAIT)
        return np.where(on_demand, Choice.ON_DEMAND, rest).astype(np.intp)
