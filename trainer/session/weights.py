"""The weight of each worker's loss in that of the batch: by samples, unless the script or the loss says otherwise.

Of a batch of B samples worker i has n_i. With L_i the mean loss of its samples, the loss of the batch is

    L = sum_i (n_i / B) L_i

A loss that is a mean over something else (tokens that are not padding, classes with weights) counts by its own
denominator d_i in the place of n_i, and a loss that is a sum counts as it is. Scripts say so; the denominator of one
cross entropy is read off it, since losses over tokens are common.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, TypeAlias

from torch import Tensor

from hetopt.core.errors import BadInput
from hetopt.trainer.task import cross_entropy_weight

Weight: TypeAlias = "float | Tensor | Literal['sum']"
"""Count that a loss is a mean over on this worker, or ``"sum"`` for a loss that is a sum."""


class Counts(NamedTuple):
    """The samples, the denominator and the kind (mean or sum) of a worker's loss; summed over workers, of the batch's.

    Attributes:
        samples: samples of its part of the batch.
        denominator: count that the loss is a mean over, where the script or a cross entropy says so; else 0.
        losses: number of losses that count: 1 if the worker has a part of the batch.
        means: number of those that are means over samples.
        sums: number of those that are sums.
    """

    samples: float = 0.0
    denominator: float = 0.0
    losses: float = 0.0
    means: float = 0.0
    sums: float = 0.0

    @classmethod
    def of(cls, samples: int, loss: Tensor | None, weight: Weight | None) -> Counts:
        """Return the counts of a loss that is a mean over ``weight`` (None: its targets, else ``samples``) or a sum.

        Args:
            samples: samples of this worker's part; 0: the loss does not count.
            loss: scalar, before its backward pass; None: not known.
            weight: denominator of the loss, or ``"sum"``; None: the targets' weight of a cross entropy, else samples.

        Returns:
            The counts; all 0 where the worker has no samples.

        Raises:
            BadInput: the weight is negative or not finite, or another text than ``"sum"``.
        """
        if isinstance(weight, str):
            if weight != "sum":
                raise BadInput(f"`weight` must be a number or 'sum', got {weight!r}.", hint="see run.backward")
            return cls(float(samples), 0.0, 1.0, 0.0, 1.0) if samples else cls()
        denominator = cross_entropy_weight(loss) if weight is None and loss is not None else weight
        if denominator is None or not samples:
            return cls(float(samples), 0.0, 1.0, 1.0, 0.0) if samples else cls()
        number = float(denominator)
        if not (math.isfinite(number) and number >= 0):
            raise BadInput(
                f"`weight` must be a finite number of at least 0, got {number:g}.",
                hint="give what the loss of this worker's part is a mean over: its samples, or its tokens",
            )
        return cls(float(samples), number, 1.0, 0.0, 0.0)

    @property
    def factor(self) -> float:
        """The factor of this worker's gradient where all losses are of one kind: 1, its samples or its denominator."""
        return self.sums or (self.samples if self.means else self.denominator)

    def weight(self, whole: Counts) -> float:
        """Return the factor on this worker's loss, by all workers' summed counts: losses then add up to the batch's.

        Args:
            whole: the sum of all workers' counts.

        Returns:
            The factor, 0 to 1; 0 where nothing of the batch counts.

        Raises:
            BadInput: some workers' losses are sums and others' are means; all workers raise it.
        """
        if 0 < whole.sums < whole.losses:
            raise BadInput(
                "Some workers' losses are sums (weight='sum'), and others' are means.",
                hint="call run.backward with the same kind of weight on all workers",
            )
        part, total = (self.samples, whole.samples) if whole.means else (self.denominator, whole.denominator)
        return self.sums if whole.sums else part / total if total else 0.0

    @property
    def total(self) -> float:
        """The divisor of the sum of all workers' gradients that are weighted by `factor`.

        1 for sums, and for no counts.
        """
        return 1.0 if self.sums else self.samples if self.means else self.denominator or 1.0

    @property
    def is_mixed(self) -> bool:
        """True if these summed counts are of several kinds of loss: means over samples, sums, and others."""
        return 0 < self.means < self.losses or 0 < self.sums < self.losses
