"""Collectives obey their contract when a worker is alone; `test_processes` runs them between real ones."""

from __future__ import annotations

from hetopt.trainer.exchange.compressor import DensePayload
from hetopt.trainer.exchange.dense_all_reduce import DenseAllReduce
from hetopt.trainer.exchange.sparse_all_gather import SparseAllGather
from hetopt.trainer.exchange.topk import TopKCompressor

from .contracts import CollectiveContract


class TestDenseAllReduce(CollectiveContract):
    def make(self):
        return DenseAllReduce()

    def payload(self, flat):
        return DensePayload(values=flat)


class TestSparseAllGather(CollectiveContract):
    def make(self):
        return SparseAllGather()

    def payload(self, flat):
        return TopKCompressor().compress(flat, 0.1, None)
