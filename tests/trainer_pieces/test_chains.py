"""Laws of every combination of compressor, memory and collective, among workers that are threads of this process."""

from __future__ import annotations

import math

import pytest
import torch

from hetopt.core.comm.composition import (
    CORRECTION,
    FEEDBACK,
    GATHER,
    METHODS,
    NONE,
    PACKED,
    PACKED_BF16,
    STAR,
    Combination,
    combinations,
)
from hetopt.core.comm.payload_bytes import wire_bytes
from hetopt.core.run_spec import Compression
from hetopt.trainer.comm import topk
from hetopt.trainer.comm.compressor import AllReduce, Chain, Residual
from hetopt.trainer.comm.methods import make_chain, make_residual
from hetopt.trainer.comm.quantisation import Quantised
from tests.thinned import few

from .thread_group import Crew

SHAPES = ((24, 30), (24,), (5, 7, 3, 3), (10, 24), (1,))
NUMEL = sum(math.prod(shape) for shape in SHAPES)
EVERY = combinations()
UNBIASED = ("randomk", "qsgd_maxnorm", "qsgd_two_scale", "qsgd_multi_scale", "global_randomk_maxnorm")


def name_of(combination: Combination) -> str:
    return f"{combination.name}-{combination.collective}-{combination.memory}"


def compression_of(combination: Combination, ratio: float = 0.05, **options: object) -> Compression:
    if combination.memory == CORRECTION:
        options = {"momentum": 0.0, **options}  # then it is error feedback, so that the same sums hold
    return Compression(
        name=combination.name,
        ratio=ratio if METHODS[combination.name].by_ratio else 1.0,
        memory=combination.memory,
        collective=combination.collective,
        **options,
    )


def crew(compression: Compression, workers: int, *, seed: int = 3) -> Crew:
    return Crew(
        workers,
        lambda: (
            make_residual(compression, NUMEL),
            make_chain(compression, NUMEL, shapes=SHAPES, seed=seed),
        ),
    )


def gradients(workers: int, step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + workers)
    return [torch.randn(NUMEL, generator=generator) * 10 ** (rank / 2) for rank in range(workers)]


def rounding_at_random(levels):
    """Without a residual."""
    return Residual(), Chain(Quantised(at_random=True, levels=levels), AllReduce(), seed=1)


every = pytest.mark.parametrize("combination", EVERY, ids=name_of)


@every
@pytest.mark.parametrize("workers", few(1, [3, 2]))
def test_all_workers_hold_the_same_bits_and_send_what_was_planned(combination, workers):
    compression = compression_of(combination)
    group = crew(compression, workers)
    planned = wire_bytes(
        combination.name, NUMEL, compression.ratio, workers=workers, collective=combination.collective, shapes=SHAPES
    )
    for step in range(4):
        first, *others = group.exchange(gradients(workers, step))
        assert all(torch.equal(first, other) for other in others)
        assert len(set(group.sent_bytes)) == 1
        if METHODS[combination.name].same_size:
            assert group.sent_bytes[0] == planned
        else:
            assert group.sent_bytes[0] <= 2.1 * planned


@pytest.mark.parametrize(
    "combination", [c for c in EVERY if c.memory != NONE and c.name not in ("fp16", "bf16")], ids=name_of
)
@pytest.mark.parametrize("workers", few(1, [3, 1]))
def test_all_that_was_received_plus_all_residuals_is_all_there_was(combination, workers):
    """Over steps and workers. For fp16 and bf16 it holds but for the rounding of sums, see below."""
    group = crew(compression_of(combination), workers)
    received = brought = torch.zeros(NUMEL, dtype=torch.float64)
    for step in range(6):
        mine = gradients(workers, step)
        brought = brought + sum(gradient.double() for gradient in mine)
        received = received + group.exchange(mine)[0].double()
        torch.testing.assert_close(received + group.held_back(), brought, rtol=0, atol=2e-4)


@pytest.mark.parametrize(
    "combination", [c for c in EVERY if c.method.by_ratio and "levels" not in c.method.options], ids=name_of
)
def test_a_ratio_of_one_sends_everything(combination):
    group = crew(compression_of(combination, ratio=1.0), 3)
    for step in range(3):
        mine = gradients(3, step)
        expected = sum(gradient.double() for gradient in mine)
        torch.testing.assert_close(group.exchange(mine)[0].double(), expected, rtol=1e-5, atol=1e-5)
        assert not group.held_back().any()


