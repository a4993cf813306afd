"""Steps to the target that compression and local SGD add, by pilot runs, and which of both may be planned with.

    S(B, gain)     = S(B) (1 + a sqrt(1 / gain - 1))                   compression with error feedback
    S(B)           = S(B) (1 + c e) / s                                rounding without it
    S(B, share, N) = S(B) (1 + c (1 - 1/N) sqrt(1/share - 1))          local SGD of N workers

Gain is the share of the gradient's energy that gets through (`hetopt.core.training_laws`, the law that training follows
as well). It says how much slower a run goes, but not that it arrives: in GraVAC's experiments (table 2) Top-k
at 0.1 % kept 80 to 90 % of an LSTM's gradient and still ended at a perplexity of 26.8 where 22 was wanted. So arriving
is a gate of its own, closed by a pilot that fell short.

The energy ``e`` that rounding adds follows from its measured variance ``q`` at the levels that so many workers leave.
Codes that are summed have the fewer levels the more workers there are: between the levels that were tried the log of
``q`` is interpolated in the log of the levels, and beyond them it falls with their square, as the error of a uniform
grid does.

``share`` of the steps end in an average of parameters, so 1/share - 1 others lie between two of them. Gradients are
mostly noise: in so many steps a worker wanders off by the root of their number, and 1 - 1/N of that wandering is not
the average's. Analyses of local SGD bound its cost by a term that grows like this (Khaled et al. 2020, 1909.04746).
The ten published runs of SelSync and FedAvg that arrived (2307.07950, table I: three models, 16 workers, shares of
0.001 to 0.28; the fourth model's counts contradict its speed-ups) give ``c`` of 0 to 0.6, whatever the share, 0.25 in
the mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np
from numpy.typing import ArrayLike

from hetopt.core.comm.compression_text import parse_compression
from hetopt.core.comm.options import KEPT, LOSSLESS, RANDOM, has_levels, timed_as
from hetopt.core.comm.payload_bytes import summed_bits
from hetopt.core.errors import BadInput, setting
from hetopt.core.profile import ExchangeTrial
from hetopt.core.run_spec import Compression, Synchronization, spell_sync
from hetopt.core.training_laws import COEFFICIENT, COEFFICIENT_SD, LEAST_GAIN, NOISE_COEFFICIENT, NOISE_COEFFICIENT_SD
from hetopt.optimizer.convergence.steps_law import Z90, Array

PILOT_LOG_SD = 0.1
"""Spread of one pilot's steps over dense ones: two runs, each 5 to 20 % off by its seed."""

FAIR_TRIAL = 1.5
"""A pilot has failed when it took this many times the steps it should have needed; before that it proves nothing."""


@dataclass(frozen=True, kw_only=True)
class PilotBesideDense:
    """Pilot run with compression or local SGD, beside the steps that dense training needs at its batch size.

    Attributes:
        dense_steps: steps to the target of dense training at the pilot's batch size.
        steps_trained: steps that the pilot ran.
        steps_to_target: steps that it needed; None where it ended before the target.
    """

    dense_steps: float
    steps_trained: float
    steps_to_target: float | None

    def failed(self, inflation: ArrayLike) -> bool:
        """Return whether the pilot never reached the target in 1.5 x its expected steps, ``inflation`` x dense ones."""
        needed = self.dense_steps * float(np.asarray(inflation))
        return self.steps_to_target is None and self.steps_trained >= FAIR_TRIAL * needed


@dataclass(frozen=True, kw_only=True)
class CompressedPilot(PilotBesideDense):
    """Pilot run with compressed gradients: compressor, ratio and retained energy, beside the steps of dense training.

    Attributes:
        scheme: name of the compressor.
        ratio: fraction of the elements that was sent, in (0, 1].
        gain: retained gradient energy, averaged over the run, in (0, 1].
    """

    scheme: str
    ratio: float
    gain: float


