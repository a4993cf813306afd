"""The one loop that looks after a run: observe, decide (`reconcile`), record, act, record.

Whatever ends the process in between, the next one reads what was meant and goes on with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hetopt.backends.ec2 import facts
from hetopt.backends.ec2.protocol import Latest, Renewal
from hetopt.backends.ec2.renter import calls
from hetopt.backends.ec2.renter.cluster_state import ClusterState
from hetopt.backends.ec2.renter.errors import ApiRefused, if_there
from hetopt.backends.ec2.renter.ledger import Made
from hetopt.backends.ec2.renter.order import Order
from hetopt.backends.ec2.renter.placement import placement_json, places_of, ranked_spec
from hetopt.backends.ec2.renter.reconcile import (
    ASK_AGAIN_S,
    Action,
    Clear,
    End,
    Extend,
    Note,
    Observed,
    Pause,
    Place,
    Rent,
    Stop,
    must_end,
    reconcile,
)
from hetopt.backends.ec2.renter.removal import Remover
from hetopt.backends.ec2.renter.renting import Renter, Tell
from hetopt.backends.ec2.renter.request import Edge
from hetopt.backends.ec2.renter.run_status import has_failed, is_finished, stopped_s, why_failed
from hetopt.backends.ec2.renter.spot_pools import are_due, billed_from_s, price_request, rebilled, remember, spot_types
from hetopt.backends.ec2.renter.watch import Watcher
from hetopt.core.budget_law import SHUTDOWN_S
from hetopt.core.errors import BadInput, CloudRefused, HetoptError
from hetopt.core.nodes import host_names
from hetopt.core.run_folder import LATEST_OBJECT, read_spec, write_spec
from hetopt.core.run_spec import RunSpec
from hetopt.core.run_status import last_events

PRICES_HOLD = "The prices that were seen last are taken to hold."

_MOST_ROUNDS = 16
"""Of decisions upon one look: far more than any run needs."""


@dataclass(frozen=True, kw_only=True)
class Loop:
    """Looks after one run.

    Attributes:
        watcher: observes, and records.
        sleep: waits for so many seconds.
        tell: says what goes on.
        patience_s: how long machines may take to end by themselves, beside the time that their checkpoint takes.
        made: what the run's ledger knows to be there.
    """

    watcher: Watcher
    sleep: Callable[[float], None]
    tell: Tell
    patience_s: float
    made: Callable[[], Made]

    @property
    def order(self) -> Order:
        """What was rented."""
        return self.watcher.order

    @property
    def edge(self) -> Edge:
        """Carries out calls."""
        return self.watcher.edge

    @property
    def run_dir(self) -> Path:
        """The run's folder here."""
        return self.watcher.run_dir

    def settle(self, state: ClusterState) -> ClusterState:
        """Do whatever a look asks for, until nothing is left to do before the next.

        Args:
            state: as it was just seen.

        Raises:
            CloudRefused: the cloud does not answer, or too little is left to go on. The next look tries again.
        """
        for _ in range(_MOST_ROUNDS):
            before, now_s = state, self.watcher.clock()
            try:
                observed = self._observed(state, now_s)
            except BadInput:
                # What ends a run in time needs none of its folder.
                ending = must_end(self.order, state, now_s, patience_s=self.patience_s)
                if ending is None:
                    raise
                return self.act(ending)
            actions = reconcile(self.order, observed, now_s, patience_s=self.patience_s)
            for action in actions:
                state = self.act(action)
            if state == before or any(isinstance(action, Clear) for action in actions):
                break
        return state

    def _observed(self, state: ClusterState, now_s: float) -> Observed:
        events = last_events(self.run_dir)
        return Observed(
            state=state,
            spec=read_spec(self.run_dir),
            stopped_s=stopped_s(events),
            is_finished=is_finished(events),
            has_failed=has_failed(self.order, events, now_s),
        )

    def act(self, action: Action) -> ClusterState:
        """Carry out one action; answers what was recorded.

        Raises:
            CloudRefused: it cannot be carried out.
        """
        state = action.state
        said = action.say
        if isinstance(action, Note | Clear) and action.unbooted:
            said = f"{why_failed(self.run_dir, action.unbooted)}. {action.say}"
        if said is not None:
            self.tell(said)
        match action:
            case Clear():
                return self.clear(state, reason=said)
            case Rent():
                return self._rent(action)
            case Extend():
                return self.extend(state, action.end_s, action.stop_training_s, action.renewal)
            case Stop():
                self.edge(calls.stop_call(self.order, state.lease_end_s or self.watcher.clock()))
            case End():
                Remover(edge=self.edge, sleep=self.sleep).end_machines(action.ids)
            case Pause():
                self._tell_places(state, read_spec(self.run_dir), pauses=True)
            case Place():
                state = self._outlive(state, state.lease_end_s)
                state = state.model_copy(update={"resume_from": latest_checkpoint(self.edge, self.order)})
                write_spec(self.run_dir, self._tell_places(state, action.spec))
        self.watcher.save(state)
        return state

    def extend(
        self, state: ClusterState, end_s: float, stop_training_s: float, renewal: Renewal | None = None
    ) -> ClusterState:
        """Let the machines live until then, unless somebody else has said something else meanwhile.

        Args:
            state: as it was seen last.
            end_s: until when they live, seconds since the epoch.
            stop_training_s: until when they train.
            renewal: by what they extend that themselves; None: not by themselves.
        """
        grows = state.lease_end_s is None or end_s >= state.lease_end_s
        if grows:
            state = self._outlive(state, end_s)
        if renewal is not None and self._ends_outside(state):
            outside_s = min(one.ends_outside_s or 0.0 for one in state.alive)
            renewal = renewal.model_copy(update={"latest_end_s": max(0.0, outside_s - SHUTDOWN_S)})
        call = calls.lease_call(self.order, end_s, stop_training_s, over=state.lease_tag, renewal=renewal)
        try:
            answer = self.edge(call)
        except ApiRefused as refused:
            if refused.code == facts.WRITTEN_MEANWHILE.value:
                return state  # the next look reads what it was
            raise
        granted = state.model_copy(
            update={"lease_end_s": end_s, "lease_tag": answer["ETag"], "lease_renews": renewal is not None}
        )
        self.watcher.save(granted)
        return granted if grows else self._outlive(granted, end_s)

    def _ends_outside(self, state: ClusterState) -> bool:
        return self.order.end_role is not None and state.ends_outside

    def _outlive(self, state: ClusterState, lease_end_s: float | None) -> ClusterState:
        """Have the account end machines with a place later than their lease: before that grows, after it has shrunk.

        Each move is a call for each machine, so that they are moved when half of the slack is used up.

        Raises:
            CloudRefused: it may end them sooner, so that their lease must not grow.
        """
        first_s = self.order.created_s + self.order.lifetime_s
        ends_s = first_s if lease_end_s is None else lease_end_s
        outside_s = self.order.outside_end_s(ends_s)
        soonest_s = (outside_s + ends_s + SHUTDOWN_S) / 2
        due = [
            one
            for one in state.serving
            if one.ends_outside_s is None or not soonest_s <= one.ends_outside_s <= math.ceil(outside_s)
        ]
        if not due or not self._ends_outside(state):
            return state
        ends = self._renter().end_later(self.order, [one.id for one in due], outside_s)
        moved = [
            one.model_copy(update={"ends_outside_s": outside_s if ends else None}) if one in due else one
            for one in state.machines
        ]
        state = state.model_copy(update={"machines": tuple(moved), "ends_outside": ends})
        self.watcher.save(state)
        return state

    def _renter(self) -> Renter:
        return Renter(edge=self.edge, sleep=self.sleep, tell=self.tell, clock=self.watcher.clock)

    def billed(self, state: ClusterState) -> ClusterState:
        """Machines on spot are billed at what their pools have cost since the last time, if that is to be asked for.

        Raises:
            CloudRefused: nobody tells: they stay billed at the prices that were told last.
        """
        order, now_s = self.order, self.watcher.clock()
        if not are_due(order, state, now_s):
            return state
        history = self.edge(price_request(spot_types(order), billed_from_s(order, state)))
        state = rebilled(order, state, history, now_s)
        self.watcher.save(state)
        return state

    def clear(self, state: ClusterState, reason: str | None = None) -> ClusterState:
        """Remove everything that is left of the run, then read what its machines wrote last.

        Args:
            state: as it was seen last.
            reason: why it ends; absent: that is known.

        Raises:
            CloudRefused: something stayed.
        """
        if reason is not None:
            state = state.model_copy(update={"stop_reason": reason})
            self.watcher.save(state)
        Remover(edge=self.edge, sleep=self.sleep, made=self.made()).remove_run(self.order.run_id)
        try:
            state = self.watcher.look()
        except (HetoptError, OSError, ValueError) as error:
            self.tell(f"What the machines of {self.order.run_id} wrote last could not be read: {error}")
            state = self.watcher.machines_now(state)
        state = state.model_copy(update={"cleared": not state.alive})
        self.watcher.save(state)
        try:
            state = self.billed(state)  # nobody looks at it again
        except CloudRefused as refused:
            self.tell(f"{refused.message} {refused.hint or ''} {PRICES_HOLD}")
        if state.cleared:
            try:
                remember(state, self.order, self.run_dir)
            except (BadInput, OSError) as error:  # the run ends all the same
                self.tell(f"What this run has seen of its spot pools is not kept: {error}")
        return state

    def _rent(self, action: Rent) -> ClusterState:
        """Ask for machines. Before anything is rented: whatever ends this process, the next ask has other tokens."""
        state, zone = action.state, self.order.zone(action.zone)
        self.watcher.save(state)
        try:
            granted, missing = self._renter().ask(
                self.order, action.roles, zone, ask=state.asks, end_s=state.lease_end_s, together=action.together
            )
        except CloudRefused as refused:
            if not action.together:
                raise
            self.tell(f"{refused.message} {refused.hint or ''}")
            return state
        if missing:
            again = "" if action.together else f"; it is asked for again in {ASK_AGAIN_S:.0f} s"
            self.tell(f"there is no capacity for {', '.join(missing)}{again}")
        new = self.watcher.granted(granted, zone, state, on_demand=state.on_demand, duty="waits")
        state = state.model_copy(update={"machines": (*state.machines, *new)})
        self.watcher.save(state)
        return state

    def _tell_places(self, state: ClusterState, spec: RunSpec, *, pauses: bool = False) -> RunSpec:
        """Tell the machines that serve who is who; answers the run as they rank its workers."""
        ids = {machine.host: machine.id for machine in state.serving}
        hosts = host_names(spec)
        (found,) = self._renter().machines(self.order, [[ids[host] for host in hosts]])
        places = places_of(dict(zip(hosts, found, strict=True)))
        ranked = ranked_spec(spec, places.values())
        body = placement_json(ranked, places, state.generation, state.resume_from, pauses=pauses)
        self.edge(calls.placement_call(self.order, body))
        return ranked


def latest_checkpoint(edge: Edge, order: Order) -> str | None:
    """The newest checkpoint that is complete; None where there is none yet."""
    answer = if_there(edge, calls.get_object(order, f"{order.prefix}/{LATEST_OBJECT}"))
    latest = None if answer is None else Latest.of(answer["Body"])
    return None if latest is None else latest.checkpoint
