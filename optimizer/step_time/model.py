"""Step times with intervals, from a profile or from imported samples, and which configurations to measure next."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hetopt.core.profile import Profile
from hetopt.core.step_samples import IN_PRECISION, Configuration, Node
from hetopt.optimizer.convergence.steps_law import Z90
from hetopt.optimizer.fit import FittedDevice, FittedModel
from hetopt.optimizer.market.instance_type import InstanceType
from hetopt.optimizer.plan import EVIDENCE_IN_WORDS, Evidence
from hetopt.optimizer.step_time.machine_bus import is_switched
from hetopt.optimizer.step_time.observed import Observed, observe
from hetopt.optimizer.step_time.physics import make_rows
from hetopt.optimizer.step_time.posterior import Known, Posterior, Shape, fit
from hetopt.optimizer.step_time.prediction import Linearised, Probe, predict, suggest
from hetopt.optimizer.step_time.priors import OWN_LINKS, PRIORS, SWITCHED, Normal
from hetopt.optimizer.step_time.tiers import Kinship, SampledMachines, measured_steps, relatives

TIERS: tuple[Evidence, ...] = tuple(EVIDENCE_IN_WORDS)
"""From the best known to the least."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Predicted seconds of a step (median), with a 90 % interval, and the evidence of its least known machine type."""

    step_time_s: float
    step_time_low_s: float
    step_time_high_s: float
    evidence: Evidence


def switched_types(catalog: Mapping[str, InstanceType]) -> set[str]:
    """Return the names of the catalogue's instance types whose GPUs are joined by NVSwitch."""
    return {name for name, instance in catalog.items() if is_switched(instance)}


@dataclass(frozen=True, kw_only=True)
class StepTimeModel:
    """Step-time model fitted to measured steps, which predicts steps of other cluster configurations.

    Attributes:
        posterior: fit to the measured steps.
        catalog: known instance types, for machine types that were not measured.
    """

    posterior: Posterior
    catalog: Mapping[str, InstanceType]

    @classmethod
    def fit(
        cls, observed: Observed, catalog: Mapping[str, InstanceType], priors: Mapping[str, Normal] = PRIORS
    ) -> StepTimeModel:
        """Fit the model to measured steps; takes seconds at most for the samples that `observe` lets through.

        Where NVSwitch joins the GPUs of all types, the priors of such machines (`SWITCHED`) take the place of
        ``priors``.
        """
        if {name.partition(IN_PRECISION)[0] for name in observed.rows.types} <= switched_types(catalog):
            return cls(posterior=fit(observed, priors={**priors, **SWITCHED}, classes=(OWN_LINKS,)), catalog=catalog)
        return cls(posterior=fit(observed, priors=priors), catalog=catalog)

    def predict(self, configurations: Sequence[Configuration]) -> list[StepTime]:
        """Return the predicted seconds of a step of each configuration, in order; at least one is needed.

        Raises:
            BadInput: a machine type that nothing relates to what was measured, or an impossible compression.
        """
        kin, asked = self._linearised(configurations)
        tiers = np.array([TIERS.index(relative.evidence) for relative in kin])
        worst = np.where(asked.rows.has_type, tiers, 0).max(axis=1)
        middle = np.exp(asked.steps.log_step)
        above, below = (np.exp(Z90 * np.sqrt(part)) for part in (asked.above, asked.below))
        return [
            StepTime(step_time_s=step, step_time_low_s=low, step_time_high_s=high, evidence=TIERS[tier])
            for step, low, high, tier in zip(
                middle.tolist(), (middle / below).tolist(), (middle * above).tolist(), worst.tolist(), strict=True
            )
        ]

    def suggest(
        self, configurations: Sequence[Configuration], count: int, usd: Sequence[float | None]
    ) -> tuple[Probe, ...]:
        """Return up to ``count`` configurations to measure next, best first; ``usd``: their prices, None: unknown.

        See `prediction.suggest`; errors are as of `predict`.
        """
        return suggest(self.posterior, self._linearised(configurations)[1], count, usd)

    def _linearised(self, configurations: Sequence[Configuration]) -> tuple[tuple[Kinship, ...], Linearised]:
        """Return the relation of measured types, then others, to the measured ones, and the configurations' steps.

        Raises:
            BadInput: nothing relates a machine type to what was measured, or a compression is impossible.
        """
        measured = self.posterior.observed.rows.types
        names = dict.fromkeys((*measured, *(c.kind(node) for c in configurations for node in c.nodes)))
        kin = relatives(tuple(names), measured, self.catalog, measured_steps(self.posterior, self.catalog))
        return kin, predict(self.posterior, configurations, kin[len(measured) :], switched_types(self.catalog))


