"""Step times with intervals from a profile or from imported samples, and what to measure next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hetopt.core.step_samples import IN_PRECISION, Configuration
from hetopt.optimizer.convergence.steps_law import Z90
from hetopt.optimizer.market.instance_type import InstanceType
from hetopt.optimizer.plan import EVIDENCE_IN_WORDS, Evidence
from hetopt.optimizer.step_time.links import is_switched
from hetopt.optimizer.step_time.observed import Observed
from hetopt.optimizer.step_time.posterior import Posterior, fit
from hetopt.optimizer.step_time.prediction import Linearised, Probe, predict, suggest
from hetopt.optimizer.step_time.priors import OWN_LINKS, PRIORS, SWITCHED, Normal
from hetopt.optimizer.step_time.tiers import Kinship, measured_steps, relatives

TIERS: tuple[Evidence, ...] = tuple(EVIDENCE_IN_WORDS)
"""From the best known to the least."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The predicted seconds of a step, with their interval.

    Attributes:
        step_time_s: the median; ``step_time_low_s`` and ``step_time_high_s`` bound 90 %.
        evidence: of the least known machine type.
    """

    step_time_s: float
    step_time_low_s: float
    step_time_high_s: float
    evidence: Evidence


def switched_types(catalog: Mapping[str, InstanceType]) -> set[str]:
    """Return the names of the types whose GPUs a switch joins."""
    return {name for name, instance in catalog.items() if is_switched(instance)}


@dataclass(frozen=True, kw_only=True)
class StepTimeModel:
    """The step-time model, fitted to measured steps.

    Attributes:
        catalog: known instance types, for machine types that were not measured.
    """

    posterior: Posterior
    catalog: Mapping[str, InstanceType]

    @classmethod
    def fit(
        cls, observed: Observed, catalog: Mapping[str, InstanceType], priors: Mapping[str, Normal] = PRIORS
    ) -> StepTimeModel:
        """Fit the model to measurements; takes seconds at most for the samples that `observe` lets through."""
        if {name.partition(IN_PRECISION)[0] for name in observed.rows.types} <= switched_types(catalog):
            return cls(posterior=fit(observed, priors={**priors, **SWITCHED}, classes=(OWN_LINKS,)), catalog=catalog)
        return cls(posterior=fit(observed, priors=priors), catalog=catalog)

    def predict(self, configurations: Sequence[Configuration]) -> list[StepTime]:
        """Predict the step time of each of at least one configuration.

        Raises:
            BadInput: a machine type that nothing relates to what was measured, or an impossible compression.
        """
        kin, asked = self._linearised(configurations)
        return self._step_times(kin, asked)

    def suggest(
        self, configurations: Sequence[Configuration], count: int, usd: Sequence[float | None]
    ) -> tuple[Probe, ...]:
        """Return the best of the configurations to measure next, see `prediction.suggest`."""
        return suggest(self.posterior, self._linearised(configurations)[1], count, usd)

    def _linearised(self, configurations: Sequence[Configuration]) -> tuple[tuple[Kinship, ...], Linearised]:
        measured = self.posterior.observed.rows.types
        names = dict.fromkeys((*measured, *(c.kind(node) for c in configurations for node in c.nodes)))
        kin = relatives(tuple(names), measured, self.catalog, measured_steps(self.posterior, self.catalog))
        return kin, predict(self.posterior, configurations, kin[len(measured) :], switched_types(self.catalog))

    def _step_times(self, kin: Sequence[Kinship], asked: Linearised) -> list[StepTime]:
        tiers = np.array([TIERS.index(relative.evidence) for relative in kin])
        worst = np.where(asked.rows.has_type, tiers, 0).max(axis=1)
        middle = np.exp(asked.log_step)
        above, below = (np.exp(Z90 * np.sqrt(part)) for part in (asked.above, asked.below))
        return [
            StepTime(step_time_s=step, step_time_low_s=low, step_time_high_s=high, evidence=TIERS[tier])
            for step, low, high, tier in zip(
                middle.tolist(), (middle / below).tolist(), (middle * above).tolist(), worst.tolist(), strict=True
            )
        ]
