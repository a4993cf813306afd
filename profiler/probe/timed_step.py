"""The time of a training step without contention: what it takes a processor that nobody else wants.

    contention c = wall / processor time      of forward, backward and update, which only compute
    alone        = processor time             of these
                 = wall - (c - 1) processor   of all else, which also waits for disks and loaders

Where other programs share the processors, wall time says how busy they are, and processor time how fast the machine is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from hetopt.trainer.steps.stopwatch import Mark, Stopwatch

Span = tuple[Mark, Mark]


class TimedStep(NamedTuple):
    """One training step on two clocks, in seconds.

    Attributes:
        wall_s: as it passed.
        alone_s: without contention.
        phases_s: of that, loading, forward, backward and update.
        contention: wall over processor time of computing, at least 1.
    """

    wall_s: float
    alone_s: float
    phases_s: tuple[float, ...]
    contention: float


def timed_step(stopwatch: Stopwatch, whole: Span, loading: Sequence[Span], *computing: Sequence[Span]) -> TimedStep:
    """Return the time of one step, which may compute in several spans.

    Args:
        stopwatch: that set the marks.
        whole: the step from its beginning to its end.
        loading: spans that waited for samples.
        computing: spans of forward, of backward and of the update.
    """
    wall_s, processor_s = _spent(stopwatch, [whole])
    phases = [_spent(stopwatch, spans) for spans in computing]
    computed_wall_s, computed_s = (math.fsum(column) for column in zip(*phases, strict=True))
    contention = max(1.0, computed_wall_s / computed_s) if computed_s > 0 else 1.0

    def alone_s(wall_s: float, processor_s: float) -> float:
        return max(processor_s, wall_s - (contention - 1) * processor_s)

    return TimedStep(
        wall_s=wall_s,
        alone_s=computed_s + alone_s(wall_s - computed_wall_s, processor_s - computed_s),
        phases_s=(alone_s(*_spent(stopwatch, loading)), *(phase_s for _, phase_s in phases)),
        contention=contention,
    )


def _spent(stopwatch: Stopwatch, spans: Sequence[Span]) -> tuple[float, float]:
    return (
        math.fsum(stopwatch.seconds(*span) for span in spans),
        math.fsum(stopwatch.processor_s(*span) for span in spans),
    )