@dataclass(frozen=True, kw_only=True)
class Penalty:
    """Steps that compression or local SGD adds: ``c`` in ``steps / dense steps = 1 + c distance``, normal, from pilots.

    Attributes:
        coefficient, coefficient_sd: mean and standard deviation of ``c``; see `distance`.
        pilots: number of pilots that ``c`` was learned from; 0: prior.
    """

    coefficient: float = COEFFICIENT
    coefficient_sd: float = COEFFICIENT_SD
    pilots: int = 0

    def inflation(self, share: ArrayLike, workers: ArrayLike = math.inf) -> Array:
        """Return steps over those of dense training; ``share``: gain, or share of steps that average ``workers``."""
        return np.asarray(1 + self.coefficient * distance(share, workers))

    def log_sd(self, share: ArrayLike, workers: ArrayLike = math.inf) -> Array:
        """Return the standard deviation of the log of `inflation`; 0 for dense training (``share`` 1)."""
        return np.asarray(self.coefficient_sd * distance(share, workers) / self.inflation(share, workers))

    @property
    def cautious_coefficient(self) -> float:
        """The upper end of the coefficient's 90 % interval."""
        return self.coefficient + Z90 * self.coefficient_sd

    def least_gain(self, inflation: float) -> float:
        """Return the least retained energy, (0, 1], that cautiously costs at most ``inflation`` x the dense steps.

        By `cautious_coefficient`, and never below `LEAST_GAIN`.
        """
        return max(LEAST_GAIN, 1 / (1 + ((inflation - 1) / self.cautious_coefficient) ** 2))

    def after(self, runs: Iterable[tuple[PilotBesideDense, Array]]) -> Penalty:
        """Return the belief updated by ``runs``, pilots with their `distance`; pilots short of the target are ignored.

        Mean and deviation are summed up over a grid of ``c >= 0``: the prior is normal, cut off at 0, and measured
        inflation has a log deviation of `PILOT_LOG_SD`. Without a pilot that reached the target the belief stays.
        """
        reached = [
            (pilot.steps_to_target / pilot.dense_steps, float(distance))
            for pilot, distance in runs
            if pilot.steps_to_target is not None
        ]
        if not reached:
            return self
        inflation, distance = np.array(reached).T
        mean, sd = self.coefficient, self.coefficient_sd
        coefficients = np.linspace(0.0, mean + 8 * sd, 401)
        errors = np.log(inflation / (1 + coefficients[:, None] * distance)) / PILOT_LOG_SD
        log_weight = -0.5 * (((coefficients - mean) / sd) ** 2 + (errors**2).sum(axis=1))
        weight = np.exp(log_weight - log_weight.max())
        weight /= weight.sum()
        estimate = float(weight @ coefficients)
        estimate_sd = math.sqrt(float(weight @ (coefficients - estimate) ** 2))
        return replace(self, coefficient=estimate, coefficient_sd=estimate_sd, pilots=len(reached))


def distance(share: ArrayLike, workers: ArrayLike = math.inf) -> Array:
    """Return how far training lags behind dense training, without unit: ``(1 - 1/N) sqrt(1/share - 1)``.

    Args:
        share: share of steps in which ``workers`` average, or, for compression, gain; in (0, 1].
        workers: ``N``; infinite for compression.
    """
    part = np.asarray(share, dtype=np.float64)
    return np.asarray((1 - 1 / np.asarray(workers, dtype=np.float64)) * np.sqrt(1 / part - 1))


