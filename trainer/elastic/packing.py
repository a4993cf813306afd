"""Nested plain values and tensors as bytes, and back: a JSON header and the tensors' raw contents, as in safetensors.

What comes over a network is never unpickled: reading this runs no code, whatever the bytes are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hetopt.core.errors import RunFailed

_LENGTH_BYTES = 8
_TYPES = {
    str(kind).removeprefix("torch."): kind
    for kind in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}


def pack(value: Any) -> Tensor:
    """Nested dictionaries, lists, tuples, tensors, numbers, texts and None as a 1-D tensor of bytes.

    Raises:
        TypeError: something else is in it.
    """
    tensors: list[Tensor] = []
    header = json.dumps(_described(value, tensors)).encode()
    parts = [torch.frombuffer(bytearray(len(header).to_bytes(_LENGTH_BYTES, "little") + header), dtype=torch.uint8)]
    parts += [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors if tensor.numel()]
    return torch.cat(parts)


def unpack(data: Tensor) -> Any:
    """What `pack` was given; tensors are copies, on the CPU.

    Raises:
        RunFailed: these are no bytes of `pack`.
    """
    raw = data.contiguous()
    try:
        length = int.from_bytes(bytes(raw[:_LENGTH_BYTES].tolist()), "little")
        end = _LENGTH_BYTES + length
        header = json.loads(raw[_LENGTH_BYTES:end].numpy().tobytes().decode())
        value, used = _restored(header, raw, end)
    except (ValueError, KeyError, TypeError, RuntimeError, OverflowError, IndexError, RecursionError):
        raise RunFailed("the state that another worker sent cannot be read.") from None
    if used != raw.numel():
        raise RunFailed("the state that another worker sent is incomplete.")
    return value


def _described(value: Any, tensors: list[Tensor]) -> Any:
    """JSON for a value; tensors are put aside, in the order in which they will follow."""
    if isinstance(value, Tensor):
        tensors.append(value.detach().cpu())
        return {"t": [str(value.dtype).removeprefix("torch."), list(value.shape)]}
    if isinstance(value, Mapping):
        return {"d": [[_described(key, tensors), _described(each, tensors)] for key, each in value.items()]}
    if isinstance(value, list):
        return {"l": [_described(each, tensors) for each in value]}
    if isinstance(value, tuple):
        return {"u": [_described(each, tensors) for each in value]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"a {type(value).__name__} cannot be handed over")


def _restored(described: Any, raw: Tensor, at: int) -> tuple[Any, int]:
    """The value, and where the next tensor begins."""
    if not isinstance(described, dict):
        return described, at
    ((kind, inner),) = described.items()
    if kind == "t":
        dtype, shape = _TYPES[inner[0]], inner[1]
        size = torch.Size(shape).numel() * dtype.itemsize
        if any(extent < 0 for extent in shape) or at + size > raw.numel():
            raise ValueError("too short")
        return raw[at : at + size].clone().view(dtype).view(shape), at + size
    values: list[Any] = []
    for each in inner:
        if kind == "d":
            key, at = _restored(each[0], raw, at)
            one, at = _restored(each[1], raw, at)
            values.append((key, one))
        else:
            one, at = _restored(each, raw, at)
            values.append(one)
    return {"d": dict, "l": list, "u": tuple}[kind](values), at
