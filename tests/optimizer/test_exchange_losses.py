"""What rounding and factoring costs in steps: the law, what a profile's trials say, and what the menu makes of it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetopt.core.comm.compression_text import spell
from hetopt.core.comm.options import LOSSLESS, timed_as, tried_ways, whole_ways
from hetopt.core.profile import CompressorCost, ExchangeTrial, Profile
from hetopt.core.run_spec import Compression
from hetopt.core.training_laws import NOISE_COEFFICIENT
from hetopt.optimizer.convergence.exchange_losses import added_noise, exchange_losses, noise_inflation
from hetopt.optimizer.fit import fit
from hetopt.optimizer.search.exchange_menu import Menu, exchange_menu

from .profiles import make_profile

SHAPES = ((500, 900), (50_000,))
COUNTS = st.integers(1, 64)
SAMPLES = st.floats(1, 1e5)


def with_trials(profile: Profile | None = None) -> Profile:
    """A profile whose every way to send whole gradients in fewer bytes was tried and timed."""
    made = profile or make_profile()
    numel = made.job.parameters
    shapes = SHAPES if numel == 500_000 else ((numel,),)
    trials = []
    for way in tried_ways():
        forgets = way.name.startswith(("qsgd", "terngrad"))
        gain = None if forgets else {"powersgd": 0.2 * (way.rank or 1), "sign": 0.4}.get(way.name, 0.98)
        trials.append(
            ExchangeTrial(
                compression=spell(way),
                workers=2,
                gain=gain,
                variance=4.0 / (way.levels or 40) ** 2 if forgets else None,
                signal=0.85 if way.name == "terngrad" else 1.0,
            )
        )
    costs = tuple(
        CompressorCost(name=timed_as(way), ratio=1.0, compress_s=4e-9 * numel, decompress_s=1e-10 * numel)
        for way in whole_ways()
    )
    devices = tuple(device.model_copy(update={"compressors": (*device.compressors, *costs)}) for device in made.devices)
    job = made.job.model_copy(update={"parameter_shapes": shapes})
    return made.model_copy(update={"devices": devices, "job": job, "exchange_trials": tuple(trials)})


def menu(profile: Profile, *, to_target: bool = True) -> Menu:
    return exchange_menu(fit(profile), minimum_gain=0.05, max_workers=16, to_target=to_target)


@given(st.floats(0, 100), SAMPLES, SAMPLES, COUNTS)
def test_noise_that_is_added_is_less_between_more_workers(q: float, scale: float, batch: float, workers: int) -> None:
    noise = added_noise(q, noise_scale=scale, batch_size=batch, workers=workers)
    assert q / workers * (1 - 1e-9) <= noise <= q * (1 + 1e-9)
    assert added_noise(q, noise_scale=scale, batch_size=batch, workers=workers + 1) <= noise * (1 + 1e-9)
    assert added_noise(q, noise_scale=scale, batch_size=2 * batch, workers=workers) <= noise * (1 + 1e-9)
    assert added_noise(q, noise_scale=None, batch_size=batch, workers=workers) == q
    assert noise_inflation(noise) >= 1


@given(st.integers(2, 8), st.floats(0.1, 10))
def test_the_law_is_what_rounded_gradients_come_to(workers: int, noise_over_signal: float) -> None:
    """Gradients of G and noise, each with an error of its own of energy q: the error of their mean over the mean's."""
    random = np.random.default_rng(0)
    numel, q, batch = 200_000, 0.7, 8 * workers
    signal = random.standard_normal(numel)
    scale = noise_over_signal * batch  # V / |G|^2, in samples
    own = signal + random.standard_normal((workers, numel)) * math.sqrt(scale / 8)
    error = random.standard_normal((workers, numel)) * np.sqrt(q * (own**2).mean(axis=1, keepdims=True))
    seen = (error.mean(axis=0) ** 2).sum() / (own.mean(axis=0) ** 2).sum()
    assert added_noise(q, noise_scale=scale, batch_size=batch, workers=workers) == pytest.approx(seen, rel=0.05)


