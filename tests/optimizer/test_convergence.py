"""Laws of S(B, gain), planted pilots, and the evidence that is used when some is missing.

Laws of steps by batch size: what every fit keeps, what planted runs give back, and how one law is preferred.
What compression costs in steps, and when it may not be planned with.
What rounding and factoring costs in steps: the law, what a profile's trials say, and what the menu makes of it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from hetopt.core.comm.composition import METHODS
from hetopt.core.comm.compression_text import spell
from hetopt.core.comm.options import LOSSLESS, timed_ways, tried_ways
from hetopt.core.errors import BadInput
from hetopt.core.profile import CompressorCost, Evaluation, ExchangeTrial, NoiseSample, Pilot, PilotCompression, Profile
from hetopt.core.run_spec import Compression
from hetopt.core.training_laws import KAPPA, LEAST_GAIN, Moments, step_inflation, step_worth
from hetopt.optimizer.convergence.averaged_law import averaged_curve
from hetopt.optimizer.convergence.compression_penalty import (
    CompressedPilot,
    Penalty,
    QualityGate,
    added_noise,
    exchange_losses,
    noise_inflation,
)
from hetopt.optimizer.convergence.convergence import (
    FEWEST_UPDATES,
    GivenSteps,
    equal_steps,
    fit_convergence,
    noise_scale,
    surely_best,
    target_steps,
)
from hetopt.optimizer.convergence.steps_law import Z90, PriorRun
from hetopt.optimizer.fit import fit
from hetopt.optimizer.search.exchange_menu import ExchangeOption, exchange_menu, methods_left_out

from .profiles import make_profile

batches = st.integers(1, 100_000)
gains = st.floats(0.01, 1.0)


def test_compressed_pilots_teach_the_penalty_and_close_the_gate() -> None:
    def pilot(ratio: float, gain: float, steps: float | None, trained: int) -> Pilot:
        return Pilot(
            global_batch_size=64,
            learning_rate_scale=1.0,
            seed=0,
            evaluations=(Evaluation(step=trained, metric=0.8),),
            steps_to_target=steps,
            compression=PilotCompression(name="topk", ratio=ratio, gain=gain),
        )

    plain = make_profile()
    dense = fit_convergence(plain)
    slow = 1.6 * (400 + 400_000 / 64)
    taught = fit_convergence(
        plain.model_copy(
            update={"pilots": (*plain.pilots, pilot(0.01, 0.1, slow, 20_000), pilot(0.001, 0.3, None, 60_000))}
        )
    )
    assert taught.pilot_batch_sizes == dense.pilot_batch_sizes, "a compressed pilot says nothing about dense steps"
    assert taught.gate.penalty.coefficient == pytest.approx(0.2, abs=0.03)
    assert taught.gate.objection(scheme="topk", ratio=0.01, gain=0.1) is None
    assert taught.gate.objection(scheme="topk", ratio=0.001, gain=0.3) is not None
    assert dense.gate.objection(scheme="topk", ratio=0.001, gain=0.3) is None


def test_a_target_is_noticed_at_an_evaluation() -> None:
    convergence = fit_convergence(make_profile(dataset_size=6400))
    at_once, seldom = target_steps(convergence), target_steps(convergence, check_every_samples=6400)
    assert float(seldom.steps(64, 1.0) - at_once.steps(64, 1.0)) == pytest.approx(50)


def test_without_a_mean_gradient_the_noise_scale_is_what_it_is_at_least() -> None:
    samples = [
        NoiseSample(step=k, samples_seen=k, gradient_square=s, gradient_variance=1.0) for k, s in ((0, -2.0), (1, 1.0))
    ]
    # |G|^2 / V is -0.5 in the mean, and at most -0.5 + 1.645 x 2.12 / sqrt(2).
    assert noise_scale(samples) == pytest.approx(1 / (-0.5 + 1.645 * 3 / 2), rel=1e-3)
    assert noise_scale(samples[:1]) is None
    assert noise_scale([samples[0]] * 3) is None
    profile = make_profile(pilots=(64,)).model_copy(update={"noise": tuple(samples)})
    assert np.isfinite(target_steps(fit_convergence(profile)).steps(256, 1.0))


def test_the_noise_scale_is_a_ratio_of_averages() -> None:
    """|G|^2 is averaged before it divides: negative estimates are part of it."""
    squares = (3.0, -1.0, 1.0)
    samples = [NoiseSample(step=0, samples_seen=0, gradient_square=s, gradient_variance=10.0) for s in squares]
    assert noise_scale(samples) == pytest.approx(10.0)


@pytest.mark.parametrize("kwargs", [{"reached": False}, {"pilots": ()}, {"pilots": (64,), "noise_scale": None}])
def test_no_number_of_steps_without_evidence(kwargs: dict[str, object]) -> None:
    with pytest.raises(BadInput, match="no pilot run reached it") as caught:
        target_steps(fit_convergence(make_profile(**kwargs)))  # type: ignore[arg-type]  # three small variations
    assert caught.value.hint is not None
    assert "`epochs`" in caught.value.hint


@given(st.floats(0.01, 100), st.integers(1, 10**6), batches)
def test_epochs_are_rounded_up_to_steps(epochs: float, dataset: int, batch: int) -> None:
    steps = float(GivenSteps(amount=epochs, dataset_size=dataset).steps(batch, 1.0))
    assert steps >= 1
    assert steps * batch >= epochs * dataset * (1 - 1e-9) - 1e-6
    assert (steps - 1) * batch < epochs * dataset or steps == 1


@given(st.integers(1, 100), st.integers(1, 10**6), batches)
def test_a_loop_over_a_loader_counts_the_last_batch_of_each_epoch(epochs: int, dataset: int, batch: int) -> None:
    steps = float(GivenSteps(amount=epochs, dataset_size=dataset, restarts=True).steps(batch, 1.0))
    assert steps == epochs * len(range(0, dataset, batch))


@given(
    st.floats(1, 1e5),
    st.lists(st.floats(1, 64), min_size=2, max_size=2).map(sorted),
    st.sampled_from([GivenSteps(amount=20.0, dataset_size=50_000), GivenSteps(amount=9000)]),
)
def test_equal_progress_is_priced(noise: float, times: list[float], own: GivenSteps) -> None:
    """The job's own batch size is as asked for; a larger one takes fewer steps, more samples, and is less known."""
    for scale in (noise, None):
        model = equal_steps(fit_convergence(make_profile(noise_scale=scale, pilots=())), own, 64)
        sizes = np.array([64.0, *(64 * factor for factor in times)])
        steps, spread = model.steps(sizes, 1.0), model.log_sd(sizes, 1.0)
        assert steps[0] == pytest.approx(own.steps(64, 1.0))
        assert (np.diff(steps) <= 1e-6 * steps[0]).all()
        assert (np.diff(steps * sizes) >= -1e-6 * steps[0] * 64).all()
        assert spread[0] == 0
        assert (np.diff(spread) >= -1e-9).all()
        # A step of a batch is worth as much as its critical batch size says, by which runs go on from there.
        at = Moments(gradient_variance=model.critical(128), gradient_square=1.0)
        assert step_worth(at, 128, 64) == pytest.approx(float(steps[0] / model.steps(128, 1.0)), rel=0.02)
    assert "64" in model.source


