"""What imported step samples leave open, in sentences: gaps that widen intervals, rows that contradict each other."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from hetopt.core.step_samples import StepSample

CONTRADICTION = 1.5
"""Repeats of one configuration differ by 5-15 % on public clusters; beyond this factor, something else differed too."""

LONG_STEP_S = 60.0


def remarks(samples: Sequence[StepSample]) -> tuple[str, ...]:
    """One sentence for everything that a person should know before relying on predictions from these samples."""
    found = []
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
