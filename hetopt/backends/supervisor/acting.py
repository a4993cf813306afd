"""Supervises a run: looks at it now and then, does what it decides, and writes expected and measured gain.

Where hosts come and go, one that costs more than it brings is dropped, and the others go on from memory. Where machines
are rented, one that has become slow is given back, and another takes its place; more are rented for a run that would be
late; all are had on demand when only that still keeps the deadline, or in another zone where that has become cheaper.
Elsewhere the person is told, and decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from hetopt.backends.backend import Pools, Renting, RunHandle
from hetopt.backends.emulation.injection import ask_for_change, comes_and_goes
from hetopt.backends.supervisor.alternatives import (
    in_other_zones,
    on_demand_for_all,
    with_another_for_each_host,
    with_more_of_each_type,
    without_each_host,
)
from hetopt.backends.supervisor.decide import Action, Alternative, Decision, Hysteresis, Supervisor
from hetopt.backends.supervisor.progress import PredictedGain, RunProgress
from hetopt.core.errors import BadInput, BudgetStop, CloudRefused
from hetopt.core.events.decisions import gain_in_words, write_decision
from hetopt.core.events.fold import RunFold
from hetopt.core.events.records import LogEvent
from hetopt.core.scaled_emulation import Change
from hetopt.optimizer.launch_record import Launch

ACTED, MEASURED = "supervisor_acted", "supervisor_measured"

Hand = Callable[[Decision, float], None]
"""Does what was decided, for a run that needs so many seconds more.

Raises `BadInput` where it cannot be any more, `BudgetStop` where it is not paid for, `CloudRefused` where the cloud
does not answer; see `Renting`.
"""

Look = Callable[[], Pools | None]
"""What the machines cost here and in other zones; None while some come or go."""

UNPAID_S = 3600.0
"""What the budget did not pay for is asked again so much later: the less of a run is left, the more it may pay for."""

ENDING_S = 180.0
"""So long before its deadline a rented run is told to save its last checkpoint and to end."""


@dataclass(kw_only=True)
class Supervision:
    """One run's supervisor, with the hand to act.

    Attributes:
        run_dir: of the run.
        usd_per_hour: of each host.
        hands: what can be done here, by its name; of what was done for good, or cannot be paid, there is none any more.
        pools: what machines cost here and in other zones; None: as planned.
        boot_s: from asking for a machine to its first step.
        until_there_s: from an order to end a machine to the first step of the one that is asked for instead.
        supervisor: who decides.
        run: all that its log has told so far.
        standing: of the run against its plan, by that.
        replaced: hosts that were; a second machine would have no better luck.
        unpaid: zones that the budget did not pay for, and when that was found, seconds since the epoch.
        said: why nothing could be done, for which nobody needs to be told again.
    """

    run_dir: Path
    usd_per_hour: Mapping[str, float]
    hands: dict[Action, Hand] = field(default_factory=dict)
    pools: Look | None = None
    boot_s: float = 0.0
    until_there_s: float = 0.0
    supervisor: Supervisor
    run: RunFold = field(default_factory=RunFold)
    standing: RunProgress = field(default_factory=RunProgress)
    replaced: set[str] = field(default_factory=set)
    unpaid: dict[str, float] = field(default_factory=dict)
    said: str = ""

    @classmethod
    def of(
        cls, record: Launch, run_dir: Path, renting: Renting | None = None, hysteresis: Hysteresis | None = None
    ) -> Supervision:
        """The supervision of a launch.

        Args:
            record: of the launch.
            run_dir: of the run.
            renting: where its machines are rented; None: they are not.
            hysteresis: how slowly minds are changed.
        """
        # A machine that is lost takes the work since the last checkpoint with it: half of what is between two.
        lost_s = record.spec.checkpoint_every_s / 2
        handle, hands = RunHandle(run_dir=run_dir), dict[Action, Hand]()
        if comes_and_goes(record.spec):
            hands["drop"] = dropping(run_dir)
        if renting is not None and record.spec.resumes:
            # Any change of machines costs a run that saves nothing all that it has done.
            hands |= renting_hands(renting, handle)
        return cls(
            run_dir=run_dir,
            usd_per_hour=host_prices(record),
            hands=hands,
            pools=None if renting is None else partial(renting.pools, handle),
            boot_s=record.prediction.startup_s,
            until_there_s=record.prediction.startup_s + lost_s,
            supervisor=Supervisor(promise=promise_of(record), hysteresis=hysteresis or Hysteresis()),
            run=RunFold.launched(record.starts),
        )

    def take_in(self, event: LogEvent) -> None:
        """Go on with the next event of the run's log."""
        self.run.take(event)
        self.standing = self.standing.after(event, self.run)

    def look(self) -> str | None:
        """Look once, and do what is to be done; what a person is told of it, if anything."""
        self.supervisor, told = self.supervisor.measured(self.standing)
        if told is not None:
            self._write(MEASURED, told)
        others = self._others(self._priced())
        before, (self.supervisor, decision) = self.supervisor, self.supervisor.look(self.standing, others)
        if decision.action in self.hands:
            return self._act(decision, before)
        if decision.acts:
            return f"{decision.reason}; `hetopt report` shows by what"
        if told is None:
            return None
        return gain_in_words(told, "{how} a step takes {measured} ({before} before, {expected} expected)")

    def _priced(self) -> Pools | None:
        """What the machines cost now, which is what the run will cost from now on, too."""
        pools = self.pools() if self.pools is not None else None
        if pools is None:
            return None
        usd_per_hour = sum(pools.usd_per_hour.values())
        self.usd_per_hour = pools.usd_per_hour
        supervisor = replace(self.supervisor, promise=replace(self.supervisor.promise, usd_per_hour=usd_per_hour))
        last = supervisor.last.decision if supervisor.last is not None else None
        # A switch that was given up has no gain to be measured.
        given_up = last is not None and last.action == "switch" and last.name != pools.zone
        self.supervisor = replace(supervisor, last=None) if given_up else supervisor
        return pools

    def _others(self, pools: Pools | None) -> list[Alternative]:
        promise, found = self.supervisor.promise, []
        if "drop" in self.hands:
            found += without_each_host(self.standing, promise, self.usd_per_hour)
        if "replace" in self.hands:
            fresh = with_another_for_each_host(self.standing, promise, until_there_s=self.until_there_s)
            found += [one for one in fresh if one.name not in self.replaced]
        # Machines that were asked for are still to come, and to show what they bring.
        if "add" in self.hands and self.supervisor.last is None:
            found += with_more_of_each_type(self.standing, promise, self.usd_per_hour, until_there_s=self.until_there_s)
        if "switch" in self.hands and pools is not None:
            there = in_other_zones(self.standing, promise, pools, boot_s=self.boot_s, until_there_s=self.until_there_s)
            found += [one for one in there if self._may_be_paid(one.name)]
        if "on-demand" in self.hands:
            found += on_demand_for_all(self.standing, promise, until_there_s=self.until_there_s)
        return found

    def _may_be_paid(self, zone: str) -> bool:
        refused_s = self.unpaid.get(zone)
        return refused_s is None or self.standing.now_s >= refused_s + UNPAID_S

    def _left_s(self, decision: Decision) -> float:
        """Until the end of the run, after a decision."""
        step_s = decision.expected_step_time_s or self.supervisor.promise.step_time_s
        return self.until_there_s + self.standing.steps_left(self.supervisor.promise) * step_s

    def _act(self, decision: Decision, before: Supervisor) -> str | None:
        try:
            self.hands[decision.action](decision, self._left_s(decision))
        except BadInput:
            self.supervisor = before  # the host is gone already, or the run is over
            return None
        except BudgetStop as refused:
            self.supervisor = before
            if decision.action == "switch":
                said, self.unpaid[decision.name] = decision.name in self.unpaid, self.standing.now_s
                return None if said else refused.message
            del self.hands[decision.action]  # the budget will pay for it even less later
            return refused.message
        except CloudRefused as refused:
            self.supervisor = before  # nothing was done; the next look finds it called for again
            stays = decision.name if decision.action in ("drop", "replace") else "everything"
            before_said, self.said = self.said, f"{refused.message} {stays} stays for now."
            return self.said if self.said != before_said else None
        if decision.action == "replace":
            self.replaced.add(decision.name)
        if decision.action == "on-demand":
            del self.hands["on-demand"]
        self._write(
            ACTED,
            {
                "action": decision.action,
                "host": decision.name,
                "reason": decision.reason,
                "step_time_expected_s": decision.expected_step_time_s,
                "expected_saving_s": round(decision.expected_saving_s, 3),
                "expected_saving_usd": round(decision.expected_saving_usd, 6),
            },
        )
        return f"{_DOES[decision.action]} {decision.name}: {decision.reason}"

    def _write(self, event: str, fields: Mapping[str, Any]) -> None:
        write_decision(self.run_dir, event, {"step": self.standing.step, **fields})


