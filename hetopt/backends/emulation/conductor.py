"""The process that owns a rehearsal: it builds the cluster, starts its hosts, changes them as ordered, and removes all.

``python -m hetopt.backends.emulation.conductor RUN_DIR PARENT_PID``. Scheduled changes, changes that other processes
ask for by a line in a file (`ask_for_change`), hosts that die, and slowing the miniature down where the real
computation does not fit into the declared time all happen here, each an event in the run's log.

With restarts the run survives the death of a host as on real machines (`hetopt.backends.conductor`).
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from hetopt.backends.backend import RunHandle, until
from hetopt.backends.conductor import SURVIVORS_S, Conductor
from hetopt.backends.emulation.namespaces import (
    LINK,
    EmulatedNetwork,
    find_leftovers,
    host_address,
    remove,
    why_not,
)
from hetopt.backends.prediction import rounded_up
from hetopt.backends.processes import QUIET_TORCH, ProcessLauncher, Program, conduct, run_status
from hetopt.core.artifact import write_atomically
from hetopt.core.batch_partition import begun_on
from hetopt.core.errors import BadInput
from hetopt.core.events.fold import RunFold
from hetopt.core.events.log import EVENTS_FILE
from hetopt.core.events.records import ConditionChanged, LogEvent, StepsLogged
from hetopt.core.interruption import StopSignal
from hetopt.core.listening import SECRET_VARIABLE, new_secret
from hetopt.core.run_folder import (
    CONDITIONS_FILE,
    LIVING_FILE,
    STOP_FILE,
    conditions_in,
    host_log_folder,
    read_from,
    read_spec,
    write_conditions,
    write_present,
    write_spec,
)
from hetopt.core.run_spec import (
    EVERY_HOST,
    MEETING_PORT,
    Change,
    Conditions,
    EmulatedHost,
    Node,
    RunSpec,
    ScaledEmulation,
    host_names,
)
from hetopt.core.run_status import exit_code
from hetopt.trainer.host.forks import WORKERS_NEED, ForkedProcess, ForkServer

_LOOK_S = 0.05
_FAREWELL_S = 0.2
"""Between a host's death and the loss of its link: long enough for its connections to be closed, as a machine that is
shut down closes them."""
_TERMINATE_S = 13.0  # an agent gives its workers 10 s


@dataclass(kw_only=True)
class RehearsalConductor(Conductor):
    """The conductor of a rehearsal, whose hosts are network namespaces that change, die and return as ordered.

    Attributes:
        miniature: the emulated cluster, as the spec describes it.
        network: its hosts, without a process yet.
        turn_s: seconds between two decisions.
    """

    miniature: ScaledEmulation
    network: EmulatedNetwork
    turn_s: float = _LOOK_S
    _requests_read: int = 0
    _agents: dict[str, ForkedProcess] = field(default_factory=dict)
    _training_since_s: float | None = None
    _starts: int = -1

    def __post_init__(self) -> None:
        """Read what earlier sessions have done."""
        super().__post_init__()
        self._hosts = {host.name: HostNow(**host.model_dump()) for host in self.miniature.hosts}
        self._places = {name: place for place, name in enumerate(self._hosts)}
        earlier = self.reader.read()
        self._pending = still_to_come(self.miniature.changes, earlier)
        # A resumed run keeps what was learned about this machine.
        kept = conditions_in(self.run_dir)().slowdown if earlier else 1.0
        self._fit = FitWatch(slowdown=kept)
        self._run = RunFold()  # of this session
        self.now.survives = survives(self.spec)
        self._secret = new_secret()
        self.now.members = tuple(self._hosts)
        self._forks = ForkServer.importing(WORKERS_NEED, os.environ)

    def begin(self) -> None:
        """Announce speeds, set the links' rates, and start the workers of all hosts.

        Raises:
            NetworkRefused: a link's rate cannot be set.
        """
        self._announce_conditions()
        self._set_rates(self._hosts)
        self.place()

    def _start(self, name: str) -> ForkedProcess:
        """Fork the agent of a member inside its host's network, and return its process.

        Its output goes to the host's log.
        """
        # A port of its own for each generation: what is left of the last must not be met.
        meeting = f"{host_address(self._places[self.now.members[0]])}:{MEETING_PORT + self._starts}"
        place = self._places[name]
        node = Node(host=name, address=host_address(place), meeting=meeting)
        folder = host_log_folder(self.run_dir, name)
        folder.mkdir(parents=True, exist_ok=True)
        program = ["-m", "hetopt.trainer.host.agent", str(self.run_dir), str(os.getpid()), node.model_dump_json()]
        environment = {
            **os.environ,
            # Whatever device the caller prefers, a host in the box has one.
            "GLOO_SOCKET_IFNAME": LINK,
            SECRET_VARIABLE: self._secret,
        }
        with (folder / "host.log").open("ab") as output:
            return self.network.fork(place, self._forks, program, env=environment, output=output)

    def look(self) -> None:
        """Collect exit codes and events, carry out the changes that are due, and update `now`.

        Each change is logged, and changes the network, the announced speeds or the hosts' processes.
        """
        self._have_ended()
        now_s = time.monotonic()
        self._read(now_s)
        self.now.stopping = not self.now.pauses and (self.run_dir / STOP_FILE).exists()
        if not self._run.has_ended:
            since_s = self._training_since_s
            training_s = None if since_s is None else now_s - since_s
            due, self._pending = split(self._pending, training_s, self._run.furthest_step)
            for change in due:
                self._apply(change)
        self.now.there = self._alive
        first, *others = self.now.members
        # Hosts that will soon be gone take no part where there are others, unless these go on without them.
        missed_by_nobody = others if self.spec.is_elastic and not self._hosts[first].leaving else ()
        staying = [name for name in self._alive if not self._hosts[name].leaving or name in missed_by_nobody]
        self.now.allowed = staying or self._alive

    def awaits(self) -> bool:
        """Return whether a change still to come brings a dead host back."""
        return any(change.returns for change in self._pending)

    def is_over(self) -> bool:
        """Return whether training and all hosts have ended (the first alone, if the run goes on without others)."""
        finished = self._run.has_ended and self._run.finish_reason != "stopped"
        return finished and (not self._agents or (self.spec.is_elastic and self.now.members[0] in self.now.ended))

    @property
    def _alive(self) -> list[str]:
        return [name for name, host in self._hosts.items() if host.alive]

    def _have_ended(self) -> bool:
        """Collect the exit codes of hosts that have ended; return whether all have."""
        for name, agent in list(self._agents.items()):
            code = agent.poll()
            if code is not None:
                del self._agents[name]
                self.now.ended[name] = code
        return not self._agents

    def _read(self, now_s: float) -> None:
        """Take in new events; announce another slowdown where this machine does not compute as fast as declared.

        Requests to change conditions are taken in, too.
        """
        for event in self.reader.read():
            self._run.take(event)
            self.take(event)
            if self._training_since_s is None and self._run.training_started_s is not None:
                self._training_since_s = now_s
            rank = self._fit.look(event, now_s)
            if rank is not None:
                self._slow_down(rank)
        text, self._requests_read = read_from(self.run_dir / CHANGES_FILE, self._requests_read)
        self._pending += parse_requests(text.splitlines())

    def _apply(self, change: Change) -> None:
        """Apply a change to every host that it is for, and log each host that it changes.

        Dead hosts' processes are killed; returning ones join or wait for a generation; links are cut, healed or slowed;
        a new speed is announced. Where all hosts are about to leave, workers save a checkpoint first.
        """
        before = self._hosts
        self._hosts = {name: host.after(change) for name, host in before.items()}
        changed = [name for name, host in self._hosts.items() if host != before[name]]
        for name in changed:
            host = self._hosts[name]
            self.log.write(
                CONDITION_CHANGED,
                host=name,
                speed=host.speed,
                rate_bits_per_s=host.rate_bits_per_s,
                dies=not host.alive,
                **{fate: True for fate in ("returns", "notice", "cut", "heals") if getattr(change, fate)},
                step=self._run.furthest_step,
            )
        dying = [name for name in changed if not self._hosts[name].alive]
        if dying:
            self._kill(dying, change)
        if change.notice and self.now.survives and all(self._hosts[name].leaving for name in self._alive):
            self.now.pauses = True  # what they have in memory will be lost
            self.pause()
        if change.returns:
            self._take_back(changed)
        for name in changed if change.cut else ():
            self.network.take_down(self._places[name])
        for name in changed if change.heals else ():
            self.network.bring_up(self._places[name])
        living = [name for name in changed if self._hosts[name].alive]
        if change.speed is not None and living:
            self._announce_conditions()
        if change.rate_bits_per_s is not None:
            self._set_rates(living)

    def _kill(self, names: Sequence[str], change: Change) -> None:
        """Kill all processes of hosts, tell the others at once, and take the hosts' links down after a moment.

        A run that cannot lose a host has failed by it, which the log says before.
        """
        if not self.now.survives:
            hosts = f"host{'s' if len(names) > 1 else ''} {', '.join(names)}"
            wish = "asked for" if (change.at_s, change.at_step) == (None, None) else "scheduled"
            self.log.write("run_failed", reason=f"{hosts} died at step {self._run.furthest_step}, as {wish}")
        for name in names:
            self.network.kill(self._places[name])
            self._agents.pop(name, None)
            self.goes_on_without(name)
        write_present(self.run_dir, self.now.members)
        time.sleep(_FAREWELL_S)
        for name in names:
            self.network.take_down(self._places[name])

    def _take_back(self, names: Sequence[str]) -> None:
        """Bring hosts up again that were taken down: those that may join the training ones now, others next time."""
        for name in names:
            self.network.bring_up(self._places[name])
            self.now.ended.pop(name, None)
            if self.takes_back(name):
                write_present(self.run_dir, self.now.members)
                self._agents[name] = self._start(name)
            else:
                self.now.fresh.add(name)

    def pause(self) -> None:
        """Tell all workers to save a checkpoint at one step and end, by the run's stop file."""
        (self.run_dir / STOP_FILE).touch()

    def place(self) -> None:
        """Kill workers that still run, and start a generation on all usable hosts, from the newest checkpoint.

        Nothing is started once the run is to stop. At every start but the first, a written wish to stop is removed.
        """
        for name in self._agents:
            self.network.kill(self._places[name])
        self._agents, self._starts = {}, self._starts + 1
        self.begin_generation(self.now.allowed or self.now.members)
        write_present(self.run_dir, self.now.members)
        if self._starts:
            (self.run_dir / STOP_FILE).unlink(missing_ok=True)
            living = begun_on(self.spec, self.now.members)
            hosts = tuple(host for host in self.miniature.hosts if host.name in host_names(living))
            miniature = self.miniature.model_copy(update={"hosts": hosts, "changes": ()})
            write_spec(self.run_dir, living.model_copy(update={"miniature": miniature}), LIVING_FILE)
        for name in self.now.members:
            if self.stop_signal() is None:
                self._agents[name] = self._start(name)

    def _slow_down(self, rank: int) -> None:
        """Log that everything now takes `FitWatch.slowdown` times as long, because of ``rank``.

        Announce it, and slow links.
        """
        factor = self._fit.slowdown
        host = self._run.roster.host(rank)
        self.log.write(
            "miniature_slowed",
            factor=factor,
            step=self._run.furthest_step,
            reason=f"the computation of worker {rank} on {host} does not fit into its declared time on this machine, "
            f"so everything takes {factor:g} times as long as planned",
        )
        self._announce_conditions()
        self._set_rates(self._alive)

    def _announce_conditions(self) -> None:
        factors = {host.name: self._hosts[host.name].speed / host.speed for host in self.miniature.hosts}
        write_conditions(
            self.run_dir,
            Conditions(
                slowdown=self._fit.slowdown,
                speed_factors={name: factor for name, factor in factors.items() if factor != 1},
            ),
        )

    def _set_rates(self, names: Iterable[str]) -> None:
        """Set the links of hosts to their rates, over the slowdown of this machine.

        NetworkRefused: the kernel refuses.
        """
        rates = {self._places[name]: self._hosts[name].rate_bits_per_s for name in names}
        slowdown = self._fit.slowdown
        self.network.set_rates({place: None if rate is None else rate / slowdown for place, rate in rates.items()})

    def exit_code(self, *, failed: bool) -> int:
        """Return hetopt's exit code: 6 if a host died that the run cannot lose, or none ended; else by their codes.

        Where workers go on without lost hosts and training has ended, 0 if any host ended well.
        """
        codes = list(self.now.ended.values())
        if self.spec.is_elastic and self._run.has_ended and 0 in codes:
            return 0
        return exit_code(codes, host_died=not codes or (not self.now.survives and len(self._alive) < len(self._hosts)))

    def finish(self, *, failed: bool) -> None:
        """Wait up to 20 s for the hosts to end, not if the run has ``failed``; then terminate or kill the rest."""
        until(self._have_ended, within_s=0.0 if failed else SURVIVORS_S)
        self._end_agents()

    def let_go(self) -> None:
        """Terminate, then kill, the hosts that are left, and end the process that forks them."""
        self._end_agents()
        self._forks.close()

    def _end_agents(self) -> None:
        """End the hosts that are left: agents let their workers save what they can; whoever stays longer is killed."""
        for agent in self._agents.values():
            agent.terminate()
        until(self._have_ended, within_s=_TERMINATE_S)
        for agent in self._agents.values():
            agent.kill()
            agent.wait()
        self._have_ended()


