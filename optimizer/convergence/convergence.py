"""Optimizer steps to a run's goal, by global batch size, retained gradient energy and precision.

A lower precision costs no steps unless pilots of the job say otherwise: networks of many kinds were trained in fp16
with a loss scale, and in bf16, to the accuracy of fp32 in as many steps (Micikevicius et al. 2018, 1710.03740; Kalamkar
et al. 2019, 1905.12322). With ``n`` trials of a precision, each beside a pilot in the usual one from the same weights
over the same batches, and ``m`` the mean log of their steps over the usual ones, a precision is seen to cost more where
``m > 1.645 PILOT_LOG_SD / sqrt(n)``.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from hetopt.core.errors import BadInput
from hetopt.core.memory import Precision
from hetopt.core.profile import LearningRateRule, NoiseSample, Pilot, Profile
from hetopt.core.run_spec import Settings, parse_sync
from hetopt.core.training_laws import KAPPA, Moments
from hetopt.optimizer.convergence.averaged_law import (
    EARLY_GROWTH,
    EARLY_LOG_SDS,
    KAPPA_LOG_SDS,
    AveragedCurve,
    averaged_curve,
)
from hetopt.optimizer.convergence.compression_penalty import (
    PILOT_LOG_SD,
    CompressedPilot,
    LocalGate,
    LocalPilot,
    Penalty,
    QualityGate,
    distance,
)
from hetopt.optimizer.convergence.steps_law import Z90, Array, PriorRun

LARGEST_BATCH_FACTOR = 16
"""Learning-rate rules are known to break down somewhere; no batch larger than this times the task's is proposed."""

FEWEST_UPDATES = 250
"""That a larger batch size than the task's own leaves a run: in the public logs that the laws were held against, no run
to a target took fewer than 268."""

LEARNING_RATES: dict[LearningRateRule, str] = {
    "none": "one learning rate for all batch sizes",
    "linear": "the learning rate in proportion to the batch size",
    "sqrt": "the learning rate with the square root of the batch size",
}
"""What a count of steps holds for."""

PILOT_BATCH_FACTOR = 2
"""How far above the pilots' batch sizes a target is trusted. Below them nothing is gained that is worth the doubt."""


@dataclass(frozen=True, kw_only=True)
class Convergence:
    """Fits to a profile's pilots: steps to the target by batch size, and what compression and local SGD add to them.

    Attributes:
        noise_scale: Bn = tr(cov) / |G|^2 over the pilots, samples; None: not measured.
        pilot_batch_sizes: global batch sizes of the pilots that reached the target, samples; () without a curve.
        basis: source of the figures, in words, with the learning-rate rule that they hold for.
        curve: steps by batch size; None: no pilot reached the target, or one did and no noise scale is known.
        gate: rule of which compression may be used, with its cost in steps, by the compressed pilots if there are any.
        local: rule of which local SGD policies may be used, by the pilots under local SGD.
        is_early: whether the noise was measured from new weights on, and not from a checkpoint.
    """

    noise_scale: float | None
    pilot_batch_sizes: tuple[int, ...]
    basis: str
    curve: AveragedCurve | None = None
    gate: QualityGate = field(default_factory=QualityGate)
    local: LocalGate = field(default_factory=LocalGate)
    is_early: bool = True


@dataclass(frozen=True, kw_only=True)
class TargetSteps:
    """Model of the optimizer steps to the task's target, by global batch size and retained gradient energy.

        S(B, gain) = S(B) (1 + a sqrt(1 / gain - 1)) + check / (2 B)

    ``a`` is the penalty of compression (`compression_penalty`). A run notices its target only when it evaluates, every
    ``check`` samples, on average half of that later.
    """

    convergence: Convergence
    curve: AveragedCurve
    check_every_samples: float = 0.0

    @property
    def source(self) -> str:
        """The basis of the number of steps, as a phrase."""
        return self.convergence.basis

    def steps(self, global_batch_size: ArrayLike, gain: ArrayLike) -> Array:
        """Return the expected optimizer steps to the target, at least 1, by batch size (samples) and gain in (0, 1].

        Half an evaluation period is included, which passes until the target is seen.
        """
        batch = np.asarray(global_batch_size, dtype=np.float64)
        stretched = self.curve.steps(batch) * self.convergence.gate.penalty.inflation(gain)
        return np.maximum(1.0, stretched + self.check_every_samples / 2 / batch)

    def log_sd(self, global_batch_size: ArrayLike, gain: ArrayLike) -> Array:
        """Return the standard deviation of the log of `steps`: over seeds, batch sizes and compression."""
        batch = np.asarray(global_batch_size, dtype=np.float64)
        return np.hypot(self.curve.log_sd(batch), self.convergence.gate.penalty.log_sd(gain))


