"""The process that leads a run on the user's machines: it connects to them, places them, and keeps what they tell.

``python -m hetopt.backends.ssh.conductor RUN_DIR PARENT_PID``. Every host's part lives as long as its connection, so
when this process ends, by whatever signal, all of it ends. What becomes of the run with the hosts that are there is
decided by `hetopt.backends.conductor`.
"""

from __future__ import annotations

import datetime
import math
import re
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from hetopt.backends.backend import MOST_IDLE, back_off_s, is_given_up, until
from hetopt.backends.conductor import SURVIVORS_S, Conductor
from hetopt.backends.host.protocol import (
    OUTCOME_OBJECT,
    Latest,
    Lease,
    Place,
    Placements,
    State,
    is_over,
    placed_on,
    placement_json,
    spec_digest,
)
from hetopt.backends.processes import conduct
from hetopt.backends.ssh.checking import INVENTORY_FILE, Inventory
from hetopt.backends.ssh.link import SSH, Link, Part
from hetopt.backends.ssh.objects import FolderObjects
from hetopt.core.artifact import parse_from_peer, write_atomically
from hetopt.core.budget_law import LEASE_OBJECT, PLACEMENT_OBJECT
from hetopt.core.errors import HetoptError, RunFailed
from hetopt.core.events.log import EVENTS_FILE
from hetopt.core.hosts import CPU
from hetopt.core.interruption import StopSignal
from hetopt.core.listening import new_secret
from hetopt.core.paths import inside
from hetopt.core.plain_text import one_line
from hetopt.core.run_folder import (
    BUNDLE_FILE,
    LATEST_OBJECT,
    LOG_FOLDER,
    OBJECTS_FOLDER,
    STOP_FILE,
    host_log_folder,
    read_spec,
)
from hetopt.core.run_spec import RunSpec, host_names
from hetopt.core.run_status import last_log_line

AGAIN_S = 5.0
"""Seconds between tries to reach a host that is away."""
SILENT_S = 45.0
"""Seconds after which a host that asks for nothing is lost: it asks several times a second."""
MOST_SKEW_S = 2.0
"""Difference in seconds between the clocks of two machines up to which log times stay: answers take part of it, and no
figure of a run is finer."""
_LATER = Lease(end_s=1e11, stop_training_s=1e11)
_NOW = Lease(end_s=1e11, stop_training_s=0.0)


def in_our_time(lines: bytes, ahead_s: float) -> bytes:
    """Return log lines with the lead of a host's clock taken off their ``time_s``.

    Args:
        lines: lines of a log, as a host wrote them.
        ahead_s: seconds that its clock is ahead of this machine's; up to 2 s nothing is changed.
    """
    if abs(ahead_s) <= MOST_SKEW_S:
        return lines
    return re.sub(
        rb'(?m)^(\{.*?"time_s": )(-?[0-9]{1,15}(?:\.[0-9]{1,20})?(?:e[+-]?[0-9]{1,2})?)(?=[,}])',
        lambda match: match[1] + b"%.6f" % (float(match[2]) - ahead_s),
        lines,
    )


