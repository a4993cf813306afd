"""The process that owns a rehearsal: it builds the cluster, starts its hosts, changes them as told, and removes it all.

``python -m hetopt.backends.emulation.conductor RUN_DIR [PARENT_PID]``. Everything that happens to the cluster happens
here, in one loop: scheduled changes, changes that other processes ask for, hosts that die, and slowing the miniature
down where the real computation does not fit into the declared time. Each is an event in the run's log.

The death of a host ends the run, unless its workers go on without those that they lose: then each host starts for
itself, may return, and this process, which knows who is dead, tells them (`hetopt.core.run_folder`). The workers of a
script cannot: the hosts that are left start them again, and again with whoever returns, each time from the newest
checkpoint, as rented machines do.

Another process asks a running rehearsal to change a host by a line in a file (`ask_for_change`).
"""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from hetopt.backends.backend import RunHandle
from hetopt.backends.emulation.namespaces import LINK, EmulatedNetwork, check_size, find_leftovers, remove, why_not
from hetopt.backends.prediction import rounded_up
from hetopt.backends.processes import QUIET_TORCH, ProcessLauncher, Program, conduct, run_status
from hetopt.core.batch_partition import spec_of_living
from hetopt.core.errors import BadInput
from hetopt.core.events.fold import RunFold
from hetopt.core.events.log import EVENTS_FILE, EventLog, EventReader
from hetopt.core.events.records import ConditionChanged, LogEvent, StepsLogged
from hetopt.core.interruption import StopSignal
from hetopt.core.listening import SECRET_VARIABLE, new_secret
from hetopt.core.run_folder import (
    CONDITIONS_FILE,
    INCARNATION_VARIABLE,
    LIVING_FILE,
    PRESENCE_FILE,
    STOP_FILE,
    ConditionsReader,
    HostThere,
    host_log_folder,
    read_from,
    read_spec,
    write_conditions,
    write_presence,
    write_spec,
)
from hetopt.core.run_spec import MEETING_PORT, Node, RunSpec
from hetopt.core.run_status import exit_code, last_log_line
from hetopt.core.scaled_emulation import EVERY_HOST, Change, Conditions, EmulatedHost, ScaledEmulation
from hetopt.trainer.host.forks import WORKERS_NEED, ForkedProcess, ForkServer, NoFork

Agent = subprocess.Popen[bytes] | ForkedProcess
"""The process that hosts a host's workers."""

_LOOK_S = 0.05
_FAREWELL_S = 0.2
"""Between a host's death and the loss of its link: long enough for its connections to be closed, as a machine that is
shut down closes them."""
_SURVIVORS_S = 10.0
"""Once a host has failed, the others end by themselves (they lose their peers), or are ended after so long."""
_TERMINATE_S = 13.0  # an agent gives its workers 10 s


