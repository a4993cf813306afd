"""The small parts that exchanges are made of: lanes, bits, rounding, random elements, orthonormal columns, averages.

What other ratios would have kept, which is never in the way of the exchange.

Laws of payloads that are chosen by what they keep: the candidate, its floor, or everything.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings, strategies as st

from hetopt.core.comm.composition import FEEDBACK, LOW_PRECISION, METHODS
from hetopt.core.comm.payload_bytes import LARGEST_SUM, index_bytes, kept_elements, summed_bits, summed_code_bytes
from hetopt.core.run_spec import Compression
from hetopt.trainer.comm.exchange import Exchange, average_parameters, weights_by_samples
from hetopt.trainer.comm.low_rank import orthonormal
from hetopt.trainer.comm.methods import make_chain, make_residual
from hetopt.trainer.comm.quantisation import nearest
from hetopt.trainer.comm.topk import (
    ElementCoding,
    kept_energies,
)
from hetopt.trainer.comm.vectors import (
    Lanes,
    bit_values,
    energy,
    look_up,
    pack_codes,
    pack_flags,
    unpack_flags,
)

from .contracts import GRADIENTS
from .thread_group import Crew, ThreadGroup


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
    assert weights_by_samples([0, 5, 0], participants=(0, 2)) == (0.5, 0.0, 0.5), "nobody drawn has samples"


RATIOS = (0.0001, 0.001, 0.01, 0.03, 0.1, 0.3, 0.7, 1.0)


def exact(flat: torch.Tensor, counts: list[int]) -> list[float]:
    squares = flat.double().square().sort(descending=True).values.cumsum(0)
    return [float(squares[count - 1]) for count in counts]


@pytest.mark.parametrize("kind", GRADIENTS)
@pytest.mark.parametrize("numel", [1, 1000, 700_001])
def test_kept_energies_are_those_of_top_k(kind, numel):
    flat = GRADIENTS[kind](numel)
    counts = [kept_elements(numel, ratio) for ratio in RATIOS]
    whole = float(flat.double().square().sum())
    for found, expected in zip(kept_energies(flat, counts), exact(flat, counts), strict=True):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6 * whole)


@pytest.mark.parametrize("scale", [1e-42, 1e-25, 1.0, 1e25])
def test_energy_is_that_of_double_precision_at_any_scale(scale):
    flat = scale * torch.randn(300_000, generator=torch.Generator().manual_seed(1))
    assert energy(flat) == pytest.approx(float(flat.double().square().sum()), rel=1e-6)


def test_energy_of_nothing_and_of_nonsense():
    assert energy(torch.empty(0)) == 0.0
    assert math.isnan(energy(torch.tensor([1.0, math.nan])))
    assert energy(torch.tensor([1.0, math.inf])) == math.inf


@pytest.mark.parametrize(
    "compression", [Compression(), Compression(name="topk", ratio=0.01), Compression(name="qsgd_maxnorm")]
)
def test_looking_changes_nothing_that_is_exchanged(compression):
    one, two = Exchange(compression, 5000, seed=1), Exchange(compression, 5000, seed=1)
    for step in range(3):
        flat = torch.randn(5000, generator=torch.Generator().manual_seed(step))
        other = flat.clone()
        plain, looked = one.run(flat), two.run(other, look_at=(0.01, 0.5, 1.0))
        assert torch.equal(flat, other)
        assert plain.look_energies == ()
        assert looked.energy == pytest.approx(looked.look_energies[-1])
        if compression.name == "topk":
            assert looked.kept_energy == pytest.approx(looked.look_energies[0], rel=1e-4)
            assert plain.kept_energy / plain.energy == looked.kept_energy / looked.energy < 1
        else:
            assert looked.kept_energy == looked.energy


NUMEL = 2000
SELECTIONS = ["topk", "mstopk", "dgc", "redsync"]


def in_levels(name, least_gain, *, ratio=0.01, floor_ratio=0.1):
    memory = "error_feedback" if name == "dgc" else "auto"
    return Compression(name=name, ratio=ratio, floor_ratio=floor_ratio, least_gain=least_gain, memory=memory)


def crew(compression, workers=3):
    return Crew(workers, lambda: (make_residual(compression, NUMEL), make_chain(compression, NUMEL, seed=3)))


def gradients(workers, step, tail=1.0):
    """With a few large elements, or with many alike: ``tail`` is the exponent of the magnitudes."""
    generator = torch.Generator().manual_seed(100 * step + workers)
    return [torch.randn(NUMEL, generator=generator).abs() ** tail * (1 + rank) for rank in range(workers)]


@pytest.mark.parametrize("name", SELECTIONS)
@given(least_gain=st.floats(0.001, 1.2), tail=st.floats(0.5, 8))
@settings(max_examples=8, deadline=None)
def test_nothing_is_lost_workers_agree_and_what_is_sent_keeps_enough(name, least_gain, tail):
    group = crew(in_levels(name, least_gain))
    received = brought = torch.zeros(NUMEL, dtype=torch.float64)
    for step in range(4):
        mine = gradients(3, step, tail)
        there = sum(float((r.prepare(g) ** 2).sum()) for r, g in zip(group.residuals, mine, strict=True))
        brought = brought + sum(gradient.double() for gradient in mine)
        first, *others = group.exchange(mine)
        assert all(torch.equal(first, other) for other in others)
        received = received + first.double()
        scale = max(1.0, float(brought.abs().max()))
        torch.testing.assert_close(received + group.held_back(), brought, rtol=0, atol=1e-5 * scale)
        left = sum(float((r.state()["residual"] ** 2).sum()) for r in group.residuals)
        assert left <= (1 - min(1.0, least_gain)) * there * (1 + 1e-4) + 1e-6 * there


def kinds_sent(name, least_gain, tail):
    group = crew(in_levels(name, least_gain))
    sent = []
    for step in range(3):
        group.exchange(gradients(3, step, tail))
        sent.append(group.sent_bytes[0])
    return sent


@pytest.mark.parametrize("name", ["topk", "dgc", "redsync"])
def test_each_level_is_sent_where_it_keeps_enough(name):
    """A gradient with a long tail fits into the candidate; one of alike elements needs everything."""
    dense = 4 * NUMEL
    assert max(kinds_sent(name, 0.01, 8)) < 0.1 * dense, "the candidate, a hundredth of the elements"
    floor = kinds_sent(name, 0.6, 3)[0]
    assert 0.1 * dense < floor < 0.5 * dense, "the floor, a tenth with its indices"
    assert min(kinds_sent(name, 0.9, 0.1)) > dense
    assert min(kinds_sent(name, 1.5, 8)) > dense, "nothing keeps more than everything"


def test_a_nan_is_sent_to_all():
    group, mine = crew(in_levels("topk", 0.5)), gradients(3, 0)
    mine[1][7] = torch.nan
    assert all(out[7].isnan() for out in group.exchange(mine))


def test_an_exchange_tells_what_both_would_have_kept():
    exchange = Exchange(in_levels("topk", 0.5), NUMEL)
    flat = gradients(1, 0, 4)[0]
    square = flat.double().square().sort(descending=True).values
    stats = exchange.run(flat.clone())
    expected = (float(square[:20].sum() / square.sum()), float(square[:200].sum() / square.sum()))
    assert stats.level_gains == pytest.approx(expected, rel=1e-4)
    assert stats.kept_energy / stats.energy == pytest.approx(
        expected[0] if expected[0] >= 0.5 else expected[1], rel=1e-4
    )
