"""`hetopt.launch`: a plan becomes a run, on this machine, on an emulation of its cluster, or on rented machines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetopt.api.backends import Machines, Rehearsal, backend, options_at
from hetopt.api.changes import exchanged, on_stream, synchronized
from hetopt.api.options import Changes
from hetopt.api.run import Run
from hetopt.api.script_text import lost_files, read_script, resumes, several_workers
from hetopt.core.comm.composition import METHODS
from hetopt.core.errors import BadInput, setting
from hetopt.core.interruption import Reporter
from hetopt.core.option import changed, options_of, takes
from hetopt.core.plain_text import converted_script, known, typed, typed_script
from hetopt.core.run_folder import RunFolders, runs_home
from hetopt.core.run_rules import check_follows_noise, check_for_script, check_script_batch, left_to_script
from hetopt.core.run_spec import BATCH_POLICIES, DATA_PLACE, RunSpec
from hetopt.core.run_status import RunState
from hetopt.optimizer.launch_record import Place
from hetopt.optimizer.plan import Plan

if TYPE_CHECKING:
    from hetopt.backends.backend import Backend, Prepared


AS_PLANNED = Changes()
"""The changes of a launch that changes nothing of its plan."""


@takes(Changes)
def launch(
    plan: Plan | Path | str,
    *,
    on: Machines | Place,
    detach: bool = False,
    reporter: Reporter | None = None,
    **options: Any,
) -> Run:
    """Start a plan, with ``options`` changed, and return before it trains (renting takes minutes); `Run.wait` follows.

    What costs money is never a default: nothing is rented unless ``on`` is `Ec2` or `Sky`, and then no more is spent
    than the budget of the plan, or ``Ec2(budget_usd=...)``. A new folder of the run is made in the user's home folder
    of hetopt.

    Args:
        plan: made by `recommend`, or its file.
        on: place to run with its options, such as ``Ec2(zone="us-east-1a")``, or its name where all are usual:
            ``"local"``: real processes on this machine; ``"rehearsal"``: a scaled emulation of the cluster on this
            machine, with a network of its own (it needs root); ``"ssh"``: hosts of your own; ``"slurm"``: nodes of a
            Slurm cluster; ``"ec2"`` and ``"sky"``: the plan's machines are rented, on EC2 or by SkyPilot.
        detach: whether the run goes on when this process ends. A run on EC2 does so in any case.
        reporter: receives progress and remarks; None: nothing is reported.
        **options: what this launch changes in its plan.

    Raises:
        BadInput: the plan cannot be read or cannot run there, or an option is invalid or does not go with the plan.
        NoFeasiblePlan: ec2: the plan is likely to break its limits, and ``accept_risk`` was not given.
        CloudRefused: ec2: AWS refuses the machines. Nothing is left there.
        BudgetStop: ec2: at present prices the run may cost more than its budget. Nothing is left there.
        RunFailed: ssh, slurm, sky: no host can take part.
    """
    changes, reporter = Changes(**options), reporter or Reporter()
    place = options_at(on, {}) if isinstance(on, str) else on
    where = backend(place.PLACE, reporter)
    return submit(
        replace(prepare(plan, where, place, changes), detached=detach),
        where,
        begun=lambda name: reporter.note(f"run {name}"),
    )


def prepare(plan: Plan | Path | str, where: Backend, place: Machines, changes: Changes = AS_PLANNED) -> Prepared:
    """Prepare a launch: apply its changes to a plan and map it onto a backend. Nothing is started or rented.

    Args:
        plan: made by `recommend`, or its file.
        where: the backend to run on.
        place: launch options of that backend.
        changes: changes of the plan for this launch; by default none.

    Returns:
        The launch with its prediction on that backend, for `submit`.

    Raises:
        BadInput: the plan cannot be read, or a change or option does not go with the plan, its script or the backend.
        HetoptError: the backend cannot run the plan, such as a `BudgetStop` on ec2.
    """
    on = place.PLACE
    policy, batch_settings = changes.batch_policy or (None, None)
    if changes.stream is not None and on not in ("local", "rehearsal"):
        raise BadInput(
            '`stream` is for `on="local"` and `on="rehearsal"`.', hint='leave it out, or choose `on="local"`'
        )
    if policy == "rate":
        if changes.stream is None:
            raise BadInput('`batch_policy="rate"` follows streams, and there is none.', hint="add `stream`")
        policy = batch_settings = None  # what a stream implies
    planned = plan if isinstance(plan, Plan) else Plan.load(Path(plan))
    if on != "rehearsal":
        planned.refuse_if_estimated()
    stands_in = planned.profile.is_counted or (isinstance(place, Rehearsal) and place.stand_in)
    known(planned.run.batch_policy, BATCH_POLICIES, "batch policy")
    if planned.run.compression.name not in METHODS:
        raise BadInput(
            f"the plan sends gradients by {planned.run.compression.name!r}, which this version of hetopt does not "
            "have.",
            hint="plan again, or name another with `compression`" if changes.compression is None else "plan again",
        )
    wanted = planned.adjusted(steps=changes.steps, policy=policy, batch_settings=batch_settings)
    remarks: tuple[str, ...] = ()
    if stands_in:
        names = ["script", "partition", "inject", "stream", "shard", *["batch_policy"] * (policy == "critical")]
        _refuse(changes, names, "what is trained, and a stand-in trains nothing")
    else:
        wanted, remarks = _scripted(wanted, changes, place)
    wanted = wanted.model_copy(update={"run": synchronized(changes, exchanged(changes, wanted.run))})
    if wanted.run.script and not stands_in:
        check_for_script(wanted.run)
    if changes.shard not in (None, "none", planned.run.shard):
        remarks += (f"The plan reckons with {setting('shard', planned.run.shard or 'none')}.",)
    prepared = where.prepare(planned, wanted, place)
    record = prepared.launch
    if changes.stream is not None:
        record = record.model_copy(update={"spec": on_stream(changes.stream, record.spec, policy)})
        remarks += ("How long steps wait for samples to arrive is not predicted; the report tells.",)
    if record.spec.batch_policy == "critical":
        check_follows_noise(record.spec)
    return replace(prepared, launch=record.model_copy(update={"notes": (*record.notes, *remarks)}))


def prepare_resumed(run: Run, where: Backend, place: Machines) -> Prepared:
    """Prepare an ended run to go on from its last checkpoint on its backend. Nothing is started or rented.

    A run that has saved no checkpoint begins anew.

    Args:
        run: run to go on with.
        where: the run's backend.
        place: launch options of this launch, such as a new budget; options that are fixed for a run must stay at their
            defaults.

    Raises:
        BadInput: the run is not over or ran on another backend, or an option is fixed for a run.
        HetoptError: the backend cannot resume the run.
    """
    for name in changed(place):
        if options_of(type(place))[name].is_fixed:
            raise BadInput(
                f"`{name}` cannot change in a run that goes on.", hint="leave it out, or start the plan anew"
            )
    return where.prepare_resumed(run.folder, place)


def _refuse(changes: Changes, names: Sequence[str], reason: str) -> None:
    """Refuse changes of these names; ``reason`` says what they are for.

    Raises:
        BadInput: one of them was asked for.
    """
    for name in names:
        if getattr(changes, name):
            raise BadInput(f"`{name}` is for {reason}.", hint=f"leave `{name}` out")


def _scripted(plan: Plan, changes: Changes, place: Machines) -> tuple[Plan, tuple[str, ...]]:
    """Return the plan with the script that will run, and remarks on that script; a task's plan is returned as it is.

    The script is the launch's, else the plan's; nothing of it runs.

    Raises:
        BadInput: the plan is of a task and a script is named, or the script trains on one worker alone, gets changes
            that are for tasks, takes a data folder and is given none or the reverse, or steps by other samples than the
            plan.
    """
    typed_words = typed_script(changes.script)
    if not plan.run.script:
        if typed_words:
            raise BadInput(
                f"the plan is of the task {plan.run.task}, and `script` names {typed_words[0]}.",
                hint=f"profile the script first: `hetopt profile -- {typed(typed_words[0])}`",
            )
        return plan, ()
    script = typed_words or plan.run.script
    _refuse(changes, ("partition", "inject", "stream", "steps"), "tasks: a script has its own data and loop")
    path = Path(script[0])
    files = read_script(path)
    if not several_workers(files):
        raise BadInput(
            f"{path} uses neither DistributedDataParallel nor a session: its workers would each train for themselves.",
            hint=f"`hetopt convert {typed(path)}`, then launch {typed(converted_script(path))}",
        )
    takes_data = any(DATA_PLACE in argument for argument in script[1:])
    if takes_data != (place.data is not None):
        raise BadInput(
            f"`data` is told to a script by {DATA_PLACE} among its arguments, and "
            + ("it is not there." if place.data is not None else "there is no `data`."),
            hint=f"give both, {DATA_PLACE} in the place of the folder that {path.name} takes, or neither",
        )
    facts = {"script": (str(path.resolve()), *script[1:]), "resumes": resumes(files)}
    run = plan.run.model_copy(update=facts)
    profiled, planned = plan.profile.job, Path(plan.run.script[0])
    if changes.shard is not None and profiled.shard not in ("auto", changes.shard):
        shares = "nothing" if profiled.shard is None else f'`shard="{profiled.shard}"`'
        raise BadInput(
            f"A script says itself what devices share of its model: {planned.name}, as it was profiled, {shares}.",
            hint='give its session `shard="auto"`, or call torch\'s `fully_shard` in it, and profile it again',
        )
    another = (
        ()
        if path.name in (planned.name, converted_script(planned).name)
        else (f"The plan is of {planned.name}: what it predicts is not of {path.name}, which was not profiled.",)
    )
    if script[1:] == profiled.script[1:] and not another:
        check_script_batch(run, profiled.batch_size)
    remarks = (
        *another,
        left_to_script(run),
        *_resuming(path.name, plan.run, run),
        *(lost_files(files) if place.PLACE == "ec2" else ()),
    )
    return plan.model_copy(update={"run": run}), remarks


def _resuming(name: str, planned: RunSpec, run: RunSpec) -> Iterator[str]:
    """Yield a remark on what an interruption costs the script ``name``, if it saves no checkpoint of a session."""
    if not run.resumes:
        priced = "is too cheap" if planned.resumes else "has priced that"
        yield (
            f"{name} saves no checkpoint of a session: after a loss it starts again, from checkpoints of its own if it "
            f"has any; the plan {priced}. With run.checkpoint and run.resume it goes on."
        )


def submit(prepared: Prepared, where: Backend, *, begun: Callable[[str], None] = lambda name: None) -> Run:
    """Start a prepared launch, renting its machines on EC2, and return its run without waiting for training.

    Args:
        prepared: the launch, by `prepare` or `prepare_resumed`.
        where: the backend that the launch was prepared on.
        begun: called with the run's name once its folder exists, before anything is started or rented; by default
            nothing.

    Raises:
        HetoptError: the launch cannot be started; nothing of it runs or is rented.
    """
    if prepared.folder is not None:
        begun(prepared.folder.name)
    handle, _ = where.submit(prepared, RunFolders(home=runs_home(), on_create=begun))
    return Run(folder=handle.run_dir, backend=where)


def resume(run: Run | str, on: Machines | None = None) -> Run:
    """Resume an ended run from its last checkpoint, and return it; return a run that finished as it is.

    Args:
        run: the run, or its name or an unambiguous part of it.
        on: launch options of this launch, such as a new budget; None: the defaults of the run's backend.

    Raises:
        BadInput: there is no such run, it is not over, or an option is fixed for a run.
        HetoptError: the backend cannot start the run again, such as a `CloudRefused` on ec2; nothing of it runs.
    """
    ended = run if isinstance(run, Run) else Run.find(run)
    if ended.status().state is RunState.FINISHED:
        return ended
    place = on or options_at(ended.launch.on if ended.launch is not None else "local", {})
    return submit(prepare_resumed(ended, ended.backend, place), ended.backend)