@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(0, 2)), min_size=1, max_size=9))
def test_what_surely_pays_is_chosen_and_else_what_is_had(others: list[tuple[float, float]]) -> None:
    scores, log_sds = np.array([(1.0, 0.0), *others]).T
    best = surely_best(scores, log_sds, 1.0)
    assert scores[best] * np.exp(Z90 * log_sds[best]) <= 1
    assert all(score >= scores[best] for score, sd in others if score * np.exp(Z90 * sd) <= 1)


@given(st.floats(1, 1e5), st.lists(st.tuples(st.sampled_from([64, 128, 512, 4096]), st.floats(0.01, 100)), min_size=1))
def test_following_the_noise_costs_no_more_than_the_batch_size_that_is_kept(
    noise: float, others: list[tuple[int, float]]
) -> None:
    sizes, costs = np.array(sorted(dict([*others, (64, 1.0)]).items())).T
    low, middle, high = averaged_curve(runs(mccandlish, (64,)), noise_scale=noise).least(costs, sizes, 64)
    assert low <= middle <= high <= 1


def test_no_public_run_took_fewer_updates_than_a_larger_batch_size_may_leave(shared_data: Path) -> None:
    for app in ("cifar10", "bert", "ncf"):
        log = json.loads((shared_data / "convergence" / f"{app}.json").read_text())
        assert min(min(run["steps_to_target"].values()) for run in log["runs"]) >= FEWEST_UPDATES


