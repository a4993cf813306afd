"""One worker among others that may be lost: it leaves a group that has fallen apart, and joins the next one.

A worker that loses its neighbours keeps its process and what it has learned. It breaks the connections of its group,
so that nobody waits in them, asks for a new generation (`hetopt.trainer.elastic.rendezvous`), and goes on in a new
process group from the newest state that any of them holds.

A survivor's parameters and optimizer state are those of all, so whoever did the last step has what the lost workers
had. What is each worker's own stays with it: the residual of a lost worker is lost, and a worker that comes anew begins
without one.

The store that workers meet over is on the first host. The process that hosts workers there opens it, and outlives any
of them; other hosts reach it through a relay of their own.

**Breaking connections.** gloo's operations end when a connection breaks or time is up, and by no other means: a worker
whose neighbour has left the group without dying would wait for its whole time. Only Linux tells which connections a
process has; elsewhere nothing is broken, and time must be up. Where half of a message was there when its connection
broke, gloo does not end the operation: in 8 of 24 trials between two processes the wait went on until time was up.
So no worker waits longer than its group holds (`wait_while`).
"""

from __future__ import annotations

import datetime
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hetopt.core.artifact import ReplacedRecord
from hetopt.core.batch_partition import spec_of_living
from hetopt.core.errors import RunFailed
from hetopt.core.events.log import EVENTS_FILE, EventLog
from hetopt.core.run_folder import PRESENT_FILE, PresentHosts
from hetopt.core.run_spec import RunSpec
from hetopt.trainer.agreement import gather_numbers, join_group
from hetopt.trainer.checkpoints.folder import RankState, SharedState, pack, unpack
from hetopt.trainer.comm.compressor import State
from hetopt.trainer.comm.peers import HungPeer, has_timed_out, in_words
from hetopt.trainer.context import WorkerContext
from hetopt.trainer.elastic.rendezvous import (
    LOOK_S,
    NO_GENERATION,
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
from hetopt.trainer.failure import is_peer_loss

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore


_OPEN = Path("/proc/self/fd")

DEAF_S = 10
"""Seconds without an answer after which a connection is broken: a cut link says nothing by itself, and a crowded one
may lose some packets in a row."""
_PROBES = 5
_ENDS_WHEN_DEAF = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, DEAF_S // _PROBES),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, DEAF_S // _PROBES),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * DEAF_S),
)


def open_sockets() -> dict[str, int]:
    """Return the file descriptors of this process's open sockets, by socket name; empty where there is no /proc."""
    sockets: dict[str, int] = {}
    for entry in os.listdir(_OPEN) if sys.platform == "linux" else ():
        with suppress(OSError):  # it was closed meanwhile
            name = os.readlink(_OPEN / entry)
            if name.startswith("socket:"):
                sockets[name] = int(entry)
    return sockets


def break_all_but(known: Collection[str]) -> None:
    """Shut down every TCP connection of this process that is not in ``known``, a former result of `open_sockets`."""
    for connection in _opened_since(known):
        with suppress(OSError):  # it went by itself
            connection.shutdown(socket.SHUT_RDWR)


def break_when_deaf(known: Collection[str]) -> None:
    """Have the kernel break TCP connections not in ``known`` once their other end is silent for `DEAF_S` s.

    Without this, whoever waits for the answer of a host that is cut off waits for a quarter of an hour.

    Args:
        known: what `open_sockets` gave before.
    """
    for connection in _opened_since(known):
        with suppress(OSError):
            for level, option, value in _ENDS_WHEN_DEAF:
                connection.setsockopt(level, option, value)


def _opened_since(known: Collection[str]) -> Iterator[socket.socket]:
    """Yield the TCP connections of this process that are not in ``known``, each by a descriptor of its own.

    Listening sockets are left out: gloo would end the process where one is shut down.
    """
    for name, descriptor in open_sockets().items():
        if name not in known:
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                is_tcp = (
                    connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM
                )
                if is_tcp and not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    yield connection


_ANSWERED_WITHIN = datetime.timedelta(seconds=30)


def connect(meeting: str) -> TCPStore:
    """Open a new connection to the store at ``meeting``, ``address:port``, which breaks if that host is cut off.

    Raises:
        DistNetworkError: nobody answers there within 30 s.
    """
    address, _, port = meeting.rpartition(":")
    known = open_sockets()
    store: TCPStore = dist.TCPStore(address, int(port), is_master=False, timeout=_ANSWERED_WITHIN)  # type: ignore[attr-defined]  # torch's gap
    break_when_deaf(known)
    return store


_wait_in_torch = dist.Work.wait