@dataclass(frozen=True, kw_only=True)
class QualityGate:
    """Rules by which a plan may use a compressor at a ratio, from the pilot runs of a profile.

    A pilot speaks for its scheme alone: one that arrived for every ratio at least as large, one that failed for every
    ratio at least as small. Where no pilot speaks, the law does, with its wide prior, down to the least gain that it
    was seen to hold for: training measures what compression costs, and sends more when that is too much.
    """

    pilots: tuple[CompressedPilot, ...] = ()
    penalty: Penalty = field(default_factory=Penalty)

    def objection(self, *, scheme: str, ratio: float, gain: float) -> str | None:
        """Return why a compressor at ``ratio``, with gain ``gain``, may not be planned, in a sentence; None: it may.

        A pilot of the compressor that sent as much or more and failed forbids it. Else a gain below `LEAST_GAIN` does,
        unless a pilot that sent as little or less reached the target.
        """
        alike = [pilot for pilot in self.pilots if pilot.scheme == scheme]
        for pilot in alike:
            if pilot.ratio >= ratio and pilot.failed(self.penalty.inflation(pilot.gain)):
                return (
                    f"{scheme} at {pilot.ratio:g} did not reach the target in {pilot.steps_trained:.0f} steps; "
                    f"dense training needs {pilot.dense_steps:.0f}"
                )
        if gain >= LEAST_GAIN or any(pilot.ratio <= ratio and pilot.steps_to_target is not None for pilot in alike):
            return None
        return (
            f"{scheme} at {ratio:g} keeps {100 * gain:.0f} % of the gradient's energy, below {100 * LEAST_GAIN:.0f} %, "
            "and no pilot has shown that it reaches the target"
        )


PRIOR = Penalty(coefficient=0.25, coefficient_sd=0.2)
"""``c`` of one policy before any such run was seen."""

MOST_TIMES_WORKERS = 4
"""A pilot speaks for clusters of so many times its workers: each then has so many times fewer samples of a batch."""


@dataclass(frozen=True, kw_only=True)
class LocalPilot(PilotBesideDense):
    """Pilot run under local SGD: its averaging policy, the share of its steps that averaged, and its workers.

    Attributes:
        sync: policy by which workers average.
        share: fraction of its steps that ended in an average, in (0, 1].
        workers: number of workers, two at least.
    """

    sync: Synchronization
    share: float
    workers: int


@dataclass(frozen=True, kw_only=True)
class LocalGate:
    """Rules by which a plan may use a local SGD policy, from the pilot runs of a profile.

    A pilot speaks for its policy alone, whatever the share: one that arrived for every larger share (for more frequent
    averages), one that failed for every smaller one. Where no pilot speaks, nothing is planned unasked.
    """

    pilots: tuple[LocalPilot, ...] = ()

    def penalty(self, sync: Synchronization) -> Penalty:
        """Return what a local SGD policy costs in steps, by pilots of its `family`; the prior if none succeeded."""
        return PRIOR.after((pilot, distance(pilot.share, pilot.workers)) for pilot in self._of_family(sync))

    def arrived(self) -> tuple[LocalPilot, ...]:
        """Return, for each policy `family`, the pilot that reached the target with the fewest averaging steps."""
        least: dict[Synchronization, LocalPilot] = {}
        for pilot in sorted(self.pilots, key=lambda pilot: pilot.share):
            if pilot.steps_to_target is not None:
                least.setdefault(family(pilot.sync), pilot)
        return tuple(least.values())

    def measured_share(self, sync: Synchronization) -> float | None:
        """Return the mean share of averaging steps over the pilots of exactly this policy; None: there are none."""
        shares = [pilot.share for pilot in self.pilots if pilot.sync == sync]
        return sum(shares) / len(shares) if shares else None

    def most_workers(self, sync: Synchronization, share: float) -> int:
        """Return the most workers for which pilots support a policy at an averaging ``share``; 0: none does."""
        return max(
            (
                MOST_TIMES_WORKERS * pilot.workers
                for pilot in self._of_family(sync)
                if pilot.steps_to_target is not None and pilot.share <= share * (1 + 1e-9)
            ),
            default=0,
        )

    def objection(self, sync: Synchronization, share: float) -> str | None:
        """Return why a local SGD policy is planned only if asked for, as a clause; None: pilots support it.

        Args:
            sync: policy of local SGD.
            share: fraction of the steps that end in an average of parameters, in (0, 1].
        """
        for pilot in self._of_family(sync):
            needed = self.penalty(pilot.sync).inflation(pilot.share, pilot.workers)
            if pilot.share >= share * (1 - 1e-9) and pilot.failed(needed):
                return (
                    f"{spell_sync(pilot.sync)} did not reach the target in {pilot.steps_trained:.0f} steps; summing "
                    f"gradients in every step needs {pilot.dense_steps:.0f}"
                )
        if self.most_workers(sync, share) == 0:
            policy = spell_sync(sync)
            return f"what {policy} costs in steps was not measured: profile with {setting('sync', policy)}"
        return None

    def _of_family(self, sync: Synchronization) -> list[LocalPilot]:
        return [pilot for pilot in self.pilots if family(pilot.sync) == family(sync)]


