"""Supervises a run: looks at it now and then, does what it decides, and writes expected and measured gain.

Where hosts come and go, one that costs more than it brings is dropped, and the others go on from memory. Where machines
are rented, one that has become slow is given back, and another takes its place; more are rented for a run that would be
late; all are had on demand when only that still keeps the deadline, or in another zone where that has become cheaper.
Elsewhere the person is told, and decides.

What training would be like on other machines: what the supervisor weighs against leaving a run alone.

Each function names what could be had for one action, predicted with what was measured of the run; an empty list means
that nothing calls for that action. A worker of share ``b_j`` computes for ``t_j``, so it does ``v_j = b_j / t_j``
samples a second. Workers that share a batch ``B`` by their speeds compute for ``B / sum v_j``, and exchange after that
for as long as now. This takes what is fixed in ``t_j`` for work, so that fewer workers are a little quicker than
predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from hetopt.backends.backend import Pools, Renting, RunHandle
from hetopt.backends.emulation.injection import ask_for_change, comes_and_goes
from hetopt.backends.supervisor.decide import (
    Action,
    Alternative,
    Decision,
    Hysteresis,
    PredictedGain,
    RunProgress,
    Supervisor,
)
from hetopt.core.budget_law import SECONDS_PER_HOUR
from hetopt.core.errors import BadInput, BudgetStop, CloudRefused
from hetopt.core.events.fold import RunFold
from hetopt.core.events.log import write_decision
from hetopt.core.events.records import LogEvent
from hetopt.core.formatting import gain_in_words
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


CHANGEOVER_S = 5.0
"""Until the others train again: measured from one to two seconds on a busy machine, and the step that is lost."""
LONGER = 1.1
"""A step may take so much longer without the host than with all in balance: it is dropped for what it costs, not to
shrink the cluster."""


def without_each_host(
    standing: RunProgress, promise: PredictedGain, usd_per_hour: Mapping[str, float]
) -> list[Alternative]:
    """An alternative for each host that the others could do without; none while the run is as it was predicted."""
    now_s, hosts, speeds = standing.step_time_s, standing.hosts, standing.speeds
    if now_s is None or now_s <= promise.step_time_high_s or not speeds:
        return []
    # As quick as all of them would be in balance: what that brings is no merit of a host that is missing.
    balanced_s = min(now_s, sum(standing.shares) / sum(speeds) + standing.sync_s)
    found = []
    for host in dict.fromkeys(hosts):
        others = sum(speed for speed, where in zip(speeds, hosts, strict=True) if where != host)
        if not others:
            continue
        step_time_s = sum(standing.shares) / others + standing.sync_s
        if step_time_s <= LONGER * balanced_s:
            found.append(
                Alternative(
                    action="drop",
                    name=host,
                    step_time_s=step_time_s,
                    usd_per_hour=promise.usd_per_hour - usd_per_hour.get(host, 0.0),
                    changeover_s=CHANGEOVER_S,
                )
            )
    return found


SLOW = 0.5
"""Of what its type has done; shares are small for slow workers, and what is fixed in a step weighs more in them."""


def with_another_for_each_host(
    standing: RunProgress, promise: PredictedGain, *, until_there_s: float
) -> list[Alternative]:
    """An alternative for each host that has become slow; none while the run is as it was predicted.

    Only for a machine that does less than half of what machines of its type have done in this run: a type that is
    slower than predicted is slow in every copy, and the batch is shared out accordingly already.

    While the new machine boots, the others do a step in ``t_w``, and in ``t_n`` once it is there. With ``n`` steps left
    and ``s`` seconds until then, the rest takes

        s + (n - s / t_w) t_n  =  s (1 - t_n / t_w) + n t_n

    so that the first term is what the change costs.

    Args:
        standing: of the run.
        promise: of its plan.
        until_there_s: from the order to end a machine until another one trains in its place.
    """
    now_s, speeds, hosts = standing.step_time_s, standing.speeds, standing.hosts
    if now_s is None or now_s <= promise.step_time_high_s or not speeds:
        return []
    batch, found = sum(standing.shares), []
    for host in dict.fromkeys(hosts):
        mine = [place for place, where in enumerate(hosts) if where == host]
        slow = sum(speeds[place] for place in mine)
        sound = sum(max(speeds[place], standing.quickest.get(standing.types[place], 0.0)) for place in mine)
        if slow > SLOW * sound:
            continue
        others = sum(speeds) - slow
        then_s = batch / (others + sound) + standing.sync_s
        without_s = batch / others + standing.sync_s if others > 0 else float("inf")
        found.append(
            Alternative(
                action="replace",
                name=host,
                step_time_s=then_s,
                usd_per_hour=promise.usd_per_hour,
                changeover_s=until_there_s * max(0.0, 1 - then_s / without_s),
            )
        )
    return found


AT_MOST = 1.0
"""So many machines more, over those that there are: beyond that what the exchange takes is not known from this run."""


def with_more_of_each_type(
    standing: RunProgress, promise: PredictedGain, usd_per_hour: Mapping[str, float], *, until_there_s: float
) -> list[Alternative]:
    """For each type the fewest more machines with which the run would be in time; none while it is.

    With ``k`` more of speed ``v`` a step takes ``B / (sum v_j + k v)``, and the exchange after that. While the new
    machines boot, the others train: the change costs ``s (1 - t_n / t_w)``, as in `with_another_for_each_host`.
    """
    deadline_s, now_s, speeds = promise.deadline_s, standing.step_time_s, standing.speeds
    if deadline_s is None or now_s is None or not speeds:
        return []
    left = standing.steps_left(promise)
    if standing.now_s + left * now_s <= deadline_s:
        return []
    hosts = list(dict.fromkeys(standing.hosts))
    found, batch = [], sum(standing.shares)
    for kind in dict.fromkeys(standing.types):
        like = next(where for where, its in zip(standing.hosts, standing.types, strict=True) if its == kind)
        own = sum(speed for speed, where in zip(speeds, standing.hosts, strict=True) if where == like)
        for more in range(1, int(AT_MOST * len(hosts)) + 1):
            then_s = batch / (sum(speeds) + more * own) + standing.sync_s
            one = Alternative(
                action="add",
                name=like,
                machines=more,
                step_time_s=then_s,
                usd_per_hour=promise.usd_per_hour + more * usd_per_hour.get(like, 0.0),
                changeover_s=until_there_s * max(0.0, 1 - then_s / now_s),
            )
            if standing.now_s + one.total_s(left) <= deadline_s:
                found.append(one)
                break
    return found


ON_DEMAND = "the same machines on demand"


def on_demand_for_all(standing: RunProgress, promise: PredictedGain, *, until_there_s: float) -> list[Alternative]:
    """The alternative that nobody takes back; none without a deadline, or before training has begun.

    A step takes what it took when all workers were last there, or what was promised where that was never measured: with
    some of them away it takes longer, and those come back with the move.

    Args:
        standing: of the run.
        promise: of its plan.
        until_there_s: until the new machines train, were all others lost at once.
    """
    if promise.deadline_s is None or standing.began_s is None:
        return []
    return [
        Alternative(
            action="on-demand",
            name=ON_DEMAND,
            step_time_s=standing.whole_step_time_s or promise.step_time_s,
            # Never taken for what it costs: nobody moves to save money.
            usd_per_hour=float("inf"),
            changeover_s=until_there_s,
            holds=True,
        )
    ]


def in_other_zones(
    standing: RunProgress, promise: PredictedGain, pools: Pools, *, boot_s: float, until_there_s: float
) -> list[Alternative]:
    """An alternative for each zone where the same machines cost less an hour; a step takes what it takes here.

    The machines are rented first and boot for ``b`` seconds, while those here go on; then all pause for ``s`` seconds,
    and nothing is lost. With ``n`` steps of ``t`` left, at ``p`` USD a second here and ``q`` there, the rest costs

        b (p + q) + s (p + q) + (n t - b) q  =  (s + n t) q + (b + s) p

    where the second term is what is paid for machines that are given back. A pause is not known beforehand: as it is
    for machines that boot first, it is taken for no longer than their start.

    A run whose deadline will soon call for machines on demand stays: it would pay for two changes.

    Args:
        standing: of the run.
        promise: of its plan.
        pools: what its machines cost here and there.
        boot_s: from asking for machines to their first step.
        until_there_s: until others train, were all lost at once.
    """
    step_s, here_usd_per_hour = standing.step_time_s, sum(pools.usd_per_hour.values())
    if step_s is None:
        return []
    found = [
        Alternative(
            action="switch",
            name=zone,
            step_time_s=step_s,
            usd_per_hour=usd_per_hour,
            changeover_s=boot_s,
            overlap_usd=2 * boot_s / SECONDS_PER_HOUR * here_usd_per_hour,
        )
        for zone, usd_per_hour in pools.elsewhere_usd_per_hour.items()
        if usd_per_hour < here_usd_per_hour
    ]
    left, deadline_s = standing.steps_left(promise), promise.deadline_s
    if deadline_s is None:
        return found
    return [one for one in found if standing.now_s + one.total_s(left) + 2 * until_there_s <= deadline_s]