_DOES = {
    "drop": "drops",
    "replace": "replaces",
    "on-demand": "moves to",
    "add": "adds machines like",
    "switch": "leaves for",
}


def dropping(run_dir: Path) -> Hand:
    """Drops hosts of a rehearsed run: its conductor ends them."""
    return lambda decision, _: ask_for_change(run_dir, Change(host=decision.name, dies=True))


def renting_hands(renting: Renting, handle: RunHandle) -> dict[Action, Hand]:
    """What can be done about the machines of a rented run."""
    return {
        "replace": lambda decision, _: renting.replace(handle, decision.name),
        "on-demand": lambda _, needed_s: renting.move(handle, needed_s),
        "add": lambda decision, needed_s: renting.add(handle, decision.name, decision.machines, needed_s),
        "switch": lambda decision, needed_s: renting.switch(handle, decision.name, needed_s),
    }


def host_prices(record: Launch) -> dict[str, float]:
    """Of each host of the run: the plan's machines in their order, or equal parts where there are others instead."""
    hosts = list(dict.fromkeys(worker.host for worker in record.spec.workers))
    prices = [group.price_usd_per_hour for group in record.plan.chosen.groups for _ in range(group.machines)]
    if len(prices) != len(hosts):
        prices = [record.hourly_usd / len(hosts)] * len(hosts)
    return dict(zip(hosts, prices, strict=True))


def promise_of(record: Launch) -> PredictedGain:
    """What was predicted for the place where the run is."""
    told = record.prediction
    return PredictedGain(
        step_time_s=told.step_time_s.value,
        step_time_low_s=told.step_time_s.low,
        step_time_high_s=told.step_time_s.high,
        steps=told.steps.value,
        usd_per_hour=record.hourly_usd,
        deadline_s=_deadline_s(record),
    )


def _deadline_s(record: Launch) -> float | None:
    """By when training must end; elsewhere than on what was planned to be rented a deadline says nothing."""
    wished_s = record.plan.goal.deadline_s
    return record.started_s + wished_s - ENDING_S if record.on == "ec2" and wished_s is not None else None
