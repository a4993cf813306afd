"""The process that owns a run on machines of one's own: it connects to them, places them, and keeps what they tell.

``python -m hetopt.backends.ssh.conductor RUN_DIR [PARENT_PID]``. Every host's part lives as long as its connection, so
when this process ends, by whatever signal, all of it ends. A host that is lost leaves the others to go on from the last
checkpoint; one whose hours end, or that comes back, is a reason to save a checkpoint at one step and
to go on with those that are there then (`next_move`).
"""

from __future__ import annotations

import datetime
import re
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hetopt.backends.backend import MOST_IDLE, advances, back_off_s, is_given_up
from hetopt.backends.host.protocol import (
    OUTCOME_OBJECT,
    Latest,
    Lease,
    Place,
    Placements,
    State,
    is_over,
    placement_json,
    spec_digest,
    without,
)
from hetopt.backends.processes import conduct
from hetopt.backends.ssh.checking import INVENTORY_FILE, Inventory
from hetopt.backends.ssh.link import Link
from hetopt.backends.ssh.objects import FolderObjects
from hetopt.core.artifact import read_words, write_atomically
from hetopt.core.budget_law import LEASE_OBJECT, PLACEMENT_OBJECT
from hetopt.core.errors import HetoptError, RunFailed
from hetopt.core.events.log import EVENTS_FILE, EventLog, EventReader, read_log
from hetopt.core.hosts import CPU
from hetopt.core.interruption import StopSignal
from hetopt.core.listening import new_secret
from hetopt.core.paths import inside
from hetopt.core.plain_text import one_line
from hetopt.core.run_folder import LATEST_OBJECT, LOG_FOLDER, OBJECTS_FOLDER, STOP_FILE, host_log_folder, read_spec
from hetopt.core.run_spec import RunSpec, host_names
from hetopt.core.run_status import exit_code, failure_reason, last_log_line

BUNDLE_FILE = "bundle.tar.gz"
TURN_S = 0.1
AGAIN_S = 5.0
"""Between tries to reach a host that is away."""
UNHEARD_S = 10.0
"""A host that asks for nothing for so long is told of: it asks several times a second."""
SILENT_S = 45.0
"""One that asks for nothing for so long is lost."""
SURVIVORS_S = 20.0
"""Once a host's workers have failed, those of the others end by themselves, or are ended after so long."""
MOST_SKEW_S = 2.0
"""Between the clocks of two machines: answers take part of it, and no figure of a run is finer."""
RETURN_WITHIN_S = 600.0
"""How long a run without any host waits for one."""
_LATER = Lease(end_s=1e11, stop_training_s=1e11)
_NOW = Lease(end_s=1e11, stop_training_s=0.0)