class Conductor:
    """Conducts one rehearsal from beginning to end.

    Args:
        run_dir: the run's folder.
        spec: the run; it has a miniature.
        miniature: that one.
        network: its hosts, without a process yet.
        stop_signal: the signal that asked this process to end, if any did.
    """

    def __init__(
        self,
        run_dir: Path,
        spec: RunSpec,
        miniature: ScaledEmulation,
        network: EmulatedNetwork,
        stop_signal: Callable[[], int | None],
    ) -> None:
        self._run_dir = run_dir
        self._spec = spec
        self._miniature = miniature
        self._network = network
        self._stop_signal = stop_signal
        self._hosts = [HostNow(**host.model_dump()) for host in miniature.hosts]
        self._reader = EventReader(path=run_dir / EVENTS_FILE)
        earlier = self._reader.read()
        self._pending = still_to_come(miniature.changes, earlier)
        # A resumed run keeps what was learned about this machine.
        kept = ConditionsReader(run_dir).now().slowdown if earlier else 1.0
        self._fit = FitWatch(slowdown=kept)
        self._run = RunFold()  # of this session
        self._log = EventLog(run_dir / EVENTS_FILE)
        self._requests_read = 0
        self._forks: ForkServer | None = None
        self._agents: dict[int, Agent] = {}
        self._codes: dict[int, int] = {}
        self._failed_s: float | None = None
        self._training_since_s: float | None = None
        self._comes_and_goes = comes_and_goes(spec)
        self._starts_again = starts_again(spec)
        self._pauses = False  # until all hosts have saved a checkpoint and ended, to start again together
        self._starts = 0
        self._secret = new_secret()
        self._incarnations = [0] * len(self._hosts)

    def conduct(self) -> int:
        """Start the hosts and stay until the last has ended; the exit code is hetopt's."""
        try:
            self._announce_conditions()
            self._network.set_rates(self._rates(range(len(self._hosts))))
            (self._run_dir / PRESENCE_FILE).unlink(missing_ok=True)  # of an earlier launch
            self._announce_presence()
            with suppress(NoFork):
                self._forks = ForkServer.importing(WORKERS_NEED, os.environ)
            for place in range(len(self._hosts)):
                if self._stop_signal() is None:
                    self._agents[place] = self._start(place)
            while (self._agents or self._pauses or self._awaits_return) and self._stop_signal() is None:
                self._look()
                time.sleep(_LOOK_S)
            return self._conclude()
        finally:
            self._end_agents()
            if self._forks is not None:
                self._forks.close()
            self._log.close()

    def _start(self, place: int) -> Agent:
        name = self._hosts[place].name
        if self._comes_and_goes:
            addresses = [self._network.address(other) for other in range(len(self._hosts))]
            meeting = ",".join(f"{address}:{MEETING_PORT + 1}" for address in addresses)
        else:
            # A port of its own for each start: what is left of the last must not be met.
            meeting = f"{self._network.address(self._there[0])}:{MEETING_PORT + self._starts}"
        node = Node(host=name, address=self._network.address(place), meeting=meeting)
        folder = host_log_folder(self._run_dir, name)
        folder.mkdir(parents=True, exist_ok=True)
        module = "hetopt.trainer.standalone_host" if self._comes_and_goes else "hetopt.trainer.host.agent"
        program = ["-m", module, str(self._run_dir), str(os.getpid()), *node.to_arguments()]
        environment = {
            **os.environ,
            # Whatever device the caller prefers, a host in the box has one.
            "GLOO_SOCKET_IFNAME": LINK,
            **({} if self._comes_and_goes else {SECRET_VARIABLE: self._secret}),
            INCARNATION_VARIABLE: str(self._incarnations[place]),
        }
        with (folder / "host.log").open("ab") as output:
            if self._forks is not None:
                with suppress(NoFork):
                    return self._network.fork(place, self._forks, program, env=environment, output=output)
            command = [sys.executable, *program]
            return self._network.popen(place, command, env=environment, stdout=output, stderr=subprocess.STDOUT)

    def _look(self) -> None:
        """One turn of the loop."""
        self._collect()
        now_s = time.monotonic()
        self._read(now_s)
        if self._pauses and not self._agents:
            # All have ended: for the pause, unless they came to their end by themselves.
            self._pauses = False
            by_itself = self._run.has_ended and self._run.finish_reason != "stopped"
            if not by_itself and not any(self._codes.values()):
                self._start_together()
        if not self._run.has_ended:
            since_s = self._training_since_s
            training_s = None if since_s is None else now_s - since_s
            due, self._pending = split(self._pending, training_s, self._run.furthest_step)
            for change in due:
                self._apply(change)
        if self._failed_s is not None and now_s - self._failed_s > _SURVIVORS_S:
            self._end_agents()

    def _collect(self) -> None:
        for place, agent in list(self._agents.items()):
            code = agent.poll()
            if code is not None:
                del self._agents[place]
                self._codes[place] = code
                if self._comes_and_goes and not self._run.has_ended:
                    self._announce_presence()
                elif (code != 0 or self._comes_and_goes) and self._failed_s is None:
                    # In a run that goes on without some, those that have only just come need not begin.
                    self._failed_s = time.monotonic()

    def _read(self, now_s: float) -> None:
        for event in self._reader.read():
            self._run.take(event)
            if self._training_since_s is None and self._run.training_started_s is not None:
                self._training_since_s = now_s
            rank = self._fit.look(event, now_s)
            if rank is not None:
                self._slow_down(rank)
        text, self._requests_read = read_from(self._run_dir / CHANGES_FILE, self._requests_read)
        self._pending += parse_requests(text.splitlines())

    def _apply(self, change: Change) -> None:
        """Do a change to every host that it is for, and tell."""
        before = self._hosts
        self._hosts = [host.after(change) for host in before]
        changed = [place for place, host in enumerate(before) if host.after(change) != host]
        for place in changed:
            host = self._hosts[place]
            self._log.write(
                CONDITION_CHANGED,
                host=host.name,
                speed=host.speed,
                rate_bits_per_s=host.rate_bits_per_s,
                dies=not host.alive,
                **{fate: True for fate in ("returns", "notice", "cut", "heals") if getattr(change, fate)},
                step=self._run.furthest_step,
            )
        dying = [place for place in changed if not self._hosts[place].alive]
        if dying:
            self._kill(dying, change)
        if change.notice:
            self._announce_presence()
            self._pause()
        if change.returns:
            self._take_back(changed)
        for place in changed if change.cut else ():
            self._network.take_down(place)
        for place in changed if change.heals else ():
            self._network.bring_up(place)
        living = [place for place in changed if self._hosts[place].alive]
        if change.speed is not None and living:
            self._announce_conditions()
        if change.rate_bits_per_s is not None:
            self._network.set_rates(self._rates(living))

    def _kill(self, places: Sequence[int], change: Change) -> None:
        names = ", ".join(self._hosts[place].name for place in places)
        hosts = f"host{'s' if len(places) > 1 else ''} {names}"
        goes_on = self._comes_and_goes or self._starts_again
        if not goes_on:
            wish = "asked for" if (change.at_s, change.at_step) == (None, None) else "scheduled"
            self._log.write("run_failed", reason=f"{hosts} died at step {self._run.furthest_step}, as {wish}")
        for place in places:
            self._network.kill(place)
        took_part = [place for place in places if goes_on and self._agents.pop(place, None) is not None]
        self._announce_presence()
        time.sleep(_FAREWELL_S)
        for place in places:
            self._network.take_down(place)
        if self._starts_again and took_part and self._agents and not self._run.has_ended:
            self._start_together()

    def _take_back(self, places: Sequence[int]) -> None:
        """Start hosts that were taken down again, each as a new life of the same host."""
        for place in places:
            self._incarnations[place] += 1
            self._network.bring_up(place)
            self._codes.pop(place, None)
            if not self._starts_again:
                self._agents[place] = self._start(place)
        self._announce_presence()
        self._pause()

    @property
    def _there(self) -> list[int]:
        """Hosts that take part in the next start: not those that will soon be gone, where there are others."""
        alive = [place for place, host in enumerate(self._hosts) if host.alive]
        return [place for place in alive if not self._hosts[place].leaving] or alive

    def _pause(self) -> None:
        """All that train save a checkpoint at one step and end, to start again with other hosts."""
        if not self._starts_again or (self._agents and not self._spec.resumes):
            return  # a script that saves nothing would lose all that it has done
        self._pauses = True
        (self._run_dir / STOP_FILE).touch()

    def _start_together(self) -> None:
        """Start the workers of all hosts that are there, again; those that still run end at once."""
        for place in self._agents:
            self._network.kill(place)
        self._agents, self._codes, self._failed_s, self._pauses = {}, {}, None, False
        self._starts += 1
        (self._run_dir / STOP_FILE).unlink(missing_ok=True)
        names = {self._hosts[place].name for place in self._there}
        ranks = [rank for rank, worker in enumerate(self._spec.workers) if worker.host in names]
        hosts = tuple(host for host in self._miniature.hosts if host.name in names)
        miniature = self._miniature.model_copy(update={"hosts": hosts, "changes": ()})
        living = spec_of_living(self._spec, ranks, {})
        write_spec(self._run_dir, living.model_copy(update={"miniature": miniature}), LIVING_FILE)
        for place in self._there:
            self._agents[place] = self._start(place)

    @property
    def _awaits_return(self) -> bool:
        """Whether nobody is left, but somebody will be."""
        anybody = any(host.alive for host in self._hosts)
        return not anybody and not self._run.has_ended and any(change.returns for change in self._pending)

    def _announce_presence(self) -> None:
        if not self._comes_and_goes:
            return
        there = {
            host.name: HostThere(incarnation=self._incarnations[place], leaving=host.leaving)
            for place, host in enumerate(self._hosts)
            if host.alive and place not in self._codes
        }
        write_presence(self._run_dir, there)

    def _slow_down(self, rank: int) -> None:
        factor = self._fit.slowdown
        host = self._run.roster.host(rank)
        self._log.write(
            "miniature_slowed",
            factor=factor,
            step=self._run.furthest_step,
            reason=f"the computation of worker {rank} on {host} does not fit into its declared time on this machine, "
            f"so everything takes {factor:g} times as long as planned",
        )
        self._announce_conditions()
        self._network.set_rates(self._rates([place for place, host in enumerate(self._hosts) if host.alive]))

    def _announce_conditions(self) -> None:
        described = {host.name: host.speed for host in self._miniature.hosts}
        factors = {host.name: host.speed / described[host.name] for host in self._hosts}
        write_conditions(
            self._run_dir,
            Conditions(
                slowdown=self._fit.slowdown,
                speed_factors={name: factor for name, factor in factors.items() if factor != 1},
            ),
        )

    def _rates(self, places: Sequence[int]) -> dict[int, float | None]:
        rates = {place: self._hosts[place].rate_bits_per_s for place in places}
        return {place: None if rate is None else rate / self._fit.slowdown for place, rate in rates.items()}

    def _conclude(self) -> int:
        number = self._stop_signal()
        if number is not None:
            return 128 + number
        self._read(time.monotonic())
        codes = list(self._codes.values())
        if self._starts_again:
            code = exit_code(codes, host_died=not codes)
        elif self._comes_and_goes:
            code = 0 if self._run.has_ended and 0 in codes else exit_code(codes, host_died=0 not in codes)
        else:
            code = exit_code(codes, host_died=not all(host.alive for host in self._hosts))
        if code != 0 and self._run.failure is None and not self._run.has_ended:
            reason = last_log_line(self._run_dir) or "the hosts ended without saying why"
            self._log.write("run_failed", reason=reason)
        return code

    def _end_agents(self) -> None:
        """End the hosts that are left: agents let their workers save what they can; whoever stays longer is killed."""
        for agent in self._agents.values():
            agent.terminate()
        deadline = time.monotonic() + _TERMINATE_S
        while self._agents and time.monotonic() < deadline:
            self._collect()
            time.sleep(_LOOK_S)
        for agent in self._agents.values():
            agent.kill()
            agent.wait()
        self._collect()


