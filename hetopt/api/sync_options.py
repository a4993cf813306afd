"""Synchronization, partition and injection, as people say them and as the run is told.

    sync: selsync(0.3)                    partition: labels(1)         inject: 0.25,0.25
    sync: selsync(auto, share=0.2)        partition: dirichlet(0.5)
    sync: local-sgd(8, momentum=average)  partition: seldp
    sync: auto

How each of them is written: `hetopt.core.synchronization_text`.
"""

from __future__ import annotations

from dataclasses import dataclass

from hetopt.core.errors import BadInput
from hetopt.core.run_spec import Compression, RunSpec
from hetopt.core.synchronization import Injection, Partition, Synchronization
from hetopt.core.synchronization_rules import why_not_local, why_not_settling
from hetopt.core.synchronization_text import parse_injection, parse_partition, parse_sync
from hetopt.optimizer.plan import Plan
from hetopt.optimizer.step_time.local_steps import communication

MAY_SETTLE = (
    "Once the network and the job were seen, the run may switch for good to averaging parameters, "
    "and takes more steps then; "
    "cluster, time and cost are those of the plan without it."
)


@dataclass(frozen=True, kw_only=True)
class SyncOverrides:
    """What was typed; None for what was not."""

    sync: Synchronization | None = None
    partition: Partition | None = None
    injection: Injection | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing was typed."""
        return self == SyncOverrides()


def parse_wish(sync: str | None, partition: str | None, inject: str | None) -> SyncOverrides:
    """Read the three options.

    Raises:
        BadInput: a name that is unknown, or a value that cannot be.
    """
    return SyncOverrides(
        sync=None if sync is None else parse_sync(sync, option="`sync`"),
        partition=None if partition is None else parse_partition(partition, option="`partition`"),
        injection=None if inject is None else parse_injection(inject, option="`inject`"),
    )


def decide(wish: SyncOverrides, run: RunSpec, *, exchange_was_asked: bool) -> RunSpec:
    """The run with the wish in it. A plan's own choice of compression gives way to workers that send no gradients.

    Args:
        wish: what was typed.
        run: as planned, with what else was typed.
        exchange_was_asked: whether compression, ratio policy or collective was typed, too.

    Raises:
        BadInput: the wish does not go with the rest of the run.
    """
    changes = {"sync": wish.sync, "partition": wish.partition, "injection": wish.injection}
    run = run.model_copy(update={name: value for name, value in changes.items() if value is not None})
    if run.sync.may_settle:
        return _settling(run, was_typed=wish.sync is not None, exchange_was_asked=exchange_was_asked)
    if not run.sync.is_local:
        return run
    if wish.sync is not None and not exchange_was_asked:
        plain = {"compression": Compression(), "ratio_policy": "fixed", "collective_policy": "fixed"}
        run = run.model_copy(update=plain)
    reason = why_not_local(run)
    if reason is not None:
        raise BadInput(reason, hint='choose `sync="bsp"`, or leave the other out')
    return run


def _settling(run: RunSpec, *, was_typed: bool, exchange_was_asked: bool) -> RunSpec:
    """The run that may settle for averages; what it sends until then is weighed, too, unless somebody said what."""
    if was_typed and not exchange_was_asked and run.ratio_policy != "auto":
        weighed = {"compression": Compression(), "ratio_policy": "auto", "collective_policy": "cheapest"}
        run = run.model_copy(update=weighed)
    reason = why_not_settling(run)
    if reason is not None:
        raise BadInput(reason, hint='choose `compression="auto"` with `sync="auto"`, or another `sync`')
    return run


def into_plan(wish: SyncOverrides, plan: Plan) -> Plan:
    """The plan, to be run as wished, where it was not made for that, and what that does to its prediction.

    Raises:
        BadInput: the wish does not go with the rest of the run.
    """
    if wish.is_empty or wish.sync == plan.run.sync:
        return plan
    run = decide(wish, plan.run, exchange_was_asked=False)
    if run.sync.is_local and not run.is_local:
        alone = f"The plan has one worker, which {run.sync.name} changes nothing for."
        return plan.model_copy(update={"run": run, "explanation": (*plan.explanation, alone)})
    if not run.is_local:
        may_settle = (MAY_SETTLE,) if run.sync.may_settle else ()
        return plan.model_copy(update={"run": run, "explanation": (*plan.explanation, *may_settle)})
    told = communication(run.sync, dataset_size=plan.profile.job.dataset_size, global_batch_size=run.global_batch_size)
    sentence = f"{told.note} Cluster, time and cost are those of the plan without it, which communicates in every step."
    return plan.model_copy(update={"run": run, "explanation": (*plan.explanation, sentence)})