def wait_while(check: Callable[[], None]) -> None:
    """Have torch's waits of this process call ``check`` every `EVERY_S` s, and end by the RuntimeError that it raises.

    Waits with a time are for single messages, and are done in a thread: time that is up would close their connection.
    That thread may never end, and with it the interpreter: the process must leave by `os._exit`.
    """
    messages = ThreadPoolExecutor(max_workers=1)

    def wait(work: dist.Work, *timeout: datetime.timedelta) -> bool:
        """Wait for a collective or message, calling ``check`` every `EVERY_S` s; return True once it is over."""
        message = messages.submit(_wait_in_torch, work, *timeout) if timeout else None
        while True:
            try:
                if message is not None:
                    return message.result(EVERY_S)
                return _wait_in_torch(work, datetime.timedelta(seconds=EVERY_S))
            except (RuntimeError, TimeoutError):
                if work.is_completed() if message is None else message.done():  # it has failed
                    raise
                check()

    dist.Work.wait = wait  # type: ignore[assignment,method-assign]


_HEAVY = ("model", "optimizer")
"""Sent only where a worker has an older one."""


@dataclass(frozen=True, kw_only=True)
class CarriedState:
    """Training state that a worker takes from one generation into the next; tensors are copies, on the CPU.

    Attributes:
        version: age of the state; the largest of all workers' is the newest.
        shared: training state that all workers share.
        rank_state: state of this worker alone; None: it has just started.
        rank_state_after: state of this worker as it is if the step that it was at counts as done, as for some of the
            others; None: it has just started.
        alike: parts of gradient memories that are the same on all workers.
        evaluation_owed: whether the workers were about to evaluate.
        share: local batch size of this worker, in samples; 0: it has just started.
    """

    version: Version
    shared: SharedState
    rank_state: RankState | None
    rank_state_after: RankState | None
    alike: State
    evaluation_owed: bool = False
    share: int = 0


def hand_over(held: CarriedState | None, generation: Generation, rank: int) -> CarriedState | None:
    """Return the newest training state of any worker, which sends it to all; None: no worker has one. All must call it.

    All workers of the generation must be in its process group. The returned state has this worker's own random state
    and residual; None where it has just started.

    Args:
        held: state that this worker holds; None: it has just started.
        generation: generation that the workers are in.
        rank: rank of this worker in it.

    Raises:
        RunFailed: the state that arrived cannot be read.
    """
    workers = len(generation.members)
    version = Version() if held is None else held.version
    rows = gather_numbers([float(number) for number in astuple(version)], workers)
    versions = [Version(agreed=int(row[0]), step=int(row[1]), decisions=int(row[2])) for row in rows]
    newest = max(versions)
    if newest.agreed == NO_GENERATION:
        return None
    source = versions.index(newest)
    behind = any(other != newest for other in versions)
    state = None
    if rank == source and held is not None:
        shared = {key: value for key, value in vars(held.shared).items() if behind or key not in _HEAVY}
        state = {"shared": shared, "alike": held.alike, "evaluation_owed": held.evaluation_owed}
    received = _spread(state, source, workers)
    kept = {} if held is None else vars(held.shared)
    rank_state = None if held is None else held.rank_state if version.step == newest.step else held.rank_state_after
    # Other workers than those that the shares were for: the spec of this generation has theirs.
    unshared = {} if generation.members[source].beside == generation.places else {"shares": (), "memory_bounds": ()}
    return CarriedState(
        version=replace(newest, agreed=generation.number),
        shared=SharedState(**{**kept, **received["shared"], **unshared}),
        rank_state=rank_state,
        rank_state_after=rank_state,
        alike=received["alike"],
        evaluation_owed=received["evaluation_owed"],
    )


def _spread(value: dict[str, Any] | None, source: int, workers: int) -> dict[str, Any]:
    """Return, on all workers, the value of the worker ``source``; all must call it, the others with None.

    Raises:
        RunFailed: what arrived cannot be read.
    """
    packed = torch.empty(0, dtype=torch.uint8)
    if value is not None:
        packed = torch.frombuffer(bytearray(pack(value)), dtype=torch.uint8)
    size = int(gather_numbers([float(packed.numel())], workers)[source][0])
    if workers > 1:
        if value is None:
            packed = torch.empty(size, dtype=torch.uint8)
        dist.broadcast(packed, src=source)
    try:
        restored: dict[str, Any] = unpack(packed.numpy().tobytes())
    except ValueError:
        raise RunFailed("the state that another worker sent cannot be read.") from None
    return restored


EVERY_S = 0.25
"""Seconds between looks for another generation."""

_REASON_LETTERS = 200


