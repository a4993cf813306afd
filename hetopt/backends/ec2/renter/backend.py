"""EC2 as a backend: the plan's machines are ordered, rented, and given back when the run ends."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

from hetopt.backends.backend import Prepared, RunHandle
from hetopt.backends.ec2.renter import calls, ordering
from hetopt.backends.ec2.renter.cluster_state import ClusterState, last_seen
from hetopt.backends.ec2.renter.edge import connect
from hetopt.backends.ec2.renter.launcher import BUNDLE_FILE, PLAN_OBJECT, Ec2Launcher
from hetopt.backends.ec2.renter.order import ORDER_FILE, Network, Order
from hetopt.backends.ec2.renter.ordering import Moved, Orders
from hetopt.backends.ec2.renter.request import Request
from hetopt.backends.host.bundle import Bundle, make_bundle
from hetopt.backends.options import Ec2
from hetopt.core.errors import BadInput, NoFeasiblePlan
from hetopt.core.plain_text import typed
from hetopt.core.run_folder import RunFolders, read_spec
from hetopt.core.run_spec import RunSpec
from hetopt.optimizer.cost.billing import load_billing
from hetopt.optimizer.exploring import check_probed
from hetopt.optimizer.launch_record import LAUNCH_FILE, Launch
from hetopt.optimizer.market.catalog import load_catalog
from hetopt.optimizer.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Rental(Prepared):
    """A launch with what is to be rented for it.

    Attributes:
        wanted: the plan as it is to be run.
        order: the machines, their prices now and at most, the budget and the end of their lease.
        bundle: the code that machines run; absent where a run goes on, whose bucket has it.
        risk: half a sentence on how likely the limits are broken, where nobody has accepted that; None: nothing.
        accept_fewer: asked whether the run may begin on fewer machines; absent: all or none.
        spent_usd: what the run has cost before.
    """

    wanted: Plan
    order: Order
    bundle: Bundle | None = None
    risk: str | None = None
    accept_fewer: Callable[[RunSpec], bool] | None = None
    spent_usd: float = 0.0

    def moved_prices(self) -> list[Moved]:
        """What machines cost now beside what was planned, a row a type."""
        return ordering.moved_prices(self.wanted, self.order)

    def expected_usd(self) -> tuple[float, float]:
        """What the run should cost at the prices of now, and at most of 90 %."""
        return ordering.expected_usd(self.wanted, self.order)

    def save_order(self, folder: Path) -> None:
        """Write what must be in the run's folder before anything is rented."""
        self.order.model_copy(update={"run_id": folder.name}).save(folder / ORDER_FILE)
        if self.bundle is not None:
            self.launch.plan.save(folder / PLAN_OBJECT)
            (folder / BUNDLE_FILE).write_bytes(self.bundle.data)

    def requests(self) -> Sequence[Request]:
        """Every call that submitting makes, as long as none is refused."""
        assert self.bundle is not None, "a run that goes on has its calls in its ledger"
        return calls.launch_calls(self.order, {PLAN_OBJECT: self.launch.plan.to_json().encode()}, self.bundle.data)


@dataclass(frozen=True, kw_only=True)
class Ec2Backend(Ec2Launcher):
    """Rents a plan's machines, all in one zone, within a budget that is a hard stop."""

    def prepare(self, made: Plan, wanted: Plan, options: Ec2) -> Rental:
        """See `hetopt.backends.backend.Backend`. It asks AWS what must be known, and changes nothing there."""
        if not options.unprobed:
            check_probed(wanted, unprobed=False)
        region = ordering.region_of(wanted)
        bundle = make_bundle(wanted.run.task, wanted.run.script)
        spec = _as_machines_read_it(wanted.run, bundle, options.data)
        orders, now = _orders(region, options), datetime.datetime.now(datetime.UTC)
        dry_run, now_s = f"{now:%Y%m%d-%H%M%S}-dry-run", now.timestamp()
        order = orders.of_plan(wanted, run_id=dry_run, bundle_sha256=bundle.sha256, now_s=now_s).of_run(spec)
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
        """See `hetopt.backends.backend.Backend`. What the run has cost so far counts towards its budget."""
        launch = Launch.load(folder / LAUNCH_FILE)
        seen = _ended(folder, launch)
        before = Order.load(folder / ORDER_FILE)
        now_s = datetime.datetime.now(datetime.UTC).timestamp()
        same_place = replace(options, bucket=options.bucket or before.bucket)
        if ordering.network_of(options) == Network():
            same_place = replace(same_place, **before.network.model_dump())
        orders = _orders(before.region, same_place)
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

    def check_ready(self, prepared: Prepared) -> None:
        """See `hetopt.backends.backend.Backend`.

        Raises:
            BudgetStop: prices have risen beyond what was planned.
        """
        assert isinstance(prepared, Rental)
        if prepared.folder is None:
            ordering.check_prices(prepared.wanted, prepared.order)

    def submit(self, prepared: Prepared, folders: RunFolders) -> tuple[RunHandle, Launch]:
        """See `hetopt.backends.backend.Backend`. From here on money is spent.

        Raises:
            NoFeasiblePlan: the plan is a risk that nobody has accepted.
            CloudRefused: it cannot be had. Nothing is left.
        """
        assert isinstance(prepared, Rental)
        if prepared.risk is not None:
            raise NoFeasiblePlan(
                f"The plan is a risk: {prepared.risk}.",
                hint="plan again with other limits, raise `budget_usd`, or take the risk with `accept_risk=True`",
            )
        self.check_ready(prepared)
        folder, launch = prepared.begun(folders, secret=True)
        prepared.save_order(folder)
        launch.save(folder / LAUNCH_FILE)
        handle = replace(self, accept=prepared.accept_fewer).start(launch.spec, folder, {})
        # The machines' addresses have decided the order of the workers.
        launch = launch.model_copy(update={"spec": read_spec(folder)})
        launch.save(folder / LAUNCH_FILE)
        return handle, launch


def _orders(region: str, options: Ec2) -> Orders:
    """Written with the credentials and the catalogue that are here."""
    return Orders(
        edge=connect(region),
        catalog=load_catalog(region),
        billing=load_billing(),
        options=options,
        version=version("hetopt"),
    )


def _ended(folder: Path, launch: Launch) -> ClusterState:
    """What was last seen of a run that is over.

    Raises:
        BadInput: it is not, or ran elsewhere.
    """
    if launch.on != "ec2":
        raise BadInput(
            f"{folder.name} was started on {launch.on}, and goes on there.",
            hint=f"hetopt launch --on {launch.on} --resume {folder.name}",
        )
    seen = last_seen(folder)
    if not seen.time_s:
        raise BadInput(f"{folder.name} never had its machines.", hint="launch its plan anew")
    if not seen.cleared:
        raise BadInput(f"{folder.name} is not over yet.", hint=f"end it first with `hetopt stop {folder.name}`")
    return seen


def _as_machines_read_it(spec: RunSpec, bundle: Bundle, data: str | None) -> RunSpec:
    """The run with the task's place in the bundle, and data from S3.

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
