"""Supervises a rehearsed run: looks at it now and then, does what it decides, and writes expected and measured gain.

Where hosts come and go, one that costs more than it brings is dropped: the conductor ends it, and the others go on from
memory. Elsewhere the person is told, and decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetopt.optimizer import words
from hetopt.optimizer.launch_record import Launch
from hetopt.optimizer.supervisor.decide import Decision, Hysteresis, Supervisor
from hetopt.optimizer.supervisor.dropping import without_each_host
from hetopt.optimizer.supervisor.standing import Promise, Standing
from hetopt.profiler.errors import BadInput
from hetopt.trainer.events import EVENTS_FILE, EventLog
from hetopt.trainer.launch.changes import ask_for_change, comes_and_goes
from hetopt.trainer.miniature import Change

ACTED, MEASURED = "supervisor_acted", "supervisor_measured"


@dataclass(kw_only=True)
class Supervision:
    """One run's supervisor, with the hand to act.

    Attributes:
        run_dir: of the run.
        usd_per_hour: of each host.
        may_drop: whether the run goes on without a host.
        supervisor: who decides.
        standing: of the run, as its log has told so far.
    """

    run_dir: Path
    usd_per_hour: Mapping[str, float]
    may_drop: bool
    supervisor: Supervisor
    standing: Standing = field(default_factory=Standing)

    @classmethod
    def of(cls, record: Launch, run_dir: Path, hysteresis: Hysteresis | None = None) -> Supervision:
        """The supervision of a launch."""
        return cls(
            run_dir=run_dir,
            usd_per_hour=host_prices(record),
            may_drop=comes_and_goes(record.spec),
            supervisor=Supervisor(promise=promise_of(record), hysteresis=hysteresis or Hysteresis()),
        )

    def take_in(self, event: Mapping[str, Any]) -> None:
        """Learn of an event."""
        self.standing = self.standing.after(event)

    def look(self) -> str | None:
        """Look once, and do what is to be done; what a person is told of it, if anything."""
        self.supervisor, told = self.supervisor.measured(self.standing)
        if told is not None:
            self._write(MEASURED, told)
        promise = self.supervisor.promise
        alternatives = without_each_host(self.standing, promise, self.usd_per_hour) if self.may_drop else []
        # What a place of one's own costs is not for a program to limit: nothing is spent here.
        before, (self.supervisor, decision) = self.supervisor, self.supervisor.look(self.standing, 0.0, alternatives)
        if decision.action == "drop":
            return self._drop(decision, before)
        if decision.acts:
            return f"{decision.reason}; `hetopt report` shows by what"
        return _gain(told) if told is not None else None

    def _drop(self, decision: Decision, before: Supervisor) -> str | None:
        try:
            ask_for_change(self.run_dir, Change(host=decision.name, dies=True))
        except BadInput:
            self.supervisor = before  # the run is over
            return None
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
        return f"drops {decision.name}: {decision.reason}"

    def _write(self, event: str, fields: Mapping[str, Any]) -> None:
        with closing(EventLog(self.run_dir / EVENTS_FILE)) as events:
            events.write(event, step=self.standing.step, **fields)


def _gain(told: Mapping[str, Any]) -> str:
    before, expected, measured = (
        words.duration(told[f"step_time_{which}_s"]) for which in ("before", "expected", "measured")
    )
    return f"without {told['name']} a step takes {measured} ({before} before, {expected} expected)"


def host_prices(record: Launch) -> dict[str, float]:
    """Of each host of the run: the plan's machines in their order, or equal parts where there are others instead."""
    hosts = list(dict.fromkeys(worker.host for worker in record.spec.workers))
    prices = [group.price_usd_per_hour for group in record.plan.chosen.groups for _ in range(group.machines)]
    if len(prices) != len(hosts):
        prices = [record.hourly_usd / len(hosts)] * len(hosts)
    return dict(zip(hosts, prices, strict=True))


def promise_of(record: Launch) -> Promise:
    """What was predicted for the place where the run is."""
    told = record.prediction
    return Promise(
        step_time_s=told.step_time_s.value,
        step_time_low_s=told.step_time_s.low,
        step_time_high_s=told.step_time_s.high,
        steps=told.steps.value,
        usd_per_hour=record.hourly_usd,
    )
