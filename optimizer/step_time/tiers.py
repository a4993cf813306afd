"""Relation of a machine type to measured ones, and its worker and links as step samples of the same job predict them.

Three tiers, each with its own interval: *measured*; *interpolated* (the same accelerator, or another size of the same
family); *extrapolated* (another family), which is a prior, to be probed before much is spent on it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import get_args

import numpy as np

from hetopt.core.errors import BadInput
from hetopt.core.memory import Precision
from hetopt.core.step_samples import IN_PRECISION
from hetopt.optimizer.fit import THREAD_SCALING, LinkModel
from hetopt.optimizer.market.instance_type import InstanceType
from hetopt.optimizer.plan import Evidence
from hetopt.optimizer.step_time.gpu_transfer import (
    PRECISIONS,
    Measured,
    Place,
    gpu_of,
    steps_elsewhere,
)
from hetopt.optimizer.step_time.physics import SHARED, Array
from hetopt.optimizer.step_time.posterior import Posterior
from hetopt.optimizer.step_time.transfer import (
    CROSS_FAMILY_LOG_SD,
    SAME_ACCELERATOR_LOG_SD,
    SAME_FAMILY_LOG_SD,
)

LINK_LOG_SD = 0.3
"""Of a link's bandwidth that is scaled by the catalogue's sustained rates."""


@dataclass(frozen=True, kw_only=True)
class BatchPower:
    """Power law of compute time in the local batch size ``b``, for a type measured at one size ``b0`` alone.

        (b / b0)^exponent       in place of      share + (1 - share) b / b0

    A line through one measured step does not tell how a GPU profits from larger batches; public measurements do.

    Attributes:
        at: ``b0``, samples.
        exponent: power of the local batch size that compute time grows with, from `gpu_transfer`.
        share: part of the reference's computation at ``b0`` that is fixed, 0 to 1.
    """

    at: float
    exponent: float
    share: float

    def log_factor(self, batch_size: Array) -> Array:
        """Return the log of the power law's compute time over the line's, by batch size in samples."""
        ratio = batch_size / self.at
        return np.asarray(self.exponent * np.log(ratio) - np.log(self.share + (1 - self.share) * ratio))

    def tangent(self, fixed_s: float, per_sample_s: float) -> tuple[float, float]:
        """Return fixed and per-sample seconds of the line that touches the power law at batch size ``at``.

        This is a worker's line in plans.

        Within a quarter and four times the batch size it is off by at most 26 % where the exponent is 0.65.
        """
        step_s, exponent = fixed_s + per_sample_s * self.at, min(1.0, max(0.0, self.exponent))
        return step_s * (1 - exponent), step_s * exponent / self.at


@dataclass(frozen=True, kw_only=True)
class Kinship:
    """Relation of a machine type to a measured one, its reference: log factors on the reference's parameters.

    Attributes:
        reference: index of the measured type among the model's types.
        evidence: "measured", if the type is its own reference, "interpolated" or "extrapolated".
        fixed, per_sample, link: log factors on the reference's parameters.
        log_sd: standard deviation of the log of the type's computation.
        link_log_sd: standard deviation of the log of the seconds a byte on the type's links.
        by_batch: compute time over batch sizes in place of the reference's line; None: the line stands.
    """

    reference: int
    evidence: Evidence
    fixed: float = 0.0
    per_sample: float = 0.0
    link: float = 0.0
    log_sd: float = 0.0
    link_log_sd: float = 0.0
    by_batch: BatchPower | None = None


@dataclass(frozen=True, kw_only=True)
class MeasuredType:
    """Measured machine type with a GPU: its index in the model, and a typical step of one worker.

    Attributes:
        reference: index of the type among the model's types.
        name: name of the type, with its precision (`IN_PRECISION`).
        step: step of one worker, at the mean (of logs) of its batch sizes.
        share: fixed part of ``step``, 0 to 1; None where several batch sizes were measured.
        off: log of measured over predicted seconds, if the job's other GPUs contradict the step; None: they do not.
    """

    reference: int
    name: str
    step: Measured
    share: float | None = None
    off: float | None = None


def measured_steps(model: Posterior, catalog: Mapping[str, InstanceType]) -> tuple[MeasuredType, ...]:
    """Return a typical step of one worker of each measured machine type whose GPU the catalogue knows; empty: none.

    Steps that contradict those of the job's other GPUs are marked by ``off``, and count little.
    """
    rows, where, job = model.observed.rows, model.where, model.observed
    steps = []
    for index, name in enumerate(rows.types):
        batches = rows.group_batch[rows.group_type == index]
        batch = float(np.exp(np.log(batches).mean()))
        place = _place(name, catalog, batch)
        if place is not None:
            fixed, per_sample = model.mode[where.fixed][index], model.mode[where.per_sample][index]
            step_s = math.exp(fixed) + batch * math.exp(per_sample)
            step = Measured(place=place, step_time_s=step_s, kind=job.model_kind, flops_per_sample=job.flops_per_sample)
            share = math.exp(fixed) / step_s if np.ptp(batches) == 0 else None
            steps.append(MeasuredType(reference=index, name=name, step=step, share=share))
    return _doubted(steps)


FAR_OFF = 3.0
"""Standard deviations: of public jobs that were left out, one step in a thousand lies farther off."""


def _doubted(seen: Sequence[MeasuredType]) -> tuple[MeasuredType, ...]:
    """Return the types with ``off`` set, and ``step.log_sd`` widened to it, where their GPUs contradict the others.

    Such a GPU is throttled, shared, or named after another type. The worst is marked until no other is `FAR_OFF`; of
    two that contradict each other, both.
    """
    result, left = list(seen), list(range(len(seen)))
    while len(left) > 1:
        off, far = [], []
        for position in left:
            others = tuple(seen[other].step for other in left if other != position)
            log_s, covariance = steps_elsewhere(others, (seen[position].step.place,))
            off.append(math.log(seen[position].step.step_time_s) - float(log_s[0]))
            far.append(abs(off[-1]) / math.sqrt(covariance[0, 0]))
        worst = int(np.argmax(far))
        if far[worst] < FAR_OFF:
            break
        for index in range(2) if len(left) == 2 else (worst,):
            doubted = seen[left[index]]
            step = replace(doubted.step, log_sd=abs(off[index]))
            result[left[index]] = replace(doubted, off=off[index], step=step)
        del left[worst]
    return tuple(result)


def _place(name: str, catalog: Mapping[str, InstanceType], batch_size: float) -> Place | None:
    """Return the place of a machine type's worker; None: the catalogue lacks the type, or facts of a CUDA GPU of it.

    ``name`` is the type's, with its precision (`IN_PRECISION`).
    """
    type_, _, precision = name.partition(IN_PRECISION)
    instance = catalog.get(type_)
    if instance is None or instance.accelerator is None or not instance.accelerator.is_cuda:
        return None
    gpu = gpu_of(instance.accelerator)
    return None if gpu is None else Place(gpu=gpu, precision=PRECISIONS[precision], batch_size=batch_size)


def relatives(
    names: Sequence[str],
    measured: Sequence[str],
    catalog: Mapping[str, InstanceType],
    seen: Sequence[MeasuredType] = (),
) -> tuple[Kinship, ...]:
    """Return how machine types, [names], relate to measured ones: by GPU to all of these, by CPU to the nearest.

    Args:
        names: names of the machine types.
        measured: names of the model's types, in their order.
        catalog: known instance types, by name.
        seen: steps on measured types with a GPU (`measured_steps`); empty: a GPU relates only to the very same GPU.

    Raises:
        BadInput: a type was not measured, nor does the catalogue relate it to one that was.
    """
    asked = [name for name in names if name not in measured and seen and _place(name, catalog, 1.0) is not None]
    by_gpu = dict(zip(asked, _by_gpus(asked, catalog, seen), strict=True)) if asked else {}
    return tuple(
        Kinship(reference=measured.index(name), evidence="measured")
        if name in measured
        else _kinship(name, measured, catalog, by_gpu.get(name))
        for name in names
    )


def kinship(
    name: str, measured: Sequence[str], catalog: Mapping[str, InstanceType], seen: Sequence[MeasuredType] = ()
) -> Kinship:
    """Return how one machine type relates to the measured ones; arguments and errors are as of `relatives`."""
    return relatives([name], measured, catalog, seen)[0]


def _kinship(
    name: str, measured: Sequence[str], catalog: Mapping[str, InstanceType], by_gpu: Kinship | None
) -> Kinship:
    """Return how a type that was not measured relates to the nearest that was.

    Args:
        name: name of the type.
        measured: names of the measured types.
        catalog: instance types by name.
        by_gpu: its relation to all measured GPUs, taken where no measured type is nearly equal; None: it has none.

    Raises:
        BadInput: the catalogue lacks the type, or nothing relates it to a measured one.
    """
    type_ = name.partition(IN_PRECISION)[0]
    wanted = catalog.get(type_)
    if wanted is None:
        raise BadInput(
            f"the type '{type_}' was not measured ({', '.join(measured)} was) and is not in the catalogue.",
            hint="measure a step on it, or see `hetopt catalog list`",
        )
    near = [
        relative
        for index, known in enumerate(measured)
        if (instance := catalog.get(known.partition(IN_PRECISION)[0])) is not None
        and (relative := _relate(index, known, instance, name, wanted)) is not None
    ]
    unknown = [known for known in measured if known.partition(IN_PRECISION)[0] not in catalog]
    if not near and by_gpu is None and len(unknown) == len(measured):
        raise BadInput(
            f"nothing relates the type '{type_}' to what was measured, as {' and '.join(unknown)} "
            f"{'is' if len(unknown) == 1 else 'are'} not in the catalogue: name samples after the type there that has "
            "the same GPU or processor.",
            hint="see `hetopt catalog list`; a new GPU's peak rates and memory bandwidth go into accelerators.csv",
        )
    if not near and by_gpu is None:
        lacking = wanted.accelerator is not None and gpu_of(wanted.accelerator) is None
        raise BadInput(
            f"nothing relates the type '{type_}' to what was measured ({', '.join(measured)}).",
            hint=f"write the peak rates and the memory bandwidth of {wanted.accelerator.name} into the catalogue's "
            "accelerators.csv"
            if lacking and wanted.accelerator is not None
            else "measure a step on it, or import samples under the names of the catalogue",
        )
    # The very same GPU beside more processors, or a processor's family, before what others tell.
    return min(near, key=lambda relative: relative.log_sd) if near or by_gpu is None else by_gpu


def _by_gpus(names: Sequence[str], catalog: Mapping[str, InstanceType], seen: Sequence[MeasuredType]) -> list[Kinship]:
    """Return each type's relation to the measured GPU nearest to it, by steps of all measured GPUs (`gpu_transfer`).

    Args:
        names: names of the types, whose GPUs are all known.
        catalog: instance types by name.
        seen: measured steps, at least one.
    """
    known = tuple(measured.step for measured in seen)
    predictions, sure, powers = [], [], []
    for measured in seen:
        found_at = [_place(name, catalog, measured.step.place.batch_size) for name in names]
        places = tuple(place for place in found_at if place is not None)
        predictions.append(steps_elsewhere(known, places))
        twice = tuple(replace(place, batch_size=2 * place.batch_size) for place in places)
        log_twice_s, _ = steps_elsewhere(known, twice)
        powers.append((log_twice_s - predictions[-1][0]) / math.log(2))
        sure.append(np.diag(predictions[-1][1] if len(seen) == 1 else steps_elsewhere((measured.step,), places)[1]))
    kin = []
    for index, name in enumerate(names):
        best = min(range(len(seen)), key=lambda source: sure[source][index])
        nearest, (log_s, covariance) = seen[best], predictions[best]
        factor = float(log_s[index]) - math.log(nearest.step.step_time_s)
        instance, wanted = (catalog[type_.partition(IN_PRECISION)[0]] for type_ in (nearest.name, name))
        kin.append(
            Kinship(
                reference=nearest.reference,
                evidence="extrapolated",
                fixed=factor,
                per_sample=factor,
                link=math.log(instance.network_bytes_per_s / wanted.network_bytes_per_s),
                log_sd=math.sqrt(covariance[index, index]),
                link_log_sd=LINK_LOG_SD,
                by_batch=None
                if nearest.share is None
                else BatchPower(
                    at=nearest.step.place.batch_size, exponent=float(powers[best][index]), share=nearest.share
                ),
            )
        )
    return kin


def _relate(reference: int, known: str, instance: InstanceType, name: str, wanted: InstanceType) -> Kinship | None:
    """Return how type ``name`` relates to the measured type ``known``; None: another GPU or precision, or no CoreMark.

    With the same GPU the computation is taken to be the same. CPUs are scaled by CoreMark a vCPU, and by threads to the
    power `THREAD_SCALING`.
    """
    precision, other = (kind.partition(IN_PRECISION)[2] for kind in (known, name))
    alike = Kinship(
        reference=reference,
        evidence="interpolated",
        link=math.log(instance.network_bytes_per_s / wanted.network_bytes_per_s),
        log_sd=SAME_ACCELERATOR_LOG_SD,
        link_log_sd=LINK_LOG_SD,
    )
    if instance.cuda_devices:
        return alike if precision == other and _gpu(instance) == _gpu(wanted) else None
    ours, theirs = instance.coremark_iterations_per_s, wanted.coremark_iterations_per_s
    if (precision or "fp32") != (other or "fp32") or wanted.cuda_devices or ours is None or theirs is None:
        return None
    one_thread = math.log((ours / instance.vcpus) / (theirs / wanted.vcpus))
    family = instance.family == wanted.family
    return replace(
        alike,
        evidence="interpolated" if family else "extrapolated",
        fixed=one_thread,
        per_sample=one_thread + THREAD_SCALING * math.log(instance.vcpus / wanted.vcpus),
        log_sd=SAME_FAMILY_LOG_SD if family else CROSS_FAMILY_LOG_SD,
    )


def _gpu(instance: InstanceType) -> tuple[str, float, float] | None:
    """Return a GPU's name, part and nominal memory in GiB; None: the type has none.

    The memory is nominal since usable memory is published differently for one GPU.
    """
    gpu = instance.accelerator
    if gpu is None:
        return None
    return gpu.name, gpu.fraction, gpu.memory_gib if gpu.model is None else gpu.model.memory_gib


LEARNED = 0.5
"""Share of a prior's variance that samples must have removed for a parameter to be theirs."""