@dataclass(frozen=True, kw_only=True)
class GivenSteps:
    """Model of the optimizer steps of a run whose length was given in steps or epochs; compression adds none.

    Attributes:
        amount: number of steps or, with a ``dataset_size``, of passes over the data.
        dataset_size: samples of a pass; None: ``amount`` counts steps.
        restarts: each pass begins with a batch of its own, as loops over a loader do; else batches reach across passes.
    """

    amount: float
    dataset_size: int | None = None
    restarts: bool = False

    @property
    def source(self) -> str:
        """The basis of the number of steps, as a phrase."""
        epochs = f"{self.amount:g} epochs of {self.dataset_size} samples"
        return f"{f'{self.amount:.0f} steps' if self.dataset_size is None else epochs}, as asked for"

    def steps(self, global_batch_size: ArrayLike, gain: ArrayLike) -> Array:
        """Return the optimizer steps of the given length by batch size (samples), rounded up, whatever the gain.

        ``ceil(epochs * dataset_size / B)`` or, where each pass restarts, ``ceil(epochs * ceil(dataset_size / B))``; a
        length that is given in steps is the same for all.
        """
        batch, _ = np.broadcast_arrays(np.asarray(global_batch_size, dtype=np.float64), gain)
        if self.dataset_size is None:
            return np.full(batch.shape, self.amount)
        epochs = self.amount * (np.ceil(self.dataset_size / batch) if self.restarts else self.dataset_size / batch)
        # 1e-9: 3.0000000001 from floating-point division is 3 steps, not 4.
        return np.maximum(1.0, np.ceil(epochs - 1e-9))

    def log_sd(self, global_batch_size: ArrayLike, gain: ArrayLike) -> Array:
        """Return zeros, as a given number of steps is certain, in the shape that both arguments broadcast to."""
        return np.zeros(np.broadcast_shapes(np.shape(global_batch_size), np.shape(gain)))


@dataclass(frozen=True, kw_only=True)
class EqualSteps:
    """Model of the steps at any batch size that make as much progress as a given length at the job's own batch size.

        S(B) = S(B0) (1 / B + 1 / Bcrit)^g / (1 / B0 + 1 / Bcrit)^g

    over all curves that pilots, the noise scale or a wide prior leave (`averaged_law`), so that a larger batch size is
    worth what it surely saves.

    Attributes:
        given: the length as it was asked for.
        batch_size: B0, samples.
        curve: steps by batch size, of which the shape counts.
    """

    given: GivenSteps
    batch_size: int
    curve: AveragedCurve

    @property
    def source(self) -> str:
        """The basis of the number of steps, as a phrase."""
        return f"as much progress as {self.given.source} with batches of {self.batch_size} make"

    def steps(self, global_batch_size: ArrayLike, gain: ArrayLike) -> Array:
        """Return the expected optimizer steps, at least 1, by batch size (samples); ``gain`` only sets the shape."""
        batch, _ = np.broadcast_arrays(np.asarray(global_batch_size, dtype=np.float64), gain)
        return np.maximum(1.0, self.given.steps(self.batch_size, 1.0) * self.curve.relative(batch, self.batch_size)[0])

    def critical(self, batch_size: int) -> float:
        """Return the critical batch size (samples) whose law gives one larger batch size the steps expected here.

        Args:
            batch_size: larger batch size, samples; above the attribute of that name.
        """
        worth = float(1 / self.curve.relative(batch_size, self.batch_size)[0])
        # A step that is worth the ratio of the sizes has no such size; a thousand times as large is none, either.
        return (worth - 1) / max(1 / self.batch_size - worth / batch_size, (worth - 1) / (1000 * batch_size))

    def following(self, begin: int, sizes: Sequence[int], step_s: Sequence[float]) -> Settings:
        """Return the batch policy ``critical``'s settings for a run that begins with batches of ``begin`` samples.

        Args:
            begin: global batch size of the first step, one of ``sizes``, samples.
            sizes: global batch sizes of known step time, samples.
            step_s: step time at each of them on the run's machines, seconds.
        """
        own, each_s = self.batch_size, float(np.polyfit(sizes, step_s, 1)[0]) if len(sizes) > 1 else 0.0
        overhead = step_s[sizes.index(begin)] / each_s - begin if each_s > 0 else math.inf
        return {
            "least": min(1.0, own / begin),
            "most": max(1.0, LARGEST_BATCH_FACTOR * own / begin),
            "critical": round(self.critical(max(begin, 2 * own)), 1),
            # Of one size alone nothing tells how the time of a step depends on it.
            **({"overhead": round(max(1.0, overhead), 1)} if math.isfinite(overhead) else {}),
        }

    def log_sd(self, global_batch_size: ArrayLike, gain: ArrayLike) -> Array:
        """Return the standard deviation of the log of `steps`: the curve's between this batch size and the given."""
        batch, _ = np.broadcast_arrays(np.asarray(global_batch_size, dtype=np.float64), gain)
        return self.curve.relative(batch, self.batch_size)[1]