SIZES = (64, 128, 256, 512, 1024, 2048)
runs_of_a_job = st.lists(
    st.builds(
        PriorRun, global_batch_size=st.sampled_from([2.0**k for k in range(4, 15)]), steps_to_target=st.floats(1, 1e7)
    ),
    min_size=1,
    max_size=8,
)


def runs(steps: Callable[[float], float], sizes: Sequence[float] = SIZES) -> list[PriorRun]:
    return [PriorRun(global_batch_size=b, steps_to_target=steps(b)) for b in sizes]


def mccandlish(batch: float) -> float:
    return 1_000 + 1e6 / batch


@given(runs_of_a_job, st.one_of(st.none(), st.floats(0, 1e12)))
def test_more_batch_needs_neither_more_steps_nor_fewer_samples(found: list[PriorRun], noise: float | None) -> None:
    batch = np.geomspace(1, 1e6, 40)
    steps = averaged_curve(found, noise_scale=noise).steps(batch)
    assert np.isfinite(steps).all()
    assert (steps > 0).all()
    assert (np.diff(steps) <= 1e-9 * steps[1:]).all()
    assert (np.diff(steps * batch) >= -1e-9 * (steps * batch)[1:]).all()


@given(runs_of_a_job, st.randoms())
def test_order_and_units_of_the_runs_do_not_matter(found: list[PriorRun], random) -> None:
    shuffled = found.copy()
    random.shuffle(shuffled)
    doubled = [
        PriorRun(global_batch_size=run.global_batch_size, steps_to_target=3 * run.steps_to_target) for run in found
    ]
    at = np.array([32.0, 500.0, 20_000.0])
    fitted = averaged_curve(found)
    assert averaged_curve(shuffled).steps(at) == pytest.approx(fitted.steps(at), rel=1e-6)
    assert averaged_curve(doubled).steps(at) == pytest.approx(3 * fitted.steps(at), rel=1e-6)
    assert averaged_curve(doubled).log_sd(at) == pytest.approx(fitted.log_sd(at), rel=1e-4)


def left_out(found: list[PriorRun]) -> list[tuple[float, float]]:
    """The log error of each batch size that the others predict, and its standard deviation."""
    told = []
    for held in found:
        curve = averaged_curve([run for run in found if run is not held])
        error = math.log(float(curve.steps(held.global_batch_size)) / held.steps_to_target)
        told.append((abs(error), float(curve.log_sd(held.global_batch_size))))
    return told


def test_the_average_comes_close_to_runs_without_spread() -> None:
    """Not onto them: it always allows for a run's spread, so at the ends of the range it leans on its prior."""
    errors = [error for error, _ in left_out(runs(mccandlish))]
    assert max(errors) < 0.05
    assert np.median(errors) < 0.02