def rehearse(run_dir: Path, stop_signal: StopSignal) -> int:
    """Rehearse the run in a folder on an emulated network, which is removed however it ends; return the exit code.

    Args:
        run_dir: the run's folder.
        stop_signal: returns the number of the signal that asked this process to end; None: none did.

    Raises:
        BadInput: the folder has no usable ``spec.json``.
        NetworkRefused: this process may not make networks, or the kernel lacks a part.
        AssertionError: the run is no rehearsal.
    """
    spec = read_spec(run_dir)
    assert spec.miniature is not None, "it was mapped onto a cluster"
    with EmulatedNetwork.create(spec.miniature.hosts) as network:
        write_atomically(run_dir / NETWORK_FILE, network.id)
        conductor = RehearsalConductor(
            run_dir=run_dir, spec=spec, stop_signal=stop_signal, miniature=spec.miniature, network=network
        )
        return conductor.conduct()


CONDITION_CHANGED = "condition_changed"


class HostNow(EmulatedHost):
    """The present condition of an emulated host: speed, link rate, and whether it is alive, leaving or cut off.

    Attributes:
        alive: whether the host has not died, or has returned.
        leaving: whether it has notice that it will be taken away.
        cut: whether it reaches nobody.
    """

    alive: bool = True
    leaving: bool = False
    cut: bool = False

    def after(self, change: Change) -> HostNow:
        """Return the host after a change that names it, or all hosts; a dead host changes only by returning."""
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
    """Return whether a change is due: at once, at its step, or at its second of training (None: not begun).

    Args:
        change: change that was scheduled, or asked for.
        training_s: seconds that training has lasted; None: it has not begun, so that only changes without a moment are
            due.
        step: number of steps done.
    """
    if change.at_step is not None:
        return training_s is not None and step >= change.at_step
    return change.at_s is None or (training_s is not None and training_s >= change.at_s)


