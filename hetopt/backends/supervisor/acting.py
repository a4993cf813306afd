"""Supervises a run: looks at it now and then, does what it decides, and writes expected and measured gain.

Where hosts come and go, one that costs more than it brings is dropped, and the others go on from memory. Where machines
are rented, one that has become slow is given back, and another takes its place; more are rented for a run that would be
late; all are had on demand when only that still keeps the deadline, or in another zone where that has become cheaper.
Elsewhere the person is told, and decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hetopt.backends.backend import Pools
from hetopt.backends.emulation.injection import ask_for_change, comes_and_goes
from hetopt.backends.supervisor.adding import with_more_of_each_type
from hetopt.backends.supervisor.decide import Alternative, Decision, Hysteresis, Supervisor
from hetopt.backends.supervisor.dropping import without_each_host
from hetopt.backends.supervisor.moving import on_demand_for_all
from hetopt.backends.supervisor.progress import PredictedGain, RunProgress
from hetopt.backends.supervisor.replacing import with_another_for_each_host
from hetopt.backends.supervisor.switching import in_other_zones
from hetopt.core.errors import BadInput, BudgetStop, CloudRefused
from hetopt.core.events.decisions import gain_in_words, write_decision
from hetopt.core.events.fold import RunFold
from hetopt.core.events.records import LogEvent
from hetopt.core.scaled_emulation import Change
from hetopt.optimizer.launch_record import Launch

ACTED, MEASURED = "supervisor_acted", "supervisor_measured"

LetGo = Callable[[str], None]
"""Ends a host of the run; raises `BadInput` where there is none any more, `CloudRefused` where it could not be done."""

Move = Callable[[float], None]
"""Has other machines in the place of all that can be taken back, for so many seconds; raises as `Renting.move` does."""

Add = Callable[[str, int, float], None]
"""Rents so many machines more like a host, for so many seconds; raises as `Renting.add` does."""

Switch = Callable[[str, float], None]
"""Has the same machines in another zone, for so many seconds; raises as `Renting.switch` does."""

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
        drop: ends a host that the run goes on without; None: it needs all of them.
        replace: ends a host whose place another machine takes; None: there are no others.
        move: has machines that nobody takes back in the place of all; None: there are none, or it was done.
        add: rents more machines; None: there are none, or they cannot be paid.
        switch: has the same machines in another zone; None: nothing is rented.
        pools: what they cost there and here; None: as planned.
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
    drop: LetGo | None = None
    replace: LetGo | None = None
    move: Move | None = None
    add: Add | None = None
    switch: Switch | None = None
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
        cls,
        record: Launch,
        run_dir: Path,
        *,
        replace: LetGo | None = None,
        move: Move | None = None,
        add: Add | None = None,
        switch: Switch | None = None,
        pools: Look | None = None,
        hysteresis: Hysteresis | None = None,
    ) -> Supervision:
        """The supervision of a launch.

        Args:
            record: of the launch.
            run_dir: of the run.
            replace: gives a rented machine back whose place another one takes; None: nothing is rented.
            move: has machines that nobody takes back in the place of all; None: there are none.
            add: rents more machines; None: nothing is rented.
            switch: has the same machines in another zone; None: nothing is rented.
            pools: what they cost there and here; None: as planned.
            hysteresis: how slowly minds are changed.
        """
        # A machine that is lost takes the work since the last checkpoint with it: half of what is between two.
        lost_s = record.spec.checkpoint_every_s / 2
        if not record.spec.resumes:  # any change of machines costs a run that saves nothing all that it has done
            replace = move = add = switch = None
        return cls(
            run_dir=run_dir,
            usd_per_hour=host_prices(record),
            drop=dropping(run_dir) if comes_and_goes(record.spec) else None,
            replace=replace,
            move=move,
            add=add,
            switch=switch,
            pools=pools,
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
        # What a place of one's own costs is not for a program to limit; what is rented has a guard of its own.
        others = self._others(self._priced())
        before, (self.supervisor, decision) = self.supervisor, self.supervisor.look(self.standing, 0.0, others)
        if decision.action == "drop" and self.drop is not None:
            return self._act(decision, self.drop, before)
        if decision.action == "replace" and self.replace is not None:
            return self._act(decision, self.replace, before)
        if decision.action == "on-demand" and self.move is not None:
            move, needed_s = self.move, self._left_s(decision)
            return self._act(decision, lambda _: move(needed_s), before)
        if decision.action == "add" and self.add is not None:
            add, needed_s = self.add, self._left_s(decision)
            return self._act(decision, lambda host: add(host, decision.machines, needed_s), before)
        if decision.action == "switch" and self.switch is not None:
            switch, needed_s = self.switch, self._left_s(decision)
            return self._act(decision, lambda zone: switch(zone, needed_s), before)
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
        if self.drop is not None:
            found += without_each_host(self.standing, promise, self.usd_per_hour)
        if self.replace is not None:
            fresh = with_another_for_each_host(self.standing, promise, until_there_s=self.until_there_s)
            found += [one for one in fresh if one.name not in self.replaced]
        # Machines that were asked for are still to come, and to show what they bring.
        if self.add is not None and self.supervisor.last is None:
            found += with_more_of_each_type(self.standing, promise, self.usd_per_hour, until_there_s=self.until_there_s)
        if self.switch is not None and pools is not None:
            there = in_other_zones(self.standing, promise, pools, boot_s=self.boot_s, until_there_s=self.until_there_s)
            found += [one for one in there if self._may_be_paid(one.name)]
        if self.move is not None:
            found += on_demand_for_all(self.standing, promise, until_there_s=self.until_there_s)
        return found

    def _may_be_paid(self, zone: str) -> bool:
        refused_s = self.unpaid.get(zone)
        return refused_s is None or self.standing.now_s >= refused_s + UNPAID_S

    def _left_s(self, decision: Decision) -> float:
        """Until the end of the run, after a decision."""
        step_s = decision.expected_step_time_s or self.supervisor.promise.step_time_s
        return self.until_there_s + max(0.0, self.supervisor.promise.steps - self.standing.step) * step_s

    def _act(self, decision: Decision, let_go: LetGo, before: Supervisor) -> str | None:
        try:
            let_go(decision.name)
        except BadInput:
            self.supervisor = before  # the host is gone already, or the run is over
            return None
        except BudgetStop as refused:
            self.supervisor = before
            if decision.action == "switch":
                said, self.unpaid[decision.name] = decision.name in self.unpaid, self.standing.now_s
                return None if said else refused.message
            # The budget will pay for it even less later.
            if decision.action == "add":
                self.add = None
            else:
                self.move = None
            return refused.message
        except CloudRefused as refused:
            self.supervisor = before  # nothing was done; the next look finds it called for again
            stays = decision.name if decision.action in ("drop", "replace") else "everything"
            before_said, self.said = self.said, f"{refused.message} {stays} stays for now."
            return self.said if self.said != before_said else None
        if decision.action == "replace":
            self.replaced.add(decision.name)
        if decision.action == "on-demand":
            self.move = None
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


def dropping(run_dir: Path) -> LetGo:
    """Drops hosts of a rehearsed run: its conductor ends them."""
    return lambda host: ask_for_change(run_dir, Change(host=host, dies=True))


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
