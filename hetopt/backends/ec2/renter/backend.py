"""EC2 as a backend: the plan's machines are ordered, rented, and given back when the run ends.

A probe is a run like any other: with a ledger, a lease, and what is left of all probes' budget as its hard stop. Of a
run that was launched elsewhere the bucket holds the order, and EC2 its machines.
"""

from __future__ import annotations

import datetime
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hetopt.backends.backend import Prepared, RunHandle, check_place
from hetopt.backends.ec2.objects import S3Objects
from hetopt.backends.ec2.renter import calls, ordering
from hetopt.backends.ec2.renter.launcher import PLAN_OBJECT, Ec2Launcher, Loop, read_lease
from hetopt.backends.ec2.renter.order import ORDER_FILE, ClusterState, Network, Order, Role, last_seen
from hetopt.backends.ec2.renter.ordering import Orders, image_kind
from hetopt.backends.ec2.renter.request import Edge, Request, connect, if_there, instances_in, read
from hetopt.backends.host.bundle import Bundle, make_bundle
from hetopt.backends.host.protocol import MODELS_FOLDER, Placements
from hetopt.backends.options import Ec2
from hetopt.core.budget_law import PLACEMENT_OBJECT
from hetopt.core.errors import BadInput, CloudRefused, NoFeasiblePlan
from hetopt.core.paths import shown
from hetopt.core.plain_text import typed
from hetopt.core.run_folder import BUNDLE_FILE, MODEL_FILES, OUTPUT_FOLDER, Outputs, RunFolders, read_spec, write_spec
from hetopt.core.run_spec import RunSpec
from hetopt.optimizer.cost.cost import checkpoint_bytes
from hetopt.optimizer.cost.provisioning import Payload, disk_gb
from hetopt.optimizer.exploring import check_probed
from hetopt.optimizer.launch_record import LAUNCH_FILE, Launch
from hetopt.optimizer.market.catalog import Catalog, load_catalog
from hetopt.optimizer.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Rental(Prepared):
    """A prepared launch on EC2 with the order of its machines; nothing is rented yet.

    Attributes:
        wanted: the plan as it is to be run.
        order: the machines, their prices now and at most, the budget and the end of their lease.
        bundle: the code that machines run; None: the run is resumed, and its bucket has the code.
        risk: half a sentence on how likely the limits are broken, which nobody has accepted; None: no such risk.
        accept_fewer: returns whether the run may begin as this smaller spec, on fewer machines; None: all machines or
            none.
        spent_usd: cost of the run in earlier lives.
    """

    wanted: Plan
    order: Order
    bundle: Bundle | None = None
    risk: str | None = None
    accept_fewer: Callable[[RunSpec], bool] | None = None
    spent_usd: float = 0.0

    def requests(self) -> Sequence[Request]:
        """Return every AWS call that `submit` would make for a new run, as long as none is refused; make none.

        Raises:
            AssertionError: the launch resumes a run.
        """
        assert self.bundle is not None, "a run that goes on has its calls in its ledger"
        return calls.launch_calls(self.order, {PLAN_OBJECT: self.launch.plan.to_json().encode()}, self.bundle.data)


