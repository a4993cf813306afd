"""What a run says that it has cost is what EC2 bills: prices that move by zone, hours in which nobody looks, machines
that reboot, are stopped, are taken back or are forgotten."""

from __future__ import annotations

import datetime
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hetopt.backends.ec2.renter.cluster_state import ClusterState, MachineState
from hetopt.backends.ec2.renter.launcher import Ec2Launcher, Loop, Polling
from hetopt.backends.ec2.renter.order import Order, Rate, Zone
from hetopt.backends.ec2.renter.request import Answer, Request
from hetopt.core.budget_law import HEARTBEAT_S

STORIES = 400
WITHIN = 0.01
EXTRAS_USD, WORST_USD = 0.01, 1.0
FORGOTTEN_S = 3600.0
ZONES = ("us-east-1a", "us-east-1b", "us-east-1c")
TYPE = "c7i.large"


def moment(seconds: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC)


@dataclass
class Billed:
    """A machine as EC2 bills it: the spans in which it ran."""

    id: str
    zone: str
    spans: list[tuple[float, float]]
    reason: str

    @property
    def ended_s(self) -> float:
        return self.spans[-1][1]

    @property
    def is_free(self) -> bool:
        """EC2 took it back within its first hour."""
        return self.reason.startswith("Server.Spot") and self.ended_s - self.spans[0][0] < 3600

    def told(self, now_s: float) -> dict[str, Any] | None:
        """As a list of machines has it; it is in none an hour after its end."""
        if now_s > self.ended_s + FORGOTTEN_S:
            return None
        begun = [one for one in self.spans if one[0] <= now_s] or self.spans[:1]
        since_s, until_s = begun[-1]
        one: dict[str, Any] = {"InstanceId": self.id, "LaunchTime": moment(since_s)}
        if now_s < until_s:
            return {**one, "State": {"Name": "running"}}
        state = "terminated" if until_s == self.ended_s else "stopped"
        why = "Client.UserInitiatedShutdown" if state == "stopped" else self.reason
        at = f"User initiated ({moment(until_s):%Y-%m-%d %H:%M:%S} GMT)"
        return {**one, "State": {"Name": state}, "StateReason": {"Code": why}, "StateTransitionReason": at}


@dataclass
class Account:
    """Prices of each zone, as steps in time; machines; and what EC2 says of both."""

    prices: dict[str, list[tuple[float, float]]]
    machines: list[Billed]
    now_s: float
    asked: list[str] = field(default_factory=list)

    def __call__(self, request: Request) -> Answer:
        self.asked.append(request.operation)
        match request.operation:
            case "describe_instances":
                told = [found for one in self.machines if (found := one.told(self.now_s)) is not None]
                return {"Reservations": [{"Instances": told}]}
            case "describe_spot_price_history":
                return {"SpotPriceHistory": list(self._history(request.parameters["StartTime"].timestamp()))}
            case "list_objects_v2" if str(request.parameters["Prefix"]).endswith("/state/"):
                said = ((one, min(one.ended_s, self.now_s) - HEARTBEAT_S / 2) for one in self.machines)
                keys = [{"Key": f"r/{one.id}.json", "LastModified": moment(at)} for one, at in said]
                return {"Contents": keys}
            case "list_objects_v2":
                return {}
            case "get_object":
                return {"Body": b"none", "ETag": "x"}
        raise AssertionError(request.operation)

    def _history(self, from_s: float) -> Any:
        """EC2 begins with the price that held then, under the time when it began to."""
        for zone, steps in self.prices.items():
            before = [at for at, _ in steps if at <= from_s]
            for at, usd in steps:
                if (not before or at >= before[-1]) and at <= self.now_s:
                    yield {
                        "AvailabilityZone": zone,
                        "InstanceType": TYPE,
                        "SpotPrice": f"{usd:.6f}",
                        "Timestamp": moment(at),
                    }

    def bill_usd(self) -> float:
        return sum(self._bill(one) for one in self.machines)

    def _bill(self, one: Billed) -> float:
        total = 0.0
        for since_s, until_s in one.spans:
            end_s = max(until_s, since_s + 60)
            total += EXTRAS_USD * (end_s - since_s)
            if one.is_free:
                continue
            steps = [*self.prices[one.zone], (float("inf"), 0.0)]
            for (at, usd), (then, _) in itertools.pairwise(steps):
                seconds = min(then, end_s) - max(at, since_s)
                total += min(usd, WORST_USD - EXTRAS_USD) * max(seconds, 0.0)
        return total / 3600