def observe_profile(profile: Profile) -> Observed:
    """Return a profile's timed computation and all-reduces, in its first precision, as observations of the step model.

    A timed step is the computation of its device's workers on one node, as they exchange nothing. An all-reduce counts
    with its time at the gradient's size: inside a host as timed, between hosts with one worker on each.
    """
    profile = profile.computing_in(profile.precisions[0])
    configurations: list[Configuration] = []
    computing: list[float] = []
    exchanging: list[float] = []
    for device in profile.devices:
        for point in device.step_times:
            configurations.append(
                Configuration(
                    nodes=(Node(type=device.type, workers=device.workers_per_host),),
                    local_batch_size=point.local_batch_size,
                )
            )
            computing.append(float(np.log(point.step_time_s)))
            exchanging.append(np.nan)
    first = profile.devices[0]
    for link in profile.links:
        if link.collective == "all_reduce":
            inside = link.scope == "host"
            nodes = (Node(type=first.type, workers=link.workers),) if inside else (Node(type=first.type, workers=1),)
            configurations.append(
                Configuration(
                    nodes=nodes * (1 if inside else link.workers),
                    local_batch_size=first.step_times[0].local_batch_size,
                )
            )
            computing.append(np.nan)
            exchanging.append(float(np.log(link.latency_s + profile.job.gradient_bytes / link.bytes_per_s)))
    return Observed(
        rows=make_rows(configurations),
        log_step=np.full(len(configurations), np.nan),
        log_compute=np.array(computing),
        log_exchange=np.array(exchanging),
    )


RUN_TO_RUN_LOG_SD = 0.08
"""Computing in earnest, the same job on the same machine some minutes later: nine runs of the demo on a
shared 2-core virtual machine (2026-11-20) lay 10 % from their predictions in the median, on both sides."""


def contention_reach(profile: Profile) -> float:
    """Return the 95th percentile of wall over processor time of the profiled host's steps, at least 1.

    1 where it was not measured. Contention by others changes by the minute: it widens intervals and shifts no median.
    """
    if profile.contention is None:
        return 1.0
    return profile.contention * math.exp(Z90 * (profile.contention_log_sd or 0.0))


RENTED = re.compile(r"[a-z0-9-]+\.[a-z0-9-]+")
"""What instance types are called: family and size."""

LEAST_JITTER = 0.005
"""Steps of one worker scatter by half a percent at least, however quiet its machine was for a minute."""

JITTER_LOG_SD = 0.5
FORWARD_LOGIT_SD = 0.3
"""How far the scatter of steps, and the part of them before backward, may be another elsewhere."""


def observe_samples(profile: Profile, owned: Collection[str] = ()) -> Observed | None:
    """Return a profile's step samples on rentable types, and on those in ``owned``, for the model; None: none is left.

    Samples of rehearsed hosts and of this machine say nothing about a cloud's links, and are left out.

    Raises:
        BadInput: an unknown compressor, or samples of different jobs.
    """
    kept = [
        sample
        for sample in profile.samples
        if all(node.type in owned or RENTED.fullmatch(node.type) for node in sample.nodes)
    ]
    return observe(kept) if kept else None


def sampled_machines(profile: Profile, catalog: Mapping[str, InstanceType]) -> SampledMachines | None:
    """Return a predictor of machine types, fitted to a profile's step samples; None: no sample can be used.

    Raises:
        BadInput: an unknown compressor, or samples of different jobs.
    """
    observed = observe_samples(profile, [name for name, instance in catalog.items() if instance.owned])
    if observed is None:
        return None
    return SampledMachines(posterior=fit(observed), gradient_bytes=profile.job.gradient_bytes, catalog=catalog)


def profile_priors(reference: FittedDevice) -> Mapping[str, Normal]:
    """Return `PRIORS` with the jitter, and the part of a step before backward, as measured on ``reference``."""
    before = statistics.median(
        (point.load_s + point.forward_s + point.optimizer_s)
        / max(point.load_s + point.forward_s + point.backward_s + point.optimizer_s, 1e-12)
        for point in reference.device.step_times
    )
    forward = min(0.95, max(0.05, before))
    jitter = max(LEAST_JITTER, reference.step_time.jitter)
    measured = {
        "straggling": (math.log(jitter), JITTER_LOG_SD),
        "forward": (math.log(forward / (1 - forward)), FORWARD_LOGIT_SD),
    }
    return {**PRIORS, **{name: replace(PRIORS[name], mean=mean, sd=sd) for name, (mean, sd) in measured.items()}}


def learned_shape(model: FittedModel, sampled: SampledMachines | None = None) -> Shape:
    """Return the parameters that a job's steps share on all machines, by step samples or else by the profile.

    The contention of a profile of CPUs is the prior's, as its workers divide the threads of a host.

    Args:
        model: fits of the profile.
        sampled: predictor fitted to its step samples; None: samples on rentable types, if any, are fitted here.

    Raises:
        BadInput: as of `sampled_machines`.
    """
    profile = model.profile
    if sampled is not None:
        return Shape.of(sampled.posterior, profile.job.gradient_bytes)
    observed = observe_samples(profile)
    if observed is not None:
        return Shape.of(fit(observed), profile.job.gradient_bytes)
    posterior = fit(observe_profile(profile), priors=profile_priors(model.reference), classes=())
    shape = Shape.of(posterior, profile.job.gradient_bytes)
    if all(device.kind == "cpu" for device in profile.devices):
        prior = PRIORS["contention"]
        assert prior.mean is not None
        return replace(shape, contention=Known(value=math.exp(prior.mean), sd=prior.sd))
    return shape