def steps_in_words(penalty: Penalty, share: float, workers: int, *, counts: bool) -> str:
    """Return a sentence on how many more steps local SGD takes to the target.

    Args:
        penalty: cost in steps of the policy.
        share: fraction of the steps that end in an average of parameters.
        workers: number of workers whose parameters are averaged.
        counts: whether the run trains to a target; else its steps are given, and the sentence says what that means.
    """
    if not counts:
        return "The number of steps is that of summing gradients in every step; what is learned in them may be less."
    more = float(penalty.inflation(share, workers)) - 1
    basis = f"as {penalty.pilots} pilot{'s' * (penalty.pilots > 1)} measured"
    if not penalty.pilots:
        basis = "by what was published of other tasks; profile with `sync` to measure it"
    return f"A target should take about {100 * more:.0f} % more steps with it ({basis})."


def family(sync: Synchronization) -> Synchronization:
    """Return a policy with its averaging frequency at a fixed value, so that policies of one family are equal."""
    return sync.model_copy(update={"every_steps": 1, "synchronised_share": 0.5})


LEAST_VARIANCE = 1e-12
"""Stands for none, so that its log is finite."""


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """Rounding noise and retained signal of a compressor without error feedback, by the number of levels of its codes.

    Attributes:
        levels: numbers of levels that were tried, ascending; (1,) where they do not depend on the workers.
        variances: ``q`` at each of them.
        signals: ``s`` at each of them.
    """

    levels: tuple[int, ...]
    variances: tuple[float, ...]
    signals: tuple[float, ...]

    def variance(self, levels: int) -> float:
        """Return the rounding variance ``q``, error energy over gradient energy, at a number of code levels.

        Between levels that were tried it is interpolated, below the fewest it stays, and beyond the most it falls with
        their square.
        """
        at, known = math.log(levels), np.log(self.levels)
        log_variances = np.log(np.maximum(self.variances, LEAST_VARIANCE))
        beyond = max(0.0, at - float(known[-1]))
        return float(np.exp(np.interp(at, known, log_variances) - 2 * beyond))

    def signal(self, levels: int) -> float:
        """Return the part ``s``, (0, 1], of the summed gradient left in its own direction, at a number of levels."""
        return float(np.interp(math.log(levels), np.log(self.levels), self.signals))