def rehearse(run_dir: Path, stop_signal: StopSignal) -> int:
    """Rehearse the run in a folder; nothing of the cluster is left when this returns, however it ends.

    Raises:
        BadInput: the folder has no usable ``spec.json``.
    """
    spec = read_spec(run_dir)
    assert spec.miniature is not None, "the launcher has checked that"
    with EmulatedNetwork.create(spec.miniature.hosts, owner=str(run_dir)) as network:
        return Conductor(run_dir, spec, spec.miniature, network, stop_signal).conduct()


CONDITION_CHANGED = "condition_changed"


class HostNow(EmulatedHost):
    """What a host is like at the moment, in the units of its description."""

    alive: bool = True
    leaving: bool = False
    cut: bool = False

    def after(self, change: Change) -> HostNow:
        """The host after a change that names it, or all; to the dead nothing happens but that they return."""
        if change.host not in (self.name, EVERY_HOST):
            return self
        if not self.alive:
            return self.model_copy(update={"alive": True}) if change.returns else self
        return self.model_copy(
            update={
                "speed": self.speed if change.speed is None else change.speed,
                "rate_bits_per_s": self.rate_bits_per_s if change.rate_bits_per_s is None else change.rate_bits_per_s,
                "alive": not change.dies,
                "leaving": (self.leaving or change.notice) and not change.dies,
                "cut": (self.cut or change.cut) and not (change.heals or change.dies),
            }
        )