def split(pending: Sequence[Change], training_s: float | None, step: int) -> tuple[list[Change], list[Change]]:
    """Return the changes that are due now, in the order of their moments, and the others.

    Args:
        pending: changes that were not made yet.
        training_s: seconds that training has lasted; None: it has not begun.
        step: number of steps done.
    """
    due = [change for change in pending if is_due(change, training_s, step)]
    later = [change for change in pending if change not in due]
    # Several may be due when a run is resumed.
    return sorted(due, key=lambda change: (change.at_s or 0.0, change.at_step or 0)), later


def still_to_come(scheduled: Iterable[Change], earlier: Iterable[LogEvent]) -> list[Change]:
    """Return the scheduled changes of a resumed run: all but the deaths of hosts that died in an earlier session.

    Args:
        scheduled: changes of the run's spec.
        earlier: events of its earlier sessions; empty: it is new, and all changes come.
    """
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
    """The watch on whether real computing fits into the times that a rehearsal imitates; it raises the slowdown if not.

    Follows ``pace_use`` of the run's ``step`` events: real computation over declared time, of each worker.

    Attributes:
        slowdown: present factor by which all times are longer than planned, at least 1.
        since_s: when it began to hold, by the monotonic clock; earlier periods say nothing about it.
    """

    slowdown: float = 1.0
    since_s: float = -math.inf
    _use: Sequence[float] = ()

    def look(self, event: LogEvent, now_s: float) -> int | None:
        """Read a log event; if computing did not fit in three periods, raise `slowdown` and return the slowest rank.

        None: all fits, or the event tells nothing.

        Args:
            event: next event of the log.
            now_s: now, by the monotonic clock.
        """
        if not isinstance(event, StepsLogged) or not event.pace_use:
            return None
        # A step more than the period has: what was measured may lag behind by one.
        if now_s - (event.steps + 1) * event.step_time_s < self.since_s:
            return None
        largest = max(event.pace_use)
        self._use = (*self._use, largest)[-_PERIODS:]
        if len(self._use) < _PERIODS or (used := statistics.median(self._use)) <= 1:
            return None
        self.slowdown, self.since_s, self._use = rounded_up(self.slowdown * used * _ROOM), now_s, ()
        return event.pace_use.index(largest)


