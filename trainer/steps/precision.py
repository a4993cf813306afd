"""Number formats of the forward and backward pass, and the loss scale that fp16 needs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from hetopt.core.precision import Precision

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Autocast:
    """Chooses the number format of each operator (parameters and gradients stay fp32)."""

    device_type: str
    precision: Precision

    def __call__(self) -> AbstractContextManager[object]:
        """A context for one forward pass."""
        dtype = _DTYPES.get(self.precision)
        return contextlib.nullcontext() if dtype is None else torch.autocast(self.device_type, dtype=dtype)


AMPERE = (8, 0)
"""Compute capability from which NVIDIA's matrix units do TF32 and bf16; before, torch does bf16 in software."""


def lacks_units(device: torch.device, precision: Precision) -> bool:
    """Whether a device would compute in a precision without any gain."""
    if device.type != "cuda":
        return precision == "tf32"
    return precision in ("tf32", "bf16") and torch.cuda.get_device_capability(device) < AMPERE


@contextlib.contextmanager
def matrices_in(precision: Precision) -> Iterator[None]:
    """Products of fp32 matrices are TF32's meanwhile, backward too, if that is the precision; else as usual.

    GPUs before Ampere have no such units, and compute in fp32.
    """
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    before = products.allow_tf32, convolutions.allow_tf32
    if precision == "tf32":
        products.allow_tf32 = convolutions.allow_tf32 = True
    try:
        yield
    finally:
        products.allow_tf32, convolutions.allow_tf32 = before


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """The factor that keeps small fp16 gradients above zero (Micikevicius et al. 2018, section 3.2).

    It halves when a gradient overflows and doubles after ``growth_interval`` steps without overflow. PyTorch's
    GradScaler does the same, but decides from this worker's gradient; here it is decided from the sum, which all
    workers hold, so that they skip the same steps and stay identical.
    """

    value: float = 2.0**16
    clean_steps: int = 0
    growth_interval: int = 2000

    def after(self, *, finite: bool) -> LossScale:
        """The scale after a step whose summed gradient was, or was not, finite."""
        if not finite:
            return LossScale(value=max(1.0, self.value / 2), growth_interval=self.growth_interval)
        if self.clean_steps + 1 >= self.growth_interval:
            return LossScale(value=self.value * 2, growth_interval=self.growth_interval)
        return LossScale(value=self.value, clean_steps=self.clean_steps + 1, growth_interval=self.growth_interval)

    def to_dict(self) -> dict[str, float]:
        """The scale as plain JSON."""
        return {"value": self.value, "clean_steps": self.clean_steps, "growth_interval": self.growth_interval}

    @classmethod
    def from_dict(cls, data: Mapping[str, float]) -> LossScale:
        """The scale that `to_dict` gave."""
        return cls(
            value=float(data["value"]),
            clean_steps=int(data["clean_steps"]),
            growth_interval=int(data["growth_interval"]),
        )


def initial_loss_scale(precision: Precision) -> LossScale | None:
    """The scale to start from; only fp16 needs one."""
    return LossScale() if precision == "fp16" else None
