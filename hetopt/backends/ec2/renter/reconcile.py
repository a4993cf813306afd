"""The next action on a run's machines: `reconcile` compares what they should be with what they are. Pure.

Nothing waits for a machine that is not there yet. The survivors of a loss share the batch among themselves: from memory
where workers can and the first host is there, and a machine in the place of a lost one joins them as it comes; else
from the newest checkpoint, and once new machines live, all save a checkpoint at one step and go on together. A machine
that no host wants trains on until the one that relieves it can take over.

Each action carries the record of the run that is to be kept with it: `launcher.Loop` observes, asks for the next
action, records, acts, records, and asks again until there is none. What is wanted is kept beside what was seen
(`ClusterState`), so that a process which dies is followed by one that wants the same:

    recover    the same hosts: one whose machine was lost has none now
    move       hosts on demand: no machine on spot fits them (`moved`)
    end        no hosts for machines that are not placed yet
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hetopt.backends.backend import MOST_IDLE
from hetopt.backends.ec2.renter.order import (
    ClusterState,
    MachineState,
    Order,
    Role,
    failed,
    hopeless_hosts,
    worst_usd_per_hour,
)
from hetopt.backends.host.protocol import placed_on
from hetopt.core import budget_law
from hetopt.core.budget_law import HEARTBEAT_S
from hetopt.core.errors import BadInput, BudgetStop, CloudRefused
from hetopt.core.formatting import usd
from hetopt.core.run_spec import RunSpec, host_names


def wanted_hosts(order: Order, state: ClusterState) -> list[str]:
    """Return the hosts that a run should have: all hosts of its order that are not given up."""
    hosts = dict.fromkeys(worker.host for worker in order.workers)
    return [host for host in hosts if host not in state.given_up]


def fits(state: ClusterState, host: str, machine: MachineState) -> bool:
    """Return whether a living machine serves, or waits to serve, as ``host``; in a run that moves, only on demand."""
    here = machine.alive and machine.duty != "relieved" and machine.host == host
    return here and (machine.on_demand or not state.on_demand)


def left_usd(order: Order, state: ClusterState, now_s: float) -> float:
    """Return the USD of the budget left for machines, less fixed costs and what a move still to come may cost.

    Negative: more was spent.

    Args:
        order: order of the run.
        state: its last look.
        now_s: seconds since the epoch.
    """
    move_usd = 0.0 if state.has_moved else max(0.0, order.move_usd - state.spent_usd(now_s, state.waiting))
    return order.budget_usd - order.fixed_usd - move_usd - state.spent_usd(now_s)


def lease_end_s(order: Order, state: ClusterState, now_s: float) -> float:
    """Return when machines must shut down (seconds since the epoch) for the budget to pay even the worst prices.

    Never later than the order's latest end.

    Args:
        order: order of the run.
        state: its last look.
        now_s: seconds since the epoch.
    """
    worst = worst_usd_per_hour(order.roles, order.zones, on_demand=state.on_demand)
    return min(budget_law.end_s(now_s, left_usd(order, state, now_s), worst), order.latest_end_s)


def moved(order: Order, state: ClusterState, needed_s: float, now_s: float) -> ClusterState:
    """Return the cluster state of a run that moves: on-demand machines are wanted for all hosts from now on.

    Args:
        order: order of the run.
        state: its last look.
        needed_s: seconds from now to its end.
        now_s: seconds since the epoch.

    Raises:
        BadInput: the run is moving already, over, being stopped, or not on spot.
        BudgetStop: the budget does not pay on-demand machines for ``needed_s``.
    """
    if state.on_demand or not state.alive or state.stop_wished_s is not None or not order.has_spot:
        raise BadInput(
            f"{order.run_id} cannot move: it is over, moving already, or not on spot.",
            hint="look at it with `hetopt status`",
        )
    after = state.model_copy(update={"on_demand": True, "asked_s": None})
    if not order.move_usd or lease_end_s(order, after, now_s) < now_s + needed_s:
        raise BudgetStop(
            f"the budget of {usd(order.budget_usd)} does not pay for on-demand machines until the end of "
            f"{order.run_id}, so that it stays on spot; its deadline may pass.",
            hint="resume it with a higher `budget_usd`",
        )
    return after


ASK_AGAIN_S = 300.0
"""Seconds after which a pool that had nothing is asked again: outages last for minutes or for hours."""

PAUSE_PATIENCE_S = 300.0
"""Seconds after which machines that have not saved their checkpoint are told their new places all the same."""

LOSSES_SHOW_S = 180.0
"""A lost machine shows within so long; a run that failed without a loss until then failed by itself."""

LEASE_GROWS_S = 60.0
"""Least seconds by which a lease is extended; it is not written anew for less."""


@dataclass(frozen=True, kw_only=True)
class Observed:
    """A run as it was last observed: machines, specification, and how its events say that it goes.

    Attributes:
        state: its machines, and what is wanted of them.
        spec: the run as it was told to them last.
        stepped_s: when a step was logged last, seconds since the epoch; None: none is in the end of the log.
        stopped_s: when training last stopped with a checkpoint, seconds since the epoch; None: it goes on.
        is_finished: whether its events say that it has reached its end.
        failed_s: when it failed by itself, seconds since the epoch, by its events; None: it did not.
    """

    state: ClusterState
    spec: RunSpec
    stepped_s: float | None = None
    stopped_s: float | None = None
    is_finished: bool = False
    failed_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Action:
    """The action that only records the cluster state, and the base of those that ask something of AWS.

    Attributes:
        state: cluster state to record with the action.
        say: sentence that people are told; None: nothing.
        unbooted: machines whose failure is the reason; their last words are told, too.
    """

    state: ClusterState
    say: str | None = None
    unbooted: tuple[MachineState, ...] = ()


@dataclass(frozen=True, kw_only=True)
class End(Action):
    """The action that ends machines by their ids.

    Attributes:
        ids: instance ids.
    """

    ids: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Rent(Action):
    """The action that rents machines for roles, which then wait for their places. The state is saved before that.

    Attributes:
        roles: fleets, each with the hosts that lack a machine.
    """

    roles: tuple[Role, ...]


@dataclass(frozen=True, kw_only=True)
class Announce(Action):
    """The action that tells machines which hosts are present, in the same generation; the state is saved after.

    Attributes:
        pauses: whether machines are to save a checkpoint, and to wait for the next generation.
    """

    pauses: bool = False


@dataclass(frozen=True, kw_only=True)
class Place(Action):
    """The action that begins the next generation on serving machines, from the newest checkpoint; state saved after.

    Attributes:
        spec: the run on these machines.
    """

    spec: RunSpec


@dataclass(frozen=True, kw_only=True)
class Extend(Action):
    """The action that lets the machines live until ``end_s``, seconds since the epoch.

    Attributes:
        end_s: end of the new lease, seconds since the epoch.
    """

    end_s: float


@dataclass(frozen=True, kw_only=True)
class Stop(Action):
    """The action that has the machines save a checkpoint and end. The state is saved once they were told."""


@dataclass(frozen=True, kw_only=True)
class Clear(Action):
    """The action that removes everything that is left of the run."""


def reconcile(order: Order, observed: Observed, now_s: float, *, patience_s: float) -> Action | None:
    """Return the next action on a run's machines; None: all is as it should be, or must be waited for. Pure.

    The same arguments give the same action. After it was carried out, and kept in the state, it is asked again.

    Args:
        order: what was rented, and the budget for it.
        observed: the run as it was seen last, and what is wanted of it.
        now_s: seconds since the epoch.
        patience_s: seconds that machines may take to end by themselves, beside the time of their checkpoint.

    Raises:
        CloudRefused: the machines that are left cannot hold the batch.
    """
    state = observed.state
    if not state.alive:
        return None if state.cleared else Clear(state=state)
    if state.stop_wished_s is not None:
        late = now_s > state.stop_wished_s + order.checkpoint_s + patience_s
        return Clear(state=state) if late else None
    end_s = lease_end_s(order, state, now_s)
    # What is decided now must hold until the next look.
    if now_s + HEARTBEAT_S >= end_s - order.checkpoint_s:
        reason = f"the budget of {usd(order.budget_usd)} is reached"
        return Stop(state=_with(state, stop_wished_s=now_s, stop_reason=reason))
    # Those that wait would take over from machines that were all lost.
    if observed.failed_s is not None and now_s - observed.failed_s > LOSSES_SHOW_S and not state.waiting:
        return Clear(state=state)
    change = _end_relieved(state, now_s) or _change(order, observed, now_s)
    if isinstance(change, Rent) and state.lease_end_s is not None and end_s + 1.0 < state.lease_end_s:
        # On demand machines cost more than those for which the lease was written, which is shortened before they come.
        return Extend(state=state, end_s=end_s)
    if change is None and (state.lease_end_s is None or end_s > state.lease_end_s + LEASE_GROWS_S):
        return Extend(state=state, end_s=end_s)
    return change


def _with(state: ClusterState, **changes: Any) -> ClusterState:
    return state.model_copy(update=changes)


def _end_relieved(state: ClusterState, now_s: float) -> End | None:
    """Return the action that ends machines without a place, once the others were seen after they were told theirs.

    Else None.
    """
    ids = tuple(
        machine.id
        for machine in state.alive
        if machine.duty == "relieved"
        and state.placed_s < state.time_s
        and (machine.end_asked_s is None or machine.end_asked_s < state.time_s)
    )
    return End(state=state.with_machines(ids, end_asked_s=now_s), ids=ids) if ids else None


def _change(order: Order, observed: Observed, now_s: float) -> Action | None:
    """Return the next action towards the wanted cluster; None: none can be taken now.

    Raises:
        CloudRefused: the hosts that are left cannot hold the batch.
    """
    state = observed.state
    there = {machine.host for machine in state.serving}
    lost = [host for host in host_names(observed.spec) if host not in there]
    hosts = [] if observed.is_finished else wanted_hosts(order, state)
    useless = [
        machine.id for machine in state.waiting if machine.host not in hosts or not fits(state, machine.host, machine)
    ]
    if useless:
        return Action(state=state.with_machines(useless, duty="relieved"))
    if observed.is_finished:
        return None
    if hopeless := hopeless_hosts(order, state, hosts):
        return Action(
            state=_with(state, given_up=(*state.given_up, *hopeless)),
            unbooted=_unbooted(order, state, hopeless),
            say=f"That was tried {MOST_IDLE} times: no machine is rented for {', '.join(hopeless)} again",
        )
    news = [host for host in lost if host not in state.missed]
    if state.serving and (news or state.missed_s):
        if not goes_on_from_memory(observed, lost, now_s):
            return _go_on_without(order, observed, lost, now_s)
        if news:
            after = _with(state, missed=tuple(lost), missed_s=now_s, asked_s=None)
            return Announce(state=after, say=f"lost {', '.join(news)}; the others go on without")
    if state.paused_s is not None and not state.waiting and not lost:
        # Whom all have paused for is lost or sent away, or has a place that it was not told of.
        return _place(order, state, observed.spec, now_s)
    if observed.spec.resumes or not state.serving:
        # Whoever joins a run that saves nothing would cost it all that it has done.
        return _rent(order, state, missing(order, observed, now_s), now_s) or _join(order, observed, now_s)
    return None


def _unbooted(order: Order, state: ClusterState, hosts: Collection[str]) -> tuple[MachineState, ...]:
    return tuple(machine for machine in failed(state.machines, order.life) if machine.host in hosts)


def missing(order: Order, observed: Observed, now_s: float) -> list[str]:
    """Return the hosts to rent machines for now, which have no living one; none within 5 minutes of the last ask.

    Where all machines that trained are lost at once, waiting ones go on without them first.

    Args:
        order: order of the run.
        observed: the run as it was seen last.
        now_s: seconds since the epoch.
    """
    state = observed.state
    if state.asked_s is not None and now_s < state.asked_s + ASK_AGAIN_S:
        return []
    lost = () if state.serving else host_names(observed.spec)
    return [
        host
        for host in wanted_hosts(order, state)
        if host not in lost and not any(fits(state, host, machine) for machine in state.alive)
    ]


def _rent(order: Order, state: ClusterState, hosts: Sequence[str], now_s: float) -> Rent | None:
    """Return the action that asks for machines for these hosts, as planned; None: no role has any of them."""
    asked = _with(state, asks=state.asks + 1, asked_s=now_s)
    market = {"market": "on-demand"} if state.on_demand else {}
    roles = [
        role.model_copy(update={"hosts": mine, **market})
        for role in order.roles
        if (mine := tuple(host for host in role.hosts if host in hosts))
    ]
    if not roles:
        return None
    how = "on demand" if state.on_demand else "again"
    return Rent(state=asked, roles=tuple(roles), say=f"asking for {', '.join(hosts)} {how}")


def goes_on_from_memory(observed: Observed, lost: Collection[str], now_s: float) -> bool:
    """Return whether workers go on from memory without the hosts ``lost``, as far as their steps show it by ``now_s``.

    False: they have to be placed again, from a checkpoint.

    Args:
        observed: the run as it was seen last.
        lost: hosts of this generation without a machine.
        now_s: seconds since the epoch.
    """
    state, stepped_s = observed.state, observed.stepped_s
    if not observed.spec.is_elastic or observed.spec.workers[0].host in lost or state.paused_s is not None:
        return False
    if stepped_s is None or stepped_s < state.placed_s or (observed.failed_s or 0.0) > state.placed_s:
        return False  # they have not begun, or have ended
    return stepped_s > state.missed_s or now_s < state.missed_s + PAUSE_PATIENCE_S


def _go_on_without(order: Order, observed: Observed, lost: Sequence[str], now_s: float) -> Action | None:
    """Return the action by which the hosts left go on; if they cannot hold the batch, they wait for what was lost.

    None: nothing is due in that wait.
    """
    news = f"lost {', '.join(lost)}; the others go on without"
    try:
        return _place(order, _with(observed.state, asked_s=None), observed.spec, now_s, say=news)
    except CloudRefused as refused:
        return _wait_for(order, observed, lost, refused, now_s)


def _wait_for(
    order: Order, observed: Observed, lost: Sequence[str], refused: CloudRefused, now_s: float
) -> Action | None:
    """Return the next action to replace lost machines of a run that cannot go on without them; None: none is due.

    That is `Clear`, which ends the run, if a lost host was given up; else `Rent`; else `Place` once a machine waits for
    each.

    Args:
        order: order of the run.
        observed: state of the run and its machines.
        lost: lost hosts.
        refused: why the others cannot go on; told with the action.
        now_s: present time, in seconds since the epoch.

    Raises:
        CloudRefused: even with waiting machines the hosts cannot hold the batch.
    """
    state = observed.state
    if given_up := [host for host in lost if host in state.given_up]:
        return Clear(state=state, say=refused.message, unbooted=_unbooted(order, state, given_up))
    hosts = [host for host in missing(order, observed, now_s) if host in lost]
    if rent := _rent(order, state, hosts, now_s):
        return replace(rent, say=f"{refused.message} {rent.say}")
    if not {machine.host for machine in state.waiting}.issuperset(lost):
        return None
    return _place(order, with_places(_with(state, asked_s=None), lost), observed.spec, now_s)


def _join(order: Order, observed: Observed, now_s: float) -> Action | None:
    """Return the next action by which machines that wait come to train; None: there are none, or the pause goes on.

    Machines that train pause first, until they have saved a checkpoint or `PAUSE_PATIENCE_S` are over. Nobody pauses
    where all of them are lost, or for hosts of the present placement that come late (``state.missed``).

    Raises:
        CloudRefused: the hosts cannot hold the batch.
    """
    state = observed.state
    new = {machine.host for machine in state.waiting if machine.heartbeat_s is not None}
    if not new:
        return None
    named, all_are_lost = ", ".join(sorted(new)), not state.serving
    back = set[str]() if all_are_lost else new.intersection(state.missed)
    if back:
        after = with_places(_with(state, missed=tuple(host for host in state.missed if host not in back)), back)
        return Announce(state=after, say=f"{', '.join(sorted(back))} joins")
    if state.paused_s is None and not all_are_lost:
        return Announce(state=_with(state, paused_s=now_s), pauses=True)
    saved = observed.stopped_s is not None and observed.stopped_s >= state.placed_s
    waited = state.paused_s is not None and now_s > state.paused_s + PAUSE_PATIENCE_S
    if not (all_are_lost or saved or waited):
        return None
    # Those that were to join or to relieve others who were all lost have nobody to wait for.
    after = with_places(_with(state, asked_s=None) if all_are_lost else state, new)
    news = f"all that trained are lost; {named} goes on" if all_are_lost else f"{named} joins"
    return _place(order, after, observed.spec, now_s, say=news)


def _place(order: Order, state: ClusterState, spec: RunSpec, now_s: float, say: str | None = None) -> Place:
    """Return the placement of the hosts that serve, who share the batch in proportion to what each began with.

    ``say`` None: nothing is told.

    Raises:
        CloudRefused: they cannot hold the batch.
    """
    there = {machine.host for machine in state.serving}
    placed = placed_on(spec.model_copy(update={"workers": order.workers}), there)
    missed = tuple(host for host in host_names(placed) if host not in there)
    after = _with(state, generation=state.generation + 1, placed_s=now_s, paused_s=None, missed=missed, missed_s=0.0)
    return Place(state=after, spec=placed, say=say)


def with_places(state: ClusterState, hosts: Collection[str]) -> ClusterState:
    """Return the cluster state in which waiting machines serve as ``hosts``, and their former machines are relieved."""
    new = {machine.host: machine.id for machine in state.waiting if machine.host in hosts}
    old = [machine.id for machine in state.serving if machine.host in new]
    return state.with_machines(old, duty="relieved").with_machines(new.values(), duty="serves")
