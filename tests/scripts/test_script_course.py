"""What is measured of a script does not depend on how finely it is asked for, in a range around the choices made."""

from __future__ import annotations

import math
import statistics
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hetopt.core.training_laws import pooled_noise
from hetopt.profiler.probe.timed_step import TimedStep
from hetopt.profiler.script import course
from hetopt.profiler.script.course import Measured, ScriptCourse
from hetopt.profiler.script.observer import Step, Wish
from hetopt.profiler.script.order import ScriptOrder

OWN = 64


def made(**order: Any) -> ScriptCourse:
    """A course over a script that is played by the test: it answers wishes with steps."""
    observer = SimpleNamespace(batch_size=OWN, dataset_size=1500, device=torch.device("cpu"), loader=object())
    crew = SimpleNamespace(elapsed_s=lambda: 0.0)
    return ScriptCourse(
        order=ScriptOrder(script="train.py", sweep_s=1.0, **order),
        observer=observer,  # type: ignore[arg-type]  # what it asks of one
        measured=Measured(),
        crew=crew,  # type: ignore[arg-type]  # likewise
    )


def step(samples: int, time_s: float = 1e-3, gradient: torch.Tensor | None = None) -> Step:
    timed = TimedStep(wall_s=time_s, alone_s=time_s, phases_s=(0.0, 0.0, 0.0, 0.0), contention=1.0)
    return Step(samples=samples, timed=timed, gradient=gradient)


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
    measured = made()
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
    told = [
        pooled_noise(one.groups, one.samples, one.weighted_square_norms, one.mean_square_norm)
        for one in measured.measured.noise
    ]
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
    assert [one.samples for one in measured.measured.sizes] == [64, 32, 16, 8, 4, 128, 256]
