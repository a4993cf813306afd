"""What was measured, as the model reads it: logs of seconds, absent where a row does not say."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hetopt.core.errors import BadInput
from hetopt.core.step_samples import ModelKind, StepSample
from hetopt.optimizer.step_time.design_matrix import Array, Rows, make_rows

MOST_LAYOUTS = 200
MOST_ROWS = 4000
"""A fit takes seconds with more, and learns nothing from them."""

LEAST_COMPUTE = 0.02
"""Of a step; what is reported as waiting is never quite all of it."""


@dataclass(frozen=True, kw_only=True)
class Observed:
    """Configurations with the log seconds that were measured of them.

    Attributes:
        log_step: log of the step's seconds; NaN where only a part of it was measured.
        log_compute: log of the computation of the slowest worker; NaN where it is not known.
        log_exchange: log of the exchange by itself; NaN where it was not timed.
        model_kind, flops_per_sample: of the job, where they are known.
    """

    rows: Rows
    log_step: Array
    log_compute: Array
    log_exchange: Array
    model_kind: ModelKind | None = None
    flops_per_sample: float | None = None

    @property
    def typical_batch(self) -> float:
        """Geometric mean of the local batch sizes."""
        return float(np.exp(np.log(self.rows.group_batch).mean()))


def observe(samples: Sequence[StepSample]) -> Observed:
    """Return step samples as arrays of log seconds; of very many, some of each number of workers and batch size.

    Raises:
        BadInput: an unknown compressor, or samples of different jobs.
    """
    kinds = sorted({sample.model_kind for sample in samples if sample.model_kind is not None})
    if len(kinds) > 1:
        raise BadInput(
            f"the samples say that model_kind is {' and '.join(kinds)}, but they must be of one job.",
            hint="import the samples of each job by themselves",
        )
    flops = [sample.flops_per_sample for sample in samples if sample.flops_per_sample is not None]
    samples = representative(samples)
    step = np.array([sample.step_time_s for sample in samples])
    sync = np.array([np.nan if sample.sync_time_s is None else sample.sync_time_s for sample in samples])
    return Observed(
        rows=make_rows(samples),
        log_step=np.log(step),
        log_compute=np.log(np.maximum(step - sync, LEAST_COMPUTE * step)),
        log_exchange=np.full(len(step), np.nan),
        model_kind=kinds[0] if kinds else None,
        flops_per_sample=statistics.median(flops) if flops else None,
    )


def representative(samples: Sequence[StepSample]) -> list[StepSample]:
    """Return at most `MOST_LAYOUTS` layouts and `MOST_ROWS` rows, even over workers and batch sizes, ends included."""
    layouts: dict[object, list[StepSample]] = {}
    for sample in samples:
        layouts.setdefault((sample.layout, sample.compression), []).append(sample)
    groups = sorted(layouts.values(), key=lambda group: (group[0].workers, len(group[0].nodes)))
    groups = [groups[index] for index in _evenly(len(groups), MOST_LAYOUTS)]
    rows = [sample for group in groups for sample in sorted(group, key=lambda sample: max(sample.batch_sizes))]
    return [rows[index] for index in _evenly(len(rows), MOST_ROWS)]


def _evenly(count: int, most: int) -> list[int]:
    if count <= most:
        return list(range(count))
    return [round(place) for place in np.linspace(0, count - 1, most).tolist()]


def median_s(*logs: Array) -> float:
    """Return the median of the first logs that are known, in seconds."""
    known = next(log[np.isfinite(log)] for log in logs if np.isfinite(log).any())
    return math.exp(statistics.median(known.tolist()))
