"""How a launch changes the run of its plan: what is exchanged, when workers synchronize, and what they compute in."""

from __future__ import annotations

from hetopt.api.options import Changes
from hetopt.core.comm.composition import AUTO, METHODS, why_not_controlled
from hetopt.core.comm.compression_text import IDENTITY
from hetopt.core.errors import BadInput, setting
from hetopt.core.run_rules import check_ratio_controller, checked, why_not_local, why_not_settling
from hetopt.core.run_spec import WEIGHS_WAYS, Compression, RunSpec
from hetopt.core.synchronization import Synchronization
from hetopt.optimizer.launch_record import Place
from hetopt.optimizer.plan import Plan
from hetopt.optimizer.step_time.local_steps import communication

MAY_SETTLE = (
    "Once the network and the job were seen, the run may switch for good to averaging parameters, "
    "and takes more steps then; "
    "cluster, time and cost are those of the plan without it."
)

PREDICTED_ANEW: tuple[Place, ...] = ("local", "rehearsal")
"""Places where nothing is rented and nobody's machines are chosen by a precision."""


def exchanged(changes: Changes, run: RunSpec) -> RunSpec:
    """Return the run with the compression, ratio policy and collective that were asked for.

    ``auto`` leaves compressor, ratio and collective to the run unless they are named.

    Raises:
        BadInput: two of them contradict each other, or compressor, memory, collective and policy do not go together.
    """
    asked, named = changes.compression, changes.collective
    if asked is None and changes.ratio_policy is None and named is None:
        return run
    policy, settings = changes.ratio_policy or (None, {})
    if asked == AUTO and policy not in (None, AUTO):
        raise BadInput(
            f'`compression="auto"` decides the ratio itself, and `ratio_policy={policy}` would decide it as well.',
            hint=f"name a compressor as well, for example `compression=topk(0.01)` and `ratio_policy={policy}`",
        )
    if policy is None and asked is not None:
        policy = AUTO if asked == AUTO else "fixed"
    if isinstance(asked, Compression) and asked.collective != AUTO:
        if named not in (None, AUTO, asked.collective):
            raise BadInput(
                f"`compression` asks for the collective {asked.collective} and `collective` for {named}.",
                hint="name one of them",
            )
        named = named or asked.collective
    if named is None and policy == AUTO:
        named = AUTO
    if policy is None:
        policy, settings = run.ratio_policy, run.ratio_settings
    compression = asked if isinstance(asked, Compression) else run.compression
    if compression is not asked and policy in WEIGHS_WAYS and not METHODS[compression.name].by_ratio:
        # Who weighs whole ways to exchange rounds as well: a plan that only rounds leaves it everything.
        compression = Compression()
    update = {"ratio_policy": policy, "ratio_settings": settings}
    if named is not None:
        update["collective_policy"] = "cheapest" if named == AUTO else "fixed"
    if named not in (None, AUTO):
        compression = compression.model_copy(update={"collective": named})
    checked(compression)
    changed = run.model_copy(update={**update, "compression": compression})
    _check_exchange(changed)
    return changed


def _check_exchange(run: RunSpec) -> None:
    compression, policy = run.compression, run.ratio_policy
    # Who weighs whole ways to exchange brings a compressor where the plan names none.
    if policy not in WEIGHS_WAYS or compression.name != IDENTITY:
        reason = why_not_controlled(compression.name, policy, compression.collective)
        if reason is not None:
            is_able = why_not_controlled(compression.name, policy) is None
            less = "name a compressor that can send less, for example `compression=topk(0.01)`"
            raise BadInput(reason, hint="leave `collective` out, or say all_gather" if is_able else less)
    if policy not in WEIGHS_WAYS:
        check_ratio_controller(policy, compression.ratio)
    if run.learning_rate_rule == "adascale" and (compression.name != IDENTITY or policy != "fixed"):
        raise BadInput(
            "The plan's learning rate follows the noise of the gradient, which nobody sees once it is compressed.",
            hint='plan again with another `learning_rate_rule`, or launch with `compression="dense"`',
        )