@dataclass(frozen=True, kw_only=True)
class RehearsalLauncher(ProcessLauncher):
    """The launcher of rehearsals; the process of each run is the conductor of its emulated cluster."""

    def _check(self, spec: RunSpec) -> None:
        """Raise BadInput if the run would not survive a scheduled change, or no network can be made on this machine."""
        assert spec.miniature is not None, "it was mapped onto a cluster"
        for change in spec.miniature.changes:
            check_change(spec, change)
        reason = why_not()
        if reason is not None:
            raise BadInput(f"no cluster can be rehearsed here: {reason}.", hint='choose `on="local"`')

    def program(self, spec: RunSpec, run_dir: Path) -> Program:
        """Remove an earlier attempt's change requests, and return the program that conducts a rehearsal.

        In a new run, also remove announced speeds.
        """
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
        """End a rehearsal and wait until its processes and its network are gone.

        Raises:
            BadInput: the run's process is of another user or machine.
            RunFailed: a part of the network cannot be removed.
        """
        super().stop(handle)
        built = handle.run_dir / NETWORK_FILE
        network_id = built.read_text(encoding="ascii") if built.exists() else None
        if network_id in find_leftovers():  # whatever is in the file: the conductor was killed
            remove(network_id)


NETWORK_FILE = "network"
"""File in a run's folder with the id of its emulated network."""

