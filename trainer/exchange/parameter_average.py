"""Averages what workers have learned for themselves since their models were last alike, each by the samples it saw.

What travels is how far a worker has come, not where it is: workers that have not moved keep the very bits that they
had, rounding is that of the small update and not of the parameter, and how far the workers have come apart can be told
from sums that do not cancel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hetopt.trainer.exchange.channel import Channel
from hetopt.trainer.exchange.energy import energy


def weights_by_samples(samples: Sequence[int], participants: Sequence[int] | None = None) -> tuple[float, ...]:
    """Weights in proportion to samples, of those that take part (None: all), that sum to 1.

    Raises:
        ValueError: nobody has seen any.
    """
    counted = [count if participants is None or rank in participants else 0 for rank, count in enumerate(samples)]
    total = sum(counted)
    if total <= 0:
        raise ValueError("parameters are averaged over samples, and there were none")
    return tuple(count / total for count in counted)


def average_parameters(own: Tensor, base: Tensor, weight: float, channel: Channel) -> float:
    """Replace every worker's parameters by ``base + sum_i weight_i (x_i - base)``, in place, the same bits on each.

    A worker of weight 0 changes nothing, whatever it holds, even what is not finite.

    Args:
        own: 1-D fp32, this worker's parameters x_i; the average afterwards.
        base: where all began, the same bits on all workers; the average afterwards, too.
        weight: of this worker; those of all sum to 1.
        channel: to the other workers.

    Returns:
        How far the workers had come apart, the same on each: the root of ``sum_i weight_i |x_i - mean|^2`` over the
        norm of the mean.
    """
    message = own.new_zeros(own.numel() + 1)
    if weight > 0:
        update = message[:-1]
        torch.sub(own, base, out=update)
        square = energy(update)
        update.mul_(weight)
        message[-1] = weight * square
    channel.all_reduce(message)
    update, spread = message[:-1], float(message[-1])
    spread = max(0.0, spread - energy(update))
    base.add_(update)
    own.copy_(base)
    norm = math.sqrt(energy(base))
    return math.sqrt(spread) / norm if norm > 0 else math.sqrt(spread)
