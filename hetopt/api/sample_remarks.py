"""What imported step samples leave open, in sentences: gaps that widen intervals, rows that contradict each other."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import get_args

from hetopt.core.profile import LOCAL, Profile
from hetopt.core.step_samples import Node, StepSample
from hetopt.optimizer.market.instance_type import InstanceType
from hetopt.optimizer.model_counts import Kind
from hetopt.optimizer.step_time.observed import CONTRADICTION, observe
from hetopt.optimizer.step_time.posterior import fit
from hetopt.optimizer.step_time.profiled import RENTED
from hetopt.optimizer.step_time.tiers import FAR_OFF, Seen, measured_steps
from hetopt.optimizer.step_time.utilisation import utilisation_prior


def remarks(samples: Sequence[StepSample], types: Mapping[str, InstanceType]) -> tuple[str, ...]:
    """One sentence for everything that a person should know before relying on predictions from these samples.

    Args:
        samples: of one job.
        types: the machine types that the catalogue has.
    """
    found = _of_types(samples, types)
    sizes = {size for sample in samples for size in sample.batch_sizes}
    if len(sizes) == 1:
        found.append(
            f"Every row has local batch {min(sizes)}: what a step takes at others is a guess, with a wide interval."
        )
    nodes = {len(sample.nodes) for sample in samples}
    if max(sample.workers for sample in samples) == 1:
        found.append("Every row has one worker: nothing says how long communication takes. Measure two workers.")
    elif max(nodes) == 1:
        found.append("Every row has one node: nothing says how fast the network between nodes is. Measure two nodes.")
    found += _torn(samples)
    return tuple(found)


def contradictions(profile: Profile, types: Mapping[str, InstanceType]) -> tuple[str, ...]:
    """Of the steps that a profile has, what contradicts what, a sentence each, for who plans with it.

    Its own machine counts where the catalogue knows its type, and is asked for where nothing tells how fast its GPU is.
    Samples of machines that are nobody's to rent are their owner's.
    """
    nameless = [
        device.type
        for device in profile.devices
        if device.kind == "cuda" and device.type not in (*types, LOCAL) and device.matmul_flops_per_s is None
    ]
    own = [
        StepSample(
            nodes=(Node(type=device.type, workers=1),),
            local_batch_size=point.local_batch_size,
            step_time_s=point.step_time_s,
            model_kind=profile.job.model_kind,
            flops_per_sample=profile.job.flops_per_sample,
        )
        for device in profile.devices
        if device.type in types
        for point in device.step_times
    ]
    rented = [
        sample.model_copy(update={"model_kind": None})
        for sample in profile.samples
        if all(RENTED.fullmatch(node.type) for node in sample.nodes)
    ]
    samples = [*rented, *own]
    asked = [_not_in_the_catalogue(nameless)] if nameless else []
    return (*asked, *_of_types(samples, types), *_torn(samples)) if samples else tuple(asked)


def _not_in_the_catalogue(names: Sequence[str]) -> str:
    return (
        f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} not in the catalogue, so no other type is "
        "predicted from there. Name samples after the type that has the same GPU (`hetopt catalog list`), or write "
        "the GPU's peak rates and memory bandwidth into accelerators.csv."
    )


def _torn(samples: Sequence[StepSample]) -> list[str]:
    """Configurations whose repeats are far apart, and types on which fewer samples took longer than more."""
    found = []
    repeats: dict[tuple[object, ...], list[float]] = {}
    for sample in samples:
        key = (sample.layout, sample.batch_sizes, sample.compression, sample.precision)
        repeats.setdefault(key, []).append(sample.step_time_s)
    apart = [max(times) / min(times) for times in repeats.values() if max(times) > CONTRADICTION * min(times)]
    if apart:
        found.append(
            f"{len(apart)} configuration{'s were' if len(apart) > 1 else ' was'} measured more than once with times up "
            f"to {max(apart):.1f} times apart: neither is believed fully. Measure again, or leave the wrong one out."
        )
    by_type: dict[tuple[str, str | None], dict[int, float]] = {}
    for sample in samples:
        if sample.workers == 1 and sample.compression is None:
            (batch,) = sample.batch_sizes
            times = by_type.setdefault((sample.nodes[0].type, sample.precision), {})
            times[batch] = min(sample.step_time_s, times.get(batch, math.inf))
    for (name, _), times in by_type.items():
        pairs = [(times[few] / times[many], few, many) for few in times for many in times if few < many]
        worst, few, many = max(pairs, default=(0.0, 0, 0))
        if worst > CONTRADICTION:
            found.append(
                f"A step on {name} took {worst:.1f} times longer for {few} samples than for {many}: something else "
                "differed too, and neither is believed fully. Measure again, or leave the wrong one out."
            )
    return found


def _of_types(samples: Sequence[StepSample], types: Mapping[str, InstanceType]) -> list[str]:
    """Types that the catalogue does not have, and GPUs that are far slower or faster than the job's others foretell."""
    named = sorted({node.type for sample in samples for node in sample.nodes})
    unknown = [name for name in named if name not in types]
    found = []
    if unknown:
        found.append(_not_in_the_catalogue(unknown))
    seen = measured_steps(fit(observe(samples)), types) if len(unknown) < len(named) else ()
    if len(seen) == 1:
        found += _far_below_usual(seen[0])
    elif seen:
        found += [
            f"Steps on {one.name} are {math.exp(abs(one.off)):.1f} times {'longer' if one.off > 0 else 'shorter'} than "
            f"{' and '.join(other.name for other in seen if other is not one)} foretells. A power limit, heat, another "
            "job beside it, or another type's name? It counts little for types that were not measured."
            for one in seen
            if one.off is not None
        ]
    return found


def _far_below_usual(seen: Seen) -> list[str]:
    """Said of a lone GPU whose job's operations are known, where it reaches far less of its rate than such jobs do."""
    step, prior = seen.step, utilisation_prior()
    kinds: tuple[Kind, ...] = get_args(Kind)
    kind = next((one for one in kinds if one == step.kind), None)
    if kind is None or step.flops_per_sample is None:
        return []
    usual = prior.of(kind, step.place.precision)
    peak = step.place.gpu.tflops(step.place.precision) * 1e12
    work_s = step.flops_per_sample * step.place.batch_size / peak
    if step.step_time_s < (prior.fixed_s + work_s / usual.share) * math.exp(FAR_OFF * usual.log_sd):
        return []
    return [
        f"Steps on {seen.name} reach {100 * work_s / step.step_time_s:.2g} % of its GPU's peak rate, where such jobs "
        f"reach {100 * usual.share:.2g} %. A power limit, heat, another job beside it, or another type's name? Other "
        "types are predicted from it as it is: look at `nvidia-smi -q -d PERFORMANCE`, and measure again."
    ]
