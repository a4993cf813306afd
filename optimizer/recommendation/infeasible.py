"""Answers where nothing fits: the nearest plan on each axis, and the memory that a job needs, part by part."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from hetopt.core.errors import BadInput, NoFeasiblePlan
from hetopt.core.formatting import bytes_, duration, round_up_usd, usd
from hetopt.core.memory import TrainingMemory
from hetopt.optimizer.fit import FittedModel
from hetopt.optimizer.market.catalog import Catalog, Offer
from hetopt.optimizer.market.instance_type import InstanceType
from hetopt.optimizer.market.quota import Quotas, bucket_of, raised
from hetopt.optimizer.plan import OWN, Candidate, MachineMemory, limits_in_words
from hetopt.optimizer.recommendation.candidates import make_candidate
from hetopt.optimizer.recommendation.confidence import NEVER, Question, remedies
from hetopt.optimizer.search.objective import Limits
from hetopt.optimizer.search.search import SearchResult
from hetopt.optimizer.search.search_space import MachineOption, SearchSpace
from hetopt.optimizer.step_time.device_memory import counted, exchange_memory, schemes, sharable, usable_bytes
from hetopt.optimizer.step_time.transfer import MENDED_BY_PROFILING, TOO_LITTLE_MEMORY, unusable

NOT_COUNTED = (
    "What training takes of memory was not counted in this profile: micro-batches are not planned, and machines are "
    "left out by the memory of the profiled process alone; profile again to have it."
)


def memory_table(
    model: FittedModel, candidates: Iterable[Candidate], options: Sequence[MachineOption]
) -> tuple[MachineMemory, ...]:
    """Return what a worker of each machine type holds in memory, bytes, in its first candidate; empty: not counted.

    Args:
        model: fits of the profile.
        candidates: clusters, the chosen one first; records are in the order in which their types appear.
        options: machines that the candidates were chosen from; of one type and precision the first counts.
    """
    if counted(model) is None:
        return ()
    known = {(option.name, option.precision): option for option in reversed(options)}
    by_type: dict[str, MachineMemory] = {}
    for candidate in candidates:
        memory = counted(model.computing_in(candidate.precision)) or counted(model)
        assert memory is not None
        workers = sum(len(group.local_batch_sizes) for group in candidate.groups)
        exchange = exchange_memory(
            candidate.compression, gradient_bytes=memory.gradient_bytes, workers=workers, sync=candidate.sync
        )
        for group in candidate.groups:
            option, share = known[group.instance_type, candidate.precision], max(group.local_batch_sizes)
            has = option.worker.room
            if group.instance_type in by_type or has is None:
                continue
            blocks = sharable(model)
            held = memory if blocks is None else has.scheme.held(memory, blocks)
            instance = option.offer.instance_type
            part = min(share, has.micro_batch or share)
            peak, kept = held.peak_bytes(part, exchange), held.kept_bytes + exchange.kept_bytes
            line = model.reference.memory if option.worker.kind == "cpu" else None
            by_type[group.instance_type] = MachineMemory(
                instance_type=group.instance_type,
                device=_device(instance),
                device_bytes=has.device_bytes,
                usable_bytes=has.usable_bytes,
                local_batch_size=share,
                micro_batch=part,
                largest_micro_batch=has.micro_batch,
                parameter_bytes=held.parameter_bytes + held.buffer_bytes,
                gradient_bytes=held.gradient_bytes,
                optimizer_bytes=held.optimizer_bytes,
                residual_bytes=exchange.kept_bytes,
                activation_bytes=round(peak - kept),
                peak_bytes=round(peak if line is None else max(peak, line.peak_bytes(part))),
            )
    return tuple(by_type.values())


def _device(instance: InstanceType) -> str:
    """Return the name of the device whose memory a worker has: the GPU's, or 'main memory'."""
    gpu = instance.accelerator
    return gpu.name if instance.cuda_devices and gpu is not None else "main memory"


