"""Machines whose steps were sampled elsewhere, as planning prices them: workers and links from the fitted step model.

A profile says what is trained, and how that runs where it was taken. Step samples beside it say how the same job runs
on other machines; those, and their relatives in the catalogue, are then planned with from there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import get_args

from hetopt.core.errors import BadInput
from hetopt.core.memory import Precision
from hetopt.core.step_samples import IN_PRECISION
from hetopt.optimizer.fit import LinkModel
from hetopt.optimizer.market.instance_type import InstanceType
from hetopt.optimizer.plan import Evidence
from hetopt.optimizer.step_time.design_matrix import Array
from hetopt.optimizer.step_time.gpu_transfer import PRECISIONS
from hetopt.optimizer.step_time.physics import SHARED
from hetopt.optimizer.step_time.posterior import Posterior
from hetopt.optimizer.step_time.tiers import Seen, kinship, measured_steps

LEARNED = 0.5
"""Share of a prior's variance that samples must have removed for a parameter to be theirs."""


@dataclass(frozen=True, kw_only=True)
class SampledMachine:
    """A worker of a machine type as samples predict it, alone on its machine: contention comes on top.

    Attributes:
        fixed_s, per_sample_s: of a worker's step.
        log_sd: how well its computation is known.
        network: one hop between machines, two of them; absent where samples say nothing about the network.
        network_log_sd: how well that is known.
        bus: one hop inside the machine; absent likewise.
    """

    fixed_s: float
    per_sample_s: float
    log_sd: float
    evidence: Evidence
    network: LinkModel | None
    network_log_sd: float
    bus: LinkModel | None


@dataclass(frozen=True, kw_only=True)
class SampledMachines:
    """Predictions of machine types from step samples.

    Attributes:
        posterior: fitted to the samples.
        gradient_bytes: of a dense exchange.
        catalog: relates types that were not sampled to those that were.
    """

    posterior: Posterior
    gradient_bytes: float
    catalog: Mapping[str, InstanceType]

    @cached_property
    def precisions(self) -> Mapping[Precision, str]:
        """The precisions in which steps were sampled, beside fp32, each with its name in the samples' types."""
        named = {name.partition(IN_PRECISION)[2] for name in self.posterior.observed.rows.types}
        by_precision: dict[Precision, str] = {}
        for precision in get_args(Precision):
            matching = sorted(name for name in named if PRECISIONS.get(name) == precision != "fp32")
            if matching:
                by_precision[precision] = matching[-1]
        return by_precision

    def machine(self, name: str, precision: Precision = "fp32") -> SampledMachine | None:
        """Return a machine type in a precision as samples predict it; None where nothing relates it to them."""
        types = self.posterior.observed.rows.types
        if precision in self.precisions:
            name = f"{name}{IN_PRECISION}{self.precisions[precision]}"
        try:
            kin = kinship(name, types, self.catalog, self._seen)
        except BadInput:
            return None
        where, mode, index = self.posterior.where, self.posterior.mode, kin.reference
        fixed = math.exp(mode[where.fixed][index] + kin.fixed)
        per_sample = math.exp(mode[where.per_sample][index] + kin.per_sample)
        if kin.by_batch is not None:
            fixed, per_sample = kin.by_batch.tangent(fixed, per_sample)
        typical = per_sample * self.posterior.observed.typical_batch
        by_mode = {where.fixed.start + index: fixed, where.per_sample.start + index: typical}
        return SampledMachine(
            fixed_s=fixed,
            per_sample_s=per_sample,
            log_sd=math.hypot(
                kin.log_sd,
                self._sd({place: part / (fixed + typical) for place, part in by_mode.items()}),
                self.posterior.latents.spread.compute,
            ),
            evidence=kin.evidence,
            network=self._link("network", ("network",), float(mode[where.link][index]) + kin.link),
            network_log_sd=math.hypot(
                kin.link_log_sd,
                self._sd({SHARED.index("network"): 1.0, where.link.start + index: 1.0}),
                self.posterior.latents.spread.exchange,
                self.posterior.latents.spread.noise_exchange,
            ),
            bus=self._link("host", ("network", "host_ratio"), 0.0),
        )

    @cached_property
    def _seen(self) -> tuple[Seen, ...]:
        return measured_steps(self.posterior, self.catalog)

    def _link(self, place: str, parameters: tuple[str, ...], factor: float) -> LinkModel | None:
        if any(self.posterior.learned(name) < LEARNED for name in parameters):
            return None
        shared: dict[str, float] = dict(zip(SHARED, self.posterior.mode[: len(SHARED)].tolist(), strict=True))
        log_beta = sum(shared[name] for name in parameters) + factor
        return LinkModel(
            latency_s=math.exp(shared[f"{place}_latency"]), bytes_per_s=self.gradient_bytes / math.exp(log_beta)
        )

    def _sd(self, by_mode: Mapping[int, float]) -> float:
        covariance: Array = self.posterior.covariance
        places = list(by_mode)
        return math.sqrt(
            max(0.0, sum(by_mode[i] * by_mode[j] * float(covariance[i, j]) for i in places for j in places))
        )
