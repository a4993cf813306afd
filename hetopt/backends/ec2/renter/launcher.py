"""Runs on EC2: the peer of the local and the rehearsal launcher. Everything it must know is in the run's folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from hetopt.backends.backend import Pools, RunHandle
from hetopt.backends.ec2.renter import calls
from hetopt.backends.ec2.renter.cluster_state import ClusterState
from hetopt.backends.ec2.renter.desired import Change, enlarged, moved, renewal_of, switched
from hetopt.backends.ec2.renter.edge import connect_run
from hetopt.backends.ec2.renter.ledger import LEDGER_FILE, Made, made, read_ledger, recorded_ids
from hetopt.backends.ec2.renter.loop import PRICES_HOLD, Loop, latest_checkpoint
from hetopt.backends.ec2.renter.order import ORDER_FILE, Order
from hetopt.backends.ec2.renter.reconcile import Stop
from hetopt.backends.ec2.renter.removal import Remover
from hetopt.backends.ec2.renter.renting import Accept, Renter, Tell
from hetopt.backends.ec2.renter.request import Edge
from hetopt.backends.ec2.renter.run_status import judged, known
from hetopt.backends.ec2.renter.spot_pools import pools_of
from hetopt.backends.ec2.renter.watch import Watcher, read_lease
from hetopt.core.bucket_traffic import HEARTBEAT_S
from hetopt.core.errors import BadInput, CloudRefused
from hetopt.core.events.log import EVENTS_FILE
from hetopt.core.nodes import host_names
from hetopt.core.run_folder import read_spec, write_spec
from hetopt.core.run_spec import RunSpec
from hetopt.core.run_status import RunState, RunStatus

BUNDLE_FILE = "bundle.tar.gz"
PLAN_OBJECT = "plan.json"

FIRST_LOOK_S = 2.0
SLOWEST_LOOK_S = HEARTBEAT_S
_SLOWER = 1.5
_STOP_PATIENCE_S = 120.0


@dataclass(kw_only=True)
class Polling:
    """When to look again: often while there is news, ever less often while there is none."""

    wait_s: float = FIRST_LOOK_S
    next_s: float = 0.0
    said: str = ""
    said_of_prices: str = ""

    def after(self, now_s: float, *, news: bool) -> None:
        """Set when to look next: soon after news, ever later without."""
        self.wait_s = FIRST_LOOK_S if news else min(SLOWEST_LOOK_S, self.wait_s * _SLOWER)
        self.next_s = now_s + self.wait_s


@dataclass(frozen=True, kw_only=True)
class Ec2Launcher:
    """Rents, watches and gives back.

    Attributes:
        home: where the regions that were ever used are kept.
        inner: carries out calls; None: boto3, with retries.
        tell: says what goes on.
        accept: whether a run may begin on fewer machines; absent: all or none.
        clock: seconds since the epoch.
        sleep: waits for so many seconds.
        patience_s: how long `stop` lets the machines save a checkpoint, beside the time that writing it takes.
    """

    home: Path
    inner: Edge | None = None
    tell: Tell = field(default=lambda _: None)
    accept: Accept | None = None
    clock: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep
    patience_s: float = _STOP_PATIENCE_S
    _polling: dict[Path, Polling] = field(default_factory=dict, repr=False, compare=False)

    def start(self, spec: RunSpec, run_dir: Path, environment: Mapping[str, str]) -> RunHandle:
        """Rent what the folder's order says, and tell the machines to begin.

        Args:
            spec: what to run; its workers are put into the order that their machines' addresses come to have.
            run_dir: holds the order and the bundle.
            environment: of this process; none of it is sent anywhere.

        Raises:
            CloudRefused: it cannot be had. Nothing is left.
        """
        order = Order.load(run_dir / ORDER_FILE).of_run(spec)
        order.save(run_dir / ORDER_FILE)
        loop = self._loop(order, run_dir)
        watcher, edge = loop.watcher, loop.edge
        generation = watcher.next_generation()
        renter = Renter(
            edge=edge,
            sleep=self.sleep,
            tell=self.tell,
            accept=self.accept,
            made=partial(self._made, run_dir),
            clock=self.clock,
        )
        rented = renter.rent(
            order,
            spec,
            self._contents(run_dir),
            (run_dir / BUNDLE_FILE).read_bytes(),
            generation=generation,
            resume_from=latest_checkpoint(edge, order) if generation else None,
        )
        write_spec(run_dir, rented.spec)
        state = watcher.begin(rented.assigned, rented.zone, ends_outside=rented.ends_outside)
        self._let_extend(loop, state)
        return RunHandle(run_dir=run_dir)

    def _let_extend(self, loop: Loop, state: ClusterState) -> None:
        """Tell the machines of a new run by what they extend their lease where nobody follows it from here on."""
        renewal = renewal_of(loop.order, state, self.clock())
        try:
            found = None if renewal is None else read_lease(loop.edge, loop.order)
            if found is not None and not found[0].wishes_end:
                lease, tag = found
                tagged = state.model_copy(update={"lease_tag": tag})
                loop.extend(tagged, lease.end_s, lease.stop_training_s, renewal)
        except CloudRefused as refused:
            self.tell(f"{refused.message} {refused.hint or ''} Its machines extend nothing until somebody looks at it.")

    def poll(self, handle: RunHandle) -> RunStatus:
        """How the run is. Asks the cloud as often as is worth it, and answers from the folder in between.

        A network or a login that is gone for a while is no reason to end a run: its machines go on until their lease
        ends, and what was seen last is answered.
        """
        polling = self._polling.setdefault(handle.run_dir, Polling())
        try:
            return self.look(handle)
        except CloudRefused as refused:
            polling.after(self.clock(), news=False)
            if refused.message != polling.said:
                polling.said = refused.message
                self.tell(
                    f"{refused.message} {refused.hint or ''} The run goes on; nobody grants it more time meanwhile."
                )
            return known(handle.run_dir)

    def look(self, handle: RunHandle) -> RunStatus:
        """The same, but whoever asks is told when the cloud does not answer.

        Raises:
            CloudRefused: it does not.
        """
        run_dir = handle.run_dir
        if not (run_dir / ORDER_FILE).exists():
            return RunStatus(state=RunState.FAILED, reason="nothing was rented")
        loop = self._opened(handle)
        state = loop.watcher.last()
        polling = self._polling.setdefault(run_dir, Polling())
        if not state.cleared and state.machines and self.clock() >= polling.next_s:
            before = (state.machines, _size(run_dir / EVENTS_FILE))
            state = loop.settle(self._priced(loop, loop.watcher.look(), polling))
            polling.after(self.clock(), news=before != (state.machines, _size(run_dir / EVENTS_FILE)))
        return judged(run_dir, state)

    def stop(self, handle: RunHandle) -> None:
        """Let the machines save a checkpoint, end them, and remove everything. Idempotent.

        Nothing of it waits for what machines have written: that is read last, and where it cannot be, it is told.
        """
        run_dir = handle.run_dir
        if not (run_dir / ORDER_FILE).exists():
            return
        loop = self._opened(handle)
        order, watcher = loop.order, loop.watcher
        try:
            state = watcher.last()
        except BadInput as damaged:
            self.tell(f"{damaged.message} Whatever carries the name of {order.run_id} is removed.")
            state = ClusterState(time_s=self.clock())
        if state.cleared:
            return
        if state.alive:
            try:
                wished = {"stop_wished_s": self.clock(), "stop_reason": "stopped by hand"}
                state = loop.act(Stop(state=state.model_copy(update=wished)))
                state = self._until_ended(watcher, watcher.machines_now(state))
            except CloudRefused as refused:
                self.tell(f"{refused.message} {refused.hint or ''} The machines end now, without a last checkpoint.")
        loop.clear(state)

    def replace(self, handle: RunHandle, host: str) -> None:
        """End a host's machine. The next look finds it lost: the others go on, and another one is asked for.

        Raises:
            BadInput: no machine of the run is that host now.
            CloudRefused: the cloud does not answer.
        """
        loop = self._opened(handle)
        state = loop.watcher.last()
        ids = [machine.id for machine in state.alive if machine.host == host]
        if not ids or state.stop_wished_s is not None:
            raise BadInput(f"no machine of {loop.order.run_id} is {host} now.", hint="look at it with `hetopt status`")
        Remover(edge=loop.edge, sleep=self.sleep).end_machines(ids)
        self._look_at_once(handle)

    def move(self, handle: RunHandle, needed_s: float) -> None:
        """Have machines that nobody takes back in the place of those on spot. The next looks do it (`Loop`).

        Raises:
            BadInput: it is moving already, or it is over.
            BudgetStop: the budget does not pay for that.
        """
        loop = self._opened(handle)
        loop.watcher.save(moved(loop.order, loop.watcher.last(), needed_s, self.clock()).state)
        self._look_at_once(handle)

    def add(self, handle: RunHandle, host: str, machines: int, needed_s: float) -> None:
        """Have more machines like that of a host. The next looks rent them, and let them join (`Loop`).

        More machines spend a budget in less time: before they are asked for, the lease is shortened to what the budget
        pays for with them.

        Raises:
            BadInput: it has no such host, or it is over.
            BudgetStop: the budget does not pay for that.
            CloudRefused: the cloud does not answer.
        """
        loop = self._opened(handle)
        spec = read_spec(handle.run_dir)
        larger = enlarged(loop.order, loop.watcher.last(), spec, host, machines, needed_s, self.clock())
        if self._take_on(loop, larger):
            loop.edge(calls.order_call(larger.order))
            larger.order.save(handle.run_dir / ORDER_FILE)
            self._look_at_once(handle)

    def pools(self, handle: RunHandle) -> Pools | None:
        """What the run's machines cost here and in other zones; None while some come or go."""
        loop = self._opened(handle)
        return pools_of(loop.order, loop.watcher.last(), host_names(read_spec(handle.run_dir)), self.clock())

    def switch(self, handle: RunHandle, zone: str, needed_s: float) -> None:
        """Have the same machines in another zone. The next looks rent them, and let them take over (`Loop`).

        Two clusters spend a budget in less time: before the second is asked for, the lease is shortened to what the
        budget pays for beside it.

        Raises:
            BadInput: it cannot leave for there now.
            BudgetStop: the budget does not pay for both meanwhile.
            CloudRefused: the cloud does not answer.
        """
        loop = self._opened(handle)
        hosts = host_names(read_spec(handle.run_dir))
        if self._take_on(loop, switched(loop.order, loop.watcher.last(), hosts, zone, needed_s, self.clock())):
            self._look_at_once(handle)

    def _take_on(self, loop: Loop, change: Change) -> bool:
        """Shorten the lease to what a change leaves; not where somebody else has said something else meanwhile."""
        loop = replace(loop, watcher=replace(loop.watcher, order=change.order))
        state = loop.extend(change.state, change.end_s, change.stop_training_s)
        return state.lease_end_s == change.end_s

    def _opened(self, handle: RunHandle) -> Loop:
        return self._loop(Order.load(handle.run_dir / ORDER_FILE), handle.run_dir)

    def _look_at_once(self, handle: RunHandle) -> None:
        self._polling.setdefault(handle.run_dir, Polling()).next_s = self.clock()

    def _priced(self, loop: Loop, state: ClusterState, polling: Polling) -> ClusterState:
        """Machines on spot are billed at the prices of now. Where nobody tells these, at those that were told last."""
        try:
            return loop.billed(state)
        except CloudRefused as refused:
            state = state.model_copy(update={"prices_asked_s": self.clock()})
            if refused.message != polling.said_of_prices:
                polling.said_of_prices = refused.message
                self.tell(f"{refused.message} {refused.hint or ''} {PRICES_HOLD}")
        loop.watcher.save(state)
        return state

    def _until_ended(self, watcher: Watcher, state: ClusterState) -> ClusterState:
        """Wait for machines that save a checkpoint. Those that never began have none to save."""
        began = any(machine.heartbeat_s is not None for machine in state.alive) or _size(watcher.run_dir / EVENTS_FILE)
        if not began:
            return state
        deadline_s, polling = self.clock() + watcher.order.checkpoint_s + self.patience_s, Polling()
        while state.alive and self.clock() < deadline_s:
            self.sleep(polling.wait_s)
            polling.after(self.clock(), news=False)
            state = watcher.machines_now(state)
        return state

    def _contents(self, run_dir: Path) -> dict[str, bytes]:
        """What other terminals need to look after the run."""
        names = (PLAN_OBJECT, ORDER_FILE)
        return {name: (run_dir / name).read_bytes() for name in names if (run_dir / name).exists()}

    def _made(self, run_dir: Path) -> Made:
        """What the ledger knows to be there."""
        return made(read_ledger(run_dir / LEDGER_FILE), self.clock())

    def _loop(self, order: Order, run_dir: Path) -> Loop:
        edge = connect_run(order.region, run_dir, self.home, self.inner, clock=self.clock)
        return Loop(
            watcher=Watcher(edge=edge, order=order, run_dir=run_dir, clock=self.clock),
            sleep=self.sleep,
            tell=self.tell,
            patience_s=self.patience_s,
            made=partial(self._made, run_dir),
        )


def fleets_of(run_dir: Path) -> list[str]:
    """The fleets that a run's ledger knows."""
    return recorded_ids(read_ledger(run_dir / LEDGER_FILE), "fleet-")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