@dataclass(frozen=True, kw_only=True)
class Ec2Backend(Ec2Launcher):
    """The backend that rents a plan's machines, all in one zone, within a budget that is a hard stop."""

    def prepare(self, made: Plan, wanted: Plan, options: Ec2) -> Rental:
        """Return a launch of the plan ``wanted``, with its order at present prices read from AWS; rent nothing.

        Args:
            made: the plan as it was made, for the record.
            wanted: the plan as it is to be run.
            options: launch options.

        Raises:
            BadInput: the plan cannot be rented as it is, such as with data on this machine, without a budget, or with
                types that nothing was measured on.
            BudgetStop: the budget is below the plan's high cost, or does not last until the cluster has booted.
            CloudRefused: AWS refuses a call, or has no such zone, image or bucket.
        """
        if not options.unprobed:
            check_probed(wanted, unprobed=False)
        region = ordering.region_of(wanted)
        bundle = make_bundle(wanted.run.task, wanted.run.script)
        spec = _as_machines_read_it(wanted.run, bundle, options.data)
        orders = Orders(edge=connect(region), catalog=load_catalog(region), options=options)
        now = datetime.datetime.now(datetime.UTC)
        dry_run, now_s = f"{now:%Y%m%d-%H%M%S}-dry-run", now.timestamp()
        order = orders.of_plan(wanted, run_id=dry_run, bundle_sha256=bundle.sha256, now_s=now_s)
        spec = order.on_its_devices(spec)
        order = order.of_run(spec)
        launch = Launch(
            created="",
            started_s=0.0,
            run_id="",
            on="ec2",
            plan=made,
            spec=spec,
            prediction=wanted.chosen.prediction,
        )
        risk = None if options.accept_risk else wanted.risk_with(order.budget_usd)
        return Rental(
            launch=launch,
            wanted=wanted,
            order=order,
            bundle=bundle,
            risk=risk,
            accept_fewer=options.accept_fewer,
        )

    def prepare_resumed(self, folder: Path, options: Ec2) -> Rental:
        """Return a launch, with a new order, to resume an ended run, whose cost so far counts towards the budget.

        Bucket and network stay as they were, unless the options name others.

        Args:
            folder: the run's folder.
            options: launch options.

        Raises:
            BadInput: the run is not over, never had its machines, or ran on another backend.
            BudgetStop: what is left of the budget does not last until the cluster has booted.
            CloudRefused: AWS refuses a call, or has no such zone, image or bucket.
        """
        launch, seen = Launch.load(folder / LAUNCH_FILE), last_seen(folder)
        check_place(launch, folder, Ec2.PLACE)
        if not seen.time_s:
            raise BadInput(f"{folder.name} never had its machines.", hint="launch its plan anew")
        if not seen.cleared:
            raise BadInput(f"{folder.name} is not over yet.", hint=f"end it first with `hetopt stop {folder.name}`")
        before = Order.load(folder / ORDER_FILE)
        now_s = datetime.datetime.now(datetime.UTC).timestamp()
        same_place = replace(options, bucket=options.bucket or before.bucket)
        if ordering.network_of(options) == Network():
            same_place = replace(same_place, **before.network.model_dump())
        orders = Orders(edge=connect(before.region), catalog=load_catalog(before.region), options=same_place)
        order = orders.of_plan(
            launch.plan,
            run_id=folder.name,
            bundle_sha256=before.bundle_sha256,
            now_s=now_s,
            life=before.life + 1,
            spent_usd=seen.spent_usd(now_s),
        )
        # All hosts of the plan again, also those that were lost on the way.
        spec = launch.spec.model_copy(update={"workers": launch.plan.run.workers})
        return Rental(
            launch=launch.model_copy(update={"spec": spec}),
            folder=folder,
            wanted=launch.plan,
            order=order,
            accept_fewer=options.accept_fewer,
            spent_usd=seen.spent_usd(now_s),
        )

    def check_ready(self, prepared: Any) -> None:
        """Refuse a new run that may cost more than its budget at the order's prices; ask AWS nothing.

        A run that is resumed always passes.

        Raises:
            BudgetStop: prices have risen beyond what was planned, and the high cost is above the budget.
        """
        if prepared.folder is None:
            ordering.check_prices(prepared.wanted, prepared.order)

    def submit(self, prepared: Any, folders: RunFolders) -> tuple[RunHandle, Launch]:
        """Rent the machines and begin the run; return its handle and launch record without waiting for training.

        From here on money is spent. It takes minutes.

        Args:
            prepared: launch by `prepare` or `prepare_resumed`.
            folders: folders of runs, among which a new run's folder is made.

        Raises:
            NoFeasiblePlan: the plan is a risk that nobody has accepted.
            BudgetStop: see `check_ready`.
            CloudRefused: the machines cannot be had; nothing of them is left, or the hint says what may be.
        """
        if prepared.risk is not None:
            raise NoFeasiblePlan(
                f"The plan is a risk: {prepared.risk}.",
                hint="plan again with other limits, raise `budget_usd`, or take the risk with `accept_risk=True`",
            )
        self.check_ready(prepared)
        folder, launch = prepared.begun(folders, secret=True)
        # What must be in the run's folder before anything is rented.
        prepared.order.model_copy(update={"run_id": folder.name}).save(folder / ORDER_FILE)
        if prepared.bundle is not None:
            launch.plan.save(folder / PLAN_OBJECT)
            (folder / BUNDLE_FILE).write_bytes(prepared.bundle.data)
        launch.save(folder / LAUNCH_FILE)
        handle = replace(self, accept=prepared.accept_fewer).start(launch.spec, folder, {})
        # The machines' addresses have decided the order of the workers.
        launch = launch.model_copy(update={"spec": read_spec(folder)})
        launch.save(folder / LAUNCH_FILE)
        return handle, launch