Move = Literal["go on", "place", "pause", "wait", "end", "fail"]


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What a decision rests on.

    Attributes:
        members: hosts of the present generation.
        there: hosts that are connected.
        fresh: those of them that came after the last placement: what they were in it is lost.
        allowed: hosts that may be used now.
        ended: exit code of each member whose workers have ended in this generation.
        failed_for_s: since the first of them failed.
        pauses: whether all were told to save a checkpoint and wait.
        over: whether the run came to an end of its own.
        stopping: whether somebody wished its end.
        resumes: whether it goes on from checkpoints.
    """

    members: Collection[str]
    there: Collection[str]
    allowed: Collection[str]
    fresh: Collection[str] = ()
    ended: Mapping[str, int] = field(default_factory=dict)
    failed_for_s: float = 0.0
    pauses: bool = False
    over: bool = False
    stopping: bool = False
    resumes: bool = True


def next_move(now: Situation) -> Move:
    """What to do next. Pure: the same situation gives the same move.

    place: say who takes part, with all that are there and may be used. pause: have a checkpoint saved, to place after
    it. wait: nobody is there. end: nothing is left to do. fail: no other machine would mend it.
    """
    if now.over or (now.stopping and set(now.ended) >= set(now.members)):
        return "end"
    if now.stopping:
        return "go on" if set(now.members) <= set(now.there) - set(now.fresh) else "end"
    able = set(now.there) & set(now.allowed)
    if not set(now.members) <= set(now.there) - set(now.fresh):
        return "place" if able else "wait"
    if set(now.ended) >= set(now.members):
        if now.pauses:
            return "place" if able else "wait"
        return "fail"
    if any(now.ended.values()) and now.failed_for_s > SURVIVORS_S:
        return "fail"
    if able != set(now.members) and not now.pauses and not now.ended and now.resumes:
        return "pause"
    return "go on"


def in_our_time(lines: bytes, ahead_s: float) -> bytes:
    """Events as this machine would have dated them: what reads a run holds them against when it was launched here.

    Args:
        lines: of a log, as a host wrote them.
        ahead_s: of its clock; up to `MOST_SKEW_S` nothing is changed.
    """
    if abs(ahead_s) <= MOST_SKEW_S:
        return lines
    return re.sub(
        rb'(?m)^(\{.*?"time_s": )(-?[0-9]{1,15}(?:\.[0-9]{1,20})?(?:e[+-]?[0-9]{1,2})?)(?=[,}])',
        lambda found: found[1] + b"%.6f" % (float(found[2]) - ahead_s),
        lines,
    )


@dataclass(kw_only=True)
class Conductor:
    """Conducts one run from beginning to end.

    Attributes:
        run_dir: its folder.
        spec: the run, its workers in the order of their hosts' addresses.
        inventory: its hosts.
        stop_signal: the signal that asked this process to end, if any did.
    """

    run_dir: Path
    spec: RunSpec
    inventory: Inventory
    stop_signal: StopSignal
    _links: dict[str, Link] = field(default_factory=dict)
    _coming: dict[str, Future[Link]] = field(default_factory=dict)
    _again_s: dict[str, float] = field(default_factory=dict)
    _idle: dict[str, int] = field(default_factory=dict)
    _has_brought: bool = False
    _members: tuple[str, ...] = ()
    _ended: dict[str, int] = field(default_factory=dict)
    _failed_s: float | None = None
    _generation: int = -1
    _pauses: bool = False
    _stopping: bool = False
    _alone_s: float | None = None
    _fresh: set[str] = field(default_factory=set)
    _unheard: set[str] = field(default_factory=set)
    _ahead_s: dict[str, float] = field(default_factory=dict)
    _reasons: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        """Open what the run has."""
        self._objects = FolderObjects(folder=self.run_dir / OBJECTS_FOLDER)
        self._objects.folder.mkdir(exist_ok=True)
        self._models = FolderObjects(folder=self.run_dir)
        self._log = EventLog(self.run_dir / EVENTS_FILE)
        self._reader = EventReader(path=self.run_dir / EVENTS_FILE)
        self._names = host_names(self.spec)
        self._code = (self.run_dir / BUNDLE_FILE).read_bytes()
        self._pool = ThreadPoolExecutor(max_workers=len(self._names))
        # Those who were placed by an earlier launch must not be met.
        before = self._objects.get(PLACEMENT_OBJECT)
        placed = None if before is None else Placements.of_json(before)
        self._generation = -1 if placed is None else placed.generation
        self._secret = new_secret()

    def conduct(self) -> int:
        """Stay until the run is over; the exit code is hetopt's."""
        try:
            self._objects.put(LEASE_OBJECT, _LATER.model_dump_json().encode())
            self._objects.delete(OUTCOME_OBJECT)
            self._objects.delete(PLACEMENT_OBJECT)
            self._reach(self._allowed())
            for name, reason in self.inventory.left_out.items():
                self._tell_absent(name, reason)
            self._receive_first()
            self._place()
            while self.stop_signal() is None:
                move = next_move(self._situation())
                if move in ("end", "fail"):
                    return self._conclude(failed=move == "fail")
                self._make(move)
                time.sleep(TURN_S)
            return 128 + (self.stop_signal() or 0)
        finally:
            self._let_go()

    def _receive_first(self) -> None:
        """Wait for every host that is tried at first.

        Raises:
            HetoptError: none was reached.
        """
        refusals: dict[str, HetoptError] = {}
        for name, coming in list(self._coming.items()):
            try:
                self._arrived(name, coming)
            except HetoptError as error:
                refusals[name] = error
        if refusals and not self._links:
            raise next(iter(refusals.values()))
        for name, refusal in refusals.items():
            self._tell_absent(name, refusal.message)

    def _tell_absent(self, name: str, reason: str | None) -> None:
        """Log that a host takes no part any more, and why, where it does not come back by itself."""
        said = None if reason is None else f"{one_line(reason.rstrip('.'))[:500]}; the run goes on without it"
        self._log.write("condition_changed", host=name, dies=True, **({} if said is None else {"reason": said}))

    def _make(self, move: Move) -> None:
        now_s = time.monotonic()
        if move == "place":
            self._place()
        elif move == "pause":
            self._pause()
        # Whoever has them for himself gives them back.
        self._alone_s = (self._alone_s or now_s) if move == "wait" and self._allowed() else None
        if self._alone_s is not None and now_s - self._alone_s > RETURN_WITHIN_S:
            raise RunFailed("all hosts are gone, and none has come back.", hint="go on with `hetopt launch`")
        self._look(now_s)

    def _look(self, now_s: float) -> None:
        """See who went and who came, and hear what the user wishes."""
        for name, link in list(self._links.items()):
            silent_s = now_s - link.heard_s
            if not link.is_over and silent_s > SILENT_S:
                link.cut()
            unheard = link.speaks and silent_s > UNHEARD_S
            if unheard != (name in self._unheard) and not link.is_over:
                self._unheard ^= {name}
                self._log.write("condition_changed", host=name, **{"cut" if unheard else "heals": True})
            if link.is_over:
                del self._links[name]
                self._unheard.discard(name)
                if name in self._members and not self._stopping:
                    # Whoever comes back must not take the place that is lost.
                    with self._lock:
                        self._objects.delete(PLACEMENT_OBJECT)
                    if name in self._allowed():
                        self._tell_absent(name, self._why_given_up(name))
                self._again_s[name] = now_s + back_off_s(AGAIN_S, self._idle.get(name, 0))
        for name, coming in list(self._coming.items()):
            if coming.done():
                self._arrived(name, coming)
        if (self.run_dir / STOP_FILE).exists() and not self._stopping:
            self._stopping = True
            with self._lock:
                self._objects.put(LEASE_OBJECT, _NOW.model_dump_json().encode())
        if not self._stopping:
            self._reach([name for name in self._allowed() if now_s >= self._again_s.get(name, 0.0)])

    def _why_given_up(self, name: str) -> str | None:
        """Count the placement that a host has ended; where that was one too many, return why it is given up.

        Raises:
            RunFailed: all hosts are given up.
        """
        self._idle[name] = 0 if self._brings() else self._idle.get(name, 0) + 1
        if not is_given_up(self._idle[name]):
            return None
        words = last_log_line(self.run_dir, name) or "it said nothing"
        reason = f"{name} was placed {MOST_IDLE} times and ended each time before a step was done: {words}"
        if all(is_given_up(self._idle.get(host.name, 0)) for host in self.inventory.fit()):
            raise RunFailed(one_line(reason)[:500], hint="look at it with `hetopt hosts check`")
        return reason

    def _brings(self) -> bool:
        """Whether a step was done since the last placement, as far as the log tells."""
        self._has_brought |= any(map(advances, self._reader.read()))
        return self._has_brought

    def _arrived(self, name: str, coming: Future[Link]) -> None:
        """Take a host in that was connected to.

        Raises:
            HetoptError: it was not, and the run has not begun.
        """
        del self._coming[name]
        try:
            self._links[name] = coming.result()
        except HetoptError:
            self._again_s[name] = time.monotonic() + AGAIN_S
            if not self._members:
                raise
        else:
            self._fresh.add(name)
            self._ahead_s.pop(name, None)
            if self._members:
                self._log.write("condition_changed", host=name, returns=True)

    def _allowed(self) -> list[str]:
        """Hosts within their hours that can take part and are not given up."""
        moment = datetime.datetime.now()
        fit = {host.name for host in self.inventory.fit()}
        kept = (name for name in self._names if name in fit and not is_given_up(self._idle.get(name, 0)))
        return [name for name in kept if self.inventory.host(name).may_be_used(moment)]

    def _situation(self) -> Situation:
        with self._lock:
            outcome = self._objects.get(OUTCOME_OBJECT)
            ended = dict(self._ended)
        if self._failed_s is None and any(ended.values()):
            self._failed_s = time.monotonic()
        return Situation(
            members=self._members,
            there=list(self._links),
            fresh=self._fresh,
            allowed=self._allowed(),
            ended=ended,
            failed_for_s=0.0 if self._failed_s is None else time.monotonic() - self._failed_s,
            pauses=self._pauses,
            over=is_over(outcome, self._generation),
            stopping=self._stopping,
            resumes=self.spec.resumes,
        )

    def _place(self) -> None:
        """Say who takes part from now on, and from which checkpoint."""
        allowed = self._allowed()
        members = [name for name in self._names if name in self._links and name in allowed]
        if not members and self._members:
            return  # they were taken back just now
        if not members:
            raise RunFailed(
                "none of the hosts may be used now.", hint="see `hours` in the inventory, or launch when they begin"
            )
        absent = set(self._names) - set(members)
        spec = without(self.spec, absent) if absent else self.spec
        with self._lock:
            latest = Latest.of(self._objects.get(LATEST_OBJECT) or b"")
            self._generation += 1
            self._fresh = set()
            self._members, self._ended, self._failed_s, self._pauses = tuple(members), {}, None, False
            self._reasons = []
            self._brings()
            self._has_brought = False
            self._announce(spec, members, None if latest is None else latest.checkpoint)

    def _pause(self) -> None:
        """Have all save a checkpoint and wait: some join, or some have to leave."""
        for name in set(self._members) - set(self._allowed()):
            self._log.write("condition_changed", host=name, notice=True)
        with self._lock:
            self._pauses = True
            placed = Placements.of_json(self._objects.get(PLACEMENT_OBJECT) or b"")
            assert placed is not None, "it was placed before"
            self._announce(placed.spec, self._members, placed.resume_from)

    def _announce(self, spec: RunSpec, members: Sequence[str], resume_from: str | None) -> None:
        places = {self._id(name): Place(host=name, address=self.inventory.address(name)) for name in members}
        data = placement_json(spec, places, self._generation, resume_from, pauses=self._pauses)
        self._objects.put(PLACEMENT_OBJECT, data)

    def _id(self, name: str) -> str:
        """What a host is called in placements, which have ids of instances."""
        return f"i-{self._names.index(name)}"

    def _reach(self, names: Sequence[str]) -> None:
        """Connect to hosts that are not there, all at once."""
        for name in names:
            if name not in self._links and name not in self._coming:
                self._coming[name] = self._pool.submit(self._connected, name)

    def _connected(self, name: str) -> Link:
        link = Link(
            host=self.inventory.host(name),
            objects=self._objects,
            models=self._models,
            lock=self._lock,
            wrote=lambda object_, data: self._keep(name, object_, data),
            errors=host_log_folder(self.run_dir, name) / "ssh.log",
        )
        config: dict[str, object] = {"id": self._id(name), "spec_sha256": spec_digest(self.spec)}
        # What is not asked for is not said: a run that goes on has the code that it began with.
        if CPU not in link.host.devices:
            config["devices"] = list(link.host.devices)
        config["group_secret"] = self._secret
        try:
            link.take_part(self.run_dir.name, self._code, self.inventory.bundle_sha256, config)
        except HetoptError:
            link.cut()
            raise
        return link

    def _keep(self, host: str, name: str, data: bytes) -> None:
        """What a host has written: events and logs become those of the run; the lock is held."""
        first, _, rest = name.partition("/")
        if first == "events":
            with (self.run_dir / EVENTS_FILE).open("ab") as stream:
                stream.write(in_our_time(data, self._ahead_s.get(host, 0.0)))
        elif first == LOG_FOLDER:
            path = inside(self.run_dir / LOG_FOLDER, rest, what="log")
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, data.decode("utf-8", errors="replace"))
            self._objects.delete(name)  # it is there now
        elif first == "state":
            said = read_words(State, data, host)
            # Where the clock is set later, an event says so.
            self._ahead_s.setdefault(host, said.time_s - time.time())
            code = said.does.removeprefix("ended with ")
            if code != said.does and said.generation == self._generation:
                self._ended[host] = int(code)
                self._reasons += [said.reason[:500]] if said.reason else []

    def _conclude(self, *, failed: bool) -> int:
        """Let the hosts bring what they have, and say how it ended."""
        self._objects.put(LEASE_OBJECT, _NOW.model_dump_json().encode())
        if not failed:
            until = time.monotonic() + SURVIVORS_S
            while any(not link.is_over for link in self._links.values()) and time.monotonic() < until:
                time.sleep(TURN_S)
        code = exit_code(list(self._ended.values()), host_died=failed and not self._ended)
        events = read_log(self.run_dir / EVENTS_FILE).events
        if failed and failure_reason(events) is None:
            said = self._reasons[0] if self._reasons else last_log_line(self.run_dir)
            self._log.write("run_failed", reason=said or "the hosts ended without saying why")
        return code

    def _let_go(self) -> None:
        """End every host's part; what is left of it there goes."""
        for coming in self._coming.values():
            coming.add_done_callback(lambda done: None if done.exception() else done.result().cut())
        list(self._pool.map(Link.end, self._links.values()))
        self._pool.shutdown(wait=True)
        self._log.close()


def train(run_dir: Path, stop_signal: StopSignal) -> int:
    """Conduct the run in a folder.

    Raises:
        BadInput: the folder has no run on hosts of one's own.
    """
    spec, inventory = read_spec(run_dir), Inventory.load(run_dir / INVENTORY_FILE)
    return Conductor(run_dir=run_dir, spec=spec, inventory=inventory, stop_signal=stop_signal).conduct()


if __name__ == "__main__":
    sys.exit(conduct(sys.argv, train))
