"""Brings here what a run has in its bucket: a run that was launched from another machine, the model and outputs of any.

Of a run from elsewhere the bucket holds the order, and EC2 its machines. A model arrives whole or not at all, and is
checked by its size.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from hetopt.backends.ec2.objects import S3Objects
from hetopt.backends.ec2.renter import calls
from hetopt.backends.ec2.renter.cluster_state import ClusterState
from hetopt.backends.ec2.renter.launcher import PLAN_OBJECT, Loop, read_lease
from hetopt.backends.ec2.renter.order import ORDER_FILE, Order
from hetopt.backends.ec2.renter.request import Edge, if_there, instances_in, read
from hetopt.backends.host.protocol import MODELS_FOLDER, Placements
from hetopt.core.budget_law import PLACEMENT_OBJECT
from hetopt.core.errors import BadInput, CloudRefused
from hetopt.core.paths import shown
from hetopt.core.run_folder import MODEL_FILES, OUTPUT_FOLDER, Outputs, write_spec
from hetopt.optimizer.launch_record import LAUNCH_FILE, Launch
from hetopt.optimizer.plan import Plan


def fetch(edge: Edge, *, bucket: str, account_id: str, run_id: str, name: str) -> bytes:
    """One object of a run.

    Raises:
        BadInput: there is no such run in the bucket.
    """
    answer = if_there(
        edge,
        read(
            "s3",
            "get_object",
            "what was ordered",
            Bucket=bucket,
            Key=f"runs/{run_id}/{name}",
            ExpectedBucketOwner=account_id,
        ),
    )
    if answer is None:
        raise BadInput(
            f"the bucket {bucket} has no {name} of a run {run_id}.",
            hint="give the run's full name, and the `region` and `bucket` that it was launched with",
        )
    body: bytes = answer["Body"]
    return body


def adopt(edge: Edge, run_dir: Path, *, bucket: str, account_id: str, now_s: float) -> Launch:
    """Fill a folder, named as the run, with what `status`, `logs` and `stop` need.

    Raises:
        BadInput: the bucket has no such run, or it was never given its machines.
    """

    def get(name: str) -> bytes:
        return fetch(edge, bucket=bucket, account_id=account_id, run_id=run_dir.name, name=name)

    def text(name: str) -> str:
        return get(name).decode("utf-8", errors="replace")

    order = Order.from_json(text(ORDER_FILE), origin=f"s3://{bucket}/{run_dir.name}/{ORDER_FILE}")
    plan = Plan.from_json(text(PLAN_OBJECT), origin=f"s3://{bucket}/{run_dir.name}/{PLAN_OBJECT}")
    placements = Placements.of_json(get(PLACEMENT_OBJECT))
    if placements is None or (order.run_id, order.bucket, order.account_id) != (run_dir.name, bucket, account_id):
        what = PLACEMENT_OBJECT if placements is None else ORDER_FILE
        raise BadInput(
            f"{what} of {run_dir.name} in the bucket {bucket} is not what a launch of it writes.",
            hint=f"end its machines with `hetopt gc --on ec2 --run {run_dir.name} --remove`",
        )
    run_dir.mkdir(parents=True, exist_ok=True)
    order.save(run_dir / ORDER_FILE)
    plan.save(run_dir / PLAN_OBJECT)
    write_spec(run_dir, placements.spec)
    loop = Loop(edge=edge, order=order, run_dir=run_dir, clock=lambda: now_s)
    written = read_lease(edge, order)
    ends_s = order.created_s + order.lifetime_s if written is None else written[0].end_s
    loop.save(_seen(edge, loop, placements, ends_s))
    record = Launch(
        created=plan.created,
        started_s=order.created_s,
        run_id=run_dir.name,
        on="ec2",
        plan=plan,
        spec=placements.spec,
        prediction=plan.chosen.prediction,
    )
    record.save(run_dir / LAUNCH_FILE)
    return record


def _seen(edge: Edge, loop: Loop, placements: Placements, lease_end_s: float) -> ClusterState:
    """The run's machines as EC2 tells of them; one that it has forgotten ended more than an hour ago."""
    order, hosts = loop.order, placements.hosts
    known = instances_in(edge(calls.addresses_call(order)))
    zone = order.zones[0]
    for id_ in hosts.keys() & known.keys():  # others may wait in another zone, and end there by themselves
        name = known[id_].get("Placement", {}).get("AvailabilityZone")
        zone = next((other for other in order.zones if other.name == name), zone)
    there = {place.host: known[id_] for id_, place in hosts.items() if id_ in known}
    on_spot = {host: machine for host, machine in there.items() if machine.get("InstanceLifecycle") == "spot"}
    held = {host: machine for host, machine in there.items() if host not in on_spot}
    unseen = ClusterState(time_s=loop.clock())
    return ClusterState(
        time_s=loop.clock(),
        zone=zone.name,
        generation=placements.generation,
        machines=(*loop.granted(on_spot, zone, unseen), *loop.granted(held, zone, unseen, on_demand=True)),
        on_demand=order.has_spot and not on_spot,
        lease_end_s=lease_end_s,
    )


