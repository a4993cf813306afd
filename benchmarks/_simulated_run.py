"""A run with faults in virtual time: the control code of elastic training over a store and collectives in memory.

What is simulated is the world: a clock, a store that can be out of reach, collectives that some workers see complete
and others do not, processes that die, freeze and are replaced, a disk that is full or tears what it holds. The
product decides: `meet_again` forms generations, `Version` tells the newest state, `spec_of_living` deals the batch out.

Training is a chain of hashes over the samples of every step (`State`), as the workers bring them to the
collective: a sample that is lost, repeated or brought by two shows, and so does any other order.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, cast, get_args

from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch's stubs do not know it

from hetopt.core.batch_partition import spec_of_living
from hetopt.core.errors import RunFailed
from hetopt.core.run_spec import RunSpec, StopRule, WorkerSpec
from hetopt.trainer.elastic.rendezvous import (
    Abandoned,
    Generation,
    Member,
    Patience,
    RendezvousStore,
    Version,
    meet_again,
    want,
    wanted,
)

BATCH = 24


@dataclass(frozen=True, kw_only=True)
class State:
    """The state of training: steps done, samples taken, and a hash over them."""

    step: int = 0
    position: int = 0
    chain: str = ""

    def after(self, samples: Sequence[int]) -> State:
        """Return the state after one more step over these samples."""
        chain = hashlib.sha256(f"{self.chain} {list(samples)}".encode()).hexdigest()
        return State(step=self.step + 1, position=self.position + len(samples), chain=chain)


def undisturbed(steps: int) -> State:
    """Return the state after ``steps`` steps without faults."""
    state = State()
    for _ in range(steps):
        state = state.after(range(state.position, state.position + BATCH))
    return state


FaultKind = Literal["kill", "leave", "freeze", "partition", "slow", "tear", "full", "kill-all"]
KINDS: tuple[FaultKind, ...] = get_args(FaultKind)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A simulated fault at a moment, of one worker or of all, with its duration."""

    at_s: float
    kind: FaultKind
    place: int
    lasts_s: float


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A run to simulate: workers, steps and faults."""

    workers: int
    steps: int
    faults: tuple[Fault, ...]

    @classmethod
    def of(cls, seed: int) -> Schedule:
        """Return the random schedule of a seed."""
        draw = random.Random(seed)
        workers = draw.randint(2, 6)
        faults = [
            Fault(
                at_s=draw.uniform(0.0, 9.0),
                kind=draw.choice(KINDS),
                place=draw.randrange(workers),
                lasts_s=draw.choice([0.3, 1.0, 4.0, 12.0]),
            )
            for _ in range(draw.randint(1, 6))
        ]
        return cls(
            workers=workers, steps=draw.randint(20, 60), faults=tuple(sorted(faults, key=lambda fault: fault.at_s))
        )


_WATCH_S = 0.1
_CHECKPOINT_STEPS = 10
_TIMEOUT_S = 5.0
_PATIENCE = Patience(start_s=120.0, regroup_s=3.0)


@dataclass(kw_only=True)
class Result:
    """The outcome of a simulated run.

    Attributes:
        final: state of every worker that finished.
        launches: of the whole run.
        generations: that formed.
        redone: steps that were done more than once, of each time that training went back; without those that only a
            checkpoint would have saved for which there was no room, or that was torn.
    """

    final: list[State] = field(default_factory=list)
    launches: int = 1
    generations: int = 0
    redone: list[int] = field(default_factory=list)


class Broken(Exception):
    """The error of members whose worker group has fallen apart."""


@dataclass(kw_only=True)
class _Process:
    """One life of a worker's process in the simulation, with the times on its clock until which it is held up.

    Attributes:
        place: number of the worker.
        life: name of this life, of which a worker has several.
        body: what the process does; yields the seconds that each piece takes.
        frozen_until_s: time until which it does nothing.
        cut_off_until_s: time until which it does not reach the store.
        alive: whether it has not ended.
    """

    place: int
    life: str
    body: Generator[float, None, None]
    frozen_until_s: float = 0.0
    cut_off_until_s: float = 0.0
    alive: bool = True


@dataclass(kw_only=True)
class _Operation:
    """A collective operation: what each member brought."""

    brought: dict[int, object] = field(default_factory=dict)


class _Store(RendezvousStore):
    """A rendezvous store in memory; whoever is cut off waits."""

    def __init__(self, number: int) -> None:
        super().__init__("", HashStore())
        self.number = number


class Simulation:
    """The simulation of a run from its launch to its end, however often it has to be launched.

    Args:
        schedule: of its faults.
        seed: of everything else that chance decides.
    """

    def __init__(self, schedule: Schedule, seed: int) -> None:
        self._schedule = schedule
        self._draw = random.Random(seed)
        self._now_s = 0.0
        self._queue: list[tuple[float, int, _Process | Fault]] = []
        self._order = 0
        self._processes: dict[int, _Process] = {}
        self._lives = 0
        self._store = _Store(0)
        self._operations: dict[tuple[int, int, str], _Operation] = {}
        self._slow: dict[int, float] = {}
        self._full_until_s = 0.0
        self._disk: list[State] = []
        self._frontier = 0
        self._denied = 0
        self.result = Result()
        worker = WorkerSpec(host="h", type="t", local_batch_size=1)
        sizes = [BATCH // schedule.workers] * schedule.workers
        sizes[0] += BATCH - sum(sizes)
        self._spec = RunSpec(
            task="t",
            workers=tuple(worker.model_copy(update={"local_batch_size": size}) for size in sizes),
            stop=StopRule(max_steps=schedule.steps),
        )

    def run(self, within_s: float = 3000.0) -> Result:
        """Simulate the run to its end, launched again as often as needed, and return its outcome.

        Raises:
            AssertionError: samples are lost or repeated, or the run is not over in ``within_s`` seconds or 50 launches.
        """
        for fault in self._schedule.faults:
            self._push(fault.at_s, fault)
        self._launch()
        while len(self.result.final) == 0 or self._processes:
            if not self._queue:
                self._relaunch()
                continue
            self._now_s, _, what = heapq.heappop(self._queue)
            if self._now_s > within_s:
                raise AssertionError(f"not over after {within_s:g} s")
            if isinstance(what, Fault):
                self._happen(what)
            elif what.alive:
                self._resume(what)
            if not self._processes and not self.result.final:
                self._relaunch()
        return self.result

    # The world.

    def _push(self, at_s: float, what: _Process | Fault) -> None:
        self._order += 1
        heapq.heappush(self._queue, (at_s, self._order, what))

    def _launch(self) -> None:
        """Start all workers within a second, with a new store."""
        self._store = _Store(self._store.number + 1)
        for place in range(self._schedule.workers):
            self._start(place, self._draw.uniform(0.0, 1.0))

    def _relaunch(self) -> None:
        """Launch again; AssertionError: for the 51st time."""
        self.result.launches += 1
        if self.result.launches > 50:
            raise AssertionError("launched again and again")
        self._launch()

    def _start(self, place: int, delay_s: float) -> None:
        """Start a new life of a worker in ``delay_s`` seconds, in the place of its process there."""
        self._lives += 1
        life = str(self._lives)
        process = _Process(place=place, life=life, body=self._live(place, life))
        self._processes[place] = process
        self._push(self._now_s + delay_s, process)

    def _resume(self, process: _Process) -> None:
        """Let a process go on to its next wait, or put it off while it is held up; its failure ends all processes."""
        held_up_s = max(process.frozen_until_s, process.cut_off_until_s)
        if self._now_s < held_up_s:
            # Cut off or frozen: whatever it does next waits.
            self._push(held_up_s, process)
            return
        try:
            pause_s = next(process.body)
        except StopIteration:
            self._gone(process)
            return
        except (RunFailed, Abandoned):
            # Too few were left: as the agent does, all are ended, and the run is launched again.
            self._kill_all()
            return
        self._push(self._now_s + pause_s, process)

    def _gone(self, process: _Process) -> None:
        """Mark a process as ended, and free its place if that is still its own."""
        process.alive = False
        if self._processes.get(process.place) is process:
            del self._processes[process.place]

    def _kill_all(self) -> None:
        for process in list(self._processes.values()):
            self._gone(process)

    def _happen(self, fault: Fault) -> None:
        """Apply a fault; one of a worker that is not there, or of a checkpoint without another, changes nothing."""
        process = self._processes.get(fault.place)
        until_s = self._now_s + fault.lasts_s
        match fault.kind:
            case "kill" | "leave" if process is not None and not self.result.final:
                self._gone(process)
                self._start(fault.place, fault.lasts_s if fault.kind == "leave" else self._draw.uniform(0.05, 0.5))
            case "freeze" if process is not None:
                process.frozen_until_s = until_s
            case "partition" if process is not None:
                process.cut_off_until_s = until_s
            case "slow":
                self._slow[fault.place] = 10.0
            case "tear" if len(self._disk) > 1:
                self._denied = max(self._denied, self._disk.pop().step)
                self._kill_all()
            case "full":
                self._full_until_s = until_s
            case "kill-all":
                self._kill_all()

    # A worker.

    def _live(self, place: int, life: str) -> Generator[float, None, None]:
        """Yield the seconds that a worker's process waits, from rendezvous to rendezvous, until the run is finished.

        Raises:
            RunFailed: too few workers have come.
            Abandoned: the run is finished.
        """
        me, held = Member(place=place, life=life), (Version(), State())
        while not self.result.final:
            store = self._store
            generation = yield from meet_again(
                store,
                me,
                range(self._schedule.workers),
                patience=_PATIENCE,
                clock=lambda: self._now_s,
                stop_wished=lambda: bool(self.result.final),
            )
            self.result.generations = max(self.result.generations, generation.number + 1)
            me = me.model_copy(update={"joined": generation.number, "beside": generation.places})
            try:
                held = yield from self._hand_over(store, generation, me, held)
                me = me.model_copy(update={"share": self._shares(generation)[place]})
                while held[1].step < self._schedule.steps:
                    held = yield from self._step(store, generation, me, held)
            except Broken:
                me = me.model_copy(update={"version": held[0]})
                want(store, generation.number + 1)
                yield self._draw.uniform(0.0, 0.2)
                continue
            self.result.final.append(held[1])
            return

    def _shares(self, generation: Generation) -> dict[int, int]:
        """Return the local batch size of each worker of a generation, by place."""
        known = {member.place: member.share for member in generation.members if member.share}
        workers = spec_of_living(self._spec, generation.places, known).workers
        return {place: worker.local_batch_size for place, worker in zip(generation.places, workers, strict=True)}

    def _hand_over(
        self, store: _Store, generation: Generation, me: Member, held: tuple[Version, State]
    ) -> Generator[float, None, tuple[Version, State]]:
        """Yield seconds, and return the newest state that a member holds, or else the disk's.

        Broken: as of `_collective`.
        """
        brought = yield from self._collective(store, generation, me, "hand-over", held)
        states = cast("Mapping[int, tuple[Version, State]]", brought)
        newest = max(states.values(), key=lambda entry: entry[0])
        from_disk = self._disk[-1] if self._disk else State()
        state = newest[1] if newest[0] != Version() else from_disk
        if me.place == min(generation.places):
            self.result.redone.append(self._frontier - max(state.step, self._denied))
        return Version(agreed=generation.number, step=state.step), state

    def _step(
        self, store: _Store, generation: Generation, me: Member, held: tuple[Version, State]
    ) -> Generator[float, None, tuple[Version, State]]:
        """Train a step, yielding the seconds it takes, and return the state after it with its version.

        Saves a checkpoint where one is due and this member is the first; a full disk takes none.

        Raises:
            AssertionError: samples are lost or repeated.
            Broken: as of `_collective`.
        """
        state, shares = held[1], self._shares(generation)
        yield 0.02 * self._draw.uniform(0.5, 1.5) * self._slow.get(me.place, 1.0) * shares[me.place]
        first = state.position + sum(shares[place] for place in generation.places if place < me.place)
        indices = list(range(first, first + shares[me.place]))
        brought = yield from self._collective(store, generation, me, f"step {state.step}", indices)
        samples = [sample for place in sorted(brought) for sample in brought[place]]  # type: ignore[attr-defined]  # lists here
        assert samples == list(range(state.position, state.position + BATCH)), "samples were lost or repeated"
        state = state.after(samples)
        self._frontier = max(self._frontier, state.step)
        last = max(self._disk[-1].step if self._disk else 0, self._denied)
        if state.step - last >= _CHECKPOINT_STEPS and me.place == min(generation.places):
            if self._now_s >= self._full_until_s:
                self._disk.append(state)
            else:
                self._denied = max(self._denied, state.step)
        return replace(held[0], step=state.step), state

    def _collective(
        self, store: _Store, generation: Generation, me: Member, name: str, value: object
    ) -> Generator[float, None, Mapping[int, object]]:
        """Return what all members brought, once they all have; each member learns of it a little later than the next.

        Raises:
            Broken: a member is gone, another generation is wanted, or time is up. Others may have seen it complete.
        """
        operation = self._operations.setdefault((store.number, generation.number, name), _Operation())
        operation.brought[me.place] = value
        begun_s = self._now_s
        while True:
            if len(operation.brought) == len(generation.members):
                yield self._draw.uniform(0.0, 0.01)  # in which it may be broken after all
                if not self._is_broken(store, generation, me):
                    return operation.brought
            if self._is_broken(store, generation, me) or self._now_s - begun_s > _TIMEOUT_S:
                yield self._draw.uniform(0.0, _WATCH_S)
                raise Broken
            yield 0.01

    def _is_broken(self, store: _Store, generation: Generation, me: Member) -> bool:
        """Return whether a newer generation is wanted, or another member's process is gone."""
        if wanted(store) > generation.number:
            return True
        present = {(process.place, process.life) for process in self._processes.values()}
        return any(
            (member.place, member.life) not in present for member in generation.members if member.place != me.place
        )


def check(seed: int) -> Result:
    """Simulate the schedule of a seed, and check that the run kept what is promised.

    Raises:
        AssertionError: it did not.
    """
    schedule = Schedule.of(seed)
    result = Simulation(schedule, seed).run()
    expected = undisturbed(schedule.steps)
    assert result.final, "nobody finished"
    assert all(state == expected for state in result.final), "trained something else"
    # Each fault may hit who writes, in the step after which a checkpoint is due: the next step has one then.
    most = max(result.redone, default=0)
    assert most <= _CHECKPOINT_STEPS + len(schedule.faults), f"went back by {most} steps"
    return result