def _as_machines_read_it(spec: RunSpec, bundle: Bundle, data: str | None) -> RunSpec:
    """Return the run as rented machines read it: the task by its place in the bundle, and data from S3.

    ``data`` None: the run reads no data folder, or the spec's, which is refused.

    Raises:
        BadInput: the data is on this machine only.
    """
    local = data if data is not None and not data.startswith("s3://") else spec.data_dir if data is None else None
    if local is not None:
        raise BadInput(
            f"the data is in {local} on this machine, which rented machines cannot read.",
            hint=f"copy it once, `aws s3 sync {typed(local)} s3://BUCKET/data/NAME`, then give `data=s3://BUCKET/data/NAME`",
        )
    return spec.model_copy(update={"task": bundle.task, "script": bundle.script, "data_dir": data})


def roles_for(spec: RunSpec, catalog: Catalog) -> tuple[Role, ...]:
    """Return a fleet request (`Role`) on the spot market for each machine of a probe's run; request nothing.

    Args:
        spec: spec of the probe; each host's worker type is the machine's instance type.
        catalog: catalog of the region.

    Raises:
        BadInput: the catalogue has no such type, or it cannot train.
    """
    hosts = dict.fromkeys((worker.host, worker.type) for worker in spec.workers)
    return tuple(
        Role(
            name=f"{number}-{name.replace('.', '-')}",
            instance_types=(name,),
            hosts=(host,),
            market="spot",
            image_kind=image_kind(catalog.instance_type(name)),
        )
        for number, (host, name) in enumerate(hosts)
    )


@dataclass(frozen=True, kw_only=True)
class Ec2Probes(Ec2Launcher):
    """The launcher of short measuring runs on rented spot machines, each within a budget.

    Attributes:
        orders: asks AWS for prices, zones and images, and makes the order of a probe.
        bundle: the code, with the task's own file where it has one.
        data: S3 address of the task's data; None: the task reads no files.
        gradient_bytes: size of the model's gradient.
        budget_usd: most that the next probe may cost.
    """

    orders: Orders
    bundle: Bundle
    data: str | None
    gradient_bytes: int
    budget_usd: float = 0.0

    def start(self, spec: RunSpec, run_dir: Path, environment: Mapping[str, str]) -> RunHandle:
        """Order and rent a probe's machines; start it in the empty folder ``run_dir``, where `hetopt gc` finds it.

        Args:
            spec: spec of the probe.
            run_dir: the probe's folder, whose name is its run's name.
            environment: not used; none of it is sent anywhere.

        Raises:
            CloudRefused: the machines cannot be had. Nothing is left.
            BudgetStop: the budget does not last until they have booted.
            BadInput: a type has no price or cannot train.
        """
        payload, catalog = Payload(checkpoint_bytes=checkpoint_bytes(self.gradient_bytes)), self.orders.catalog
        self.orders.of_job(
            roles=roles_for(spec, catalog),
            budget_usd=self.budget_usd,
            gradient_bytes=self.gradient_bytes,
            disk_gb=max(disk_gb(catalog.instance_type(worker.type), payload) for worker in spec.workers),
            run_id=run_dir.name,
            bundle_sha256=self.bundle.sha256,
            now_s=self.clock(),
        ).save(run_dir / ORDER_FILE)
        (run_dir / BUNDLE_FILE).write_bytes(self.bundle.data)
        return super().start(
            spec.model_copy(update={"task": self.bundle.task, "data_dir": self.data}), run_dir, environment
        )


def spent_usd(run_dir: Path) -> float:
    """Return the USD that a run has cost by its last look: its machines, and the fixed costs whatever they do.

    Raises:
        BadInput: the records in the run's folder cannot be read.
    """
    seen = last_seen(run_dir)
    return Order.load(run_dir / ORDER_FILE).fixed_usd + seen.spent_usd(seen.time_s)


