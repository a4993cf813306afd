"""One registry: what combines with what, the price list and the chains speak of the same methods."""

from __future__ import annotations

import math

import pytest

from hetopt.core.comm.composition import AR_TOPK, METHODS, STAR, VAR, combinations
from hetopt.core.comm.payload_bytes import wire_bytes
from hetopt.core.run_spec import Compression
from hetopt.trainer.comm.methods import make_chain, make_compressor, registered

SHAPES = ((6, 5), (4,))
NUMEL = sum(math.prod(shape) for shape in SHAPES)


def test_every_method_has_a_row_a_chain_and_a_price():
    assert set(registered()) == set(METHODS)
    for each in combinations():
        ratio = 0.3 if each.method.by_ratio else 1.0
        compression = Compression(name=each.name, ratio=ratio, memory=each.memory, collective=each.collective)
        assert make_chain(compression, NUMEL, shapes=SHAPES).counts_steps in (True, False)
        assert wire_bytes(each.name, NUMEL, ratio, collective=each.collective, shapes=SHAPES) > 0


@pytest.mark.parametrize("name", METHODS)
def test_the_table_says_how_payloads_combine(name):
    """The collectives of a method's row are those that its compressors name; a shared choice carries any selection."""
    method, named = METHODS[name], set()
    for each in (one for one in combinations() if one.name == name):
        compression = Compression(
            name=name, ratio=0.3 if method.by_ratio else 1.0, memory=each.memory, collective=each.collective
        )
        named.update(make_compressor(compression, NUMEL, shapes=SHAPES).combines)
    assert named == set(method.collectives)
    assert {AR_TOPK, STAR, VAR}.isdisjoint(named) or method.same_size
