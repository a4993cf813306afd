"""Collectives obey their contract when a worker is alone; `test_processes` runs them between real ones."""

from __future__ import annotations

import pytest
import torch

from hetopt.trainer.comm.channel import Channel
from hetopt.trainer.comm.compressor import AllReduce, Identity, Turn, chain
from hetopt.trainer.comm.elements import AllGather, RandomElements
from hetopt.trainer.comm.error_feedback import ErrorFeedback
from hetopt.trainer.comm.quantisation import MajorityVote, MaxNorm, Packed, PackedAllGather, Quantised, Sign
from hetopt.trainer.comm.topk import TopK

from .contracts import CollectiveContract


class TestAllReduce(CollectiveContract):
    def make(self):
        return AllReduce()

    def compressor(self):
        return Identity()


class TestAllReduceOfCodes(TestAllReduce):
    def compressor(self):
        return Quantised(MaxNorm(), at_random=False)


class TestAllGather(CollectiveContract):
    def make(self):
        return AllGather()

    def compressor(self):
        return TopK(0.1)


class TestPaddedAllGather(TestAllGather):
    def make(self):
        return AllGather(same_size=False)


class TestPackedAllGather(CollectiveContract):
    def make(self):
        return PackedAllGather()

    def compressor(self):
        return Packed("qsgd_maxnorm", MaxNorm(), sizes=[100], bits=4, levels=7, at_random=True)


class TestMajorityVote(CollectiveContract):
    def make(self):
        return MajorityVote()

    def compressor(self):
        return Sign()


def test_a_chain_of_chosen_elements_sends_these_and_scales_them():
    flat, out = torch.arange(1.0, 9.0), torch.empty(8)
    chain(RandomElements(0.25), Identity(), AllReduce(), scale=4.0, seed=1).run(flat, out, Channel(), 3)
    indices = RandomElements(0.25).choose(flat, Turn(Channel(), 3, 1)).long()
    expected = torch.zeros(8)
    expected[indices] = 4 * flat[indices]
    assert torch.equal(out, expected)


NO_CHAINS = [(AllReduce(),), (Identity(), TopK(0.1), AllGather()), (ErrorFeedback(3), AllReduce())]


@pytest.mark.parametrize("links", NO_CHAINS)
def test_what_is_no_chain_is_refused(links):
    with pytest.raises(ValueError, match="in this order"):
        chain(*links)


def test_payloads_combine_as_their_compressor_says():
    with pytest.raises(ValueError, match="not by all_gather"):
        chain(Identity(), AllGather())
