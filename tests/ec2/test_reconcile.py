"""The laws of the one decision about a run's machines, on clouds that lose machines, have none, and are slow."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from hetopt.backends.ec2.renter.order import (
    BootImage,
    ClusterState,
    MachineState,
    Order,
    Rate,
    Role,
    Zone,
    worst_usd_per_hour,
)
from hetopt.backends.ec2.renter.reconcile import (
    Action,
    Announce,
    Clear,
    End,
    Extend,
    Observed,
    Place,
    Rent,
    Stop,
    fits,
    moved,
    reconcile,
    wanted_hosts,
)
from hetopt.core.errors import BadInput, BudgetStop, CloudRefused
from hetopt.core.run_spec import RunSpec, StopRule, WorkerSpec, host_names
from hetopt.optimizer.plan import Market

BEGAN_S = 1_000_000.0
PATIENCE_S = 120.0
HOSTS = ("h0", "h1", "h2")
BATCH = 48


def order_of(budget_usd: float = 60.0, *, third: Market = "on-demand") -> Order:
    """Two machines on spot and a third, in one of two zones."""
    rates = {
        "s": Rate(usd_per_hour=1.0, worst_usd_per_hour=1.5, on_demand_usd_per_hour=3.0),
        "d": Rate(usd_per_hour=2.0, worst_usd_per_hour=2.0, on_demand_usd_per_hour=2.0),
    }
    zones = tuple(
        Zone(name=name, zone_id=name, subnet_id=f"subnet-{name}", vpc_id="v", rates=rates) for name in ("a", "b")
    )
    roles = tuple(
        Role(name=kind, instance_types=(kind,), hosts=hosts, market=market, image_kind="cpu")
        for kind, hosts, market in (("s", HOSTS[:2], "spot"), ("d", HOSTS[2:], third))
    )
    return Order(
        run_id="a-run",
        hetopt_version="0.1.0",
        region="us-east-1",
        account_id="123456789012",
        owner="me",
        bucket="a-bucket",
        instance_profile="hetopt-node",
        volume_gb=30,
        extras_usd_per_hour=0.01,
        zones=zones,
        roles=roles,
        images={"cpu": BootImage(ami="ami-1", root_device="/dev/xvda")},
        bundle_sha256="0" * 64,
        created_s=BEGAN_S,
        budget_usd=budget_usd,
        fixed_usd=0.1,
        move_usd=4.0,
        checkpoint_s=30.0,
        lifetime_s=3600.0,
    )


@dataclass
class World:
    """A cloud as plain data: what was granted runs, until it is lost or ended; lists follow at the next look."""

    order: Order
    is_task: bool = False
    most: int | None = None
    empty: bool = False
    now_s: float = BEGAN_S
    stopped_s: float | None = None
    steps: bool = True
    finished: bool = False
    failed_s: float | None = None
    ended: set[str] = field(default_factory=set)
    granted: int = 0
    done: list[Action] = field(default_factory=list)
    over: bool = False

    def __post_init__(self) -> None:
        """All machines are there and train."""
        workers = tuple(
            WorkerSpec(
                host=host, type="t", local_batch_size=BATCH // len(HOSTS), max_local_batch_size=self.most, device="cpu"
            )
            for host in HOSTS
        )
        script = () if self.is_task else ("train.py",)
        self.spec = RunSpec(task="digits", script=script, workers=workers, stop=StopRule(max_steps=1))
        self.order = self.order.of_run(self.spec)
        self.state = ClusterState(time_s=self.now_s, zone="a", placed_s=self.now_s)
        machines = self.grant(self.order.roles, "a", duty="serves", heartbeat_s=self.now_s)
        self.state = self.state.model_copy(update={"machines": machines})

    def grant(self, roles: tuple[Role, ...], zone: str, **changes: Any) -> tuple[MachineState, ...]:
        made = []
        for role in roles:
            for host in role.hosts:
                self.granted += 1
                machine = MachineState(
                    id=f"i-{self.granted}",
                    host=host,
                    instance_type=role.instance_types[0],
                    state="running",
                    since_s=self.now_s,
                    zone=zone,
                    usd_per_hour=self.order.zone(zone).usd_per_hour(role.instance_types[0], role.market),
                    extras_usd_per_hour=0.01,
                    on_demand=role.market == "on-demand" or self.state.on_demand,
                )
                made.append(machine.model_copy(update=changes))
        return tuple(made)

    def look(self, seconds: float = 20.0) -> None:
        """Time passes, and what was ended is seen to have ended."""
        self.now_s += seconds
        for id_ in self.ended:
            self.change(id_, state="terminated", until_s=self.now_s, ending="stopped by us")
        self.ended.clear()
        self.state = self.state.model_copy(update={"time_s": self.now_s})

    def change(self, id_: str, **changes: Any) -> None:
        self.state = self.state.model_copy(
            update={
                "machines": tuple(
                    one.model_copy(update=changes) if one.id == id_ and one.alive else one
                    for one in self.state.machines
                )
            }
        )

    @property
    def observed(self) -> Observed:
        return Observed(
            state=self.state,
            spec=self.spec,
            stepped_s=self.now_s if self.steps else None,
            stopped_s=self.stopped_s,
            is_finished=self.finished,
            failed_s=self.failed_s,
        )

    def decide(self) -> list[Action]:
        action = reconcile(self.order, self.observed, self.now_s, patience_s=PATIENCE_S)
        return [] if action is None else [action]

    def settle(self) -> None:
        """As the loop does it; the laws hold after every action."""
        for _ in range(16):
            try:
                actions = self.decide()
            except CloudRefused:
                return  # too little is left to go on; the next look tries again
            assert actions == self.decide(), "the same arguments, the same actions"
            if not actions:
                self.check()
                return
            for action in actions:
                self.act(action)
                if self.over:
                    return
        raise AssertionError(f"no end of it: {self.done[-6:]}")

    def act(self, action: Action) -> None:
        self.done.append(action)
        before, self.state = self.state, action.state
        match action:
            case End(ids=ids):
                for machine in before.machines:
                    if machine.id in ids:
                        assert machine.alive
                        assert machine.duty == "relieved", "who trains or is waited for is never ended"
                        assert machine.id not in self.ended, "a request in flight is not repeated"
                assert set(ids) <= {machine.id for machine in before.machines}, "only what was granted"
                assert before.placed_s < self.now_s, "the others have been told, and seen since"
                self.ended |= set(ids)
            case Rent(roles=roles):
                self.check_rent(before, action)
                if not self.empty:
                    new = self.grant(roles, self.state.zone, duty="waits")
                    self.state = self.state.model_copy(update={"machines": (*self.state.machines, *new)})
            case Place(spec=spec):
                self.spec = spec
                assert self.state.generation == before.generation + 1
                assert spec.global_batch_size == BATCH, "the batch is that of the run, whoever is there"
                serving = Counter(machine.host for machine in self.state.serving)
                there = set(host_names(spec)) - set(self.state.missed)
                assert all(serving[host] == 1 for host in there), "each host is one machine"
                assert spec.workers[0].host in there, "the first host is there"
                assert len({machine.zone for machine in self.state.serving}) == 1, "nobody trains across zones"
            case Extend(end_s=end_s):
                worst = (
                    worst_usd_per_hour(self.order.roles, self.order.zones, on_demand=before.on_demand)
                    * (end_s - self.now_s)
                    / 3600
                )
                spent = self.state.spent_usd(self.now_s) + self.order.fixed_usd + worst
                assert spent <= self.order.budget_usd * (1 + 1e-9), "the budget is never exceeded"
                self.state = self.state.model_copy(update={"lease_end_s": end_s})
            case Clear():
                self.over = True
            case Announce():
                assert self.state.generation == before.generation
                missed = set(self.state.missed)
                assert missed <= set(host_names(self.spec)[1:]), "nobody goes on without the first host"
                assert not missed & {machine.host for machine in self.state.serving}

    def check_rent(self, before: ClusterState, rent: Rent) -> None:
        """Never more machines than are wanted."""
        hosts = [host for role in rent.roles for host in role.hosts]
        assert set(hosts) <= set(wanted_hosts(self.order, before))
        assert len(hosts) == len(set(hosts)) > 0
        lease_s = (before.lease_end_s or self.now_s) - self.now_s
        worst = (
            worst_usd_per_hour(self.order.roles, self.order.zones, on_demand=before.on_demand) * (lease_s - 1.0) / 3600
        )
        spent = before.spent_usd(self.now_s) + self.order.fixed_usd + worst
        assert spent <= self.order.budget_usd * (1 + 1e-9), "the lease is one that the new machines can be paid for"
        for host in hosts:
            assert not any(fits(before, host, machine) for machine in before.alive), "there is one already"
            assert host not in before.given_up

    def check(self) -> None:
        """What holds whenever nothing is left to do."""
        duties = Counter((machine.host, machine.duty) for machine in self.state.alive if machine.duty != "relieved")
        assert max(duties.values(), default=0) <= 1, "a host has one machine, and at most one that is to take over"
        changes = self.state.on_demand or not self.state.serving
        both = {host for host, duty in duties if duty == "waits"} & {host for host, duty in duties if duty == "serves"}
        assert changes or not both, "nobody is relieved without a reason"
        hosts = wanted_hosts(self.order, self.state)
        waiting = [] if self.finished else self.state.waiting
        assert all(one.host in hosts and fits(self.state, one.host, one) for one in waiting)
        idle = [one for one in self.state.alive if one.duty == "relieved" and one.id not in self.ended]
        if self.state.stop_wished_s is None:
            assert not idle or self.state.placed_s >= self.state.time_s, "who has no place any more is ended"


markets = st.sampled_from(["spot", "on-demand"])
happenings = st.lists(
    st.one_of(
        st.tuples(st.just("passes"), st.floats(5.0, 700.0)),
        st.tuples(st.sampled_from(["boots", "lost", "fails to boot"]), st.integers(0, 7)),
        st.tuples(st.sampled_from(["pauses", "empty", "full", "move", "finishes", "all boot", "stalls"]), st.just(0)),
    ),
    max_size=30,
)


def happens(world: World, what: str, how: Any) -> None:
    alive = world.state.alive
    chosen = alive[how % len(alive)].id if isinstance(how, int) and alive else ""
    match what:
        case "passes":
            world.look(how)
        case "boots":
            world.change(chosen, heartbeat_s=world.now_s)
        case "all boot":
            for machine in alive:
                world.change(machine.id, heartbeat_s=world.now_s)
        case "lost":
            world.change(chosen, state="terminated", until_s=world.now_s, ending="interrupted")
        case "fails to boot":
            world.change(chosen, state="terminated", until_s=world.now_s, ending="finished")
        case "pauses" if world.state.paused_s is not None:
            world.stopped_s = world.now_s
        case "empty" | "full":
            world.empty = what == "empty"
        case "stalls":
            world.steps = not world.steps
        case "finishes":
            world.finished = True
    try:
        if what == "move":
            world.state = moved(world.order, world.state, 60.0, world.now_s)
    except (BadInput, BudgetStop):
        pass  # not now


@settings(max_examples=50)
@given(told=happenings, most=st.sampled_from([None, BATCH // len(HOSTS)]), third=markets, is_task=st.booleans())
def test_whatever_happens_the_laws_hold(
    told: list[tuple[str, Any]], most: int | None, third: Market, is_task: bool
) -> None:
    world = World(order_of(third=third), most=most, is_task=is_task)
    for what, how in told:
        happens(world, what, how)
        world.look()
        world.settle()
        if world.over:
            return


def until_quiet(world: World) -> None:
    """Machines boot, save their checkpoints when they are told to, and end when they are told to."""
    for _ in range(12):
        world.look()
        for machine in world.state.alive:
            world.change(machine.id, heartbeat_s=world.now_s)
        if world.state.paused_s is not None:
            world.stopped_s = world.now_s
        world.settle()


@settings(max_examples=25)
@given(told=happenings, third=markets, is_task=st.booleans())
def test_what_is_wanted_comes_to_be_once_the_cloud_is_kind(
    told: list[tuple[str, Any]], third: Market, is_task: bool
) -> None:
    """However a run got where it is: with machines to be had that boot, each slot has one that fits, and no more."""
    world = World(order_of(third=third), is_task=is_task)
    for what, how in told:
        if what != "finishes":
            happens(world, what, how)
            world.look()
            world.settle()
    world.empty = False
    world.look(700.0)
    until_quiet(world)
    if world.over or world.state.stop_wished_s is not None or not world.state.serving:
        return
    hosts = set(host_names(world.spec))
    assert set(wanted_hosts(world.order, world.state)) == hosts - set(world.state.given_up)
    assert {machine.host for machine in world.state.serving} == hosts - set(world.state.missed)
    assert set(world.state.missed) <= set(world.state.given_up)
    assert len(world.state.alive) == len(hosts - set(world.state.missed))
    for host in wanted_hosts(world.order, world.state):
        assert [machine.duty for machine in world.state.alive if fits(world.state, host, machine)] == ["serves"]
    assert world.decide() == [], "and nothing is left to do"


def kinds(world: World) -> list[type[Action]]:
    return [type(action) for action in world.done if not isinstance(action, Extend)]


def test_the_states_of_what_is_wanted_are_one_flow() -> None:
    """Recover and move: the same few actions, in the order that each needs."""
    recovers = World(order_of())
    happens(recovers, "lost", 0)
    until_quiet(recovers)
    assert kinds(recovers) == [Place, Rent, Announce, Place], "the others go on first"
    for which, actions in ((1, [Announce, Rent, Announce]), (0, [Place, Rent, Announce])):
        remembers = World(order_of(), is_task=True)
        happens(remembers, "lost", which)
        until_quiet(remembers)
        assert kinds(remembers) == actions, "from memory, but for the loss of the first host"
        assert len(remembers.state.serving) == len(HOSTS)
    forgets = World(order_of(), is_task=True, empty=True)
    happens(forgets, "lost", 1)
    forgets.look()
    forgets.settle()
    forgets.steps = False
    forgets.look(400.0)
    forgets.settle()
    assert Place in kinds(forgets), "what those that are left had in memory was lost, too"
    ends = World(order_of(), is_task=True, empty=True)
    happens(ends, "lost", 1)
    ends.look()
    ends.settle()
    assert Place not in kinds(ends)
    ends.failed_s = ends.now_s
    ends.look()
    ends.settle()
    assert Place in kinds(ends), "those that are left have said that they ended"
    moves = World(order_of())
    happens(moves, "move", 0)
    until_quiet(moves)
    assert kinds(moves) == [Rent, Announce, Place, End]
    assert all(machine.on_demand for machine in moves.state.alive)
    finishes = World(order_of())
    happens(finishes, "move", 0)
    finishes.look()
    finishes.settle()
    happens(finishes, "finishes", 0)
    finishes.look()
    finishes.settle()
    assert kinds(finishes) == [Rent, Action, End], "nobody is given a place in a run that is finished"


def test_nobody_joins_a_run_that_would_begin_again_for_it() -> None:
    """It begins again on the machines that are left; where none is, others are asked for."""
    loses = World(order_of())
    loses.spec = loses.spec.model_copy(update={"resumes": False})
    happens(loses, "lost", 0)
    until_quiet(loses)
    assert kinds(loses) == [Place], "the others go on, and are not disturbed by a replacement"
    assert len(loses.state.serving) == 2
    for _ in range(2):
        happens(loses, "lost", 0)
        loses.look()
        loses.settle()
    assert kinds(loses)[:2] == [Place, Place]
    assert not any(isinstance(action, Announce) for action in loses.done)


@pytest.mark.parametrize("budget_usd", [4.5, 8.0])
def test_a_budget_that_runs_out_stops_the_run_and_then_clears_it(budget_usd: float) -> None:
    world = World(order_of(budget_usd))
    for _ in range(400):
        world.look(60.0)
        world.settle()
        if world.over:
            break
    assert world.over
    assert kinds(world) == [Stop, Clear]
    assert world.state.spent_usd(world.now_s) + world.order.fixed_usd <= budget_usd
