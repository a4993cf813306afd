"""Number formats of the forward and backward pass, and the loss scale that half precision needs."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal

import torch

PrecisionName = Literal["fp32", "bf16", "fp16"]
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Autocast:
    """Chooses the number format of each operator (parameters and gradients stay fp32)."""

    device_type: str
    precision: PrecisionName

    def __call__(self) -> AbstractContextManager[object]:
        """A context for one forward pass."""
        if self.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device_type, dtype=_DTYPES[self.precision])


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


def initial_loss_scale(precision: PrecisionName) -> LossScale | None:
    """The scale to start from; only fp16 needs one."""
    return LossScale() if precision == "fp16" else None