def is_due(change: Change, training_s: float | None, step: int) -> bool:
    """Whether a change is due.

    Args:
        change: that was scheduled, or asked for.
        training_s: how long training has lasted; None: it has not begun.
        step: that it has come to.
    """
    if change.at_step is not None:
        return training_s is not None and step >= change.at_step
    return change.at_s is None or (training_s is not None and training_s >= change.at_s)


def split(pending: Sequence[Change], training_s: float | None, step: int) -> tuple[list[Change], list[Change]]:
    """The changes that are due, in the order of their moments, and those that are not yet."""
    due = [change for change in pending if is_due(change, training_s, step)]
    due.sort(key=lambda change: (change.at_s or 0.0, change.at_step or 0))  # several may be due when a run is resumed
    return due, [change for change in pending if not is_due(change, training_s, step)]


def still_to_come(scheduled: Iterable[Change], earlier: Iterable[LogEvent]) -> list[Change]:
    """The schedule of a resumed run: whoever died before has been replaced, and does not die of the same again."""
    dead = {event.host for event in earlier if isinstance(event, ConditionChanged) and event.dies}
    return [
        change
        for change in scheduled
        if not (change.dies and (change.host in dead or (change.host == EVERY_HOST and dead)))
    ]


_PERIODS = 3
"""Judged by their median: a first step, or a moment in which the machine was busy, must not count for good."""
_ROOM = 1.15


