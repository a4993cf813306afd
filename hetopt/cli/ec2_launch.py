"""`hetopt launch --on ec2`: order, show every call and its cost, ask, rent, follow, and give back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from hetopt.backends.backend import RunHandle
    from hetopt.backends.ec2.renter.bundle import Bundle
    from hetopt.backends.ec2.renter.cluster_state import ClusterState
    from hetopt.backends.ec2.renter.launcher import Ec2Launcher
    from hetopt.backends.ec2.renter.order import Order
    from hetopt.backends.ec2.renter.ordering import Wishes
    from hetopt.backends.ec2.renter.renting import Accept
    from hetopt.core.run_spec import RunSpec
    from hetopt.optimizer.launch_record import Launch
    from hetopt.optimizer.plan import Plan


def wishes(
    *,
    budget: str | None,
    bucket: str | None,
    zone: str | None,
    substitutes: Sequence[str],
    images: Sequence[str],
    instance_profile: str | None,
) -> Wishes:
    """What was typed, as what is wished for.

    Raises:
        BadInput: a substitute, an image or the budget cannot be read.
    """
    from hetopt.backends.ec2.renter.account import IMAGES
    from hetopt.backends.ec2.renter.ordering import PROFILE_NAME, Wishes
    from hetopt.cli import parse
    from hetopt.core.errors import BadInput
    from hetopt.core.grammar import arguments, fields

    chosen: dict[str, str] = {}
    for text in images:
        for kind, ami in fields(arguments(text, "--image"), {kind: kind for kind in IMAGES}).items():
            if not ami.startswith("ami-"):
                raise BadInput(
                    f"--image: {kind} must be an AMI, got {ami!r}.",
                    hint="for example --image x86_64-gpu=ami-0123456789abcdef0",
                )
            chosen[kind] = ami
    stand_ins: dict[str, tuple[str, ...]] = {}
    for text in substitutes:
        written = arguments(text, "--substitute")
        if len(written.pairs) != 1:
            raise BadInput(
                f"--substitute must be TYPE=OTHER[,OTHER], got {text!r}.",
                hint="for example --substitute c7i.large=c6i.large",
            )
        [(planned, first)] = written.pairs.items()
        stand_ins[planned] = (first, *written.values)
    return Wishes(
        budget_usd=parse.positive(budget, "--budget", "USD"),
        bucket=bucket,
        instance_profile=instance_profile or PROFILE_NAME,
        images=chosen,
        zone=zone,
        substitutes=stand_ins,
    )


def run(
    made: Plan,
    wanted: Plan,
    wished: Wishes,
    *,
    data: str | None,
    dry_run: bool,
    yes: bool,
    as_json: bool,
    detach: bool,
    partial: bool,
    accept_risk: bool = False,
) -> None:
    """Rent and run a plan.

    Args:
        made: the plan as it was made, for the record.
        wanted: as it is to be run.
        wished: what was chosen for this launch.
        data: where its data is, in S3.
        dry_run: only show what would be done.
        yes: do not ask.
        as_json: for programs.
        detach: return when the machines have been told to begin.
        partial: fewer machines will do where not all are to be had.
        accept_risk: a plan will do that is less sure to keep its limits than was asked for.
    """
    import datetime

    from hetopt.backends.ec2.renter import calls, ordering
    from hetopt.backends.ec2.renter.bundle import make_bundle
    from hetopt.backends.ec2.renter.edge import connect
    from hetopt.backends.ec2.renter.launcher import BUNDLE_FILE, PLAN_OBJECT
    from hetopt.backends.ec2.renter.order import ORDER_FILE
    from hetopt.backends.runs import RunFolders, runs_home
    from hetopt.cli import ec2_view, render, terminal
    from hetopt.optimizer.cost.billing import load_billing
    from hetopt.optimizer.market.catalog import load_catalog

    region = ordering.region_of(wanted)
    bundle = make_bundle(wanted.run.task)
    spec = _spec(wanted.run, bundle, data)
    now = datetime.datetime.now(datetime.UTC)
    catalog = load_catalog(region)
    order = ordering.make_order(
        wanted,
        connect(region),
        catalog,
        load_billing(),
        wished,
        run_id=f"{now:%Y%m%d-%H%M%S}-dry-run",
        version=_version(),
        bundle_sha256=bundle.sha256,
        now_s=now.timestamp(),
    ).of_run(spec)
    if dry_run:
        requests = calls.launch_calls(order, {PLAN_OBJECT: made.to_json().encode()}, bundle.data)
        if as_json:
            render.print_json(ec2_view.as_json(order, requests))
        else:
            ec2_view.show(wanted, order)
            ec2_view.show_calls(requests)
        return
    ordering.check_prices(wanted, order)
    if not as_json:
        ec2_view.show(wanted, order)
    _ask(order, yes, None if accept_risk else wanted.risk_with(order.budget_usd))
    folder = RunFolders(home=runs_home()).create(spec.task.rpartition("/")[2], now, secret=True)
    order = order.model_copy(update={"run_id": folder.name})
    order.save(folder / ORDER_FILE)
    made.save(folder / PLAN_OBJECT)
    (folder / BUNDLE_FILE).write_bytes(bundle.data)
    record = _record(made, wanted, spec, folder, now)
    render.note(f"run {folder.name}; look at it from another terminal with `hetopt status`, end it with `hetopt stop`")
    accept = (lambda spec: _accept_fewer(wanted, spec, yes=yes)) if partial else None
    _start_and_follow(record, folder, accept, detach=detach, as_json=as_json)
    terminal.flush()


def resume(
    folder: Path, wished: Wishes, *, dry_run: bool, yes: bool, as_json: bool, detach: bool, partial: bool
) -> None:
    """Rent again for a run that has ended, and go on from its last checkpoint. What it has cost counts.

    Args:
        folder: the run's.
        wished: what was chosen for this launch.
        dry_run: only show what would be done.
        yes: do not ask.
        as_json: for programs.
        detach: return when the machines have been told to begin.
        partial: fewer machines will do where not all are to be had.
    """
    import datetime
    from dataclasses import replace

    from hetopt.backends.ec2.renter import ordering
    from hetopt.backends.ec2.renter.edge import connect
    from hetopt.backends.ec2.renter.order import ORDER_FILE, Order
    from hetopt.cli import ec2_view, render
    from hetopt.optimizer.cost.billing import load_billing
    from hetopt.optimizer.launch_record import LAUNCH_FILE, Launch
    from hetopt.optimizer.market.catalog import load_catalog

    record = Launch.load(folder / LAUNCH_FILE)
    seen = _ended(folder, record)
    before = Order.load(folder / ORDER_FILE)
    now_s = datetime.datetime.now(datetime.UTC).timestamp()
    order = ordering.make_order(
        record.plan,
        connect(before.region),
        load_catalog(before.region),
        load_billing(),
        replace(wished, bucket=wished.bucket or before.bucket),
        run_id=folder.name,
        version=_version(),
        bundle_sha256=before.bundle_sha256,
        now_s=now_s,
        life=before.life + 1,
        spent_usd=seen.spent_usd(now_s),
    )
    if not as_json:
        ec2_view.show(record.plan, order)
        render.note(f"{folder.name} has cost ${seen.spent_usd(now_s):.4f} so far; it goes on from its last checkpoint")
    if dry_run:
        return
    _ask(order, yes)
    order.save(folder / ORDER_FILE)
    # All hosts of the plan again, also those that were lost on the way.
    record = record.model_copy(
        update={
            "spec": record.spec.model_copy(update={"workers": record.plan.run.workers}),
            "resumed_s": (*record.resumed_s, now_s),
        }
    )
    record.save(folder / LAUNCH_FILE)
    accept = (lambda spec: _accept_fewer(record.plan, spec, yes=yes)) if partial else None
    _start_and_follow(record, folder, accept, detach=detach, as_json=as_json)


def _ended(folder: Path, record: Launch) -> ClusterState:
    """What was last seen of a run that is over.

    Raises:
        BadInput: it is not, or ran elsewhere.
    """
    from hetopt.backends.ec2.renter.cluster_state import SEEN_FILE, ClusterState
    from hetopt.core.errors import BadInput

    if record.on != "ec2":
        raise BadInput(
            f"{folder.name} was started on {record.on}, and goes on there.",
            hint=f"hetopt launch --on {record.on} --resume {folder.name}",
        )
    if not (folder / SEEN_FILE).exists():
        raise BadInput(f"{folder.name} never had its machines.", hint="launch its plan anew")
    seen = ClusterState.load(folder / SEEN_FILE)
    if not seen.cleared:
        raise BadInput(f"{folder.name} is not over yet.", hint=f"end it first with `hetopt stop {folder.name}`")
    return seen


def _ask(order: Order, yes: bool, risk: str | None = None) -> None:
    """Spending is confirmed: at a terminal by a person, elsewhere by --yes. A risk is one that a person must see.

    Raises:
        BadInput: nobody is there to say yes.
        NoFeasiblePlan: nobody has accepted the risk.
    """
    import sys

    from hetopt.cli import render
    from hetopt.core.errors import BadInput, NoFeasiblePlan

    if risk is not None and (yes or not (sys.stdin.isatty() and sys.stderr.isatty())):
        raise NoFeasiblePlan(
            f"The plan is a risk: {risk}.",
            hint="plan again with other limits, raise --budget, or take the risk with --accept-risk",
        )
    if yes:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise BadInput(
            f"renting costs up to ${order.budget_usd:.2f}, and nobody is there to say yes.",
            hint="say so with --yes, or look first with --dry-run",
        )
    if risk is not None:
        render.note(f"RISK: {risk}; else it is stopped unfinished")
    if not typer.confirm(f"Rent it, for at most ${order.budget_usd:.2f}?", default=False, err=True):
        raise typer.Exit(0)


def _record(made: Plan, wanted: Plan, spec: RunSpec, folder: Path, now: object) -> Launch:
    import datetime
    import time

    from hetopt.optimizer.launch_record import LAUNCH_FILE, Launch

    assert isinstance(now, datetime.datetime)
    record = Launch(
        created=now.isoformat(timespec="seconds"),
        started_s=time.time(),
        run_id=folder.name,
        on="ec2",
        plan=made,
        spec=spec,
        prediction=wanted.chosen.prediction,
    )
    record.save(folder / LAUNCH_FILE)
    return record


def _accept_fewer(plan: Plan, spec: RunSpec, *, yes: bool) -> bool:
    """Whether to begin on fewer machines. Within what the plan stated nobody is asked; beyond it a person is.

    The slowest of those that are left computes as much longer as its share has grown; the exchange is as it was.
    """
    import sys

    from hetopt.cli import render
    from hetopt.core import formatting

    said = plan.chosen.prediction
    before = {worker.host: worker.local_batch_size for worker in plan.run.workers}
    growth = max(worker.local_batch_size / before[worker.host] for worker in spec.workers)
    step_s = said.step_time_s.value
    stretch = (step_s + (growth - 1) * said.compute_s) / step_s
    total_s = said.total_s.value * stretch
    render.note(
        f"{len(spec.workers)} of {len(plan.run.workers)} workers can be had: {formatting.duration(total_s)} instead of "
        f"{formatting.duration(said.total_s.value)}"
    )
    if total_s <= said.total_s.high:
        return True
    if yes or not (sys.stdin.isatty() and sys.stderr.isatty()):
        render.note(f"that is beyond the {formatting.duration(said.total_s.high)} that the plan stated at most")
        return False
    return typer.confirm("That is worse than the plan stated. Begin all the same?", default=False, err=True)


def _start_and_follow(record: Launch, folder: Path, accept: Accept | None, *, detach: bool, as_json: bool) -> None:
    """Whatever interrupts the following also ends the run, unless it was detached."""
    from dataclasses import replace

    from hetopt.backends.ec2.renter.launcher import Ec2Launcher
    from hetopt.cli import follow, render
    from hetopt.cli.run_record import launcher_for
    from hetopt.core.interruption import stopping
    from hetopt.core.run_folder import read_spec
    from hetopt.optimizer.launch_record import LAUNCH_FILE

    launcher = launcher_for("ec2")
    assert isinstance(launcher, Ec2Launcher)
    launcher = replace(launcher, accept=accept)
    handle: RunHandle | None = None
    with render.progress("training") as live:
        live("renting the machines", 0.0)
        try:
            handle = launcher.start(record.spec, folder, {})
            # The machines' addresses have decided the order of the workers.
            record = record.model_copy(update={"spec": read_spec(folder)})
            record.save(folder / LAUNCH_FILE)
            if detach:
                render.note("the machines have been told to begin")
                return
            follow.keep_up(launcher, handle, record, live)
        except BaseException:
            if handle is not None and not detach:
                what, command = f"the rented machines of {folder.name}", f"hetopt stop {folder.name}"
                with stopping(what, command, lambda told: live(told, None)):
                    launcher.stop(handle)
            raise
    _finish(launcher, handle, as_json=as_json)


def _finish(launcher: Ec2Launcher, handle: RunHandle, *, as_json: bool) -> None:
    """Say how it ended.

    Raises:
        BudgetStop: the budget ended it.
        RunFailed: it failed.
        RunStopped: somebody else ended it.
    """
    from hetopt.backends.ec2.renter.cluster_state import SEEN_FILE, ClusterState
    from hetopt.cli import fetch, follow, render
    from hetopt.core.errors import BudgetStop

    seen = ClusterState.load(handle.run_dir / SEEN_FILE)
    render.note(
        f"the machines are gone; they cost ${seen.spent_usd(seen.time_s):.4f} at the prices that were seen meanwhile"
    )
    fetch.bring_model(handle.run_dir)
    ended_by = None
    if seen.stop_reason is not None and "budget" in seen.stop_reason:
        ended_by = BudgetStop(
            f"the run was ended with a checkpoint, because {seen.stop_reason}.",
            hint=f"look at what it reached with `hetopt report {handle.run_dir.name}`, and plan again with more",
        )
    follow.finish(launcher, handle.run_dir, as_json=as_json, ended_by=ended_by)


def _spec(spec: RunSpec, bundle: Bundle, data: str | None) -> RunSpec:
    """The run as machines read it: the task's place in the bundle, and data from S3.

    Raises:
        BadInput: the data is on this machine only.
    """
    from hetopt.core.errors import BadInput

    if data is not None and not data.startswith("s3://"):
        raise BadInput(
            f"rented machines cannot read {data}.",
            hint=f"copy it once, `aws s3 sync {data} s3://BUCKET/data/NAME`, then give --data s3://BUCKET/data/NAME",
        )
    if data is None and spec.data_dir is not None:
        raise BadInput(
            f"the data is in {spec.data_dir} on this machine, which rented machines cannot read.",
            hint=f"`aws s3 sync {spec.data_dir} s3://BUCKET/data/NAME`, then give --data s3://BUCKET/data/NAME",
        )
    return spec.model_copy(update={"task": bundle.task, "data_dir": data})


def _version() -> str:
    from importlib.metadata import version

    return version("hetopt")
