"""What is measured of a script does not depend on how finely it is asked for, in a range around the choices made."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

from hetopt.profiler.probe.sweep import TimedStep
from hetopt.profiler.script import course
from hetopt.profiler.script.course import ScriptCourse
from hetopt.profiler.script.observer import Rebatched, Step, Wish, rebatch, samples_given, samples_of
from hetopt.profiler.script.order import ScriptOrder
from hetopt.trainer.comm.vectors import energy

OWN = 64


def made(record: Callable[[Any], None] = lambda measured: None, **order: Any) -> ScriptCourse:
    """A course over a script that is played by the test: it answers wishes with steps."""
    observer = SimpleNamespace(
        batch_size=OWN, dataset_size=1500, device=torch.device("cpu"), loader=object(), parameters=[]
    )
    crew = SimpleNamespace(elapsed_s=lambda: 0.0, record=record)
    return ScriptCourse(
        order=ScriptOrder(script="train.py", time_limit_s=1.0, **order),
        observer=observer,  # type: ignore[arg-type]  # what it asks of one
        crew=crew,  # type: ignore[arg-type]  # likewise
    )


def step(samples: int, time_s: float = 1e-3, gradient: torch.Tensor | None = None) -> Step:
    timed = TimedStep(wall_s=time_s, alone_s=time_s, phases_s=(0.0, 0.0, 0.0, 0.0))
    return Step(
        samples=samples,
        batches=1,
        timed=timed,
        gradient=None if gradient is None else (energy(gradient), gradient),
    )


@pytest.mark.parametrize(
    ("parts", "small", "large"), [(2, 2, 1), (4, 4, 2), (4, 8, 2), (4, 4, 4), (8, 8, 1), (8, 4, 2)]
)
def test_the_noise_of_a_gradient_is_found_whatever_parts_are_compared(
    parts: int, small: int, large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`E|g_b|^2 = |G|^2 + V / b` holds of any two sizes: fewer gradients only make single estimates vary more."""
    for name, value in (("PARTS", parts), ("SMALL_STEPS", small), ("LARGE_STEPS", large)):
        monkeypatch.setattr(course, name, value)
    generator = torch.Generator().manual_seed(5)
    elements, variance, square = 400, 80.0, 1.0
    mean = torch.full((elements,), math.sqrt(square / elements))
    told: list[Any] = []
    measured = made(told.append)
    for number in range(300):
        asked = measured._sample_noise(number)
        wish: Wish | None = next(asked)
        while wish is not None:
            samples = round(OWN * wish.factor)
            noise = torch.randn(elements, generator=generator) * math.sqrt(variance / elements / samples)
            try:
                wish = asked.send(step(samples, gradient=mean + noise))
            except StopIteration:
                wish = None
    assert statistics.fmean(one.gradient_variance for one in told) == pytest.approx(variance, rel=0.1)
    assert statistics.fmean(one.gradient_square for one in told) == pytest.approx(square, rel=0.1)


def test_the_scripts_own_batch_size_is_timed_first() -> None:
    measured = made(sweep=1)
    asked = measured.run()
    wish: Wish | None = next(asked)
    while wish is not None:
        try:
            wish = asked.send(step(round(OWN * wish.factor)))
        except StopIteration:
            wish = None
    assert [point.local_batch_size for point in measured.points] == [64, 32, 16, 8, 4, 128, 256]


# Loaders that give batches of another size than they were made for: every sample once, in the script's order.

SAMPLES = st.integers(1, 60)
SIZES = st.integers(1, 9)


@given(samples=SAMPLES, size=SIZES, factors=st.lists(st.sampled_from([0.25, 0.5, 1.0, 2.0, 4.0]), min_size=1))
def test_every_sample_comes_once_and_in_order(samples: int, size: int, factors: list[float]) -> None:
    asked = iter(factors * 1000)
    inner = BatchSampler(SequentialSampler(range(samples)), size, drop_last=False)
    batches = list(Rebatched(inner, lambda: next(asked), lambda: False))
    assert [one for batch in batches for one in batch] == list(range(samples))
    assert all(batches)


@given(samples=SAMPLES, size=SIZES, factor=st.sampled_from([0.25, 0.5, 1.0, 2.0, 4.0]))
def test_batches_are_so_many_times_as_large(samples: int, size: int, factor: float) -> None:
    inner = BatchSampler(SequentialSampler(range(samples)), size, drop_last=True)
    batches = list(Rebatched(inner, lambda: factor, lambda: False))
    assert all(len(batch) == max(1, round(size * factor)) for batch in batches[:-1])
    if factor == 1:
        assert batches == list(inner)


def test_an_endless_loader_begins_anew_and_says_the_length_that_the_script_expects() -> None:
    loader = DataLoader(TensorDataset(torch.arange(8)), batch_size=4)
    endless = [True]
    rebatch(loader, lambda: 0.5, lambda: endless[0])
    assert len(loader) == 2
    taken = []
    for number, (batch,) in enumerate(loader):
        taken += batch.tolist()
        endless[0] = number < 6
    assert taken == [*range(8), *range(8)]
    assert samples_of(loader) == 8


@pytest.mark.parametrize("readers", [0, 2])
def test_samples_are_counted_as_they_are_drawn_whatever_a_collate_function_makes_of_them(readers: int) -> None:
    def collate(rows: list[tuple[torch.Tensor]]) -> torch.Tensor:
        return torch.stack([row for (row,) in rows], dim=1)

    loader = DataLoader(TensorDataset(torch.zeros(10, 7)), batch_size=4, collate_fn=collate, num_workers=readers)
    rebatch(loader, lambda: 1.0, lambda: False)
    for _ in range(2):
        next(iter(loader))  # an epoch that is left
        assert [(len(batch), samples_given(loader, batch)) for batch in loader] == [(7, 4), (7, 4), (7, 2)]
