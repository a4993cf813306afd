"""A rented run that trains and is followed: what its machines would write, and what they were told."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from hetopt.backends.ec2.renter import calls
from hetopt.backends.ec2.renter.launcher import Ec2Launcher
from hetopt.backends.ec2.renter.order import ORDER_FILE, SEEN_FILE, ClusterState, Order
from hetopt.backends.ec2.renter.request import Answer, Edge, Request
from hetopt.backends.host.protocol import Latest
from hetopt.core.run_spec import RunSpec
from hetopt.core.run_status import RunState
from tests.ec2.conftest import Patience


def put(cloud: Edge, order: Order, name: str, text: str) -> None:
    cloud(calls.put_object(order, "test", f"{order.prefix}/{name}", text.encode(), "what a machine would write"))


def event(name: str, **fields: object) -> str:
    return json.dumps({"event": name, "time_s": 1.0, **fields}) + "\n"


def end_machines(cloud: Edge, ids: list[str]) -> None:
    cloud(
        Request(
            step="t",
            service="ec2",
            operation="terminate_instances",
            parameters={"InstanceIds": ids},
            purpose="they end",
        )
    )


def placement_now(cloud: Edge, order: Order) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(cloud(calls.get_object(order, f"{order.prefix}/placement.json"))["Body"])
    return told


class Priced:
    """Tells prices as a test wants them: moto's are of 2006."""

    def __init__(self, inner: Edge, prices: dict[tuple[str, str], float]) -> None:
        self.inner, self.prices = inner, prices
        self.asked = 0

    def __call__(self, request: Request) -> Answer:
        if request.operation != "describe_spot_price_history":
            return self.inner(request)
        self.asked += 1
        at = request.parameters["StartTime"]
        told = [
            {"AvailabilityZone": zone, "InstanceType": name, "SpotPrice": str(usd), "Timestamp": at}
            for (zone, name), usd in self.prices.items()
        ]
        return {"SpotPriceHistory": told}


def latest(checkpoint: str, generation: int = 0) -> str:
    """What the first host writes when a checkpoint is complete."""
    return Latest(checkpoint=checkpoint, generation=generation).model_dump_json()


class Followed:
    """A run on four machines that trains, and is looked at every minute."""

    def __init__(self, cloud: Edge, launcher: Ec2Launcher, run_dir: Path, spec: RunSpec, patience: Patience) -> None:
        self.cloud, self.launcher, self.run_dir, self.patience = cloud, launcher, run_dir, patience
        self.order = Order.load(run_dir / ORDER_FILE)
        patience.now_s = time.time()  # moto's machines are of now
        self.log = event("run_started") + event("training_started", step=0)
        self.handle = launcher.start(spec, run_dir, {})
        put(cloud, self.order, f"events/{0:015d}.jsonl", self.log)
        put(cloud, self.order, "ckpt/LATEST", latest("step-40"))
        self.look()
        self.before = self.seen

    def look(self) -> None:
        self.patience.now_s += 60
        assert self.launcher.poll(self.handle).state is RunState.RUNNING

    def happens(self, name: str, **fields: object) -> None:
        text = json.dumps({"event": name, "time_s": self.patience.now_s, **fields}) + "\n"
        put(self.cloud, self.order, f"events/{len(self.log):015d}.jsonl", text)
        self.log += text

    def boots(self, *machines: str) -> None:
        for machine in machines:
            put(self.cloud, self.order, f"state/{machine}.json", "{}")

    @property
    def seen(self) -> ClusterState:
        return ClusterState.load(self.run_dir / SEEN_FILE)

    def shares(self) -> list[int]:
        return [worker["local_batch_size"] for worker in placement_now(self.cloud, self.order)["spec"]["workers"]]
