"""Averages what workers have learned for themselves since their models were last alike, each by the samples it saw.

What travels is how far a worker has come, not where it is: workers that have not moved keep the very bits that they
had, rounding is that of the small update and not of the parameter, and how far the workers have come apart can be told
from sums that do not cancel. So it can be rounded to a half, a quarter or an eighth of the bytes as gradients are, and
what rounding leaves goes with the next average.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hetopt.core.run_spec import Compression
from hetopt.trainer.comm.channel import Channel
from hetopt.trainer.comm.compressor import Residual
from hetopt.trainer.comm.methods import make_chain, make_residual
from hetopt.trainer.comm.vectors import energy


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


class RoundedSum:
    """Sums updates in fewer bytes, and remembers what rounding left (see `composition.LOW_PRECISION`).

    Args:
        compression: how they are rounded.
        parameters: the first elements of an update, which are rounded; the rest, running statistics, is not.
        device: where updates lie.
    """

    def __init__(self, compression: Compression, parameters: int, *, device: torch.device | None = None) -> None:
        self.residual: Residual = make_residual(compression, parameters, device=device)
        self._chain = make_chain(compression, parameters, device=device)
        self._parameters = parameters
        self._step = 0

    @classmethod
    def of(cls, compression: Compression, parameters: int, *, device: torch.device | None = None) -> RoundedSum | None:
        """The same; None where nothing is rounded: updates are summed in fp32."""
        return None if compression.name == "identity" else cls(compression, parameters, device=device)

    def run(self, message: Tensor, channel: Channel) -> None:
        """Replace a message by the sum of all workers', in place."""
        update, rest = message[: self._parameters], message[self._parameters :]
        prepared = self.residual.prepare(update)
        sent = self._chain.run(prepared, update, channel, self._step)
        self.residual.commit(prepared, sent)
        self._step += 1
        channel.all_reduce(rest)

    def add_held_back(self, message: Tensor) -> None:
        """Add what earlier averages owe to a message, which is not rounded then; it stays owed."""
        residual = self.residual.state().get("residual")
        if residual is not None:
            message[: self._parameters].add_(residual)


def average_parameters(
    own: Tensor,
    base: Tensor,
    weight: float,
    channel: Channel,
    rounded: RoundedSum | None = None,
    *,
    exactly: bool = False,
    step: Callable[[Tensor], None] | None = None,
) -> float:
    """Replace every worker's parameters by ``base + sum_i weight_i (x_i - base)``, in place, the same bits on each.

    Or by what an outer step makes of that sum (`hetopt.trainer.sync.outer_step`).

    A worker of weight 0 changes nothing, whatever it holds, even what is not finite.

    Args:
        own: 1-D fp32, this worker's parameters x_i; the average afterwards.
        base: where all began, the same bits on all workers; the average afterwards, too.
        weight: of this worker; those of all sum to 1.
        channel: to the other workers.
        rounded: sums in fewer bytes; None: in fp32.
        exactly: send in fp32 whatever is said, with what rounding has left so far; no residual is kept of it.
        step: changes the sum, in place, before it is added; None: it stays.

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
    if rounded is None or exactly:
        if rounded is not None:
            rounded.add_held_back(message)
        channel.all_reduce(message)
    else:
        rounded.run(message, channel)
    update, spread = message[:-1], float(message[-1])
    spread = max(0.0, spread - energy(update))
    if step is not None:
        step(update)
    base.add_(update)
    own.copy_(base)
    norm = math.sqrt(energy(base))
    return math.sqrt(spread) / norm if norm > 0 else math.sqrt(spread)