@dataclass(frozen=True, kw_only=True)
class ExchangeLosses:
    """Retained energy and rounding noise of each compressor, from a profile's exchange trials.

    Attributes:
        gains: (ratio, retained energy) of compressors with error feedback, both in (0, 1], ratios ascending, by the
            names of `timed_as`.
        roundings: noise and signal of compressors without error feedback, by the same names.
        noise_scale: gradient noise scale of the job, samples; None: not known.
        batch_size: global batch size of the task, samples. Noise weighs less in a larger one.
    """

    gains: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=lambda: MappingProxyType({}))
    roundings: Mapping[str, Rounding] = field(default_factory=lambda: MappingProxyType({}))
    noise_scale: float | None = None
    batch_size: int = 1

    def gain(self, way: Compression) -> float | None:
        """Return the gradient energy that a compressor retains, (0, 1]; None: unknown, as below the tried ratios.

        Lossless compressors retain 1, and random selection its ratio, without a trial. Above the
        tried ratios the largest one's is returned, and 1 for a compressor that only rounds.
        """
        if way.name in LOSSLESS:
            return KEPT[way.name]
        if way.name in RANDOM:
            return way.ratio
        key = timed_as(way)
        if key in self.gains:
            ratios, gains = np.log(self.gains[key]).T
            at = math.log(way.ratio)
            return float(np.exp(np.interp(at, ratios, gains))) if at >= ratios[0] else None
        return 1.0 if key in self.roundings else KEPT.get(way.name)

    def stretch(self, way: Compression, workers: int) -> tuple[float, float]:
        """Return the factor of rounding on steps to the target, and its log's standard deviation.

        (1, 0) for a compressor without trials of rounding, and for one worker.
        """
        rounding = self.roundings.get(timed_as(way))
        if rounding is None or workers < 2:
            return 1.0, 0.0
        levels = summed_bits(workers, bits=way.bits, levels=way.levels)[1] if has_levels(way) else 1
        noise = added_noise(
            rounding.variance(levels), noise_scale=self.noise_scale, batch_size=self.batch_size, workers=workers
        )
        inflation = noise_inflation(noise, rounding.signal(levels))
        return inflation, NOISE_COEFFICIENT_SD * noise / (1 + NOISE_COEFFICIENT * noise)


def exchange_losses(trials: Sequence[ExchangeTrial], *, noise_scale: float | None, batch_size: int) -> ExchangeLosses:
    """Return energy retained and noise added by compressor, from a profile's trials; unknown methods are skipped.

    Args:
        trials: trials of the profile; of several at one ratio or number of levels, the last gain and all variances.
        noise_scale: gradient noise scale, samples; None: not known.
        batch_size: global batch size of the trials, samples.
    """
    gains: dict[str, list[tuple[float, float]]] = {}
    tried: dict[str, list[tuple[int, float, float]]] = {}
    for trial in trials:
        try:
            way = parse_compression(trial.compression)
        except BadInput:  # of another version, which had more methods
            continue
        if trial.gain is not None:
            gains.setdefault(timed_as(way), []).append((way.ratio, min(1.0, trial.gain)))
        if trial.variance is not None:
            tried.setdefault(timed_as(way), []).append((way.levels or 1, trial.variance, trial.signal))
    roundings = {
        key: Rounding(levels=levels, variances=variances, signals=signals)
        for key, rows in tried.items()
        for levels, variances, signals in [tuple(zip(*sorted(rows), strict=True))]
    }
    settled = {key: sorted(dict(points).items()) for key, points in gains.items()}
    return ExchangeLosses(gains=settled, roundings=roundings, noise_scale=noise_scale, batch_size=batch_size)


def added_noise(variance: float, *, noise_scale: float | None, batch_size: float, workers: int) -> float:
    """Return ``e``: energy that rounding adds to the summed gradient, over its energy; at most ``variance``.

    Args:
        variance: ``q`` of one worker's gradient, at least 0.
        noise_scale: ``Bn`` in samples; None: not known, and then the gradient counts as all noise.
        batch_size: ``B``, samples of all workers.
        workers: ``n``, with equal parts of the batch.
    """
    if noise_scale is None:
        return variance
    return variance * (noise_scale + batch_size / workers) / (noise_scale + batch_size)


def noise_inflation(noise: float, signal: float = 1.0) -> float:
    """Return the factor of rounding on steps to the target, at least 1, from added ``noise`` and kept ``signal``.

    Args:
        noise: ``e`` of `added_noise`.
        signal: ``s``, in (0, 1].
    """
    return (1 + NOISE_COEFFICIENT * noise) / signal
