"""What imported step samples leave open, in sentences: gaps that widen intervals, rows that contradict each other."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from hetopt.core.step_samples import StepSample
from hetopt.optimizer.market.instance_type import InstanceType
from hetopt.optimizer.step_time.observed import observe
from hetopt.optimizer.step_time.posterior import fit
from hetopt.optimizer.step_time.tiers import measured_steps

CONTRADICTION = 1.5
"""Repeats of one configuration differ by 5-15 % on public clusters; beyond this factor, something else differed too."""

LONG_STEP_S = 60.0


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
    elif max(nodes) == 2:
        found.append(
            "No row has more than two nodes: how three or more follow from two is a prior. One larger layout settles "
            "it (`hetopt predict --suggest-probes 1` says which)."
        )
    repeats: dict[tuple[object, ...], list[float]] = {}
    for sample in samples:
        repeats.setdefault((sample.layout, sample.batch_sizes, sample.compression), []).append(sample.step_time_s)
    apart = [max(times) / min(times) for times in repeats.values() if max(times) > CONTRADICTION * min(times)]
    if apart:
        found.append(
            f"{len(apart)} configuration{'s were' if len(apart) > 1 else ' was'} measured more than once with times up "
            f"to {max(apart):.1f} times apart: neither is believed fully."
        )
    typical_s = statistics.median(sample.step_time_s for sample in samples)
    if typical_s > LONG_STEP_S:
        found.append(
            f"A step takes {typical_s:.0f} s. If these are milliseconds, divide by 1000: times are in seconds."
        )
    return tuple(found)


def _of_types(samples: Sequence[StepSample], types: Mapping[str, InstanceType]) -> list[str]:
    """Types that the catalogue does not have, and GPUs that are far slower or faster than the job's others foretell."""
    named = sorted({node.type for sample in samples for node in sample.nodes})
    unknown = [name for name in named if name not in types]
    found = []
    if unknown:
        found.append(
            f"{' and '.join(unknown)} {'is' if len(unknown) == 1 else 'are'} not in the catalogue, so no other type is "
            "predicted from there. Name samples after the type that has the same GPU (`hetopt catalog list`), or write "
            "the GPU's peak rates and memory bandwidth into accelerators.csv."
        )
    if len(named) - len(unknown) > 1:
        seen = measured_steps(fit(observe(samples)), types)
        found += [
            f"Steps on {one.name} are {math.exp(abs(one.off)):.1f} times {'longer' if one.off > 0 else 'shorter'} than "
            f"{' and '.join(other.name for other in seen if other is not one)} foretells. A power limit, heat, another "
            "job beside it, or another type's name? It counts little for types that were not measured."
            for one in seen
            if one.off is not None
        ]
    return found
