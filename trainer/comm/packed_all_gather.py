"""Gathers packed payloads, and sums them on arrival or takes the majority of their signs."""

from __future__ import annotations

from torch import Tensor

from hetopt.trainer.comm.channel import Channel
from hetopt.trainer.comm.packed import PackedPayload


class PackedAllGather:
    """One all-gather of bytes; payloads are unpacked and added in rank order, so all workers hold the same bits."""

    def run(self, payload: PackedPayload, out: Tensor, channel: Channel) -> None:
        """Sum into ``out`` (see `SumCollective`)."""
        messages = channel.all_gather(payload.message())
        out.zero_()
        for message in messages:
            payload.read(message).add_to(out)


class MajorityVote:
    """Gathers signs; each element gets the sign of most workers, times the sum of all mean magnitudes.

    Where as many workers are for either sign, the element is 0 and stays as it is: the one choice that favours nobody
    and needs no agreement. (Bernstein et al., arXiv 1810.05291, whose servers send the majority back: with gathered
    bits everyone counts for himself.) Mean magnitudes make up for what signs do not know, so that learning rates mean
    what they do with whole gradients; one that is not finite makes all of the result so.
    """

    def run(self, payload: PackedPayload, out: Tensor, channel: Channel) -> None:
        """Vote into ``out`` (see `SumCollective`)."""
        ballots = [payload.read(message) for message in channel.all_gather(payload.message())]
        out.zero_()
        for ballot in ballots:
            PackedPayload(
                packed=ballot.packed,
                units=ballot.units.new_ones(1),
                code_values=ballot.code_values,
                sizes=ballot.sizes,
            ).add_to(out)
        out.sign_().mul_(sum(float(ballot.units) for ballot in ballots))
