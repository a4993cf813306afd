"""Runs on EC2: the peer of the local and the rehearsal launcher. Everything it must know is in the run's folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from hetopt.backends.backend import Pools, RunHandle
from hetopt.backends.ec2.renter import calls
from hetopt.backends.ec2.renter.changing import Changed, enlarged, guard_of, moved, switched
from hetopt.backends.ec2.renter.cluster_state import ClusterState
from hetopt.backends.ec2.renter.errors import ApiRefused
from hetopt.backends.ec2.renter.ledger import LEDGER_FILE, Made, made, read_ledger, recorded_ids
from hetopt.backends.ec2.renter.order import ORDER_FILE, Order
from hetopt.backends.ec2.renter.placing import latest_checkpoint
from hetopt.backends.ec2.renter.pools import pools_of
from hetopt.backends.ec2.renter.recovery import CannotGoOn, Recovery
from hetopt.backends.ec2.renter.removal import Remover
from hetopt.backends.ec2.renter.renting import Accept, Renter, Tell
from hetopt.backends.ec2.renter.request import Edge
from hetopt.backends.ec2.renter.run_status import has_failed, is_finished, judged, known, stopped_s
from hetopt.backends.ec2.renter.session import connect_run
from hetopt.backends.ec2.renter.spot_prices import are_due, newest_prices, price_request, repriced, spot_types
from hetopt.backends.ec2.renter.watch import Watcher
from hetopt.core.bucket_traffic import HEARTBEAT_S
from hetopt.core.errors import BadInput, CloudRefused, HetoptError
from hetopt.core.events.log import EVENTS_FILE
from hetopt.core.nodes import host_names
from hetopt.core.run_folder import read_spec, write_spec
from hetopt.core.run_spec import RunSpec
from hetopt.core.run_status import RunState, RunStatus, last_events

BUNDLE_FILE = "bundle.tar.gz"
PLAN_OBJECT = "plan.json"

FIRST_LOOK_S = 2.0
SLOWEST_LOOK_S = HEARTBEAT_S
_SLOWER = 1.5
_LEASE_GROWS_S = 60.0
_STOP_PATIENCE_S = 120.0


@dataclass(kw_only=True)
class Pace:
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
    _paces: dict[Path, Pace] = field(default_factory=dict, repr=False, compare=False)

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
        edge = self._edge(order, run_dir)
        watcher = self._watcher(order, run_dir, edge)
        generation = watcher.next_generation()
        renter = Renter(
            edge=edge, sleep=self.sleep, tell=self.tell, accept=self.accept, made=partial(self._made, run_dir)
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
        watcher.begin(rented.seats, rented.zone)
        return RunHandle(run_dir=run_dir)

    def poll(self, handle: RunHandle) -> RunStatus:
        """How the run is. Asks the cloud as often as is worth it, and answers from the folder in between.

        A network or a login that is gone for a while is no reason to end a run: its machines go on until their lease
        ends, and what was seen last is answered.
        """
        pace = self._paces.setdefault(handle.run_dir, Pace())
        try:
            return self.look(handle)
        except CloudRefused as refused:
            pace.after(self.clock(), news=False)
            if refused.message != pace.said:
                pace.said = refused.message
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
        order = Order.load(run_dir / ORDER_FILE)
        watcher = self._watcher(order, run_dir, self._edge(order, run_dir))
        seen = watcher.last()
        pace = self._paces.setdefault(run_dir, Pace())
        if not seen.cleared and seen.machines and self.clock() >= pace.next_s:
            before = (seen.machines, _size(run_dir / EVENTS_FILE))
            seen = self._supervise(order, watcher, self._priced(order, watcher, watcher.look(), pace))
            pace.after(self.clock(), news=before != (seen.machines, _size(run_dir / EVENTS_FILE)))
        return judged(run_dir, seen)

    def stop(self, handle: RunHandle) -> None:
        """Let the machines save a checkpoint, end them, and remove everything. Idempotent.

        Nothing of it waits for what machines have written: that is read last, and where it cannot be, it is told.
        """
        run_dir = handle.run_dir
        if not (run_dir / ORDER_FILE).exists():
            return
        order, watcher = self._opened(handle)
        try:
            seen = watcher.last()
        except BadInput as damaged:
            self.tell(f"{damaged.message} Whatever carries the name of {order.run_id} is removed.")
            seen = ClusterState(time_s=self.clock())
        if seen.cleared:
            return
        if seen.alive:
            try:
                seen = self._wish_end(order, watcher, seen, "stopped by hand")
                seen = self._until_ended(order, watcher, watcher.machines_now(seen))
            except CloudRefused as refused:
                self.tell(f"{refused.message} {refused.hint or ''} The machines end now, without a last checkpoint.")
        self._clear(order, watcher, seen, run_dir)

    def replace(self, handle: RunHandle, host: str) -> None:
        """End a host's machine. The next look finds it lost: the others go on, and another one is asked for.

        Raises:
            BadInput: no machine of the run is that host now.
            CloudRefused: the cloud does not answer.
        """
        order, watcher = self._opened(handle)
        seen = watcher.last()
        ids = [machine.id for machine in seen.alive if machine.host == host]
        if not ids or seen.stop_wished_s is not None:
            raise BadInput(f"no machine of {order.run_id} is {host} now", hint="look at it with `hetopt status`")
        Remover(edge=watcher.edge, sleep=self.sleep).end_machines(ids)
        self._look_at_once(handle)

    def move(self, handle: RunHandle, needed_s: float) -> None:
        """Have machines that nobody takes back in the place of those on spot. The next looks do it (`Recovery`).

        Args:
            handle: of the run.
            needed_s: from now to its end.

        Raises:
            BadInput: it is moving already, or it is over.
            BudgetStop: the budget does not pay for that.
        """
        order, watcher = self._opened(handle)
        watcher.save(moved(order, watcher.last(), needed_s, self.clock()))
        self._look_at_once(handle)

    def add(self, handle: RunHandle, host: str, machines: int, needed_s: float) -> None:
        """Have more machines like that of a host. The next looks rent them, and let them join (`Recovery`).

        More machines spend a budget in less time: before they are asked for, the lease is shortened to what the budget
        pays for with them.

        Args:
            handle: of the run.
            host: whose machine and workers they are like.
            machines: how many.
            needed_s: from now to its end.

        Raises:
            BadInput: it has no such host, or it is over.
            BudgetStop: the budget does not pay for that.
            CloudRefused: the cloud does not answer.
        """
        order, watcher = self._opened(handle)
        larger = enlarged(order, watcher.last(), read_spec(handle.run_dir), host, machines, needed_s, self.clock())
        if self._take_on(watcher, larger):
            watcher.edge(calls.order_call(larger.order))
            larger.order.save(handle.run_dir / ORDER_FILE)
            self._look_at_once(handle)

    def pools(self, handle: RunHandle) -> Pools | None:
        """What the run's machines cost here and in other zones; None while some come or go."""
        order, watcher = self._opened(handle)
        return pools_of(order, watcher.last(), host_names(read_spec(handle.run_dir)), self.clock())

    def switch(self, handle: RunHandle, zone: str, needed_s: float) -> None:
        """Have the same machines in another zone. The next looks rent them, and let them take over (`ZoneSwitch`).

        Two clusters spend a budget in less time: before the second is asked for, the lease is shortened to what the
        budget pays for beside it.

        Args:
            handle: of the run.
            zone: where, by its name.
            needed_s: from now to its end.

        Raises:
            BadInput: it cannot leave for there now.
            BudgetStop: the budget does not pay for both meanwhile.
            CloudRefused: the cloud does not answer.
        """
        order, watcher = self._opened(handle)
        hosts = host_names(read_spec(handle.run_dir))
        if self._take_on(watcher, switched(order, watcher.last(), hosts, zone, needed_s, self.clock())):
            self._look_at_once(handle)

    def _take_on(self, watcher: Watcher, change: Changed) -> bool:
        """Shorten the lease to what a change leaves; not where somebody else has said something else meanwhile."""
        seen = self._grant(change.order, watcher, change.seen, change.end_s, change.stop_training_s)
        return seen.lease_end_s == change.end_s

    def _opened(self, handle: RunHandle) -> tuple[Order, Watcher]:
        order = Order.load(handle.run_dir / ORDER_FILE)
        return order, self._watcher(order, handle.run_dir, self._edge(order, handle.run_dir))

    def _look_at_once(self, handle: RunHandle) -> None:
        self._paces.setdefault(handle.run_dir, Pace()).next_s = self.clock()

    def _priced(self, order: Order, watcher: Watcher, seen: ClusterState, pace: Pace) -> ClusterState:
        """Machines on spot are billed at the prices of now. Where nobody tells these, at those that were told last."""
        now_s = self.clock()
        if not are_due(order, seen, now_s):
            return seen
        try:
            newest = newest_prices(watcher.edge(price_request(spot_types(order), now_s)))
            seen = repriced(order, seen, newest, now_s)
        except CloudRefused as refused:
            seen = seen.model_copy(update={"prices_asked_s": now_s})
            if refused.message != pace.said_of_prices:
                pace.said_of_prices = refused.message
                self.tell(f"{refused.message} {refused.hint or ''} The prices that were seen last are taken to hold.")
        watcher.save(seen)
        return seen

    def _supervise(self, order: Order, watcher: Watcher, seen: ClusterState) -> ClusterState:
        """What follows from a look: more time, an order to end, or the last tidying up."""
        if not seen.alive:
            return self._clear(order, watcher, seen, watcher.run_dir)
        now_s = self.clock()
        guard = guard_of(order, seen, now_s)
        spent = seen.spent_usd(now_s)
        end_s = min(guard.end_s(spent, now_s), order.latest_end_s)
        if seen.stop_wished_s is None and guard.decide(spent, now_s) == "stop":
            return self._wish_end(order, watcher, seen, f"the budget of ${order.budget_usd:.2f} is reached")
        if seen.stop_wished_s is not None:
            late_s = now_s - seen.stop_wished_s - order.checkpoint_s - self.patience_s
            return self._clear(order, watcher, seen, watcher.run_dir) if late_s > 0 else seen
        events = last_events(watcher.run_dir)
        # Those that wait would take over from machines that were all lost.
        if has_failed(order, events, now_s) and not seen.waiting:
            return self._clear(order, watcher, seen, watcher.run_dir)
        recovery = Recovery.of(
            watcher.edge, sleep=self.sleep, tell=self.tell, clock=self.clock, stopped_s=stopped_s(events)
        )
        try:
            seen = recovery.end(watcher, seen) if is_finished(events) else recovery.step(order, watcher, seen)
        except CannotGoOn as ended:
            self.tell(f"{ended.message} {ended.hint}")
            last = watcher.last().model_copy(update={"stop_reason": ended.message})
            watcher.save(last)
            return self._clear(order, watcher, last, watcher.run_dir)
        if seen.lease_end_s is None or end_s > seen.lease_end_s + _LEASE_GROWS_S:
            return self._grant(order, watcher, seen, end_s, guard.stop_training_s(end_s))
        return seen

    def _grant(
        self, order: Order, watcher: Watcher, seen: ClusterState, end_s: float, stop_training_s: float
    ) -> ClusterState:
        """Let the machines live longer, unless somebody else has said something else meanwhile."""
        try:
            answer = watcher.edge(calls.lease_call(order, end_s, stop_training_s, over=seen.lease_tag))
        except ApiRefused as refused:
            if refused.code == "PreconditionFailed":
                return seen  # the next look reads what it was
            raise
        granted = seen.model_copy(update={"lease_end_s": end_s, "lease_tag": answer["ETag"]})
        watcher.save(granted)
        return granted

    def _wish_end(self, order: Order, watcher: Watcher, seen: ClusterState, reason: str) -> ClusterState:
        watcher.edge(calls.stop_call(order, seen.lease_end_s or self.clock()))
        wished = seen.model_copy(update={"stop_wished_s": self.clock(), "stop_reason": reason})
        watcher.save(wished)
        return wished

    def _until_ended(self, order: Order, watcher: Watcher, seen: ClusterState) -> ClusterState:
        """Wait for machines that save a checkpoint. Those that never began have none to save."""
        began = any(machine.heartbeat_s is not None for machine in seen.alive) or _size(watcher.run_dir / EVENTS_FILE)
        if not began:
            return seen
        deadline_s, pace = self.clock() + order.checkpoint_s + self.patience_s, Pace()
        while seen.alive and self.clock() < deadline_s:
            self.sleep(pace.wait_s)
            pace.after(self.clock(), news=False)
            seen = watcher.machines_now(seen)
        return seen

    def _clear(self, order: Order, watcher: Watcher, seen: ClusterState, run_dir: Path) -> ClusterState:
        Remover(edge=watcher.edge, sleep=self.sleep, made=self._made(run_dir)).remove_run(order.run_id)
        seen = self._read_last(watcher, seen)
        seen = seen.model_copy(update={"cleared": not seen.alive})
        watcher.save(seen)
        if seen.cleared:
            self._remember(seen, order, run_dir)
        return seen

    def _read_last(self, watcher: Watcher, seen: ClusterState) -> ClusterState:
        """What the machines have written until their end; where that cannot be read, their ends alone count."""
        try:
            return watcher.look()
        except (HetoptError, OSError, ValueError) as error:
            self.tell(f"What the machines of {watcher.order.run_id} wrote last could not be read: {error}")
            return watcher.machines_now(seen)

    def _remember(self, seen: ClusterState, order: Order, run_dir: Path) -> None:
        """Keep what was seen of spot for the next plan. Where that fails, the run ends all the same."""
        from hetopt.backends.ec2.renter.observing import remember

        try:
            remember(seen, order, run_dir)
        except (BadInput, OSError) as error:
            self.tell(f"What this run has seen of its spot pools is not kept: {error}")

    def _contents(self, run_dir: Path) -> dict[str, bytes]:
        """What other terminals need to look after the run."""
        names = (PLAN_OBJECT, ORDER_FILE)
        return {name: (run_dir / name).read_bytes() for name in names if (run_dir / name).exists()}

    def _made(self, run_dir: Path) -> Made:
        """What the ledger knows to be there."""
        return made(read_ledger(run_dir / LEDGER_FILE), self.clock())

    def _edge(self, order: Order, run_dir: Path) -> Edge:
        return connect_run(order.region, run_dir, self.home, self.inner, clock=self.clock)

    def _watcher(self, order: Order, run_dir: Path, edge: Edge) -> Watcher:
        return Watcher(edge=edge, order=order, run_dir=run_dir, clock=self.clock)


def fleets_of(run_dir: Path) -> list[str]:
    """The fleets that a run's ledger knows."""
    return recorded_ids(read_ledger(run_dir / LEDGER_FILE), "fleet-")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