# One of each method, and each way to send and to remember once; all of them hold the sums above.


@pytest.mark.parametrize("coding", [PACKED, PACKED_BF16])
@pytest.mark.parametrize(
    "combination", [c for c in EVERY if "coding" in c.method.options and c.memory == FEEDBACK], ids=name_of
)
def test_codings_change_bytes_and_nothing_else(combination, coding):
    """Indices come back to the bit. What bf16 rounds off is held back, but for the rounding of sums made on the way."""
    plain, coded = (crew(compression_of(combination, coding=each), 3) for each in (None, coding))
    received = brought = torch.zeros(NUMEL, dtype=torch.float64)
    for step in range(4):
        mine = gradients(3, step)
        brought = brought + sum(gradient.double() for gradient in mine)
        first, *others = coded.exchange(mine)
        assert all(torch.equal(first, other) for other in others)
        expected = plain.exchange(mine)[0]
        if coding == PACKED:
            assert torch.equal(first, expected)
        assert coded.sent_bytes[0] < 0.75 * plain.sent_bytes[0] + 8
        if combination.method.same_size:
            wish = {"workers": 3, "collective": combination.collective, "coding": coding, "shapes": SHAPES}
            assert coded.sent_bytes[0] == wire_bytes(combination.name, NUMEL, 0.05, **wish)
        received = received + first.double()
        exact = coding == PACKED or combination.collective == GATHER
        torch.testing.assert_close(received + coded.held_back(), brought, rtol=0, atol=2e-4 if exact else 0.2)


def test_fp16_neither_overflows_nor_vanishes():
    """Values far outside of what fp16 holds, and sums that would overflow on the way."""
    for scale in (1e-30, 1e-9, 1.0, 60_000.0, 1e30):
        group = crew(Compression(name="fp16"), 4)
        mine = [scale * (torch.rand(NUMEL, generator=torch.Generator().manual_seed(r)) + 0.5) for r in range(4)]
        expected = sum(gradient.double() for gradient in mine)
        error = (group.exchange(mine)[0].double() - expected).abs()
        assert (error <= 2**-10 * expected).all()


@every
@pytest.mark.parametrize("value", few(1, [math.nan, math.inf]))
def test_what_is_not_finite_on_one_worker_reaches_all(combination, value):
    """Sooner or later: an element that is not exchanged in this step is held back until it is."""
    group = crew(compression_of(combination), 2)
    mine = gradients(2, 0)
    mine[1][17] = value
    steps = 64 if METHODS[combination.name].by_ratio else 1
    for _ in range(steps):
        results = group.exchange(mine)
        seen = [not result.isfinite().all() for result in results]
        assert seen[0] == seen[1]
        if seen[0]:
            return
        mine = gradients(2, 1)
        if combination.memory == NONE:
            mine[1][17] = value
    pytest.fail("nobody saw it")


@every
def test_zeros_stay_zero_and_extremes_stay_finite(combination):
    for workers in (1, 3):
        group = crew(compression_of(combination), workers)
        for result in group.exchange([torch.zeros(NUMEL)] * workers):
            assert not result.any()
        for fill in (-2.0, 1e-42, 1e-30, 1e30):
            for result in group.exchange([torch.full((NUMEL,), fill)] * workers):
                assert result.isfinite().all()


@every
def test_a_gradient_of_one_element(combination):
    compression = compression_of(combination)
    group = Crew(
        2,
        lambda: (make_residual(compression, 1), make_chain(compression, 1, shapes=[(1,)], seed=0)),
    )
    first, second = group.exchange([torch.tensor([3.0]), torch.tensor([1.0])])
    assert torch.equal(first, second)
    assert first.item() == pytest.approx(4.0, rel=0.6)


@every
def test_resuming_goes_on_as_if_nothing_had_happened(combination):
    """State of the memory, of the aggregation, and the number of the step are all there is."""
    compression = compression_of(combination)
    whole, resumed = crew(compression, 2), crew(compression, 2)
    for step in range(5):
        expected = whole.exchange(gradients(2, step))
        if step == 2:
            for rank in range(2):
                resumed.residuals[rank].load_state(whole.residuals[rank].state())
                resumed.chains[rank].load_state(whole.chains[rank].state())
            resumed.step = whole.step
        elif step > 2:
            assert torch.equal(resumed.exchange(gradients(2, step))[0], expected[0])