StepsModel: TypeAlias = TargetSteps | GivenSteps | EqualSteps
"""Steps that a goal needs. Arrays in, arrays out; batch sizes in samples, gain in (0, 1]."""


def fit_convergence(profile: Profile) -> Convergence:
    """Return steps to the target, and the penalties of compression and local SGD, fitted to a profile's pilots.

    The curve takes plain pilots that reached the target, at two batch sizes, or at one beside a noise scale; else it is
    None, and the penalties are the priors. Compressed and averaging pilots are compared with the curve.
    """
    noise = noise_scale(profile.noise)
    runs = [
        PriorRun(global_batch_size=pilot.global_batch_size, steps_to_target=pilot.steps_to_target)
        for pilot in profile.pilots
        if pilot.steps_to_target is not None and pilot.compression is None and pilot.sync is None
    ]
    sizes = sorted({int(run.global_batch_size) for run in runs})
    if not sizes or (len(sizes) == 1 and noise is None):
        return Convergence(
            noise_scale=noise,
            pilot_batch_sizes=(),
            basis="no pilot reached the target"
            if not sizes
            else "one pilot reached the target, and no noise scale says what another batch size needs",
            is_early=not profile.noise or profile.noise[0].samples_seen < profile.job.dataset_size,
        )
    noisy = [sample for sample in profile.noise if sample.gradient_variance > 0]
    curve = averaged_curve(
        runs,
        # At most a thousand times the average: a mean gradient that is lost in noise has no size.
        noise_scale=[1 / max(each.gradient_square / each.gradient_variance, 1e-3 / (noise or 1)) for each in noisy]
        or None,
        noise_steps=np.maximum(1, np.diff([0, *(sample.step for sample in noisy)])),
    )
    basis = (
        f"a pilot that reached the target at batch size {sizes[0]} and the measured noise scale"
        if len(sizes) == 1
        else f"pilots that reached the target at batch sizes {', '.join(map(str, sizes))}"
    )
    compressed = tuple(_compressed(profile.pilots, curve))
    penalty = Penalty().after((pilot, distance(pilot.gain)) for pilot in compressed)
    return Convergence(
        noise_scale=noise,
        pilot_batch_sizes=tuple(sizes),
        basis=f"{basis}; {LEARNING_RATES[profile.job.learning_rate_rule]}",
        curve=curve,
        gate=QualityGate(pilots=compressed, penalty=penalty),
        local=LocalGate(pilots=tuple(_local(profile.pilots, curve))),
    )


def noise_scale(samples: Sequence[NoiseSample | Moments]) -> float | None:
    """Return the gradient noise scale ``V / |G|^2`` in samples, averaged over training; None: nothing bounds it.

    The mean is of |G|^2 / V, where a negative estimate of |G|^2 does no harm: clipping first would bias the mean. The
    upper end of its 90 % interval replaces a mean below 0 of two samples or more.
    """
    shares = [s.gradient_square / s.gradient_variance for s in samples if s.gradient_variance > 0]
    if not shares:
        return None
    inverse = sum(shares) / len(shares)
    if inverse <= 0 and len(shares) > 1:
        inverse += Z90 * statistics.stdev(shares) / math.sqrt(len(shares))
    return 1 / inverse if inverse > 0 else None


def target_steps(convergence: Convergence, *, check_every_samples: float = 0.0) -> TargetSteps:
    """Return the model of steps to the target for runs that evaluate every ``check_every_samples`` samples (0: always).

    Raises:
        BadInput: no pilot reached the target, or one did and no noise scale says what other batch sizes need.
    """
    if convergence.curve is None:
        raise BadInput(
            "The profile cannot say how many steps the target needs, because no pilot run reached it.",
            hint="give the length of the run with `epochs` or `steps`, or profile again with a larger `time_budget_s`",
        )
    return TargetSteps(
        convergence=convergence,
        curve=convergence.curve,
        check_every_samples=check_every_samples,
    )


