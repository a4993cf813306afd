"""What several workers cannot compute exactly as one does, by the names with which a task or a script accepts it."""

from __future__ import annotations

from collections.abc import Sequence

from hetopt.core.errors import BadInput

BATCH_STATISTICS = "batch_statistics"
"""BatchNorm normalises each worker's samples by their own mean and variance."""

WHOLE_BATCH = "whole_batch"
"""The loss of a sample depends on the other samples of its batch (contrastive losses, in-batch negatives)."""

ROUNDING = "rounding"
"""An optimizer that builds a step of several gradients (LBFGS) amplifies their rounding in float32."""

NAMES = (BATCH_STATISTICS, WHOLE_BATCH)


def check_accepted(accepted: Sequence[str], of: str, names: Sequence[str] = NAMES) -> tuple[str, ...]:
    """What is accepted, as a tuple.

    Raises:
        BadInput: nothing is called so.
    """
    given = (accepted,) if isinstance(accepted, str) else tuple(accepted)
    for name in given:
        if name not in names:
            raise BadInput(
                f"accept_inexact of {of} must name {' or '.join(names)}, got {name!r}.",
                hint=f'for example accept_inexact=("{BATCH_STATISTICS}",)',
            )
    return given
