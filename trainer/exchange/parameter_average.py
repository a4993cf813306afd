"""Averages parameters over workers that have trained for themselves, each by the samples that it has seen."""

from __future__ import annotations

from torch import Tensor

from hetopt.trainer.exchange.channel import Channel


def average_parameters(flat: Tensor, samples: int, channel: Channel) -> None:
    """Replace every worker's parameters by ``sum_i samples_i x_i / sum_i samples_i``, in place, the same bits on each.

    The counts travel before the parameters, in one tiny gather, so that weights are exact and a worker that has seen
    nothing since the last time changes nothing. Parameters that are alike everywhere come back to within rounding.

    Args:
        flat: 1-D fp32.
        samples: seen by this worker since the last average.
        channel: to the other workers.

    Raises:
        ValueError: nobody has seen any.
    """
    own = flat.new_tensor([samples]).double()
    counts = channel.all_gather(own).flatten().tolist()
    total = sum(counts)
    if total <= 0:
        raise ValueError("parameters are averaged over samples, and there were none")
    weight = counts[channel.rank] / total
    if weight == 0:
        flat.zero_()  # whatever it holds, even what is not finite
    else:
        flat.mul_(weight)
    channel.all_reduce(flat)