def fetch_model(order: Order, run_dir: Path) -> tuple[Path, str]:
    """Bring the model into the run's folder, if it is not there already: the trained one, else the unfinished one.

    Returns:
        the file, whose name says whether it was trained to the end, and where the bucket keeps it.

    Raises:
        BadInput: the run has no model, or there is no room for it.
        CloudRefused: it cannot be read.
    """
    objects = _models(order)
    folder = f"s3://{order.bucket}/{objects.prefix}"
    sizes = {name: size for name in MODEL_FILES if (size := objects.size_bytes(name)) is not None}
    if not sizes:
        raise BadInput(
            f"there is no model in {folder} that these credentials may read.",
            hint=f"a run has one when it has ended: look with `hetopt status {order.run_id}`, then `hetopt fetch "
            f"{order.run_id}`",
        )
    name = next(iter(sizes))
    _bring(objects, name, run_dir / name, sizes[name], order.run_id)
    return run_dir / name, f"{folder}/{name}"


def fetch_outputs(order: Order, run_dir: Path) -> Outputs:
    """Bring what the script wrote for its user into the run's folder; what is there already, as large, is left.

    Raises:
        BadInput: there is no room for it.
        CloudRefused: something cannot be read.
    """
    objects, outputs = _models(order), Outputs()
    for name in objects.names(f"{OUTPUT_FOLDER}/"):
        if (size := objects.size_bytes(name)) is None:
            continue
        path = outputs.add(run_dir / OUTPUT_FOLDER, name.removeprefix(f"{OUTPUT_FOLDER}/"), size)
        if path is not None:
            _bring(objects, name, path, size, order.run_id)
    return outputs


def _bring(objects: S3Objects, name: str, path: Path, size_bytes: int, run_id: str) -> None:
    """Bring an object into a file, whole or not at all, where it is not there already in its size."""
    if path.is_file() and path.stat().st_size == size_bytes:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    again, free = f"`hetopt fetch {run_id}`", shutil.disk_usage(path.parent).free
    if free < size_bytes:
        raise BadInput(
            f"{shown(name)} has {size_bytes:,} bytes, and {path.parent} has room for {free:,}.",
            hint=f"make room, then {again}",
        )
    if not objects.fetch(name, path) or path.stat().st_size != size_bytes:
        path.unlink(missing_ok=True)
        raise CloudRefused(f"{shown(name)} could not be read to its end.", hint=f"try again: {again}")


def _models(order: Order) -> S3Objects:
    prefix = f"{MODELS_FOLDER}/{order.run_id}"
    return S3Objects.connect(region=order.region, bucket=order.bucket, prefix=prefix, account_id=order.account_id)
