"""Which batch policy a run has, and the shares and micro-batches that it begins with."""

from __future__ import annotations

from typing import Any

from hetopt.core.errors import BadInput
from hetopt.core.local_batch_sizes import allocated_micro_batch_size, check_batch
from hetopt.core.run_spec import RunSpec
from hetopt.trainer.policies.allocation import AllocateMicroBatches
from hetopt.trainer.policies.dynamic import DynamicShares, omnilearn
from hetopt.trainer.policies.keep import KeepShares
from hetopt.trainer.policies.model import ModelShares
from hetopt.trainer.policies.policy import BatchPolicy
from hetopt.trainer.policies.proportional import ProportionalShares
from hetopt.trainer.policies.stream_rate import RateShares


def choose_policy(spec: RunSpec, *, minimum: int) -> BatchPolicy[Any]:
    """The policy of a run. What its state is made of is the policy's own affair; `BatchPolicy.initial` tells its type.

    Args:
        spec: of the run.
        minimum: least share of a worker, in samples.

    Raises:
        BadInput: the global batch does not give every worker its least share, or its micro-batches are no good.
    """
    check_batch(spec, minimum)
    match spec.batch_policy:
        case "uniform" | "static":
            return KeepShares()
        case "proportional":
            return ProportionalShares(minimum=minimum)
        case "dynamic":
            return DynamicShares(minimum=minimum)
        case "omnilearn":
            return omnilearn(minimum=minimum)
        case "allocation":
            size = allocated_micro_batch_size(spec)
            if size < minimum:
                raise BadInput(
                    f"Micro-batches of {size} samples are too small: this model needs at least {minimum} at a time.",
                    hint=f"choose a micro-batch size of at least {minimum} that divides the global batch",
                )
            return AllocateMicroBatches(micro_batch_size=size)
        case "model":
            return ModelShares(minimum=minimum)
        case "rate":
            assert spec.stream is not None, "the spec checks it"
            return RateShares(stream=spec.stream, minimum=minimum)
