"""Looking after a run that was launched from another machine: its bucket holds the order, EC2 its machines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import ConfigDict, NonNegativeInt

from hetopt.optimizer.ec2 import calls
from hetopt.optimizer.ec2.errors import ApiRefused
from hetopt.optimizer.ec2.launcher import PLAN_OBJECT
from hetopt.optimizer.ec2.order import ORDER_FILE, Order
from hetopt.optimizer.ec2.placement import Machine, Seat
from hetopt.optimizer.ec2.request import Edge, Request
from hetopt.optimizer.ec2.seen import Seen
from hetopt.optimizer.ec2.watch import Watcher, read_lease
from hetopt.optimizer.launch_record import LAUNCH_FILE, Launch
from hetopt.optimizer.plan import Plan
from hetopt.profiler.artifact import HostName, Record, validated
from hetopt.profiler.errors import BadInput
from hetopt.profiler.reading import decoded, parse_json
from hetopt.trainer.launch.ec2.protocol import PLACEMENT_OBJECT
from hetopt.trainer.run_folder import write_spec
from hetopt.trainer.spec import RunSpec

_AGAIN = "see what else writes to the run's part of the bucket; `hetopt gc --on ec2` finds its machines"


class PlacedHost(Record):
    """Where one machine of a run is."""

    model_config = ConfigDict(extra="ignore")

    host: HostName
    address: str


class Placed(Record):
    """What a run's placement says of it; machines may write beside it, so it is read as a stranger's."""

    model_config = ConfigDict(extra="ignore")

    generation: NonNegativeInt
    hosts: dict[str, PlacedHost]
    spec: RunSpec


def fetch(edge: Edge, *, bucket: str, account_id: str, run_id: str, name: str) -> bytes:
    """One object of a run.

    Raises:
        BadInput: there is no such run in the bucket.
    """
    request = Request(
        step=f"read {name}",
        service="s3",
        operation="get_object",
        parameters={"Bucket": bucket, "Key": f"runs/{run_id}/{name}", "ExpectedBucketOwner": account_id},
        purpose="what was ordered",
    )
    try:
        body: bytes = edge(request)["Body"]
    except ApiRefused as refused:
        if refused.code in ("NoSuchKey", "404"):
            raise BadInput(
                f"the bucket {bucket} has no {name} of a run {run_id}.",
                hint="give the run's full name, and the --region and --bucket that it was launched with",
            ) from None
        raise
    return body


def adopt(edge: Edge, run_dir: Path, *, bucket: str, account_id: str, now_s: float) -> Launch:
    """Fill a folder, named as the run, with what `status`, `logs` and `stop` need.

    Raises:
        BadInput: the bucket has no such run, or it was never given its machines.
    """

    def get(name: str) -> bytes:
        return fetch(edge, bucket=bucket, account_id=account_id, run_id=run_dir.name, name=name)

    def text(name: str) -> tuple[str, str]:
        origin = f"s3://{bucket}/runs/{run_dir.name}/{name}"
        return decoded(get(name), origin=origin), origin

    order_text, origin = text(ORDER_FILE)
    order = Order.from_json(order_text, origin=origin)
    plan_text, origin = text(PLAN_OBJECT)
    plan = Plan.from_json(plan_text, origin=origin)
    placed_text, origin = text(PLACEMENT_OBJECT)
    told = parse_json(placed_text, origin=origin, hint=_AGAIN)
    placement = validated(Placed, told, origin=origin, hint=_AGAIN)
    spec = placement.spec
    run_dir.mkdir(parents=True, exist_ok=True)
    order.save(run_dir / ORDER_FILE)
    plan.save(run_dir / PLAN_OBJECT)
    write_spec(run_dir, spec)
    watcher = Watcher(edge=edge, order=order, run_dir=run_dir, clock=lambda: now_s)
    watcher.save(_seen(edge, watcher, placement.hosts, placement.generation, _lease_end_s(edge, order)))
    record = Launch(
        created=plan.created,
        started_s=order.created_s,
        run_id=run_dir.name,
        on="ec2",
        plan=plan,
        spec=spec,
        prediction=plan.chosen.prediction,
    )
    record.save(run_dir / LAUNCH_FILE)
    return record


def _seen(edge: Edge, watcher: Watcher, hosts: Mapping[str, PlacedHost], generation: int, lease_end_s: float) -> Seen:
    """The run's machines as EC2 tells of them; one that it has forgotten ended more than an hour ago."""
    order = watcher.order
    answer = edge(calls.addresses_call(order))
    known = {one["InstanceId"]: one for group in answer["Reservations"] for one in group["Instances"]}
    zone = order.zones[0]
    for id_ in hosts.keys() & known.keys():  # others may wait in another zone, and end there by themselves
        name = known[id_].get("Placement", {}).get("AvailabilityZone")
        zone = next((other for other in order.zones if other.name == name), zone)
    seats = [
        Seat(
            host=place.host,
            machine=Machine(id=id_, instance_type=known[id_]["InstanceType"], address=place.address, zone=zone.name),
        )
        for id_, place in hosts.items()
        if id_ in known
    ]
    on_spot = [seat for seat in seats if known[seat.machine.id].get("InstanceLifecycle") == "spot"]
    held = [seat for seat in seats if seat not in on_spot]
    unseen = Seen(time_s=watcher.clock())
    return Seen(
        time_s=watcher.clock(),
        zone=zone.name,
        generation=generation,
        machines=(*watcher.granted(on_spot, zone, unseen), *watcher.granted(held, zone, unseen, on_demand=True)),
        on_demand=order.has_spot and not on_spot,
        lease_end_s=lease_end_s,
    )


def _lease_end_s(edge: Edge, order: Order) -> float:
    found = read_lease(edge, order)
    return found[0].end_s if found is not None else order.created_s + order.lifetime_s
