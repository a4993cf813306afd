"""How a machine type relates to one that was measured: the same, the same family, or another by its published facts.

Three tiers, each with its own interval: *measured*; *interpolated* (the same accelerator, or another size of the same
family); *extrapolated* (another family). What the last says is a prior, to be probed before much is spent on it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetopt.core.errors import BadInput
from hetopt.optimizer.market.instance_type import Accelerator, InstanceType
from hetopt.optimizer.plan import Evidence
from hetopt.optimizer.step_time.transfer import (
    CROSS_FAMILY_LOG_SD,
    OTHER_ACCELERATOR_LOG_SD,
    SAME_ACCELERATOR_LOG_SD,
    SAME_FAMILY_LOG_SD,
    THREAD_SCALING,
)

LINK_LOG_SD = 0.3
"""Of a link's bandwidth that is scaled by the catalogue's sustained rates."""


@dataclass(frozen=True, kw_only=True)
class Kinship:
    """A type in terms of a measured one.

    Attributes:
        reference: the measured type's place among the model's.
        fixed, per_sample, link: log factors on its parameters.
        log_sd: how well its computation is known that way; ``link_log_sd`` how well its links.
        basis: why, in words.
    """

    reference: int
    evidence: Evidence
    basis: str
    fixed: float = 0.0
    per_sample: float = 0.0
    link: float = 0.0
    log_sd: float = 0.0
    link_log_sd: float = 0.0


def kinship(name: str, measured: Sequence[str], catalog: Mapping[str, InstanceType]) -> Kinship:
    """The nearest measured relative of a type.

    Args:
        name: the type.
        measured: the model's types, in their order.
        catalog: known instance types.

    Raises:
        BadInput: neither was it measured, nor does the catalogue relate it to a type that was.
    """
    if name in measured:
        return Kinship(reference=measured.index(name), evidence="measured", basis="measured")
    wanted = catalog.get(name)
    if wanted is None:
        raise BadInput(
            f"the type '{name}' was not measured ({', '.join(measured)} was) and is not in the catalogue.",
            hint="measure a step on it, or see `hetopt catalog list`",
        )
    relatives = [
        found
        for index, known in enumerate(measured)
        if (instance := catalog.get(known)) is not None and (found := _relate(index, instance, wanted)) is not None
    ]
    if not relatives:
        raise BadInput(
            f"nothing relates the type '{name}' to what was measured ({', '.join(measured)}).",
            hint="measure a step on it, or import samples under the names of the catalogue",
        )
    return min(relatives, key=lambda found: found.log_sd)


def _relate(reference: int, known: InstanceType, wanted: InstanceType) -> Kinship | None:
    """Scale ``known`` to ``wanted``; absent where the facts do not suffice."""
    computing = _by_accelerator(known, wanted) if known.cuda_devices else _by_processor(known, wanted)
    if computing is None:
        return None
    fixed, per_sample, log_sd, evidence, basis = computing
    return Kinship(
        reference=reference,
        evidence=evidence,
        basis=f"{basis} {known.name}",
        fixed=fixed,
        per_sample=per_sample,
        link=math.log(known.network_bytes_per_s / wanted.network_bytes_per_s),
        log_sd=log_sd,
        link_log_sd=LINK_LOG_SD,
    )


_Scaling = tuple[float, float, float, Evidence, str]


def _by_accelerator(known: InstanceType, wanted: InstanceType) -> _Scaling | None:
    """One GPU against another: half of the time follows peak compute, half memory bandwidth; launching stays."""
    ours, theirs = known.accelerator, wanted.accelerator
    if ours is None or theirs is None or not theirs.is_cuda:
        return None
    if ours.name == theirs.name and ours.fraction == theirs.fraction:
        return 0.0, 0.0, SAME_ACCELERATOR_LOG_SD, "interpolated", "the same GPU as"
    our_rates, rates = _rates(ours), _rates(theirs)
    if our_rates is None or rates is None:
        return None
    factor = math.log((our_rates[0] / rates[0] + our_rates[1] / rates[1]) / 2)
    return 0.0, factor, OTHER_ACCELERATOR_LOG_SD, "extrapolated", "by peak rates from"


def _rates(accelerator: Accelerator) -> tuple[float, float] | None:
    flops, bandwidth = accelerator.fp32_flops_per_s, accelerator.memory_bandwidth_bytes_per_s
    return None if flops is None or bandwidth is None else (flops, bandwidth)


def _by_processor(known: InstanceType, wanted: InstanceType) -> _Scaling | None:
    """One CPU machine against another, a worker having all of it: CoreMark a vCPU, and threads to the power of eta."""
    if wanted.cuda_devices or known.coremark_iterations_per_s is None or wanted.coremark_iterations_per_s is None:
        return None
    one_thread = math.log(
        (known.coremark_iterations_per_s / known.vcpus) / (wanted.coremark_iterations_per_s / wanted.vcpus)
    )
    threads = THREAD_SCALING * math.log(known.vcpus / wanted.vcpus)
    alike = known.family == wanted.family
    return (
        one_thread,
        one_thread + threads,
        SAME_FAMILY_LOG_SD if alike else CROSS_FAMILY_LOG_SD,
        "interpolated" if alike else "extrapolated",
        "by size from" if alike else "by CoreMark from",
    )