class WorkerGroup:
    """Membership of one worker in the run's process group, which forms anew as workers come and go.

    Args:
        spec: spec of the run, with all of its workers.
        place: number of this worker in the spec.
        life: text that tells this process from others that had its place before.
        run_dir: folder of the run.
        meeting: address (``address:port``) at which this worker reaches the rendezvous store.
        attempt: torchrun's count of restarts, as a text that prefixes the store's keys, alike on all workers.
        device: device of this worker.
        stop_requested: returns whether somebody asked the run to stop.
    """

    def __init__(
        self,
        spec: RunSpec,
        place: int,
        *,
        life: str,
        run_dir: Path,
        meeting: str,
        attempt: str,
        device: torch.device,
        stop_requested: Callable[[], bool],
    ) -> None:
        self._spec = spec
        self._run_dir = run_dir
        self._meeting = meeting
        self._device = device
        self._stop_requested = stop_requested
        self._patience = Patience()
        self._me = Member(place=place, life=life, hetopt=version("hetopt"))
        self._attempt = attempt
        self._store: RendezvousStore | None = None
        self._watch: Watch | None = None
        self._known = open_sockets()
        self._present = ReplacedRecord(PresentHosts, run_dir / PRESENT_FILE)
        self._events = EventLog(None)
        self._lost_s: float | None = None
        self._reason = ""
        self.generation: Generation | None = None

    def join(self, held: CarriedState | None = None) -> WorkerContext:
        """Wait for a new generation and open its process group; return this worker's context.

        Where the group falls apart while it is opened, the next one is waited for.

        Args:
            held: state that this worker holds; None: it has just started.

        Raises:
            RunFailed: workers without whom nobody trains do not come, or the store cannot be reached, within 600 s.
            Abandoned: the run was asked to stop, is over, or another process is this worker.
            BadInput: the others train already, with another version of hetopt.
        """
        if held is not None:
            self._me = self._me.model_copy(update={"version": held.version, "share": held.share})
        while True:
            generation = self._meet()
            try:
                return self._open(generation)
            except (RuntimeError, ValueError) as error:
                self.leave(str(error))

    def survives(self, error: Exception) -> bool:
        """Return whether an error means that other workers were lost, after which this worker can `join` again."""
        has_fired = self._watch is not None and self._watch.has_fired and isinstance(error, RuntimeError)
        return has_fired or isinstance(error, HungPeer) or has_timed_out(error) or is_peer_loss(error)

    def check(self) -> None:
        """Check that no new generation is wanted, between steps, which a lone worker would not notice, and in waits.

        Raises:
            RuntimeError: a new generation is wanted.
        """
        if self._watch is not None and self._watch.has_fired:
            raise RuntimeError("another generation of workers is wanted")

    def leave(self, reason: str) -> None:
        """Leave the generation: announce its end, break connections, destroy the group; ``reason`` is for the log.

        Args:
            reason: words of the error by which the end showed here; the first one counts until training goes on.
        """
        self._lost_s = self._lost_s or time.monotonic()
        self._reason = self._reason or in_words(reason.partition("\n")[0])[:_REASON_LETTERS]
        if self.generation is not None and self._store is not None:
            with suppress(RuntimeError):  # its host is gone: the others notice by themselves
                want(self._store, self.generation.number + 1)
        break_all_but(self._known)
        self.close()

    def agreed(self, held: CarriedState | None, *, step: int) -> None:
        """Log that all workers go on from one state; nothing is logged of the first generation.

        Args:
            held: state that they took over; None: the newest checkpoint's, or none.
            step: steps done.
        """
        generation = self.generation
        assert generation is not None
        if generation.number > 0:
            seen: dict[str, object] = {"from": "checkpoint" if held is None else "memory"}
            if self._lost_s is not None:
                seen |= {"recovery_s": round(time.monotonic() - self._lost_s, 3), "reason": self._reason}
            source = max(generation.members, key=lambda member: member.version)
            self._events.write(
                "workers_changed",
                step=step,
                generation=generation.number,
                workers=list(generation.places),
                lost=[place for place in source.beside if place not in generation.places],
                new=[member.place for member in generation.members if member.joined == NO_GENERATION],
                **seen,
            )
        self._lost_s, self._reason = None, ""

    def finished(self) -> None:
        """Mark the run as over in the store, if that can be reached, so that nobody waits for its workers any more."""
        if self._store is not None:
            with suppress(RuntimeError):  # likewise
                self._store.set("finished", "1")

    @property
    def is_over(self) -> bool:
        """True once the run has finished, so that a worker that comes now comes too late.

        Raises RuntimeError where the store cannot be reached.
        """
        return self._store is not None and self._store.text("finished") == "1"

    def close(self) -> None:
        """Stop watching for new generations, destroy the process group, and close this worker's event log.

        Nothing happens where there is none.
        """
        if self._watch is not None:
            self._watch.stop()
        if dist.is_initialized():
            left = [dist.group.WORLD]
            with suppress(RuntimeError):  # of others that are gone
                dist.destroy_process_group()
            # A thread of the group may still be waiting, and whoever frees the group waits for that thread.
            threading.Thread(target=left.clear, name="frees-a-group", daemon=True).start()
        self._events.close()

    def _meet(self) -> Generation:
        """Return the next generation that this worker is part of, as soon as it has begun.

        Raises:
            RunFailed: the store cannot be reached, or others do not come.
            Abandoned: the run was asked to stop, or is over.
            BadInput: the others train already, with another version of hetopt.
        """
        begun_s = time.monotonic()
        while True:
            try:
                self._store = self._store or RendezvousStore(self._attempt, connect(self._meeting))
                return self._meet_in(self._store)
            except RuntimeError:
                self._store = None  # this host may be cut off for a while
            if self._stop_requested():
                raise Abandoned
            if time.monotonic() - begun_s > self._patience.start_s:
                raise RunFailed(
                    "the first host of the run, where workers meet, is gone.", hint="launch the run again: it resumes"
                )
            time.sleep(LOOK_S)

    def _meet_in(self, store: RendezvousStore) -> Generation:
        """Sleep until a generation with this worker has begun, and return it; errors as of `meet_again`."""
        meeting = meet_again(
            store,
            self._me,
            range(len(self._spec.workers)),
            patience=self._patience,
            clock=time.monotonic,
            stop_wished=lambda: self._stop_requested() or self.is_over,
            is_lost=self._is_lost,
        )
        while True:
            try:
                time.sleep(next(meeting))
            except StopIteration as reached:
                generation: Generation = reached.value
                return generation

    def _is_lost(self, place: int) -> bool:
        present = self._present.now()
        return present is not None and self._spec.workers[place].host not in present.names

    def _open(self, generation: Generation) -> WorkerContext:
        """Open the process group of a generation, once all its workers do, and return this worker's context in it.

        RuntimeError or ValueError: the group fell apart meanwhile. A `Watch` breaks its connections once it is over.
        """
        rank = generation.rank(self._me)
        assert rank is not None
        self.generation = generation
        self._me = self._me.model_copy(update={"joined": generation.number, "beside": generation.places})
        watching = RendezvousStore(self._attempt, connect(self._meeting))
        self._known = open_sockets()
        self._watch = Watch(
            watching,
            generation.number,
            lambda: break_all_but(self._known),
            lambda: any(map(self._is_lost, generation.places)),
        )
        if self._device.type == "cpu":  # a wait with a time would make NCCL block
            wait_while(self.check)
        workers = len(generation.members)
        store = dist.PrefixStore(f"{self._attempt}/group/{generation.number}", connect(self._meeting))  # type: ignore[attr-defined]  # torch's gap
        if workers > 1:
            join_group(store, rank, workers, self._device, self._spec.exchange_timeout_s)
        self._events = EventLog(self._run_dir / EVENTS_FILE if rank == 0 else None)
        return WorkerContext(
            spec=spec_of_living(
                self._spec,
                generation.places,
                {member.place: member.share for member in generation.members if member.share},
            ),
            rank=rank,
            world_size=workers,
            device=self._device,
            run_dir=self._run_dir,
            events=self._events,
            stop_requested=self._stop_requested,
            store=store,
        )