def equal_steps(convergence: Convergence, given: GivenSteps, batch_size: int) -> EqualSteps:
    """Return the model of steps at any batch size that make the progress of ``given`` at ``batch_size`` samples.

    By the pilots' curve; without one, by a curve through the given length and the noise scale, if that is known.
    """
    curve = convergence.curve
    if curve is None:
        asked = PriorRun(global_batch_size=batch_size, steps_to_target=float(given.steps(batch_size, 1.0)))
        # No pilot reached the target, so the noise scale is one of the beginning, but for those from a checkpoint.
        kappa, log_sds = (EARLY_GROWTH * KAPPA, EARLY_LOG_SDS) if convergence.is_early else (KAPPA, KAPPA_LOG_SDS)
        curve = averaged_curve([asked], noise_scale=convergence.noise_scale, kappa=kappa, log_sds=log_sds)
    return EqualSteps(given=given, batch_size=batch_size, curve=curve)


def surely_best(scores: Array, log_sds: Array, certain: float) -> int:
    """Return the index of the least score among scores whose upper 90 % end is at most ``certain``.

    Args:
        scores: expected time or cost, proportional to steps; one of them is ``certain``.
        log_sds: standard deviation of the log of the steps behind each score; 0 for the one that is ``certain``.
        certain: score at the task's own batch size.
    """
    return int(np.argmin(np.where(scores * np.exp(Z90 * log_sds) <= certain, scores, np.inf)))


def _compressed(pilots: Sequence[Pilot], curve: AveragedCurve) -> Iterator[CompressedPilot]:
    """Yield the pilots that were compressed, each with the dense steps that the curve expects at its batch size."""
    for pilot in pilots:
        if (way := pilot.compression) is not None:
            yield CompressedPilot(
                scheme=way.name,
                ratio=way.ratio,
                gain=way.gain,
                dense_steps=float(curve.steps(pilot.global_batch_size)),
                steps_trained=_steps_trained(pilot),
                steps_to_target=pilot.steps_to_target,
            )


def _local(pilots: Sequence[Pilot], curve: AveragedCurve) -> Iterator[LocalPilot]:
    """Yield the pilots whose workers averaged parameters, with the share of steps that end in an average.

    The share is the policy's own aim where there is one, else as measured.
    """
    for pilot in pilots:
        if (averaging := pilot.sync) is None:
            continue
        sync, share = parse_sync(averaging.policy), averaging.share
        if sync.name == "local-sgd":
            share = 1 / sync.every_steps
        elif sync.name == "selsync" and sync.delta == "auto":
            share = sync.synchronised_share
        yield LocalPilot(
            sync=sync,
            share=share,
            workers=averaging.workers,
            dense_steps=float(curve.steps(pilot.global_batch_size)),
            steps_trained=_steps_trained(pilot),
            steps_to_target=pilot.steps_to_target,
        )


def _steps_trained(pilot: Pilot) -> float:
    return max(1.0, *(float(evaluation.step) for evaluation in pilot.evaluations), pilot.steps_to_target or 0.0)


UNSEEN_LOG_SD = 0.05
"""Spread of the log of steps over fp32's where they are not seen to differ: what the papers' tables leave open."""


@dataclass(frozen=True, kw_only=True)
class PrecisionLoss:
    """Factor on the steps to the target in one precision, over those in the first precision of the profile.

    Attributes:
        stretch: the factor, at least 1.
        log_sd: standard deviation of the factor's log.
    """

    stretch: float = 1.0
    log_sd: float = 0.0


def precision_loss(profile: Profile, precision: Precision) -> PrecisionLoss:
    """Return the factor on steps to the target in ``precision``; 1 unless the profile's trials clearly show more.

    The factor 1 has a spread too (`UNSEEN_LOG_SD`), except in the profile's first precision.
    """
    if precision == profile.precisions[0]:
        return PrecisionLoss()
    log_ratios = [
        math.log(trial.steps / trial.usual_steps) for trial in profile.precision_trials if trial.precision == precision
    ]
    log_sd = PILOT_LOG_SD / math.sqrt(max(1, len(log_ratios)))
    mean = sum(log_ratios) / max(1, len(log_ratios))
    if mean > Z90 * log_sd:
        return PrecisionLoss(stretch=math.exp(mean), log_sd=log_sd)
    return PrecisionLoss(log_sd=UNSEEN_LOG_SD)
