"""Measures the progress of an exchange (`hetopt.trainer.exchange.progress`) on the gradients that go through it.

A sketch (Alon, Matias and Szegedy 1996; Charikar, Chen and Farach-Colton 2002) adds up elements with random signs in a
few places: products of sketches are, in the mean over signs, products of the vectors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hetopt.trainer.exchange.blocks import BLOCK_ELEMENTS, blocks
from hetopt.trainer.exchange.channel import Channel
from hetopt.trainer.exchange.payload import Payload
from hetopt.trainer.exchange.progress import Progress

SKETCH_PLACES = 1024
"""4 kB a worker. One look's error is then about a tenth of a worker's squared norm, and looks are many."""


class ProgressProbe:
    """Knows before an exchange what is asked after it. All workers make theirs in the same step, with the same seed.

    Args:
        gradient: this worker's weighted gradient, without what was held back.
        channel: to exchange sketches by.
        seed: of their signs.

    Attributes:
        took_s: time spent on this so far.
    """

    def __init__(self, gradient: Tensor, channel: Channel, *, seed: int) -> None:
        begun = channel.now()
        self._channel = channel
        self._gradient = gradient.clone()
        self._own = sketch(gradient, seed=seed)
        self._others = channel.all_gather(self._own).sum(0) - self._own
        self.took_s = channel.now() - begun

    def after(self, total: Tensor, sent: Payload) -> Progress:
        """Once ``total`` was summed, to which this worker contributed ``sent``."""
        begun = self._channel.now()
        achieved = product(total, self._gradient) - product(sent.dense(), self._gradient)
        found = Progress(achieved=achieved, dense=product(self._others, self._own))
        self.took_s += self._channel.now() - begun
        return found


def sketch(flat: Tensor, *, seed: int, places: int = SKETCH_PLACES) -> Tensor:
    """The sketch of a vector; sketches of one seed, and of vectors of one length, can be multiplied.

    Signs are cut out of one random string, for each block from somewhere else in it: drawing a sign for every element
    takes as long as selecting the largest.
    """
    generator = torch.Generator().manual_seed(seed)
    longest = min(flat.numel(), BLOCK_ELEMENTS)
    signs = torch.randint(2, (2 * longest,), generator=generator).mul_(2).sub_(1).to(flat)
    found = flat.new_zeros(places)
    for begin in range(0, flat.numel(), BLOCK_ELEMENTS):
        block = flat[begin : begin + BLOCK_ELEMENTS]
        shift = int(torch.randint(longest, (), generator=generator))
        signed = block * signs[shift : shift + block.numel()]
        whole = signed.numel() // places * places
        found += signed[:whole].view(-1, places).sum(0)
        found[: signed.numel() - whole] += signed[whole:]
    return found


def product(one: Tensor, other: Tensor) -> float:
    """Inner product, blocks in fp32 and their sum in double precision."""
    dots = [torch.dot(one[block], other[block]) for block in blocks(one.numel(), one.device)]
    return float(torch.stack(dots).double().sum()) if dots else 0.0