class Watch:
    """Thread that breaks the group's connections once another generation is wanted or a host is known to be lost.

    One look costs a message to the store and back.

    Args:
        store: connection to the store that nothing else uses.
        number: number of the present generation.
        end_waiting: breaks the connections of the present generation; called until `stop`, for more may be opened.
        is_lost: whether a host of the present generation is known to be lost: where it fell silent, or while
            connections are being made, nothing else tells, and all would wait until they time out.

    Attributes:
        has_fired: whether another generation is wanted, a host is lost, or the store is gone.
    """

    def __init__(
        self,
        store: RendezvousStore,
        number: int,
        end_waiting: Callable[[], object],
        is_lost: Callable[[], bool] = lambda: False,
    ) -> None:
        self._store = store
        self._number = number
        self._end_waiting = end_waiting
        self._is_lost = is_lost
        self._over = threading.Event()
        self.has_fired = False
        self._thread = threading.Thread(target=self._look, name="watches-generations", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread that watches, and wait for it."""
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        """Call ``end_waiting`` again and again once a newer generation is wanted, or a host or the store is lost."""
        while not self._over.wait(EVERY_S):
            try:
                self.has_fired = self.has_fired or wanted(self._store) > self._number or self._is_lost()
            except (RuntimeError, ValueError):
                self.has_fired = True  # the store is gone, and with it its host: whoever is left meets elsewhere
            if self.has_fired:
                self._end_waiting()
