"""Collectives obey their contract when a worker is alone; `test_processes` runs them between real ones."""

from __future__ import annotations

import torch

from hetopt.trainer.comm.elements import PaddedSparseAllGather, SparseAllGather
from hetopt.trainer.comm.quantisation import MajorityVote, MaxNorm, PackedAllGather, PackedQuantiser, SignCompressor
from hetopt.trainer.comm.topk import TopKCompressor

from .contracts import CollectiveContract


class TestSparseAllGather(CollectiveContract):
    def make(self):
        return SparseAllGather()

    def payload(self, flat):
        return TopKCompressor().compress(flat, 0.1, None)


class TestPaddedSparseAllGather(CollectiveContract):
    def make(self):
        return PaddedSparseAllGather()

    def payload(self, flat):
        return TopKCompressor().compress(flat, 0.1, None)


class TestPackedAllGather(CollectiveContract):
    def make(self):
        return PackedAllGather()

    def payload(self, flat):
        packer = PackedQuantiser("qsgd_maxnorm", MaxNorm(), sizes=[len(flat)], bits=4, levels=7)
        return packer.compress(flat, 1.0, torch.Generator().manual_seed(0))


class TestMajorityVote(CollectiveContract):
    def make(self):
        return MajorityVote()

    def payload(self, flat):
        return SignCompressor().compress(flat, 1.0, None)