def test_the_noise_scale_stands_in_for_a_second_batch_size() -> None:
    one = runs(mccandlish, (64,))  # the critical batch size is 1,000
    informed, blind = averaged_curve(one, noise_scale=1_000.0 / KAPPA), averaged_curve(one)
    assert float(informed.steps(2048)) == pytest.approx(mccandlish(2048), rel=0.01)
    assert informed.log_sd(2048) < blind.log_sd(2048)
    many = runs(mccandlish)
    for absurd in (1e-6, 1e9):
        misled = averaged_curve(many, noise_scale=absurd).steps(4096)
        assert float(misled) == pytest.approx(float(averaged_curve(many).steps(4096)), rel=0.1)


@pytest.mark.parametrize("spread", [0.02, 0.07, 0.15])
def test_nine_in_ten_new_batch_sizes_fall_in_the_interval(spread: float) -> None:
    rng = np.random.default_rng(7)
    inside, total = 0, 0
    for _ in range(60):
        critical = math.exp(rng.uniform(math.log(32), math.log(20_000)))
        found = runs(lambda b, c=critical: 1e5 * (1 / b + 1 / c) * math.exp(spread * rng.normal()))
        held = left_out(found)
        inside += sum(error <= Z90 * log_sd for error, log_sd in held)
        total += len(held)
    assert 0.84 <= inside / total <= (1.0 if spread < 0.07 else 0.97)


def pilot(
    *, ratio: float = 0.01, gain: float = 0.5, trained: float = 4_000, reached: float | None = 2_000
) -> CompressedPilot:
    return CompressedPilot(
        scheme="topk",
        ratio=ratio,
        gain=gain,
        dense_steps=1_000,
        steps_trained=trained,
        steps_to_target=reached,
    )


@given(gains)
def test_unfitted_it_is_the_inflation_of_the_trainer(gain: float) -> None:
    assert float(Penalty().inflation(gain)) == pytest.approx(step_inflation(gain))


@given(gains, gains, st.floats(0, 3))
def test_keeping_more_never_costs_more(one: float, other: float, coefficient: float) -> None:
    penalty = Penalty(coefficient=coefficient)
    poor, good = sorted((one, other))
    assert float(penalty.inflation(good)) >= 1
    assert penalty.inflation(good) <= penalty.inflation(poor) * (1 + 1e-12)
    assert float(penalty.log_sd(1.0)) == 0


@given(st.floats(1.0, 10.0), st.floats(0.01, 1))
def test_no_more_is_lost_than_may_be(inflation: float, coefficient: float) -> None:
    gain = Penalty(coefficient=coefficient, coefficient_sd=0.0).least_gain(inflation)
    assert LEAST_GAIN <= gain <= 1
    assert step_inflation(gain, coefficient) <= inflation * (1 + 1e-9)


def test_the_gate_opens_for_high_gain_or_a_pilot_that_arrived() -> None:
    unproven = QualityGate()
    assert unproven.objection(scheme="topk", ratio=0.1, gain=LEAST_GAIN) is None
    refused = unproven.objection(scheme="topk", ratio=0.01, gain=0.04)
    assert refused is not None
    assert "no pilot has shown" in refused
    proven = QualityGate(pilots=(pilot(ratio=0.01, gain=0.04),))
    assert proven.objection(scheme="topk", ratio=0.01, gain=0.04) is None
    assert proven.objection(scheme="topk", ratio=0.05, gain=0.04) is None
    assert proven.objection(scheme="topk", ratio=0.001, gain=0.03) is not None
    assert proven.objection(scheme="randomk", ratio=0.01, gain=0.01) is not None