def fits_nowhere(model: FittedModel, catalog: Catalog, offered: Sequence[Offer]) -> NoFeasiblePlan:
    """Return, not raise, the error that no offered machine's memory holds a step of the fewest samples.

    Args:
        model: fits of the profile.
        catalog: catalog of the region, or of one's own machines.
        offered: offers that were asked for, at least one of which fails by its memory alone.
    """
    instances = {offer.instance_type.name: offer.instance_type for offer in offered}
    possible = [instance for instance in instances.values() if unusable(instance) is None]
    blocks, described = sharable(model), model.reference.device.counted

    def size(instance: InstanceType) -> tuple[bool, int]:
        """Return whether a machine has GPUs, and the usable bytes of one device, or of all that share a replica."""
        shared = 1 if blocks is None else max(1, instance.cuda_devices)
        return instance.cuda_devices > 0, shared * usable_bytes(instance)[1]

    largest = max(possible, key=size)
    on_gpu = largest.cuda_devices > 0
    least, memory = model.profile.job.least_local_batch_size, counted(model) if on_gpu else None
    device_bytes, usable = usable_bytes(largest)
    if memory is not None and blocks is not None:
        held = (way.held(memory, blocks) for way in schemes(described, largest.cuda_devices, model.profile.job.shard))
        memory = min(held, key=lambda held: held.peak_bytes(least))
    line = model.reference.memory
    need = memory.peak_bytes(least) if memory is not None else line.peak_bytes(least) if line is not None else 0.0
    samples = "one sample" if least == 1 else f"{least} samples, the fewest that BatchNorm can normalise,"
    parts = "" if memory is None else f" ({_parts(memory, need)})"
    place = "of your own" if catalog.region == OWN else f"offered in {catalog.region}"
    device = "a GPU" if on_gpu else "main memory"
    if blocks is not None and largest.cuda_devices > 1:
        device = f"each of {largest.cuda_devices} GPUs that share the model"
    return NoFeasiblePlan(
        f"No machine {place} holds a training step of {samples}: it needs {bytes_(need)} of {device}{parts}, and the "
        f"largest, {largest.name}, has {bytes_(device_bytes)} ({_device(largest)}), of which training may use "
        f"{bytes_(max(0, usable))}.",
        hint=f"{'' if blocks else _SHARED}{_SMALLER_STEP if described is None else _SMALLER_JOB}, or allow machines "
        "with more memory: `hetopt gpus --sort memory --reverse`",
    )


_SHARED = "let GPUs of a machine share the model (torch's `fully_shard`, a session's `shard`, blocks of a task), "
_SMALLER_STEP = (
    "compute in bf16, recompute activations in the backward pass (gradient checkpointing, torch.utils.checkpoint), or "
    "train a smaller model"
)
_SMALLER_JOB = (
    "choose a smaller model, shorten the samples with `tokens`, train less of it or beside weights in 4 bits (`method`)"
)
"""What makes a described job fit; sharding over a machine's GPUs and recomputing were tried."""


def _parts(memory: TrainingMemory, need: float) -> str:
    """Return the parts of the ``need`` bytes of a step as a phrase."""
    return (
        f"parameters {bytes_(memory.parameter_bytes + memory.buffer_bytes)}, gradients "
        f"{bytes_(memory.gradient_bytes)}, optimizer state {bytes_(memory.optimizer_bytes)}, activations "
        f"{bytes_(need - memory.kept_bytes)}"
    )


MOST_NAMED = 3


def nothing_usable(
    region: str,
    offered: Sequence[Offer],
    excluded: Mapping[str, int],
    *,
    by_gpus: bool = False,
) -> BadInput:
    """Return, not raise, the error that no offered machine can be planned with, for the reasons in ``excluded``.

    Args:
        region: region of the offers; "own": they are the inventory's.
        offered: offers that were asked for.
        excluded: number of offers left out, by reason; at least one reason.
        by_gpus: whether machines were asked for by their GPUs, and not by type.
    """
    names = sorted({offer.instance_type.name for offer in offered})
    who = f"None of the {len(names)} instance types" if len(names) > MOST_NAMED else " and ".join(names)
    verb = "can" if len(names) > MOST_NAMED else "cannot"
    place = "of the inventory" if region == OWN else f"in {region}"
    named, listing = ("gpus", "gpus") if by_gpus else ("types", "catalog list")
    others = f"name other `{named}`, or leave it out; `hetopt {listing} --region {region}` shows what there is"
    if region == OWN:
        others = "measure a step there (`hetopt profile` on it), or leave it out of the inventory"
    changes = [
        *(["profile on a machine of the kind that you want to rent"] if MENDED_BY_PROFILING & excluded.keys() else []),
        *(["choose a smaller `batch_size` or larger machines"] if TOO_LITTLE_MEMORY in excluded else []),
    ]
    why = "; ".join(sorted(excluded, key=lambda reason: -excluded[reason]))
    return BadInput(f"{who} {place} {verb} be planned with: {why}.", hint=", or ".join(changes) or others)


def _no_cluster(space: SearchSpace, otherwise: Sequence[str]) -> NoFeasiblePlan:
    """Return, not raise, the error that limits other than budget and deadline allow no cluster; names those limits."""
    beyond = (
        space.quotas.get(bucket_of(option.offer), math.inf) < option.offer.instance_type.vcpus
        for option in space.options
    )
    if all(beyond):
        return NoFeasiblePlan(
            "The quotas hold none of the machines that this job can be planned on.",
            hint=", or ".join(otherwise) or "raise `quotas`",
        )
    small = min(space.options, key=lambda option: option.worker.workers)
    return NoFeasiblePlan(
        f"No cluster within the limits of workers ({space.max_workers:,}), machines ({space.max_machines:,}), quotas "
        f"and dollars an hour can take any of the batch sizes {', '.join(map(str, space.batch_sizes))}: the smallest "
        f"machine, {small.name}, has {small.worker.workers:,} workers, a sample each at least.",
        hint=", or ".join(otherwise)
        or "raise `max_workers`, `max_hourly_usd` or `quotas`, or choose another `batch_size` or machines",
    )


