"""Step times with intervals from a profile or from imported samples, explained, and what to measure next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hetopt.core.step_samples import IN_PRECISION, Configuration
from hetopt.optimizer.convergence.steps_law import Z90
from hetopt.optimizer.market.instance_type import InstanceType
from hetopt.optimizer.plan import EVIDENCE_IN_WORDS, Evidence
from hetopt.optimizer.step_time.links import SWITCHED_FAMILIES
from hetopt.optimizer.step_time.observed import Observed
from hetopt.optimizer.step_time.physics import SHARED
from hetopt.optimizer.step_time.posterior import LEARNED, Posterior, fit
from hetopt.optimizer.step_time.prediction import Linearised, predict
from hetopt.optimizer.step_time.priors import PRIORS, SWITCHED, Normal
from hetopt.optimizer.step_time.probes import OF_SOCKETS, Probe, suggest
from hetopt.optimizer.step_time.tiers import Kinship, measured_steps, relatives

TIERS: tuple[Evidence, ...] = tuple(EVIDENCE_IN_WORDS)
"""From the best known to the least."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """A predicted step.

    Attributes:
        step_time_s: the median; ``step_time_low_s`` and ``step_time_high_s`` bound 90 %.
        evidence: of the least known machine type.
    """

    step_time_s: float
    step_time_low_s: float
    step_time_high_s: float
    evidence: Evidence


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What one predicted step is made of, and why its interval is as wide as it is.

    Attributes:
        compute_s: the slowest worker's computation.
        exchange_s: the whole exchange, hidden or not; ``exposed_s`` is what the step shows of it.
        compress_s: compression and decompression.
        variances: share of the interval's variance, by where it comes from, largest first.
        priors: what the samples say next to nothing about, in words.
        relatives: types that were not measured, with what they are taken from.
        most_workers, most_nodes: of all layouts that were measured.
    """

    predicted: StepTime
    compute_s: float
    exchange_s: float
    exposed_s: float
    compress_s: float
    variances: dict[str, float]
    priors: tuple[str, ...]
    relatives: dict[str, str]
    most_workers: int
    most_nodes: int


def largest_shares(variances: Mapping[str, float]) -> dict[str, float]:
    """Each variance over their sum, the largest first, without those below half a percent."""
    total = sum(variances.values())
    inorder = sorted(variances.items(), key=lambda item: -item[1])
    return {name: value / total for name, value in inorder if value > 0.005 * total}


def switched_types(catalog: Mapping[str, InstanceType]) -> set[str]:
    """Types whose GPUs a switch joins."""
    return {name for name, instance in catalog.items() if instance.family.startswith(SWITCHED_FAMILIES)}


@dataclass(frozen=True, kw_only=True)
class StepTimeModel:
    """hetopt's model of step times, fitted.

    Attributes:
        catalog: known instance types, for machine types that were not measured.
    """

    posterior: Posterior
    catalog: Mapping[str, InstanceType]

    @classmethod
    def fit(
        cls, observed: Observed, catalog: Mapping[str, InstanceType], priors: Mapping[str, Normal] = PRIORS
    ) -> StepTimeModel:
        """Fit to measurements. Seconds at most, for the samples that `observe` lets through."""
        if {name.partition(IN_PRECISION)[0] for name in observed.rows.types} <= switched_types(catalog):
            priors = {**priors, **SWITCHED}
        return cls(posterior=fit(observed, priors=priors), catalog=catalog)

    def predict(self, configurations: Sequence[Configuration]) -> list[StepTime]:
        """Predict at least one configuration.

        Raises:
            BadInput: a machine type that nothing relates to what was measured, or an impossible compression.
        """
        kin, asked = self._linearised(configurations)
        return self._step_times(kin, asked)

    def suggest(
        self, configurations: Sequence[Configuration], count: int, usd: Sequence[float | None]
    ) -> tuple[Probe, ...]:
        """Which of the configurations to measure, see `suggest`."""
        return suggest(self.posterior, self._linearised(configurations)[1], count, usd)

    def explain(self, configuration: Configuration) -> Explanation:
        """One prediction with its terms, their variances and what they are based on."""
        kin, asked = self._linearised([configuration])
        steps, sources = asked.steps, asked.sources
        step_s, compute_s = float(np.exp(steps.log_step[0])), float(np.exp(steps.log_compute[0]))
        compress_s = float(steps.compress_s[0])
        variances = {
            "layouts that were not measured": float(sources.layout[0]),
            "batch sizes that were not measured": float(sources.batch[0]),
            "machine types that were not measured": float(sources.kinship[0]),
            "compressors that were not measured": float(sources.compressor[0]),
            OF_SOCKETS: float(sources.sockets[0]),
            "one run against another": float(sources.noise[0]),
            **self._by_parameter(asked),
        }
        most_workers, most_nodes = self.measured_up_to
        return Explanation(
            predicted=self._step_times(kin, asked)[0],
            compute_s=compute_s,
            exchange_s=float(np.exp(steps.log_exchange[0])) if configuration.workers > 1 else 0.0,
            exposed_s=max(0.0, step_s - compute_s - compress_s),
            compress_s=compress_s,
            variances=largest_shares(variances),
            priors=tuple(PRIORS[name].about for name in SHARED if self.posterior.learned(name) < LEARNED),
            relatives={
                name: relative.basis
                for name, relative in zip(asked.rows.types, kin, strict=True)
                if relative.evidence != "measured"
                and any(configuration.kind(node) == name for node in configuration.nodes)
            },
            most_workers=most_workers,
            most_nodes=most_nodes,
        )

    @property
    def measured_up_to(self) -> tuple[int, int]:
        """Most workers and most nodes of the layouts that were measured."""
        rows = self.posterior.observed.rows
        return int(rows.workers.max()), int(rows.nodes.max())

    def _by_parameter(self, asked: Linearised) -> dict[str, float]:
        """What each shared parameter contributes to the first row's variance, its correlations with others included."""
        derivatives, known = asked.by_mode[0], asked.parameters
        shares = derivatives * (known.covariance @ derivatives)
        named = {PRIORS[name].about: float(shares[index]) for index, name in enumerate(SHARED)}
        for name, variance in known.by_link.items():
            named[PRIORS[name].about] += float(variance[0])
        named["computing and layouts as measured"] = float(shares[len(SHARED) :].sum())
        return named

    def _linearised(self, configurations: Sequence[Configuration]) -> tuple[tuple[Kinship, ...], Linearised]:
        measured = self.posterior.observed.rows.types
        names = dict.fromkeys((*measured, *(c.kind(node) for c in configurations for node in c.nodes)))
        kin = relatives(tuple(names), measured, self.catalog, measured_steps(self.posterior, self.catalog))
        return kin, predict(self.posterior, configurations, kin[len(measured) :], switched_types(self.catalog))

    def _step_times(self, kin: Sequence[Kinship], asked: Linearised) -> list[StepTime]:
        tiers = np.array([TIERS.index(relative.evidence) for relative in kin])
        worst = np.where(asked.rows.has_type, tiers, 0).max(axis=1)
        middle = np.exp(asked.log_step)
        above, below = (np.exp(Z90 * np.sqrt(part)) for part in (asked.sources.total, asked.sources.below))
        return [
            StepTime(step_time_s=step, step_time_low_s=low, step_time_high_s=high, evidence=TIERS[tier])
            for step, low, high, tier in zip(
                middle.tolist(), (middle / below).tolist(), (middle * above).tolist(), worst.tolist(), strict=True
            )
        ]
