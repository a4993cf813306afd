"""What a model needs of a local batch: layers that normalise over the samples of a batch cannot do that with one."""

from __future__ import annotations

from torch import nn

from hetopt.core.batch_partition import least_within

LEAST_SAMPLES = 2
"""Of which a mean and a variance can be taken."""


def batch_norms(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a model that normalise over the samples of a batch."""
    return [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]


def least_samples(model: nn.Module) -> int:
    """Samples that a worker needs in a step, whatever the batch: two for BatchNorm, else one."""
    return LEAST_SAMPLES if batch_norms(model) else 1


def least_share(model: nn.Module, batch_size: int, workers: int) -> int:
    """Samples that every worker is to take of a batch: what the model needs, where the batch has as many."""
    return least_within(least_samples(model), batch_size, workers)


def normalises_apart(model: nn.Module) -> bool:
    """Return whether BatchNorm in a model normalises each worker's samples by themselves."""
    return any(not isinstance(norm, nn.SyncBatchNorm) for norm in batch_norms(model))