@pytest.mark.parametrize("combination", [c for c in EVERY if c.memory == NONE and c.name in UNBIASED], ids=name_of)
@pytest.mark.parametrize("workers", few(1, [1, 3]))
def test_unbiased_ones_are(combination, workers):
    """The mean over many draws comes as close to the sum as the spread of the draws allows."""
    group = crew(compression_of(combination, ratio=0.25), workers)
    mine = gradients(workers, 7)
    expected = sum(gradient.double() for gradient in mine)
    draws = torch.stack([group.exchange(mine)[0].double() for _ in range(400)])
    spread = draws.std(0)  # which the draws themselves may miss, where one in a thousand rounds the other way
    deviations = (draws.mean(0) - expected) / (spread + 0.05 * spread.mean()) * math.sqrt(len(draws))
    # Of so many standard normals none is beyond 5.5 in all but one in ten thousand cases; binomials have longer tails.
    assert deviations.abs().max() < 7.0
    assert deviations.square().mean() < 1.2


@pytest.mark.parametrize("levels", [1, 7, 63])
def test_the_variance_of_quantised_values_is_within_its_bound(levels):
    """w^2 / (4 s^2) for each coordinate, on the grid of the largest magnitude w."""
    gradient = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    group = Crew(1, lambda: rounding_at_random(levels))
    errors = torch.stack([(group.exchange([gradient])[0] - gradient).double() for _ in range(200)])
    bound = float(gradient.abs().max()) ** 2 / (4 * levels**2)
    assert errors.square().mean() <= bound
    assert errors.square().mean(0).max() <= bound * 1.5


def test_star_lets_each_worker_choose_once_in_turn():
    """Each worker's largest elements are elsewhere; what is exchanged shows whose turn it was."""
    workers, group = 3, crew(Compression(name="topk", ratio=0.01, collective=STAR), 3)
    k = int(0.01 * NUMEL)
    for step in range(2 * workers):
        mine = [torch.full((NUMEL,), 1e-3) for _ in range(workers)]
        for rank, gradient in enumerate(mine):
            gradient[rank * k : (rank + 1) * k] = 1.0 + step
        sent = group.exchange(mine)[0].nonzero().squeeze(1)
        assert sent.tolist() == list(range(step % workers * k, (step % workers + 1) * k))


def test_var_lets_the_worker_choose_that_has_most_to_say():
    group = crew(Compression(name="topk", ratio=0.01, collective="ar_topk_var"), 3)
    k = int(0.01 * NUMEL)
    for loudest in (2, 0, 1, 1):
        mine = [torch.full((NUMEL,), 1e-3) for _ in range(3)]
        for rank, gradient in enumerate(mine):
            gradient[rank * k : (rank + 1) * k] = 1000.0 * (rank == loudest) + 1.0
        sent = group.exchange(mine)[0].nonzero().squeeze(1)
        assert sent.tolist() == list(range(loudest * k, (loudest + 1) * k))


def test_automatic_ar_topk_elects_only_among_many_workers(monkeypatch):
    compression = Compression(name="topk", ratio=0.01, collective="ar_topk")
    planned = wire_bytes("topk", NUMEL, 0.01, workers=4, collective=STAR)
    for many, more in ((4, 0), (3, 4)):
        monkeypatch.setattr(topk, "MANY_WORKERS", many)
        group = crew(compression, 4)
        group.exchange(gradients(4, 0))
        assert group.sent_bytes[0] == planned + more


def test_low_rank_is_exact_where_the_rank_suffices():
    generator = torch.Generator().manual_seed(0)
    shapes, compression = ((40, 30), (7,)), Compression(name="powersgd", rank=2)

    def low(worker: int) -> torch.Tensor:
        own = torch.Generator().manual_seed(worker)
        matrix = torch.randn(40, 1, generator=own) @ torch.randn(1, 30, generator=own)
        return torch.cat((matrix.flatten(), torch.randn(7, generator=generator)))

    mine = [low(0), low(1)]
    group = Crew(2, lambda: (make_residual(compression, 1207), make_chain(compression, 1207, shapes=shapes)))
    torch.testing.assert_close(group.exchange(mine)[0], mine[0] + mine[1], rtol=1e-4, atol=1e-5)


def test_low_rank_recovers_from_a_gradient_of_zeros():
    group = crew(Compression(name="powersgd", rank=2), 2)
    group.exchange([torch.zeros(NUMEL)] * 2)
    assert group.exchange(gradients(2, 0))[0][: 24 * 30].any()