def test_levels_between_those_tried_lie_between_and_finer_ones_err_by_their_square() -> None:
    losses = fit(with_trials()).losses
    rounding = losses.roundings["qsgd_maxnorm"]
    assert [rounding.variance(levels) for levels in (1, 7, 63)] == pytest.approx([4, 4 / 49, 4 / 63**2])
    assert rounding.variance(126) == pytest.approx(1 / 63**2)
    assert 4 > rounding.variance(3) > 4 / 49


def test_the_more_workers_the_coarser_their_codes_and_the_more_steps() -> None:
    losses = fit(with_trials()).losses
    found = [losses.stretch(Compression(name="qsgd_maxnorm"), workers)[0] for workers in (1, 2, 8, 32, 127)]
    assert found[0] == 1.0
    assert found == sorted(found)
    assert losses.stretch(Compression(name="qsgd_maxnorm"), 128)[0] < found[-1]  # codes of 16 bits from here on
    assert losses.stretch(Compression(name="terngrad"), 4)[0] > 1 / 0.85
    assert losses.stretch(Compression(), 8) == (1.0, 0.0)


@pytest.mark.parametrize("to_target", [True, False])
def test_everything_that_was_tried_and_timed_is_priced(to_target: bool) -> None:
    """Nothing that sends whole gradients is left out any more, but signs without a residual; nor does one cost less."""
    found = menu(with_trials(), to_target=to_target)
    left = {way.name for way in whole_ways()} & set(found.left_out)
    assert not left, found.left_out
    beaten = exchange_menu(fit(with_trials()), minimum_gain=0.05, max_workers=16, to_target=to_target).options
    for option in beaten:
        assert (option.stretch >= 1).all()
        assert (option.late >= 1).all()
        assert to_target or (option.stretch == 1).all()
        assert not to_target or (option.late == 1).all()
    ranks = {option.compression.rank: option for option in found.options if option.compression.name == "powersgd"}
    assert set(ranks) == {1, 2, 4}
    assert ranks[1].gain < ranks[4].gain
    assert (ranks[1].traffic_bytes[2:] < ranks[4].traffic_bytes[2:]).all()


@pytest.mark.parametrize("missing", ["trials", "times", "shapes"])
def test_what_was_not_measured_is_left_out_and_said(missing: str) -> None:
    profile = with_trials()
    if missing == "trials":
        profile = profile.model_copy(update={"exchange_trials": ()})
    elif missing == "times":
        profile = profile.model_copy(update={"devices": make_profile().devices})
    else:
        profile = profile.model_copy(update={"job": profile.job.model_copy(update={"parameter_shapes": ()})})
    found = menu(profile)
    why = {"trials": "was not measured", "times": "how long it takes", "shapes": "shapes"}[missing]
    assert why in found.left_out["powersgd"]
    assert all(option.compression.name != "powersgd" for option in found.options)


def test_a_trial_of_a_method_that_this_version_lacks_is_passed_over() -> None:
    gone = ExchangeTrial(compression="telepathy(levels=3)", workers=2, gain=0.5)
    losses = exchange_losses([gone], noise_scale=None, batch_size=64)
    assert not losses.gains
    assert not losses.roundings


def test_without_noise_a_gradient_counts_as_all_noise() -> None:
    unknown, known = (fit(with_trials(make_profile(noise_scale=scale))).losses for scale in (None, 1000.0))
    way = Compression(name="qsgd_maxnorm")
    assert unknown.stretch(way, 8)[0] == pytest.approx(
        1 + NOISE_COEFFICIENT * known.roundings["qsgd_maxnorm"].variance(15)
    )
    assert unknown.stretch(way, 8) >= known.stretch(way, 8)


def test_what_loses_nothing_needs_no_trial() -> None:
    losses = fit(make_profile()).losses
    assert [losses.gain(Compression(name=name)) for name in LOSSLESS] == [1.0] * len(LOSSLESS)
    assert losses.gain(Compression(name="powersgd", rank=2)) is None