def larger_quotas(space: SearchSpace, result: SearchResult, quotas: Quotas, limits: Limits) -> str | None:
    """Return 'ask AWS to raise ...', the least increase of quotas with which a cluster keeps limits; None: none helps.

    A cluster that keeps the limits surely is preferred to one that fits them at its median.

    Args:
        space: search space without quotas.
        result: result of the search in that space.
        quotas: vCPUs by bucket, within which nothing fits.
        limits: budget and deadline to be kept.
    """
    forecast = result.forecast
    rows = np.flatnonzero(limits.risk(forecast) <= 1)
    if not rows.size:
        rows = np.flatnonzero(limits.overrun(forecast) <= 1)
    if not rows.size:
        return None
    option, count = result.rows.option[rows], result.rows.count[rows]
    offers = [machine.offer for machine in space.options]
    vcpus = np.array([offer.instance_type.vcpus for offer in offers])
    taken = {
        bucket: (count * vcpus[option] * np.array([bucket_of(offer) == bucket for offer in offers])[option]).sum(axis=1)
        for bucket in quotas
    }
    over = sum(np.maximum(0, used - quotas[bucket]) for bucket, used in taken.items())
    best = int(np.lexsort((limits.expected_score(forecast)[rows], over))[0])
    asked = [raised(bucket, int(used[best])) for bucket, used in taken.items() if used[best] > quotas[bucket]]
    return f"ask AWS to raise {' and '.join(asked)}" if asked else None


def nothing_fits(
    question: Question, result: SearchResult, limits: Limits, otherwise: Sequence[str] = ()
) -> NoFeasiblePlan:
    """Return, not raise, the error that no plan keeps the limits; it names the cheapest and the quickest affordable.

    Searches and simulates again for the hint, limits that a plan would keep. If the search priced no cluster, the error
    is that of `_no_cluster`.

    Args:
        question: the request's search, which can be made again.
        result: result of the search within the limits; without a choice.
        limits: budget and deadline that no plan keeps.
        otherwise: changes other than to the limits that would help, such as an increase of quotas.
    """
    forecast, space, job = result.forecast, question.space, question.job
    if len(forecast) == 0:
        return _no_cluster(space, otherwise)

    def described(result: SearchResult, row: int) -> str:
        """Return a cluster in words with its median cost and time, and the least budget where that is more."""
        candidate = make_candidate(space, job, result.cluster(row), result.forecast, row)
        prediction = candidate.prediction
        least = float(result.forecast.least_budget_usd[row])
        rent = ""
        if least > max(prediction.cost_usd.value, limits.budget_usd or math.inf):
            rent = f" (rented for {usd(round_up_usd(least))} or more: ten minutes at on-demand prices)"
        machines = candidate.in_words
        return f"{machines}, about {usd(prediction.cost_usd.value)} and {duration(prediction.total_s.value)}{rent}"

    took_s, cost_usd = forecast.total_s, forecast.cost_usd
    needed_usd = np.maximum(cost_usd, forecast.least_budget_usd)
    paid = np.flatnonzero(needed_usd <= (limits.budget_usd or math.inf))
    nearest: list[str] = []
    # The search within these limits need not have kept what is cheapest: that is another question.
    sparing = question.search(replace(limits, budget_usd=None, time_weight=0.0))
    took, cost = sparing.forecast.total_s, sparing.forecast.cost_usd
    needed = np.maximum(cost, sparing.forecast.least_budget_usd)
    in_time = np.flatnonzero(took <= (limits.deadline_s or math.inf))
    rows = in_time if in_time.size or paid.size or limits.budget_usd is None else np.arange(len(cost))
    if rows.size:
        of_all = "" if limits.deadline_s is None else " that meets the deadline" if in_time.size else " of all"
        cheapest = int(rows[np.lexsort((took[rows], needed[rows], cost[rows]))[0]])
        if max(took[cheapest], cost[cheapest]) < NEVER:
            nearest.append(f"the cheapest plan{of_all} is {described(sparing, cheapest)}")
        else:
            nearest.append("every loss of a spot machine begins the run again, and none is likely to end before one")
    if limits.deadline_s is not None:
        rows = paid if paid.size and limits.budget_usd is not None else np.arange(len(forecast))
        row = int(rows[np.lexsort((cost_usd[rows], took_s[rows]))[0]])
        if took_s[row] > limits.deadline_s:
            that = " within the budget" if paid.size and limits.budget_usd is not None else ""
            nearest.append(f"the quickest plan{that} is {described(result, row)}")
    asked = limits_in_words("a", limits.budget_usd, limits.deadline_s)
    return NoFeasiblePlan(
        f"Nothing fits {asked}: {'; '.join(nearest)}.",
        hint=", or ".join([*otherwise, *remedies(question, limits)]) or None,
    )