@dataclass(kw_only=True)
class HostsConductor(Conductor):
    """The conductor of one run on hosts that it connects to, by ssh or inside Slurm jobs.

    Attributes:
        inventory: the hosts. The workers of the run are in the order of their addresses.
        link: the way to them.
    """

    inventory: Inventory
    link: Link = SSH
    _links: dict[str, Part] = field(default_factory=dict)
    _coming: dict[str, Future[Part]] = field(default_factory=dict)
    _again_s: dict[str, float] = field(default_factory=dict)
    _idle: dict[str, int] = field(default_factory=dict)
    _there_s: float = math.inf
    _placed: RunSpec = field(init=False)
    _ahead_s: dict[str, float] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        """Open the files of the run."""
        super().__post_init__()
        self._objects = FolderObjects(folder=self.run_dir / OBJECTS_FOLDER)
        self._objects.folder.mkdir(exist_ok=True)
        self._models = FolderObjects(folder=self.run_dir)
        self._names = host_names(self.spec)
        self._code = (self.run_dir / BUNDLE_FILE).read_bytes()
        self._pool = ThreadPoolExecutor(max_workers=len(self._names))
        # Those who were placed by an earlier launch must not be met.
        placed = Placements.of_json(self._objects.get(PLACEMENT_OBJECT))
        self._generation = -1 if placed is None else placed.generation
        self._secret = new_secret()

    def begin(self) -> None:
        """Connect to all usable hosts, wait for each of them, and place the first generation.

        Raises:
            HetoptError: no host was reached; it is the first host's error.
            RunFailed: no host may be used now.
        """
        self._objects.put(LEASE_OBJECT, _LATER.model_dump_json().encode())
        self._objects.delete(OUTCOME_OBJECT)
        self._objects.delete(PLACEMENT_OBJECT)
        self._reach(self._allowed())
        for name, reason in self.inventory.left_out.items():
            self._tell_absent(name, reason)
        refusals = {name: refusal for name in list(self._coming) if (refusal := self._arrived(name)) is not None}
        for name, refusal in refusals.items():
            if not self._links:
                raise refusal
            self._tell_absent(name, refusal.message)
        self.place()

    def _tell_absent(self, name: str, reason: str | None) -> None:
        """Log that a host takes no part any more, and why (None: not known)."""
        others = "; the run goes on without it" if self._links or self._coming else ""
        text = None if reason is None else f"{one_line(reason.rstrip('.'))[:500]}{others}"
        self.log.write("condition_changed", host=name, dies=True, **({} if text is None else {"reason": text}))

    def look(self) -> None:
        """Drop lost connections, add new ones, connect again where due, heed a wish to stop, and update `now`.

        Raises:
            RunFailed: every host was placed three times and ended each time before a step was done.
        """
        now_s = time.monotonic()
        for event in self.reader.read():
            self.take(event)
        for name, part in list(self._links.items()):
            if now_s - part.heard_s > SILENT_S:
                part.cut()
            if part.is_over:
                del self._links[name]
                if name in self.now.members and not self.now.stopping:
                    with self._lock:
                        if self.goes_on_without(name):
                            self._announce()
                        else:  # whoever comes back must not take the place that is lost
                            self._objects.delete(PLACEMENT_OBJECT)
                    if name in self._allowed():
                        lost = self.link.why_lost(part.host, part.complaint())
                        self._tell_absent(name, self._why_given_up(name) or lost)
                self._again_s[name] = now_s + back_off_s(AGAIN_S, self._idle.get(name, 0))
        for name, coming in list(self._coming.items()):
            if coming.done():
                self._arrived(name)
        if (self.run_dir / STOP_FILE).exists() and not self.now.stopping:
            self.now.stopping = True
            with self._lock:
                self._objects.put(LEASE_OBJECT, _NOW.model_dump_json().encode())
        allowed = self._allowed()
        for name in [name for name in self.now.members if name in self._links and name not in allowed]:
            if self.goes_on_without(name):
                self.log.write("condition_changed", host=name, notice=True)
                self._links.pop(name).cut()
                with self._lock:
                    self._announce()
        self.now.there, self.now.allowed = list(self._links), allowed
        if not self.now.stopping:
            self._reach([name for name in self.now.allowed if now_s >= self._again_s.get(name, 0.0)])
        # Whoever has all of them for himself gives them back.
        if not self.now.allowed or set(self.now.allowed) & set(self._links):
            self._there_s = now_s

    def _why_given_up(self, name: str) -> str | None:
        """Count the placement that a host has ended; return why the host is given up now; None: it is not.

        Raises:
            RunFailed: all hosts are given up.
        """
        self._idle[name] = 0 if name in self._brought else self._idle.get(name, 0) + 1
        if not is_given_up(self._idle[name]):
            return None
        words = last_log_line(self.run_dir, name) or "it said nothing"
        reason = f"{name} was placed {MOST_IDLE} times and ended each time before a step was done: {words}"
        if all(is_given_up(self._idle.get(host.name, 0)) for host in self.inventory.fit()):
            raise RunFailed(one_line(reason)[:500], hint="look at it with `hetopt hosts check`")
        return reason

    def _arrived(self, name: str) -> HetoptError | None:
        """Take in a host that was connected to, now or in the next generation; return why that failed, or None."""
        try:
            self._links[name] = self._coming.pop(name).result()
        except HetoptError as refusal:
            self._again_s[name] = time.monotonic() + AGAIN_S
            return refusal
        self._ahead_s.pop(name, None)
        with self._lock:
            if self.takes_back(name):
                self._announce()
            else:
                self.now.fresh.add(name)
        if self.now.members:
            self.log.write("condition_changed", host=name, returns=True)
        return None

    def awaits(self) -> bool:
        """Return True: a host may come back; raise once none has been there for too long (10 minutes by ssh).

        Inside Slurm there is no such limit.

        Raises:
            RunFailed: all hosts have been gone for too long.
        """
        if time.monotonic() - self._there_s > self.link.RETURN_WITHIN_S:
            raise RunFailed("all hosts are gone, and none has come back.", hint="go on with `hetopt launch`")
        return True

    def is_over(self) -> bool:
        """Return whether the first host has told that the present generation ended the run for good."""
        with self._lock:
            return is_over(self._objects.get(OUTCOME_OBJECT), self._generation)

    def _allowed(self) -> list[str]:
        """Return the hosts within their hours that can take part and are not given up."""
        moment = datetime.datetime.now()
        fit = {host.name for host in self.inventory.fit()}
        kept = (name for name in self._names if name in fit and not is_given_up(self._idle.get(name, 0)))
        hosts = (self.inventory.host(name) for name in kept)
        return [host.name for host in hosts if host.may_be_used(moment) and self.link.may_be_used(host)]

    def place(self) -> None:
        """Place all usable connected hosts as the next generation, to resume from the newest checkpoint.

        Where none is usable now, but the run has begun, nothing happens.

        Raises:
            RunFailed: no host may be used, and the run has not begun.
            CloudRefused: the workers of the hosts cannot hold the batch.
        """
        allowed = self._allowed()
        members = [name for name in self._names if name in self._links and name in allowed]
        if not members and self.now.members:
            return  # they were taken back just now
        if not members:
            raise RunFailed(
                "none of the hosts may be used now.", hint="see `hours` in the inventory, or launch when they begin"
            )
        with self._lock:
            self._placed = placed_on(self.spec, members)
            self._generation += 1
            self.begin_generation(members)
            self._announce()

    def pause(self) -> None:
        """Tell the hosts to save a checkpoint and wait; log a notice for each that has to leave."""
        for name in set(self.now.members) - set(self._allowed()):
            self.log.write("condition_changed", host=name, notice=True)
        with self._lock:
            self._announce()

    def _announce(self) -> None:
        """Tell the members their places in this generation; the lock is held."""
        latest = Latest.of_json(self._objects.get(LATEST_OBJECT))
        places = {
            self._id(name): Place(
                host=name, address=self.link.address(self.inventory.host(name)) or self.inventory.address(name)
            )
            for name in self.now.members
        }
        data = placement_json(
            self._placed,
            places,
            self._generation,
            None if latest is None else latest.checkpoint,
            pauses=self.now.pauses,
        )
        self._objects.put(PLACEMENT_OBJECT, data)

    def _id(self, name: str) -> str:
        """Return the id of a host in placements, in the form of an instance id."""
        return f"i-{self._names.index(name)}"

    def _reach(self, names: Sequence[str]) -> None:
        """Connect to hosts that are not there, all at once."""
        for name in names:
            if name not in self._links and name not in self._coming:
                self._coming[name] = self._pool.submit(self._connected, name)

    def _connected(self, name: str) -> Part:
        """Connect to a host and begin its part of the run, whose requests are answered from then on.

        Errors as of `Part`.
        """
        folder = host_log_folder(self.run_dir, name)
        folder.mkdir(parents=True, exist_ok=True)
        part = Part(
            host=self.inventory.host(name),
            link=self.link,
            objects=self._objects,
            models=self._models,
            lock=self._lock,
            wrote=partial(self._keep, name),
            errors=folder / "ssh.log",
        )
        config: dict[str, object] = {"id": self._id(name), "spec_sha256": spec_digest(self.spec)}
        # What is not asked for is not said: a run that goes on has the code that it began with.
        if CPU not in part.host.devices:
            config["devices"] = list(part.host.devices)
        config["group_secret"] = self._secret
        try:
            part.take_part(self.run_dir.name, self._code, self.inventory.bundle_sha256, config)
        except HetoptError:
            part.end()
            raise
        return part

    def _keep(self, host: str, name: str, data: bytes) -> None:
        """Keep an object that a host has written: events and logs become those of the run; the lock is held.

        HetoptError: the host's object is not what a host writes.
        """
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
            sent = parse_from_peer(State, data, host)
            # Where the clock is set later, an event says so.
            self._ahead_s.setdefault(host, sent.time_s - time.time())
            code = sent.does.removeprefix("ended with ")
            if code != sent.does and sent.generation == self._generation:
                self.now.ended[host] = int(code)
                self.reasons += [sent.reason[:500]] if sent.reason else []

    def finish(self, *, failed: bool) -> None:
        """Tell the hosts to end, and wait up to 20 s for their last uploads; not if the run has ``failed``."""
        self._objects.put(LEASE_OBJECT, _NOW.model_dump_json().encode())
        until(lambda: all(part.is_over for part in self._links.values()), within_s=0.0 if failed else SURVIVORS_S)

    def let_go(self) -> None:
        """Close all connections, with which every host's part ends and its files of the run are removed."""
        for coming in self._coming.values():
            coming.add_done_callback(lambda done: None if done.exception() else done.result().cut())
        list(self._pool.map(Part.end, self._links.values()))
        self._pool.shutdown(wait=True)


def train(run_dir: Path, stop_signal: StopSignal, link: Link = SSH) -> int:
    """Lead the run in a folder on the hosts of its inventory until it is over; return hetopt's exit code.

    Args:
        run_dir: the run's folder.
        stop_signal: returns the number of the signal that asked this process to end; None: none did.
        link: the way to the hosts.

    Raises:
        BadInput: the folder holds no spec or no inventory of the user's hosts.
        HetoptError: no host can take part, or the run cannot go on.
    """
    spec, inventory = read_spec(run_dir), Inventory.load(run_dir / INVENTORY_FILE)
    conductor = HostsConductor(run_dir=run_dir, spec=spec, inventory=inventory, link=link, stop_signal=stop_signal)
    return conductor.conduct()


if __name__ == "__main__":
    sys.exit(conduct(sys.argv, train))
