"""One run in the box from its plan to its bill, with what is done to it on the way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.box.box import Box, Happening
from benchmarks.box.machine import Machine
from hetopt.backends.ec2.renter.cluster_state import SEEN_FILE, ClusterState
from hetopt.backends.ec2.renter.edge import LEDGER_FILE, read_ledger
from hetopt.backends.ec2.renter.order import ORDER_FILE, Order
from hetopt.core.errors import RunFailed
from hetopt.core.events.log import EVENTS_FILE, Event, read_events

HETOPT = (sys.executable, "-m", "hetopt.cli.main")
_TURN_S = 0.2
_RENTS = ("ec2:CreateFleet", "ec2:TerminateInstances")
_TOLD = ("training_started", "training_finished", "run_failed")


@dataclass(frozen=True, kw_only=True)
class Act:
    """Something that is done once, as soon as the run has come so far."""

    when: Callable[[Stage], bool]
    do: Callable[[Stage], object]


@dataclass(frozen=True, kw_only=True)
class Played:
    """How a run went.

    Attributes:
        out: what the command printed.
        folder: of the run.
        events: of the run, as its folder has them in the end.
        wall_s: from the command to its end.
    """

    code: int
    out: str
    err: str
    folder: Path
    events: list[Event]
    wall_s: float

    @property
    def order(self) -> Order:
        """What was rented."""
        return Order.load(self.folder / ORDER_FILE)

    @property
    def seen(self) -> ClusterState:
        """What the run's folder says of its machines."""
        return ClusterState.load(self.folder / SEEN_FILE)

    def ledger_usd(self) -> float:
        """What the run's own record comes to."""
        seen = self.seen
        return seen.spent_usd(seen.time_s)


@dataclass(kw_only=True)
class Stage:
    """A box, and a person's folder from which hetopt is used as on any machine."""

    box: Box
    home: Path

    def hetopt(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        """One command to its end.

        Raises:
            RunFailed: it did not end well, or the box itself failed.
        """
        command = [*HETOPT, *map(str, arguments)]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=self._environment()
        ) as process:
            out = err = None
            while out is None:
                try:
                    out, err = process.communicate(timeout=_TURN_S)
                except subprocess.TimeoutExpired:
                    try:
                        self.box.check()
                    except RunFailed:
                        process.kill()
                        raise
        if process.returncode != 0:
            raise RunFailed(f"`hetopt {arguments[0]}` ended with {process.returncode}: {err}", hint="read it")
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def play(self, arguments: Sequence[object], acts: Sequence[Act], *, within_s: float) -> Played:
        """Launch, and do each act when its time has come.

        Args:
            arguments: of `hetopt launch`.
            acts: in their order.
            within_s: that all of it may take.

        Raises:
            RunFailed: it takes longer, or the box itself failed.
        """
        begun, waiting = time.monotonic(), list(acts)
        known = set(self._runs())
        out, err = self.home / "launch.out", self.home / "launch.err"
        with out.open("w") as to_out, err.open("w") as to_err:
            launch = subprocess.Popen(
                [*HETOPT, "launch", "--on", "ec2", *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=to_out,
                stderr=to_err,
                env=self._environment(),
            )
        try:
            while launch.poll() is None:
                self.box.check()
                if waiting and waiting[0].when(self):
                    waiting.pop(0).do(self)
                if time.monotonic() - begun > within_s:
                    raise RunFailed(f"the run has not ended in {within_s:g} s: {err.read_text()}", hint="")
                time.sleep(_TURN_S)
        finally:
            if launch.poll() is None:
                launch.kill()
            launch.wait()
        (folder,) = set(self._runs()) - known
        return Played(
            code=launch.returncode,
            out=out.read_text(),
            err=err.read_text(),
            folder=folder,
            events=read_events(folder / EVENTS_FILE),
            wall_s=time.monotonic() - begun,
        )

    def folder(self) -> Path | None:
        """Of the newest run."""
        return max(self._runs(), default=None)

    def seen(self) -> ClusterState | None:
        """What the newest run's folder says of its machines."""
        folder = self.folder()
        return ClusterState.load(folder / SEEN_FILE) if folder is not None and (folder / SEEN_FILE).exists() else None

    def _runs(self) -> list[Path]:
        runs = self.home / "runs"
        return list(runs.iterdir()) if runs.is_dir() else []

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        return {**kept, **self.box.environment, "HETOPT_HOME": str(self.home)}


def trained(steps: int, *, generation: int = 0) -> Callable[[Stage], bool]:
    """Whether so many steps were trained in a generation of the run, as its first machine's own log tells."""

    def reached(stage: Stage) -> bool:
        seen = stage.seen()
        if seen is None or seen.generation < generation:
            return False
        first: int | None = None
        for event in _newest_log(stage.box):
            if event["time_s"] < seen.placed_s:
                continue
            if event["event"] == "training_started":
                first = int(event.get("step", 0))
            if event["event"] == "step" and first is not None and event["step"] >= first + steps:
                return True
        return False

    return reached


def _newest_log(box: Box) -> list[Event]:
    logs = [read_events(machine.run_dir / EVENTS_FILE) for machine in box.living()]
    return max(logs, key=lambda log: log[-1]["time_s"] if log else 0.0, default=[])


def meeting_host(box: Box) -> Machine:
    """The machine at which all others meet."""
    return box.living()[0]


def timeline(box: Box, played: Played) -> list[Happening]:
    """What happened, in the order of time: to machines, in the run, and in its ledger."""
    told = list(box.happenings)
    for event in played.events:
        if event["event"] in _TOLD:
            more = {key: value for key, value in event.items() if key in ("step", "reason", "metrics")}
            told.append(Happening(time_s=event["time_s"], what=f"run: {event['event']} {json.dumps(more)}"))
    for entry in read_ledger(played.folder / LEDGER_FILE):
        if entry.event != "begun" and entry.api_name in _RENTS:
            ids = ", ".join(id_ for id_ in entry.ids if id_.startswith("i-")) or entry.reason or "nothing"
            told.append(Happening(time_s=entry.time_s, what=f"ledger: {entry.api_name} {entry.step}: {ids}"))
    return sorted(told, key=lambda one: one.time_s)
