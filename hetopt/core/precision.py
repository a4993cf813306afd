"""What a step multiplies matrices in; parameters, gradients and their sums stay fp32 (mixed precision, 1710.03740)."""

from __future__ import annotations

from typing import Literal

Precision = Literal["fp32", "tf32", "bf16", "fp16"]
"""``fp32`` is torch's default, ``tf32`` its switch for products on NVIDIA's Ampere and later, ``bf16`` and ``fp16`` its
autocast, the latter with a loss scale."""