def story(order: Order, seed: int, folder: Path) -> tuple[float, float, bool]:
    """A run's life: what its ledger says in the end, what EC2 bills, and whether a machine was free that EC2 has
    forgotten before anybody looked."""
    drawn = random.Random(seed)
    begun_s = order.created_s
    prices = {}
    for zone in ZONES:
        at, usd, steps = begun_s - 7200.0, 0.3, []
        while at < begun_s + 40 * 3600:
            steps.append((at, round(usd, 4)))
            usd = min(1.3, max(0.05, usd * drawn.uniform(0.6, 1.7)))  # at times above what is the worst
            at = round(at + drawn.uniform(300, 3 * 3600))
        prices[zone] = steps
    zone = drawn.choice(ZONES)
    ends_s = begun_s + drawn.uniform(900, 30 * 3600)
    follows = drawn.random() < 0.5
    machines = []
    for place in range(drawn.randint(1, 5)):
        since_s = round(begun_s + drawn.uniform(0, 20))
        until_s = round(min(ends_s, since_s + drawn.uniform(600, 30 * 3600)))
        reason = drawn.choice(("Client.InstanceInitiatedShutdown", "Client.UserInitiatedShutdown", "Server.SpotX"))
        spans = [(float(since_s), float(until_s))]
        # Stopped by hand, and started again: its own unit ends it at once, and it is billed for a minute more.
        if follows and drawn.random() < 0.2 and until_s - since_s > 3 * 3600:
            again_s = until_s + drawn.uniform(700, 7200)
            spans.append((round(again_s), round(again_s) + 20.0))
            reason = "Client.InstanceInitiatedShutdown"
        machines.append(Billed(id=f"i-{place}", zone=zone, spans=spans, reason=reason))
    account = Account(prices=prices, machines=machines, now_s=begun_s)
    first = {name: [usd for at, usd in steps if at <= begun_s][-1] for name, steps in prices.items()}
    zones = tuple(
        Zone(
            name=name,
            zone_id=name,
            subnet_id=f"subnet-{name}",
            vpc_id="vpc-1",
            rates={TYPE: Rate(usd_per_hour=first[name] + EXTRAS_USD, worst_usd_per_hour=WORST_USD)},
        )
        for name in ZONES
    )
    role = order.roles[0].model_copy(update={"hosts": tuple(f"h{place}" for place in range(len(machines)))})
    order = order.model_copy(update={"zones": zones, "roles": (role,), "extras_usd_per_hour": EXTRAS_USD})
    watcher = Loop(edge=account, order=order, run_dir=folder, clock=lambda: account.now_s)
    states = tuple(
        MachineState(
            id=one.id,
            host=f"h{place}",
            instance_type=TYPE,
            state="pending",
            since_s=begun_s,
            zone=zone,
            usd_per_hour=first[zone] + EXTRAS_USD,
            extras_usd_per_hour=EXTRAS_USD,
        )
        for place, one in enumerate(machines)
    )
    seen = ClusterState(time_s=begun_s, zone=zone, machines=states)
    watcher.save(seen)
    launcher = Ec2Launcher(home=folder, inner=account, clock=lambda: account.now_s, sleep=lambda _: None)
    spent = 0.0
    while seen.alive or seen.time_s < begun_s + 60:
        account.now_s += drawn.uniform(60, 1200) if follows else drawn.uniform(600, 8 * 3600)
        seen = launcher._priced(launcher._loop(order, folder), watcher.look(), Polling())
        spent = seen.spent_usd(account.now_s)
    unknown = any(one.is_free and state.ending == "unknown" for one, state in zip(machines, seen.machines, strict=True))
    return spent, account.bill_usd(), unknown


@pytest.fixture
def spot_order(order_for: Callable[..., Order]) -> Order:
    return order_for().model_copy(update={"created_s": 1_800_000_000.0})


def test_the_ledger_is_the_bill(spot_order: Order, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    errors = []
    for seed in range(STORIES if pytestconfig.getoption("--slow") else STORIES // 10):
        folder = tmp_path / str(seed)
        folder.mkdir()
        spent, billed, unknown = story(spot_order, seed, folder)
        # What nobody can know any more is taken to be paid: the budget holds.
        errors.append((spent / billed - 1 if not unknown else min(0.0, spent / billed - 1), seed))
    assert max(abs(error) for error, _ in errors) <= WITHIN, sorted(errors)
