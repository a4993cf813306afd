"""The small parts that exchanges are made of: lanes, bits, rounding, random elements, orthonormal columns, averages."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, strategies as st

from hetopt.core.comm.composition import FEEDBACK, LOW_PRECISION, METHODS
from hetopt.core.comm.payload_bytes import LARGEST_SUM, index_bytes, summed_bits, summed_code_bytes
from hetopt.core.run_spec import Compression
from hetopt.trainer.comm.exchange import Exchange, average_parameters, weights_by_samples
from hetopt.trainer.comm.low_rank import orthonormal
from hetopt.trainer.comm.quantisation import nearest
from hetopt.trainer.comm.topk import (
    ElementCoding,
)
from hetopt.trainer.comm.vectors import (
    Lanes,
    bit_values,
    look_up,
    pack_codes,
    pack_flags,
    unpack_flags,
)

from .thread_group import ThreadGroup


@given(
    st.sampled_from(sorted(LARGEST_SUM)), st.integers(1, 64), st.integers(0, 200), st.integers(0, 2**32), st.booleans()
)
def test_sums_of_packed_codes_are_packed_sums_of_codes(bits, workers, numel, seed, at_limits):
    """Also where all workers are at the largest magnitude, next to its opposite: nothing wraps around."""
    workers = min(workers, LARGEST_SUM[bits])
    _, levels = summed_bits(workers, bits=bits)
    lanes, generator = Lanes(bits, levels), torch.Generator().manual_seed(seed)
    codes = [torch.randint(-levels, levels + 1, (numel,), generator=generator) for _ in range(workers)]
    if at_limits:
        codes = [levels * codes[0].sign()] * workers
    words = torch.stack([lanes.pack(each.to(lanes.code_dtype)).clone() for each in codes])
    assert words[0].nbytes == summed_code_bytes(numel, bits)
    total = words.sum(0, dtype=words.dtype)
    assert torch.equal(lanes.unpack(total, numel, workers).long(), sum(codes))


@given(st.integers(0, 300), st.integers(0, 2**32))
def test_flags_and_codes_come_back_from_their_bytes(numel, seed):
    generator = torch.Generator().manual_seed(seed)
    flags = torch.rand(numel, generator=generator) < 0.4
    packed = pack_flags(flags.clone(), torch.full((-(-numel // 8),), 255, dtype=torch.uint8))
    assert torch.equal(unpack_flags(packed, numel), flags)
    for bits in (2, 4, 8):
        codes = torch.randint(2**bits, (numel,), generator=generator).to(torch.uint8)
        packed = pack_codes(codes, bits, torch.full((-(-numel * bits // 8),), 7, dtype=torch.uint8))
        table = bit_values(torch.arange(2**bits), bits)
        assert torch.equal(look_up(packed, table, numel), codes.long())


@given(st.integers(1, 100_000), st.floats(0, 1), st.integers(0, 2**32))
def test_indices_come_back_from_their_packed_form(numel, ratio, seed):
    count = max(0, min(numel, int(numel * ratio)))
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randperm(numel, generator=generator)[:count].sort().values.to(torch.int32)
    for coding in map(ElementCoding, ("packed", "plain")):
        data = torch.full((index_bytes(numel, count, coding.name),), 255, dtype=torch.uint8)
        coding.write_indices(indices, numel, data)
        assert torch.equal(coding.read_indices(data, numel, count), indices)


@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=50))
def test_rounding_to_nearest_errs_by_no_more_than_the_value(values):
    flat = torch.tensor(values)
    rounded = nearest(flat.clone())
    assert ((rounded - flat).abs() <= torch.minimum(flat.abs(), torch.tensor(0.5))).all()


def test_dependent_columns_become_zero_and_nonsense_stays_visible():
    column = torch.randn(20, 1, generator=torch.Generator().manual_seed(1))
    basis = orthonormal(torch.cat((column, 2 * column, torch.zeros(20, 1)), dim=1))
    assert not basis[:, 1:].any()
    assert basis[:, 0].norm() == pytest.approx(1.0)
    assert orthonormal(torch.full((3, 2), math.nan)).isnan().all()


@given(
    name=st.sampled_from([name for name in LOW_PRECISION if name != "identity"]),
    workers=st.integers(2, 5),
    rounds=st.integers(1, 4),
    seed=st.integers(0, 2**16),
)
def test_rounded_averages_lose_nothing_and_leave_the_same_bits_on_all(name, workers, rounds, seed):
    """Everything that workers learned is in the model or still owed, where something is remembered at all."""
    parameters, statistics = 300, 20
    generator = torch.Generator().manual_seed(seed)
    begun = torch.randn(parameters + statistics, generator=generator)
    moves = 0.1 * torch.randn(rounds, workers, parameters + statistics, generator=generator)
    samples = [int(count) for count in torch.randint(1, 50, (workers,), generator=generator)]
    weights, group = weights_by_samples(samples), ThreadGroup(workers)

    def train(rank: int) -> tuple[torch.Tensor, torch.Tensor, float]:
        rounded = Exchange(Compression(name=name), parameters)
        own, base, apart = begun.clone(), begun.clone(), 0.0
        for move in moves[:, rank]:
            own += move
            apart = average_parameters(own, base, weights[rank], group.channel(rank), rounded)
            assert torch.equal(own, base)
        whole, whole_base = own.clone(), base.clone()
        average_parameters(whole, whole_base, weights[rank], group.channel(rank), rounded, exactly=True)
        return own, whole, apart

    with ThreadPoolExecutor(workers) as pool:
        results = list(pool.map(train, range(workers)))
    assert all(torch.equal(own, results[0][0]) and torch.equal(whole, results[0][1]) for own, whole, _ in results)
    assert len({apart for _, _, apart in results}) == 1
    assert results[0][2] > 0
    own, whole, _ = results[0]
    learned = begun + sum(weight * moves[:, rank].sum(0) for rank, weight in enumerate(weights))
    remembers = METHODS[name].memories[0] == FEEDBACK
    torch.testing.assert_close(whole, learned, rtol=1e-4, atol=1e-5 if remembers else 1e-2)
    torch.testing.assert_close(own, learned, rtol=1e-2, atol=0.15)
    torch.testing.assert_close(own[parameters:], learned[parameters:], rtol=1e-5, atol=1e-5)


def test_a_worker_without_samples_does_not_matter_even_if_it_has_gone_wrong():
    group, held = ThreadGroup(2), [torch.ones(5), torch.full((5,), math.nan)]

    def average(rank: int, weight: float) -> None:
        average_parameters(held[rank], torch.zeros(5), weight, group.channel(rank))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(average, range(2), weights_by_samples([7, 0])))
    assert held[1].eq(1).all()
    assert weights_by_samples([3, 5, 1], participants=(0, 2)) == (0.75, 0.0, 0.25)