def test_a_pilot_that_fell_short_closes_the_gate_whatever_the_gain() -> None:
    """An LSTM kept 80 to 90 % of its gradient and still fell short: gain alone does not tell."""
    gate = QualityGate(pilots=(pilot(ratio=0.001, gain=0.85, trained=4_000, reached=None),))
    for ratio in (0.001, 0.0005):
        objection = gate.objection(scheme="topk", ratio=ratio, gain=0.85)
        assert objection is not None
        assert "did not reach the target in 4000 steps" in objection
    assert gate.objection(scheme="topk", ratio=0.01, gain=0.95) is None
    # one that was stopped early has shown nothing
    early = QualityGate(pilots=(pilot(ratio=0.001, gain=0.85, trained=1_200, reached=None),))
    assert early.objection(scheme="topk", ratio=0.001, gain=0.85) is None


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
        forgets = way.name.startswith("qsgd")
        gain = None if forgets else {"powersgd": 0.2 * (way.rank or 1), "sign": 0.4}.get(way.name, 0.98)
        trials.append(
            ExchangeTrial(
                compression=spell(way),
                workers=2,
                gain=gain,
                variance=4.0 / (way.levels or 40) ** 2 if forgets else None,
            )
        )
    costs = tuple(
        CompressorCost(name=name, ratio=1.0, compress_s=4e-9 * numel, decompress_s=1e-10 * numel)
        for name in timed_ways()
    )
    devices = tuple(device.model_copy(update={"compressors": (*device.compressors, *costs)}) for device in made.devices)
    job = made.job.model_copy(update={"parameter_shapes": shapes})
    return made.model_copy(update={"devices": devices, "job": job, "exchange_trials": tuple(trials)})


def menu(profile: Profile, *, to_target: bool = True) -> tuple[ExchangeOption, ...]:
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


def test_the_more_workers_the_coarser_their_codes_and_the_more_steps() -> None:
    losses = fit(with_trials()).losses
    found = [losses.stretch(Compression(name="qsgd_maxnorm"), workers)[0] for workers in (1, 2, 8, 32, 127)]
    assert found[0] == 1.0
    assert found == sorted(found)
    assert losses.stretch(Compression(name="qsgd_maxnorm"), 128)[0] < found[-1]  # codes of 16 bits from here on
    assert losses.stretch(Compression(), 8) == (1.0, 0.0)


@pytest.mark.parametrize("to_target", [True, False])
def test_everything_that_was_tried_and_timed_is_priced(to_target: bool) -> None:
    """No compressor of the registry is left out, and none costs fewer steps than sending everything."""
    found = menu(with_trials(), to_target=to_target)
    for name in METHODS:
        assert exchange_menu(fit(with_trials()), minimum_gain=0, max_workers=2, to_target=to_target, names=[name])
    assert methods_left_out(fit(with_trials()), 0.01) == {}
    assert set(methods_left_out(fit(make_profile()), 0.01)) >= {"powersgd", "dgc"}
    for option in found:
        assert (option.stretch >= 1).all()
        assert (option.lost_progress >= 1).all()
        assert to_target or (option.stretch == 1).all()
        assert not to_target or (option.lost_progress == 1).all()
    ranks = {option.compression.rank: option for option in found if option.compression.name == "powersgd"}
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
    why = {"trials": "was not measured", "times": "how long it takes", "shapes": "shapes"}[missing]
    with pytest.raises(BadInput, match=why):
        exchange_menu(fit(profile), minimum_gain=0.05, max_workers=16, names=["powersgd"])
    assert all(option.compression.name != "powersgd" for option in menu(profile))


def test_what_loses_nothing_needs_no_trial() -> None:
    losses = fit(make_profile()).losses
    assert [losses.gain(Compression(name=name)) for name in LOSSLESS] == [1.0] * len(LOSSLESS)
    assert losses.gain(Compression(name="powersgd", rank=2)) is None
    assert losses.gain(Compression(name="randomk", ratio=0.03)) == 0.03


def test_what_a_selection_keeps_lies_between_the_ratios_that_were_tried() -> None:
    trials = [
        ExchangeTrial(compression=f"dgc({ratio})", workers=2, gain=gain) for ratio, gain in ((0.1, 0.4), (0.01, 0.1))
    ]
    losses = exchange_losses(trials, noise_scale=None, batch_size=8)
    kept = [losses.gain(Compression(name="dgc", ratio=ratio)) for ratio in (0.001, 0.01, 0.0316227766, 0.1, 1.0)]
    assert kept == [None, *map(pytest.approx, (0.1, 0.2, 0.4, 0.4))]
