"""The batch policies by name, and which of them a run has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from hetopt.core.batch_partition import allocated_micro_batch_size, check_batch
from hetopt.core.errors import BadInput
from hetopt.core.plain_text import known
from hetopt.core.run_spec import BATCH_POLICIES, RunSpec
from hetopt.trainer.policies.dynamic import DynamicShares, omnilearn
from hetopt.trainer.policies.model import ModelShares
from hetopt.trainer.policies.policy import BatchPolicy, KeepShares
from hetopt.trainer.policies.published import AllocateMicroBatches, ProportionalShares, RateShares

Maker: TypeAlias = Callable[[RunSpec, int], BatchPolicy[Any]]
"""Makes the policy of a run; the number is the least share of a worker, in samples."""


def _allocation(spec: RunSpec, minimum: int) -> BatchPolicy[Any]:
    size = allocated_micro_batch_size(spec)
    if size < minimum:
        raise BadInput(
            f"Micro-batches of {size} samples are too small: this model needs at least {minimum} at a time.",
            hint=f"choose a micro-batch size of at least {minimum} that divides the global batch",
        )
    return AllocateMicroBatches.model_validate({**spec.batch_settings, "micro": size})


def _told(policy: type[ProportionalShares | DynamicShares]) -> Maker:
    """Makes a policy by what the run tells it."""
    return lambda spec, minimum: policy.model_validate({**spec.batch_settings, "minimum": minimum})


def _rate(spec: RunSpec, minimum: int) -> BatchPolicy[Any]:
    assert spec.stream is not None, "the spec checks it"
    return RateShares(stream=spec.stream, minimum=minimum)


POLICIES: dict[str, Maker] = {
    "uniform": lambda spec, minimum: KeepShares(),
    "static": lambda spec, minimum: KeepShares(),
    "proportional": _told(ProportionalShares),
    "dynamic": _told(DynamicShares),
    "omnilearn": lambda spec, minimum: omnilearn(minimum=minimum),
    "allocation": _allocation,
    "model": lambda spec, minimum: ModelShares(minimum=minimum),
    "rate": _rate,
}


def register(name: str, about: str, make: Maker) -> None:
    """Add a batch policy: from here on a run may ask for it by this name.

    Args:
        name: as people write it.
        about: half a sentence: how it shares the batch.
        make: makes it for a run, with the least share of a worker in samples.

    Raises:
        ValueError: there is one of this name.
    """
    if name in POLICIES:
        raise ValueError(f"there is a batch policy {name!r} already")
    BATCH_POLICIES[name] = about
    POLICIES[name] = make


def choose_policy(spec: RunSpec, *, minimum: int) -> BatchPolicy[Any]:
    """The policy of a run. What its state is made of is the policy's own affair; `BatchPolicy.initial` tells its type.

    Args:
        spec: of the run.
        minimum: least share of a worker, in samples.

    Raises:
        BadInput: there is no policy of that name, the global batch does not give every worker its least share, or its
            micro-batches are no good.
    """
    check_batch(spec, minimum)
    return POLICIES[known(spec.batch_policy, list(POLICIES), "batch policy")](spec, minimum)
