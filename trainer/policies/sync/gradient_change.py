"""How much a worker's gradient changes: the relative change of a moving mean of its squared norm.

    m_t = (1 - a) m_{t-1} + a |g_t|^2,    change_t = |m_t - m_{t-1}| / m_{t-1}        (SelSync, 2307.07950)

The published weight of the newest, a, is a hundredth of the number of workers, 0.16 in its experiments. Here it is that
number whatever the workers, so that a delta means the same on every cluster.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class GradientChange:
    """One worker's own; not the same on all ranks.

    Attributes:
        smoothing: weight of the newest squared norm, a.
        mean: moving mean of the squared norm; None: there was none yet.
        change: at the last step; 0 at the first.
    """

    smoothing: float
    mean: float | None = None
    change: float = 0.0

    def after(self, square_norm: float) -> GradientChange:
        """With one more step's. One that is not finite is a change without bound, and is not remembered."""
        if not math.isfinite(square_norm):
            return replace(self, change=math.inf)
        if self.mean is None:
            return replace(self, mean=square_norm, change=0.0)
        mean = (1 - self.smoothing) * self.mean + self.smoothing * square_norm
        if self.mean == 0:
            return replace(self, mean=mean, change=0.0 if mean == 0 else math.inf)
        return replace(self, mean=mean, change=abs(mean - self.mean) / self.mean)