def synchronized(changes: Changes, run: RunSpec) -> RunSpec:
    """Return the run with the synchronization, partition and injection that were asked for.

    A plan's own choice of compression gives way to workers that send no gradients, and is weighed with averages of
    parameters by those that may settle for them, unless somebody chose it for this launch.

    Raises:
        BadInput: they do not go with the rest of the run.
    """
    update = {"sync": changes.sync, "partition": changes.partition, "injection": changes.inject}
    update = {name: value for name, value in update.items() if value is not None}
    if not update and not run.is_local:
        return run
    run = run.model_copy(update=update)
    chooses = changes.sync is not None and not (changes.compression or changes.ratio_policy or changes.collective)
    exchange: dict[str, object] = {}
    if run.sync.may_settle:
        if chooses and run.ratio_policy != "auto":
            exchange = {"ratio_policy": "auto", "collective_policy": "cheapest"}
        reason_of, hint = why_not_settling, 'choose `compression="auto"` with `sync="auto"`, or another `sync`'
    elif run.sync.is_local:
        exchange = {"ratio_policy": "fixed", "collective_policy": "fixed"} if chooses else {}
        reason_of, hint = why_not_local, 'choose `sync="bsp"`, or leave the other out'
    else:
        return run
    if exchange:
        run = run.model_copy(update={"compression": Compression(), **exchange})
    reason = reason_of(run)
    if reason is not None:
        raise BadInput(reason, hint=hint)
    return run


def into_plan(sync: Synchronization | None, plan: Plan) -> Plan:
    """Return the plan with this synchronization, where it was not made for it, and what that does to its prediction.

    Raises:
        BadInput: it does not go with the rest of the run.
    """
    if sync is None or sync == plan.run.sync:
        return plan
    run = synchronized(Changes(sync=sync), plan.run)
    if run.sync.is_local and not run.is_local:
        note = f"The plan has one worker, which {run.sync.name} changes nothing for."
    elif not run.is_local:
        note = MAY_SETTLE if run.sync.may_settle else ""
    else:
        job = plan.profile.job
        less = communication(run.sync, dataset_size=job.dataset_size, global_batch_size=run.global_batch_size)
        note = f"{less.note} Cluster, time and cost are those of the plan without it, which communicates in every step."
    return plan.model_copy(update={"run": run, "explanation": (*plan.explanation, *([note] if note else []))})


def in_precision(plan: Plan, precision: str | None, on: Place) -> tuple[Plan, tuple[str, ...]]:
    """Return the plan in another precision that its profile has steps of, and what to know of that.

    Args:
        plan: as it is to be run otherwise.
        precision: None: as planned.
        on: name of the backend.

    Raises:
        BadInput: it was not measured, does not go with the rest, or the plan is for machines of another.
    """
    planned = plan.run.precision
    if precision is None or precision == planned:
        return plan, ()
    named = setting("precision", precision)
    if on not in PREDICTED_ANEW:
        raise BadInput(
            f"{named} contradicts the plan, whose machines, batch sizes and costs are for {planned}.",
            hint=f"leave it out, or plan again with {named}",
        )
    if precision not in plan.profile.precisions:
        raise BadInput(
            f"{named} was not measured: the profile has steps in {', '.join(plan.profile.precisions)}.",
            hint=f"hetopt profile TASK --precision {precision}, on a machine that has it",
        )
    if precision == "fp16" and plan.run.is_local:
        raise BadInput(
            "fp16 needs gradients to be summed in every step, as workers agree on its loss scale there.",
            hint=f"choose {setting('precision', 'bf16')}, or {setting('sync', 'bsp')}",
        )
    run = plan.run.model_copy(update={"precision": precision})
    note = f"The plan computes in {planned}, this run in {precision} as asked: the prediction is for that."
    return plan.model_copy(update={"run": run}), (note,)
