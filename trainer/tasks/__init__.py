"""The tasks that ship with hetopt, by name. Listing them imports neither torch nor the tasks."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

BUNDLED: Mapping[str, str] = MappingProxyType(
    {
        "digits": "hetopt.trainer.tasks.digits:digits",
        "resnet20-cifar10": "hetopt.trainer.tasks.vision:resnet20_cifar10",
        "resnet101-cifar10": "hetopt.trainer.tasks.vision:resnet101_cifar10",
        "vgg11-cifar10": "hetopt.trainer.tasks.vision:vgg11_cifar10",
        "vgg16-cifar100": "hetopt.trainer.tasks.vision:vgg16_cifar100",
        "lstm-small": "hetopt.trainer.tasks.language:lstm_small",
        "lstm-ptb": "hetopt.trainer.tasks.language:lstm_ptb",
    }
)
"""Name of a bundled task -> where it is defined, as ``module:attribute``."""