def adopt(edge: Edge, run_dir: Path, *, bucket: str, account_id: str, now_s: float) -> Launch:
    """Write a run that was launched elsewhere into ``run_dir``, read from its bucket and EC2; return its launch record.

    The folder gets what `status`, `logs` and `stop` need. In AWS nothing changes.

    Args:
        edge: makes the calls.
        run_dir: folder to make, which has the run's name.
        bucket: S3 bucket of the run.
        account_id: number of the account that must own the bucket.
        now_s: seconds since the epoch.

    Raises:
        BadInput: the bucket has no such run, the run was never given its machines, or an object is not what a launch
            writes.
        CloudRefused: AWS refuses a call.
    """

    def get(name: str) -> str:
        """Return the text of an object of the run; BadInput: the bucket has none."""
        place = {"Bucket": bucket, "Key": f"runs/{run_dir.name}/{name}", "ExpectedBucketOwner": account_id}
        answer = if_there(edge, read("s3", "get_object", "what was ordered", **place))
        if answer is None:
            raise BadInput(
                f"the bucket {bucket} has no {name} of a run {run_dir.name}.",
                hint="give the run's full name, and the `region` and `bucket` that it was launched with",
            )
        return bytes(answer["Body"]).decode("utf-8", errors="replace")

    order = Order.from_json(get(ORDER_FILE), origin=f"s3://{bucket}/{run_dir.name}/{ORDER_FILE}")
    plan = Plan.from_json(get(PLAN_OBJECT), origin=f"s3://{bucket}/{run_dir.name}/{PLAN_OBJECT}")
    placements = Placements.of_json(get(PLACEMENT_OBJECT).encode())
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
    # A machine that EC2 has forgotten ended more than an hour ago.
    known = instances_in(edge(calls.addresses_call(order)))
    there = {place.host: known[id_] for id_, place in placements.hosts.items() if id_ in known}
    seen = ClusterState(time_s=now_s, generation=placements.generation, lease_end_s=ends_s)
    machines = tuple(loop.granted(there, seen))
    has_moved = order.has_spot and all(machine.on_demand for machine in machines)
    zone = machines[0].zone if machines else order.zones[0].name
    loop.save(seen.model_copy(update={"zone": zone, "machines": machines, "on_demand": has_moved}))
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


def fetch_model(order: Order, run_dir: Path) -> tuple[Path, str]:
    """Download a run's model, trained or else unfinished, into ``run_dir``; return its path and S3 address.

    A file that is there already in its size is not fetched. The file's name says whether the model was trained to the
    end.

    Args:
        order: order of the run.
        run_dir: the run's folder.

    Raises:
        BadInput: the run has no model that these credentials may read, or there is no room for it.
        CloudRefused: the download broke off.
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
    """Download a script's outputs into the run's folder, but for files there in the same size; return names and sizes.

    Files beyond 1,000 or 10 GB are left out, and named so.

    Args:
        order: order of the run.
        run_dir: the run's folder.

    Raises:
        BadInput: there is no room for a file.
        CloudRefused: the outputs cannot be listed, or a download broke off.
    """
    objects, outputs = _models(order), Outputs()
    names = objects.names(f"{OUTPUT_FOLDER}/")
    if names is None:
        raise CloudRefused(
            f"the outputs of {order.run_id} cannot be listed.", hint=f"try again: `hetopt fetch {order.run_id}`"
        )
    for name in names:
        if (size := objects.size_bytes(name)) is None:
            continue
        path = outputs.add(run_dir / OUTPUT_FOLDER, name.removeprefix(f"{OUTPUT_FOLDER}/"), size)
        if path is not None:
            _bring(objects, name, path, size, order.run_id)
    return outputs


def _bring(objects: S3Objects, name: str, path: Path, size_bytes: int, run_id: str) -> None:
    """Fetch an object of the bucket into a file, whole or not at all; do nothing where a file of its size is there.

    Args:
        objects: objects of the bucket.
        name: name of the object.
        path: path of the file.
        size_bytes: bytes of the object.
        run_id: run that the hints name.

    Raises:
        BadInput: there is no room for the file.
        CloudRefused: the object could not be read to its end; the file is removed.
    """
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
    return S3Objects.connect(
        region=order.region,
        bucket=order.bucket,
        prefix=f"{MODELS_FOLDER}/{order.run_id}",
        account_id=order.account_id,
    )