@dataclass(kw_only=True)
class FitWatch:
    """How much slower a miniature must run so that the real computation fits into the declared time.

    Follows ``pace_use`` of the run's ``step`` events: real computation over declared time, of each worker.

    Attributes:
        slowdown: the present one, at least 1.
        since_s: when it began to hold; periods that began earlier say nothing about it.
    """

    slowdown: float = 1.0
    since_s: float = -math.inf
    _use: deque[Sequence[float]] = field(default_factory=lambda: deque(maxlen=_PERIODS))

    def look(self, event: LogEvent, now_s: float) -> int | None:
        """Take in one event, now; the rank whose computation does not fit is returned, after `slowdown` was raised."""
        if not isinstance(event, StepsLogged) or not event.pace_use:
            return None
        use = event.pace_use
        # A step more than the period has: what was measured may lag behind by one.
        if now_s - (event.steps + 1) * event.step_time_s < self.since_s:
            return None
        if self._use and len(self._use[-1]) != len(use):
            self._use.clear()  # others train
        self._use.append(use)
        if len(self._use) < _PERIODS:
            return None
        medians = [statistics.median(worker) for worker in zip(*self._use, strict=True)]
        if max(medians) <= 1:
            return None
        self.slowdown = rounded_up(self.slowdown * max(medians) * _ROOM)
        self.since_s = now_s
        self._use.clear()
        return medians.index(max(medians))