CHANGES_FILE = "changes.jsonl"


def ask_for_change(run_dir: Path, change: Change) -> None:
    """Ask a rehearsal for a change, by a line in its folder; it is made within 0.1 s, or at its moment.

    Args:
        run_dir: the run's folder.
        change: change of a host, with link rates as in the emulation.

    Raises:
        BadInput: the run is over, or would not survive the change.
    """
    check_change(read_spec(run_dir), change)
    if run_status(run_dir).state.is_over:
        raise BadInput(f"the run {run_dir.name} is over.", hint="start it again with `hetopt launch`")
    # One write of one line to a file opened for appending: requests made at the same time do not mix.
    with (run_dir / CHANGES_FILE).open("ab", buffering=0) as stream:
        stream.write(change.model_dump_json().encode() + b"\n")


def check_change(spec: RunSpec, change: Change) -> None:
    """Refuse a change that the run would not survive.

    Args:
        spec: spec of the rehearsal.
        change: change that is scheduled or asked for.

    Raises:
        BadInput: a host returns, has notice or is cut off in a run without restarts or with one host, or a host of a
            script's run is cut off.
    """
    if change.cut and spec.script:
        raise BadInput(
            "a host of a script's run cannot be cut off for a while: its workers would wait for it.",
            hint="let it die and return",
        )
    if (change.returns or change.notice or change.cut) and not survives(spec):
        what = "return" if change.returns else "be given notice" if change.notice else "be cut off for a while"
        raise BadInput(
            f"a host cannot {what}: this run ends with the first that dies.",
            hint="rehearse on several hosts, with `restarts` of at least 1",
        )


def survives(spec: RunSpec) -> bool:
    """Return whether a rehearsal goes on when a host dies: it has restarts, and several hosts."""
    return spec.max_restarts > 0 and spec.miniature is not None and len(spec.miniature.hosts) > 1


def parse_requests(lines: Iterable[str]) -> Iterator[Change]:
    """Yield the change in each line of JSON; skip a line that is no change."""
    for line in lines:
        try:
            yield Change.model_validate_json(line)
        except ValidationError:
            continue


if __name__ == "__main__":
    sys.exit(conduct(sys.argv, rehearse))
