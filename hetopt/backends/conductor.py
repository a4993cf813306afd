"""The conductor of a run on several hosts, whatever the machines are: it places workers, follows them, and ends them.

What it decides is pure (`next_move`). The workers of a task go on from memory when any host but the first is lost, and
take it back when it returns (`goes_on_without`, `takes_back`). Otherwise those that are there go on from the last
checkpoint after a loss, and save one before a host leaves or comes. A form of `Conductor` for each kind of machines
tells which hosts are there, and starts their workers.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hetopt.backends.backend import advances
from hetopt.core.events.log import EVENTS_FILE, EventLog, EventReader, read_log
from hetopt.core.events.records import LogEvent, RunStarted
from hetopt.core.run_spec import RunSpec, host_names
from hetopt.core.run_status import exit_code, failure_reason, last_log_line

SURVIVORS_S = 20.0
"""Seconds after which, once a host's workers have failed, those of the others are ended if they have not ended by
themselves."""

Move = Literal["go on", "place", "pause", "wait", "end", "fail"]


@dataclass(kw_only=True)
class Situation:
    """The state of a run and its hosts, from which `next_move` decides.

    Attributes:
        members: names of the hosts of the present generation.
        there: names of the hosts that are connected.
        allowed: names of the hosts that may be used now.
        fresh: hosts that came back after the last placement, without the state that they had in it.
        ended: exit code of each member whose workers have ended in this generation.
        failed_for_s: seconds since the first of these failed; 0 while none has.
        pauses: whether all members were told to save a checkpoint and wait.
        reduced: whether members were lost that the others go on without; where these end, too, all start again.
        over: whether the run came to an end of its own.
        stopping: whether somebody asked the run to end.
        resumes: whether the run goes on from checkpoints.
        survives: whether the run goes on without a member that is lost.
    """

    members: Sequence[str] = ()
    there: Collection[str] = ()
    allowed: Sequence[str] = ()
    fresh: set[str] = field(default_factory=set)
    ended: dict[str, int] = field(default_factory=dict)
    failed_for_s: float = 0.0
    pauses: bool = False
    reduced: bool = False
    over: bool = False
    stopping: bool = False
    resumes: bool = True
    survives: bool = True


def next_move(now: Situation) -> Move:
    """Return the conductor's next move for a run's situation; pure.

    ``go on``: nothing changes. ``place``: begin a generation on all hosts that are there and may be used. ``pause``:
    have a checkpoint saved, to place after it. ``wait``: no host is there. ``end``: nothing is left to do. ``fail``: no
    other host would mend it.
    """
    if now.over or (now.stopping and set(now.ended) >= set(now.members)):
        return "end"
    if now.stopping:
        return "go on" if set(now.members) <= set(now.there) - set(now.fresh) else "end"
    able = set(now.there) & set(now.allowed)
    if not set(now.members) <= set(now.there) - set(now.fresh):
        return "fail" if not now.survives else "place" if able else "wait"
    all_ended = set(now.ended) >= set(now.members)
    if (all_ended and now.pauses) or (now.reduced and (all_ended or any(now.ended.values()))):
        return "place" if able else "wait"
    if all_ended or (any(now.ended.values()) and now.failed_for_s > SURVIVORS_S):
        return "fail"
    if able != set(now.members) and not now.pauses and not now.ended and now.resumes:
        return "pause"
    return "go on"


@dataclass(kw_only=True)
class Conductor(ABC):
    """The base class of conductors: each places, follows, replaces and ends the workers of one run on several hosts.

    Attributes:
        run_dir: the run's folder.
        spec: spec of the run, with all of its workers.
        stop_signal: returns the number of the signal that asked this process to end; None: none did.
        turn_s: seconds between two decisions.
        now: the situation, on which the next decision rests.
        reasons: sentences of hosts of the present generation on why they failed.
    """

    run_dir: Path
    spec: RunSpec
    stop_signal: Callable[[], int | None]
    turn_s: float = 0.1
    now: Situation = field(default_factory=Situation)
    reasons: list[str] = field(default_factory=list)
    _failed_s: float | None = None
    _hosts_begun: tuple[str, ...] = ()
    _brought: set[str] = field(default_factory=set)
    _training: Collection[str] = ()

    def __post_init__(self) -> None:
        """Open the run's log."""
        self.now.resumes = self.spec.resumes
        self.log = EventLog(self.run_dir / EVENTS_FILE)
        self.reader = EventReader(path=self.run_dir / EVENTS_FILE)

    @abstractmethod
    def begin(self) -> None:
        """Connect to the hosts and start the first generation of workers on them; called once, by `conduct`.

        Raises:
            HetoptError: no host can be used.
        """

    @abstractmethod
    def look(self) -> None:
        """Update `now`: connected and usable hosts, exit codes of members, and whether the user wants the end.

        Raises:
            RunFailed: no host can be used any more.
        """

    @abstractmethod
    def is_over(self) -> bool:
        """Return whether the run has come to an end by itself, so that a host that ends now is no loss."""

    @abstractmethod
    def awaits(self) -> bool:
        """Return whether a host may still come, asked while none is usable; False ends the run as failed."""

    @abstractmethod
    def place(self) -> None:
        """Start the next generation of workers on all usable hosts that are there, from the newest checkpoint."""

    @abstractmethod
    def pause(self) -> None:
        """Tell all workers to save a checkpoint at one step and wait, as hosts join or have to leave."""

    @abstractmethod
    def finish(self, *, failed: bool) -> None:
        """Have the hosts upload their results and end; wait some seconds for that, not if the run has ``failed``."""

    @abstractmethod
    def let_go(self) -> None:
        """End what is left of the run on every host; called last, also after an error."""

    def conduct(self) -> int:
        """Connect, place, pause and follow workers until the run is over; return hetopt's exit code.

        Ended by a signal, the code is 128 and the signal's number. Whatever happens, what is left of the run on the
        hosts is ended, and the event log is closed.

        Raises:
            HetoptError: the hosts cannot be used, or a file of the run cannot be read or written.
        """
        try:
            self.begin()
            while self.stop_signal() is None:
                move = self._decide()
                if move in ("end", "fail") or (move == "wait" and not self.awaits()):
                    return self._conclude(failed=move != "end")
                if move == "place":
                    self.place()
                elif move == "pause":
                    self.now.pauses = True
                    self.pause()
                time.sleep(self.turn_s)
            return 128 + (self.stop_signal() or 0)
        finally:
            self.let_go()
            self.log.close()

    def _decide(self) -> Move:
        """Look at the hosts, unless the run is over, note since when workers have failed, and return the next move."""
        self.now.over = self.is_over()
        if not self.now.over:
            self.look()
            self.now.over = self.is_over()
        now_s = time.monotonic()
        self._failed_s = (self._failed_s or now_s) if self.has_failed() else None
        self.now.failed_for_s = now_s - (self._failed_s or now_s)
        return next_move(self.now)

    def begin_generation(self, members: Sequence[str]) -> None:
        """Record that the hosts ``members`` now train as a new generation; start nothing.

        Where workers go on without lost hosts, those that are not there yet may join from memory when they come.
        """
        later = [name for name in host_names(self.spec) if name not in members] if self.spec.is_elastic else []
        self.now.members, self.now.ended, self.now.fresh, self.now.pauses = members, {}, set(), False
        self.now.reduced, self._hosts_begun, self.reasons = False, (*members, *later), []
        self._brought, self._training = set(), ()

    def take(self, event: LogEvent) -> None:
        """Note, from the next event of the run's log, which hosts train, and which have done steps since placement."""
        if isinstance(event, RunStarted):
            self._training = {worker.host for worker in event.workers}
        elif advances(event):
            self._brought |= set(self._training or self.now.members)

    def goes_on_without(self, host: str) -> bool:
        """Drop a lost host from the members if the others can go on from memory; return whether they do.

        They cannot where the run is not elastic, the host is the first, or no step was done since the placement.
        """
        others = self._hosts_begun[1:]
        if not self.spec.is_elastic or host not in others or not self._brought:
            return False
        self.now.members = [name for name in self.now.members if name != host]
        self.now.ended.pop(host, None)
        self.now.reduced = True
        return True

    def takes_back(self, host: str) -> bool:
        """Add a host that has come back to the members if it may join training from memory; return whether it may.

        False: it is a member already, or can only take part in the next generation.
        """
        if self.now.pauses or host in self.now.members or host not in self._hosts_begun:
            return False
        self.now.members = [name for name in self._hosts_begun if name == host or name in self.now.members]
        self._brought.discard(host)
        return True

    def has_failed(self) -> bool:
        """Return whether workers of any member have ended with an error, after which the others end."""
        return any(self.now.ended.values())

    def exit_code(self, *, failed: bool) -> int:
        """Return hetopt's exit code from the ended hosts' exit codes; with none, 6 if ``failed``, else 0."""
        return exit_code(list(self.now.ended.values()), host_died=failed and not self.now.ended)

    def _conclude(self, *, failed: bool) -> int:
        """Finish the run, and return hetopt's exit code; of a run that ``failed``, log why if no event says so."""
        self.finish(failed=failed)
        if failed and failure_reason(read_log(self.run_dir / EVENTS_FILE)) is None:
            words = last_log_line(self.run_dir) or "the hosts ended without saying why"
            self.log.write("run_failed", reason=next(iter(self.reasons), words))
        return self.exit_code(failed=failed)