@dataclass(frozen=True, kw_only=True)
class RehearsalLauncher(ProcessLauncher):
    """Starts, watches and stops rehearsals. The run's process is their conductor."""

    def _check(self, spec: RunSpec) -> None:
        if spec.miniature is None:
            raise BadInput("the run describes no cluster to rehearse.", hint='choose `on="local"`')
        check_size(len(spec.miniature.hosts))
        for change in spec.miniature.changes:
            check_change(spec, change)
        reason = why_not()
        if reason is not None:
            raise BadInput(f"no cluster can be rehearsed here: {reason}.", hint='choose `on="local"`')

    def program(self, spec: RunSpec, run_dir: Path) -> Program:
        """See `ProcessLauncher.program`."""
        (run_dir / CHANGES_FILE).unlink(missing_ok=True)  # wishes of an earlier attempt
        if not (run_dir / EVENTS_FILE).exists():
            (run_dir / CONDITIONS_FILE).unlink(missing_ok=True)
        return Program(
            module="hetopt.backends.emulation.conductor",
            log_name="conductor.log",
            # Workers share the cores, and many hosts share few: one thread each, unless the spec says otherwise.
            defaults={"OMP_NUM_THREADS": "1", **QUIET_TORCH},
        )

    def stop(self, handle: RunHandle) -> None:
        """End the run; when it returns nothing of it is left, its network included."""
        super().stop(handle)
        run_dir = str(handle.run_dir.resolve())
        for network in find_leftovers():
            if network.purpose and run_dir.endswith(network.purpose):
                remove(network.id)


CHANGES_FILE = "changes.jsonl"


def ask_for_change(run_dir: Path, change: Change) -> None:
    """Ask the rehearsal in ``run_dir`` for a change; it happens within a tenth of a second, or when it is due.

    Raises:
        BadInput: the run is no rehearsal, is over, has no such host, or the host cannot change so.
    """
    spec = read_spec(run_dir)
    check_change(spec, change)
    if run_status(run_dir).state.is_over:
        raise BadInput(f"the run {run_dir.name} is over.", hint="start it again with `hetopt launch`")
    # One write of one line to a file opened for appending: requests made at the same time do not mix.
    with (run_dir / CHANGES_FILE).open("ab", buffering=0) as stream:
        stream.write(change.model_dump_json().encode() + b"\n")


def check_change(spec: RunSpec, change: Change) -> None:
    """Refuse what cannot be done to this run.

    Raises:
        BadInput: so it is.
    """
    if spec.miniature is None:
        raise BadInput("the run is no rehearsal, so its hosts stay as they are.", hint='use `on="rehearsal"`')
    hosts = {host.name: host for host in spec.miniature.hosts}
    if change.host != EVERY_HOST and change.host not in hosts:
        raise BadInput(
            f"the rehearsal has no host called {change.host!r}.",
            hint=f"its hosts are {', '.join(hosts)}, or '*' for all",
        )
    if change.cut and starts_again(spec):
        raise BadInput(
            "a host of a script's run cannot be cut off for a while: its workers would wait for it.",
            hint="let it die and return",
        )
    if (change.returns or change.notice or change.cut) and not (comes_and_goes(spec) or starts_again(spec)):
        what = "return" if change.returns else "be given notice" if change.notice else "be cut off for a while"
        raise BadInput(
            f"a host cannot {what}: this run ends with the first that dies.",
            hint="rehearse on several hosts, with `restarts` of at least 1",
        )
    if change.speed is None:
        return
    declared = {worker.host for worker in spec.workers if worker.declared is not None}
    for name in hosts if change.host == EVERY_HOST else [change.host]:
        if name not in declared:
            raise BadInput(
                f"the speed of {name} cannot change: its workers compute as fast as they can.",
                hint="rehearse with declared times",
            )


def comes_and_goes(spec: RunSpec) -> bool:
    """Whether the workers that are left go on from memory when one of the run's hosts dies."""
    return spec.is_elastic and spec.miniature is not None and len(spec.miniature.hosts) > 1


def starts_again(spec: RunSpec) -> bool:
    """Whether the hosts that are left start a script's workers again when one dies, who go on from a checkpoint."""
    survives = bool(spec.script) and spec.max_restarts > 0
    return survives and spec.miniature is not None and len(spec.miniature.hosts) > 1


def parse_requests(lines: Iterable[str]) -> Iterator[Change]:
    """The changes that were asked for; a line that is none is passed over."""
    for line in lines:
        try:
            yield Change.model_validate_json(line)
        except ValidationError:
            continue


if __name__ == "__main__":
    sys.exit(conduct(sys.argv, rehearse))
