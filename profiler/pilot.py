"""Reading a pilot run: after how many steps its evaluations say that the target was reached."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hetopt.core.profile import Evaluation


def steps_to_target(evaluations: Sequence[Evaluation], *, target: float, higher_is_better: bool) -> float | None:
    """Steps until the metric first reaches ``target``, by a straight line between evaluations; None if it never does.

    Interpolating keeps the answer from jumping by a whole evaluation interval, which at large batches is a large part
    of the run. A target that the very first evaluation already reaches is credited to that evaluation.

    Args:
        evaluations: in increasing order of step.
        target: value of the metric to reach.
        higher_is_better: whether reaching means at least (True) or at most (False) ``target``.
    """
    sign = 1.0 if higher_is_better else -1.0
    before: Evaluation | None = None
    for now in evaluations:
        if sign * (now.metric - target) >= 0:
            if before is None:
                return float(max(1, now.step))
            part = (target - before.metric) / (now.metric - before.metric)
            return max(1.0, before.step + part * (now.step - before.step))
        before = now
    return None


def found_at(steps: float, every_steps: float) -> float:
    """The evaluation that finds a target which is reached after ``steps``: runs end there, not where they cross it."""
    # 1e-9: a target that is reached at an evaluation is found by that one.
    return max(1, math.ceil(steps / every_steps - 1e-9)) * every_steps
