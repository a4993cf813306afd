"""`hetopt.launch`: a plan becomes a run, on this machine, on an emulation of its cluster, or on rented machines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING

from hetopt.api import compression_options, precision_options, stream_options, sync_options
from hetopt.api.backends import backend
from hetopt.api.run import Run
from hetopt.api.script_text import lost_files, read_script, resumes, trains_on_several_workers
from hetopt.api.values import MOST_STEPS, chosen, positive, within
from hetopt.backends.backend import LaunchOptions, Prepared, check_options
from hetopt.core.comm.composition import METHODS
from hetopt.core.commands import typed
from hetopt.core.errors import BadInput
from hetopt.core.names import converted_script, typed_script
from hetopt.core.policy_settings import BATCH_SETTINGS, Settings, parse_policy
from hetopt.core.reporter import Reporter
from hetopt.core.run_spec import BATCH_POLICIES, DATA_PLACE, BatchPolicy, RunSpec
from hetopt.core.runs import RunFolders, runs_home
from hetopt.core.script_rules import check_batch, check_for_script, left_to_script
from hetopt.optimizer.launch_record import Place
from hetopt.optimizer.plan import Plan

__all__ = ["LaunchOptions", "launch", "prepare", "prepare_resumed", "resume", "submit"]

if TYPE_CHECKING:
    from hetopt.backends.backend import Backend


def launch(
    plan: Plan | Path | str,
    *,
    on: Place,
    script: Sequence[str] = (),
    slowdowns: Sequence[float] | None = None,
    hosts: str | None = None,
    inventory: Path | str | None = None,
    schedule: str | None = None,
    stand_in: bool = False,
    batch_policy: BatchPolicy | None = None,
    compression: str | None = None,
    ratio_policy: str | None = None,
    collective: str | None = None,
    sync: str | None = None,
    partition: str | None = None,
    inject: str | None = None,
    stream: str | None = None,
    precision: str | None = None,
    steps: int | None = None,
    data: Path | str | None = None,
    restarts: int | None = None,
    budget_usd: float | None = None,
    bucket: str | None = None,
    zone: str | None = None,
    substitutes: Mapping[str, Sequence[str]] | None = None,
    instance_profile: str | None = None,
    images: Mapping[str, str] | None = None,
    unprobed: bool = False,
    accept_risk: bool = False,
    accept_fewer: Callable[[RunSpec], bool] | None = None,
    subnets: Sequence[str] = (),
    security_group: str | None = None,
    public_address: bool = True,
    proxy: str | None = None,
    canary: bool = False,
    reporter: Reporter | None = None,
) -> Run:
    """Start a plan and return at once; `Run.wait` follows it, `Run.stop` ends it.

    What costs money is never a default: nothing is rented unless ``on`` is ``"ec2"``, and then no more is spent than
    the budget of the plan, or ``budget_usd``.

    Args:
        plan: made by `recommend`, or its file.
        on: ``"local"``: real processes on this machine; ``"rehearsal"``: a scaled emulation of the cluster on this
            machine, with a network of its own (it needs root); ``"ssh"``: hosts of your own; ``"ec2"``: the plan's
            machines are rented.
        script: a training script with a session in it, and its arguments: ``["train_hetopt.py", "config.yaml"]``.
            Absent: the one that was profiled, where the plan is of a script.
        slowdowns: local: a factor of 1 or more for each worker, whose computation takes so many times as long.
            Absent: as many workers as the plan has, at full speed.
        hosts: rehearsal: these hosts instead of the plan's machines: ``"speed=1,rate=100mbit x2; speed=0.25"``.
            ssh: those to run on: ``"alice@box1,bob@box2"``.
        inventory: ssh: the file that describes them, such as ``"hosts.toml"``.
        schedule: rehearsal: what happens on the way, a change a line: ``"30s h2 speed=0.25"``.
        batch_policy: how the batch is shared: uniform, static, proportional, dynamic, omnilearn, allocation, model, or
            rate with ``stream``. Absent: the plan's.
        compression: of gradients: ``"topk(0.01)"``, ``"powersgd,rank=2"``, ``"dense"`` or ``"auto"``.
        ratio_policy: who decides how much is sent.
        collective: which collective operation aggregates compressed gradients.
        sync: when workers are synchronized: ``"bsp"``, ``"local-sgd(8)"``, ``"selsync(auto)"``.
        partition: which samples a worker sees.
        inject: samples that workers hand on.
        stream: train on samples as they arrive: ``"replay(40/80)"``, ``"redis(redis://HOST:6379/0)"``.
        precision: that workers compute in: ``"fp32"``, ``"tf32"``, ``"bf16"`` or ``"fp16"``; another than the plan's is
            for local and rehearsal, where its steps were measured. Absent: the plan's.
        steps: stop after so many instead of at the plan's end.
        stand_in: rehearsal: the job is not trained; a gradient that weighs as much against the links is exchanged.
        data: folder of the task's data, where it is not where the profile found it; ec2: ``s3://BUCKET/PREFIX``. A
            script is told it where its arguments say ``{data}``.
        restarts: how often a worker that is killed is replaced (local, rehearsal).
        budget_usd: ec2: a hard cap on the whole bill, USD.
        bucket: ec2: where code, checkpoints and state go. Absent: ``hetopt-ACCOUNT-REGION``.
        zone: ec2: only this availability zone, by name or id.
        substitutes: ec2: for an instance type those that may stand in for it.
        instance_profile: ec2: the machines' role. Absent: ``hetopt-node``.
        images: ec2: an AMI for a kind of machine: x86_64-cpu, arm64-cpu, x86_64-gpu or arm64-gpu.
        unprobed: ec2: rent types although no step was ever measured on them or a relative.
        accept_risk: ec2: rent a plan that is less sure to keep its limits than was asked for.
        accept_fewer: ec2: asked whether the run may begin on fewer machines; absent: all or none.
        subnets: ec2: ids of the subnets that machines may be in, all of one network. None: the default ones.
        security_group: ec2: id of the machines' group, which lets them reach each other. Absent: one is made.
        public_address: ec2: False: machines get none, whatever their subnet gives; it must have another way out.
        proxy: ec2: ``http://HOST:PORT`` by which machines reach S3 and packages. Absent: by themselves.
        canary: ec2: first rent one machine of each type, for some minutes and under a dollar, and put what it measures
            into the plan.
        reporter: told what goes on.

    Raises:
        BadInput: the plan cannot be run there, or an option cannot be.
        NoFeasiblePlan: ec2: the plan is a risk that was not accepted.
        CloudRefused, BudgetStop: ec2: it cannot be had. Nothing is left.
    """
    if isinstance(slowdowns, Real):
        raise BadInput(
            f"`slowdowns` must be a factor for each worker, got {slowdowns}.", hint="for example `slowdowns=[1, 2]`"
        )
    options = LaunchOptions(
        data=None if data is None else str(data),
        restarts=restarts,
        slowdowns=None if slowdowns is None else tuple(slowdowns),
        hosts=hosts,
        inventory=None if inventory is None else str(inventory),
        schedule=schedule,
        stand_in=stand_in,
        budget_usd=positive(budget_usd, "budget_usd", "USD"),
        bucket=bucket,
        zone=zone,
        substitutes={name: tuple(others) for name, others in (substitutes or {}).items()},
        instance_profile=instance_profile,
        images=dict(images or {}),
        unprobed=unprobed,
        accept_risk=accept_risk,
        accept_fewer=accept_fewer,
        subnets=tuple(subnets),
        security_group=security_group,
        public_address=public_address,
        proxy=proxy,
        canary=canary,
    )
    told = reporter or Reporter()
    where = backend(on, told)
    changes = Changes(
        script=tuple(script),
        batch_policy=batch_policy,
        compression=compression,
        ratio_policy=ratio_policy,
        collective=collective,
        sync=sync,
        partition=partition,
        inject=inject,
        stream=stream,
        precision=precision,
        steps=steps,
    )
    prepared = prepare(plan, where, on, options, changes)
    return submit(prepared, where, begun=lambda name: told.note(f"run {name}"))


@dataclass(frozen=True, kw_only=True)
class Changes:
    """What a launch changes in its plan, as people write it; see `launch` for each. Absent: as it was planned."""

    script: tuple[str, ...] = ()
    batch_policy: str | None = None
    compression: str | None = None
    ratio_policy: str | None = None
    collective: str | None = None
    sync: str | None = None
    partition: str | None = None
    inject: str | None = None
    stream: str | None = None
    precision: str | None = None
    steps: int | None = None


def prepare(
    plan: Plan | Path | str, where: Backend, on: Place, options: LaunchOptions, changes: Changes = Changes()
) -> Prepared:
    """Map a plan onto a backend, with what is asked for this launch in it. Nothing is started or rented.

    Args:
        plan: as it was made, or its file, which is read once all that was asked for can be.
        where: the backend.
        on: its name.
        options: of the launch.
        changes: of the plan.

    Raises:
        BadInput: something does not go with the rest.
    """
    check_options(on, options)
    policy, batch_settings = batch_wish(changes.batch_policy)
    wish = compression_options.parse_wish(changes.compression, changes.ratio_policy, changes.collective)
    sync_wish = sync_options.parse_wish(changes.sync, changes.partition, changes.inject)
    stream_wish = stream_options.parse_stream(changes.stream)
    if stream_wish is not None and on in ("ssh", "ec2"):
        raise BadInput(
            '`stream` is for `on="local"` and `on="rehearsal"`.', hint='leave it out, or choose `on="local"`'
        )
    if policy == "rate":
        if stream_wish is None:
            raise BadInput('`batch_policy="rate"` follows streams, and there is none.', hint="add `stream`")
        policy = batch_settings = None  # what a stream implies
    steps = changes.steps
    if steps is not None:
        within(steps, "steps", 1, MOST_STEPS, example="500")
    made = plan if isinstance(plan, Plan) else Plan.load(Path(plan))
    if on != "rehearsal":
        made.refuse_if_estimated()
    stands_in = options.stand_in or made.profile.is_counted
    chosen(made.run.batch_policy, list(BATCH_POLICIES), "batch policy")
    if made.run.compression.name not in METHODS:
        raise BadInput(
            f"the plan sends gradients by {made.run.compression.name!r}, which this version of hetopt does not have.",
            hint="plan again, or name another with `compression`" if wish.compression is None else "plan again",
        )
    wanted = made.adjusted(steps=steps, policy=policy, batch_settings=batch_settings)
    remarks: tuple[str, ...] = ()
    if stands_in:
        _refuse_what_would_train(changes)
    else:
        wanted, remarks = _scripted(wanted, changes, options, rents=on == "ec2")
    if not wish.is_empty:
        wanted = wanted.model_copy(update={"run": compression_options.decide(wish, wanted.run)})
    if not sync_wish.is_empty or wanted.run.is_local:
        run = sync_options.decide(sync_wish, wanted.run, exchange_was_asked=not wish.is_empty)
        wanted = wanted.model_copy(update={"run": run})
    wanted, computing = precision_options.in_precision(wanted, changes.precision, on)
    remarks = (*remarks, *computing)
    if wanted.run.script and not stands_in:
        check_for_script(wanted.run)
    prepared = where.prepare(made, wanted, options)
    record = prepared.launch
    if remarks:
        record = record.model_copy(update={"notes": (*record.notes, *remarks)})
    if stream_wish is None:
        return replace(prepared, launch=record)
    spec = stream_options.on_stream(stream_wish, record.spec, policy)
    prediction, said = stream_options.waiting(record.prediction, spec)
    update = {"spec": spec, "prediction": prediction, "notes": (*record.notes, said)}
    return replace(prepared, launch=record.model_copy(update=update))


def prepare_resumed(run: Run, where: Backend, on: Place, options: LaunchOptions) -> Prepared:
    """A run that has ended, to go on from its last checkpoint. Nothing is started or rented.

    Args:
        run: that one.
        where: the backend.
        on: its name.
        options: of this launch: a new budget, other images.

    Raises:
        HetoptError: it is not over, ran elsewhere, has no checkpoint, or an option would make another run of it.
    """
    check_options(on, options)
    for name in ("data", "slowdowns", "hosts", "inventory", "schedule", "stand_in"):
        if getattr(options, name) not in (None, False):
            raise BadInput(
                f"`{name}` cannot change in a run that goes on.", hint="leave it out, or start the plan anew"
            )
    return where.prepare_resumed(run.folder, options)


def _refuse_what_would_train(changes: Changes) -> None:
    """A stand-in has neither code nor samples of its own.

    Raises:
        BadInput: something was asked for that needs them.
    """
    for name in ("script", "partition", "inject", "stream", "precision"):
        if getattr(changes, name):
            raise BadInput(
                f"`{name}` is for what is trained, and a stand-in trains nothing.", hint=f"leave `{name}` out"
            )


def batch_wish(text: str | None) -> tuple[str | None, Settings | None]:
    """A batch policy, and its settings: `allocation(micro=4)`; None where none was given.

    Raises:
        BadInput: there is no such policy, or it has no such setting.
    """
    if text is None:
        return None, None
    return parse_policy(text, BATCH_POLICIES, BATCH_SETTINGS, "`batch_policy`", "batch policy")


def _scripted(plan: Plan, changes: Changes, options: LaunchOptions, *, rents: bool) -> tuple[Plan, tuple[str, ...]]:
    """The plan with the script that will run, where it is of one, and what to know of that script.

    Raises:
        BadInput: the plan is of a task, or the script has no session, no place for its data, or shares out its data
            itself.
    """
    said = typed_script(changes.script)
    if not plan.run.script:
        if said:
            raise BadInput(
                f"the plan is of the task {plan.run.task}, and `script` names {said[0]}.",
                hint=f"profile the script first: `hetopt profile -- {typed(said[0])}`",
            )
        return plan, ()
    script = said or plan.run.script
    for name in ("partition", "inject", "stream", "steps", "precision"):
        if getattr(changes, name) is not None:
            raise BadInput(
                f"`{name}` is for tasks: a script has its own data, arithmetic and loop.",
                hint="leave it out",
            )
    path = Path(script[0])
    files = read_script(path)
    if not trains_on_several_workers(files):
        raise BadInput(
            f"{path} uses neither DistributedDataParallel nor a session: its workers would each train for themselves.",
            hint=f"`hetopt convert {typed(path)}`, then launch {typed(converted_script(path))}",
        )
    takes_data = any(DATA_PLACE in one for one in script[1:])
    if takes_data != (options.data is not None):
        raise BadInput(
            f"`data` is told to a script by {DATA_PLACE} among its arguments, and "
            + ("it is not there." if options.data is not None else "there is no `data`."),
            hint=f"give both, {DATA_PLACE} in the place of the folder that {path.name} takes, or neither",
        )
    found = {"script": (str(path.resolve()), *script[1:]), "resumes": resumes(files)}
    run = plan.run.model_copy(update=found)
    profiled, another = plan.profile.job, tuple(_another_script(path, Path(plan.run.script[0])))
    if script[1:] == profiled.script[1:] and not another:
        check_batch(run, profiled.batch_size)
    remarks = (
        *another,
        left_to_script(run),
        *_resuming(path.name, plan.run, run),
        *(lost_files(files) if rents else ()),
    )
    profile = plan.profile
    if another or script[1:] != plan.run.script[1:]:
        # It may read by another number of processes.
        profile = profile.model_copy(update={"job": profile.job.model_copy(update={"reading": None})})
    return plan.model_copy(update={"run": run, "profile": profile}), remarks


def _another_script(path: Path, planned: Path) -> Iterator[str]:
    """That predictions are of another script, where neither it nor what `convert` makes of it is launched."""
    if path.name not in (planned.name, converted_script(planned).name):
        yield f"The plan is of {planned.name}: what it predicts is not of {path.name}, which was not profiled."


def _resuming(name: str, planned: RunSpec, run: RunSpec) -> Iterator[str]:
    """What becomes of a script after an interruption, where it is not what is usual, or not what was planned."""
    if not run.resumes:
        priced = (
            "the plan reckons with checkpoints, so it is too cheap" if planned.resumes else "the plan has priced that"
        )
        yield (
            f"{name} saves no checkpoint: after a loss it begins again, and all that was done before is lost; "
            f"{priced}. With run.checkpoint and run.resume it goes on."
        )
    elif not planned.resumes:
        yield (
            f"{name} goes on from checkpoints, and the plan reckons without: an interruption takes less than was "
            "planned."
        )


def submit(prepared: Prepared, where: Backend, *, begun: Callable[[str], None] = lambda name: None) -> Run:
    """Start what was prepared.

    Args:
        prepared: on a backend.
        where: that one.
        begun: told the run's name once it has a folder, before anything is started or rented.

    Raises:
        HetoptError: it cannot be started; nothing of it is left.
    """
    if prepared.folder is not None:
        begun(prepared.folder.name)
    handle, _ = where.submit(prepared, RunFolders(home=runs_home(), made=begun))
    return Run(folder=handle.run_dir, backend=where)


def resume(run: Run | str, options: LaunchOptions | None = None) -> Run:
    """Go on with a run that has ended, from its last checkpoint.

    Args:
        run: or its name.
        options: of this launch: a new budget, other images.

    Raises:
        HetoptError: it is not over, or has no checkpoint.
    """
    ended = run if isinstance(run, Run) else Run.find(run)
    on = ended.launch.on if ended.launch is not None else "local"
    return submit(prepare_resumed(ended, ended.backend, on, options or LaunchOptions()), ended.backend)
