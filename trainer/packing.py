"""Nested plain values and tensors as one safetensors file, in memory or on disk, and back.

What comes from a disk or over a network is never unpickled: reading this runs no code, whatever the bytes are.
Tensors are numbered in the order in which they are met; one more, `_TREE`, holds the JSON of everything around them.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save, save_file
from torch import Tensor

from hetopt.core.run_status import LOG_ROOM_BYTES

_TREE = "tree"


def pack(value: Any) -> bytes:
    """Nested dictionaries, lists, tuples, tensors, numbers, texts and None as bytes.

    A tensor that is one number expanded to a shape takes the room of that number.

    Raises:
        TypeError: something else is in it.
    """
    return save(_separate(_flattened(value).items()))


def save_packed(path: Path, value: Any) -> None:
    """The same into a file.

    Raises:
        TypeError: something else is in it.
        OSError: the disk refuses.
    """
    save_tensors(path, _flattened(value).items())


def save_tensors(path: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Named tensors as a file, which is its owner's alone.

    Tied parameters are written under each of their names, so that the names are those of the state dictionary.

    Raises:
        OSError: the disk refuses, or would have no room left for the lines of the run's log.
    """
    kept = _separate(tensors)
    if shutil.disk_usage(path.parent).free < sum(tensor.nbytes for tensor in kept.values()) + LOG_ROOM_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    try:
        # Not `save` and a write: that holds up all other threads (of training) for as long as it copies.
        save_file(kept, path)
        path.chmod(0o600)
    except SafetensorError as error:
        told = re.search(r"os error (\d+)", str(error))
        number = int(told[1]) if told else errno.EIO
        raise OSError(number, os.strerror(number), str(path)) from None


def unpack(data: bytes) -> Any:
    """What `pack` was given; tensors are copies, on the CPU.

    Raises:
        ValueError: these are no bytes of `pack`.
    """
    try:
        tensors = load(data)
        return _restored(json.loads(tensors[_TREE].numpy().tobytes()), tensors)
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError, RecursionError):
        raise ValueError("these bytes are not what was packed") from None


def _separate(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """As safetensors takes them: on the CPU, contiguous, and no two in the same memory."""
    found: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors:
        kept = tensor.detach().cpu().contiguous()
        if kept.untyped_storage().data_ptr() in storages:
            kept = kept.clone()
        storages.add(kept.untyped_storage().data_ptr())
        found[name] = kept
    return found


def _flattened(value: Any) -> dict[str, Tensor]:
    """All tensors of a value, and the JSON of everything around them."""
    tensors: dict[str, Tensor] = {}
    tree = json.dumps(_described(value, tensors)).encode()
    return {**tensors, _TREE: torch.frombuffer(bytearray(tree), dtype=torch.uint8)}


def _described(value: Any, tensors: dict[str, Tensor]) -> Any:
    """JSON for a value; its tensors are put aside under numbers."""
    if isinstance(value, Tensor):
        name = str(len(tensors))
        expanded = value.numel() > 1 and not any(value.stride())
        tensors[name] = value[(0,) * value.dim()] if expanded else value
        return {"t": [name, list(value.shape)]}
    if isinstance(value, Mapping):
        return {"d": [[_described(key, tensors), _described(each, tensors)] for key, each in value.items()]}
    if isinstance(value, list):
        return {"l": [_described(each, tensors) for each in value]}
    if isinstance(value, tuple):
        return {"u": [_described(each, tensors) for each in value]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"a {type(value).__name__} cannot be packed")


def _restored(described: Any, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(described, dict):
        return described
    ((kind, inner),) = described.items()
    if kind == "t":
        name, shape = inner
        return tensors[name].expand(shape)
    if kind == "d":
        return {_restored(key, tensors): _restored(each, tensors) for key, each in inner}
    return {"l": list, "u": tuple}[kind](_restored(each, tensors) for each in inner)