@dataclass(frozen=True, kw_only=True)
class SampledMachine:
    """Worker of a machine type as step samples predict it, alone on its machine: contention comes on top.

    Attributes:
        fixed_s, per_sample_s: line of a worker's seconds of computation over its samples.
        log_sd: standard deviation of the log of the worker's computation.
        network: one hop between two machines; None: samples say too little of the network.
        network_log_sd: standard deviation of the log of the seconds a byte between machines.
        bus: one hop inside the machine; None: samples say too little of links inside machines.
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
    """Predictor of workers of any machine type, fitted to a job's step samples.

    Attributes:
        posterior: fitted to the samples.
        gradient_bytes: bytes of a dense exchange.
        catalog: relates types that were not sampled to those that were.
    """

    posterior: Posterior
    gradient_bytes: float
    catalog: Mapping[str, InstanceType]

    @cached_property
    def precisions(self) -> Mapping[Precision, str]:
        """The precisions other than fp32 in which steps were sampled, each with its name in the samples' types."""
        named = {name.partition(IN_PRECISION)[2] for name in self.posterior.observed.rows.types}
        by_precision: dict[Precision, str] = {}
        for precision in get_args(Precision):
            matching = sorted(name for name in named if PRECISIONS.get(name) == precision != "fp32")
            if matching:
                by_precision[precision] = matching[-1]
        return by_precision

    def machine(self, name: str, precision: Precision = "fp32") -> SampledMachine | None:
        """Return the predicted worker of machine type ``name``; None: nothing relates it to the samples.

        Samples in fp32 stand for a precision that was not sampled.
        """
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
    def _seen(self) -> tuple[MeasuredType, ...]:
        return measured_steps(self.posterior, self.catalog)

    def _link(self, place: str, parameters: tuple[str, ...], factor: float) -> LinkModel | None:
        """Return one hop by the fitted shared parameters; None: the samples say little of one of ``parameters``.

        Args:
            place: "network" (between machines) or "host" (inside one), whose latency is taken.
            parameters: shared parameters whose sum is the log of the seconds of a dense gradient over the hop.
            factor: added to that log.
        """
        if any(self.posterior.learned(name) < LEARNED for name in parameters):
            return None
        shared: dict[str, float] = dict(zip(SHARED, self.posterior.mode[: len(SHARED)].tolist(), strict=True))
        log_beta = sum(shared[name] for name in parameters) + factor
        return LinkModel(
            latency_s=math.exp(shared[f"{place}_latency"]), bytes_per_s=self.gradient_bytes / math.exp(log_beta)
        )

    def _sd(self, by_mode: Mapping[int, float]) -> float:
        """Return the standard deviation of a weighted sum of fitted numbers; ``by_mode``: weight by index in `mode`."""
        covariance: Array = self.posterior.covariance
        places = list(by_mode)
        return math.sqrt(
            max(0.0, sum(by_mode[i] * by_mode[j] * float(covariance[i, j]) for i in places for j in places))
        )
