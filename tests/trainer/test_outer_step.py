"""Averaged updates as steps of an optimizer of their own: DiLoCo's, of which plain averages are one case."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hetopt.trainer.sync.synchroniser import OuterStep

ELEMENTS, STATISTICS = 12, 3

rates = st.floats(0.05, 2.0)
momenta = st.floats(0.0, 0.95)
seeds = st.integers(0, 2**20)


def updates(seed: int, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(ELEMENTS + STATISTICS, generator=generator) for _ in range(count)]


def run(steps: list[Tensor], rate: float, momentum: float, cuts: tuple[int, ...] = ()) -> Tensor:
    """The sum of all outer steps, taken in parts that are cut there."""
    outer = OuterStep(ELEMENTS, rate=rate, momentum=momentum, like=torch.zeros(1))
    found = torch.zeros(ELEMENTS + STATISTICS)
    ends = (0, *cuts, ELEMENTS + STATISTICS)
    for update in steps:
        own = update.clone()
        for begin, end in itertools.pairwise(ends):
            outer.take(own[begin:end], begin=begin)
        found += own
    return found


@given(seeds)
def test_a_rate_of_one_without_momentum_is_the_average(seed: int) -> None:
    steps = updates(seed, 4)
    assert torch.equal(run(steps, 1.0, 0.0), sum(steps, torch.zeros_like(steps[0])))


@given(seeds, rates, momenta)
def test_it_steps_as_nesterovs_momentum_of_torch(seed: int, rate: float, momentum: float) -> None:
    steps = updates(seed, 5)
    parameter = torch.nn.Parameter(torch.zeros(ELEMENTS))
    optimizer = torch.optim.SGD([parameter], lr=rate, momentum=momentum, nesterov=momentum > 0)
    for update in steps:
        parameter.grad = -update[:ELEMENTS]
        optimizer.step()
    torch.testing.assert_close(run(steps, rate, momentum)[:ELEMENTS], parameter.detach(), rtol=1e-4, atol=1e-5)


@given(seeds, rates, momenta, st.sets(st.integers(1, ELEMENTS + STATISTICS - 1), max_size=4))
def test_parts_step_as_the_whole(seed: int, rate: float, momentum: float, cuts: set[int]) -> None:
    steps = updates(seed, 4)
    torch.testing.assert_close(run(steps, rate, momentum, tuple(sorted(cuts))), run(steps, rate, momentum))


@given(seeds, rates, momenta)
def test_running_statistics_are_averaged_as_they_are(seed: int, rate: float, momentum: float) -> None:
    steps = updates(seed, 3)
    plain = sum(steps, torch.zeros_like(steps[0]))
    torch.testing.assert_close(run(steps, rate, momentum)[ELEMENTS:], plain[ELEMENTS:])
