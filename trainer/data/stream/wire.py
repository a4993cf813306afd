"""How a sample travels: a JSON header that says what its tensors are like, and their bytes. Reading one runs no code.

    header  {"tuple": [{"dtype": "float32", "shape": [3, 32, 32]}, {"dtype": "int64", "shape": []}]}
    data    the tensors of one sample one after another, little-endian, row by row

Samples of one header are packed and unpacked together, as columns of one table of bytes. So this is not safetensors,
which the rest of hetopt uses (`hetopt.trainer.packing`): a file for each sample takes 70 times as long to write and 13
times as long to read (CIFAR-10's images: 330 and 34 µs a sample).
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hetopt.core.errors import BadInput, RunFailed
from hetopt.trainer.data.fetch import Batch, leaves_of

_DTYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
_DEEPEST = 8
_MOST_BYTES = 512 * 1024 * 1024  # the largest value that Redis keeps

assert sys.byteorder == "little", "samples travel in little-endian order"


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """One tensor of a sample."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements of the tensor."""
        return math.prod(self.shape)

    @property
    def wire_bytes(self) -> int:
        """Bytes of the tensor as it is sent."""
        return self.numel * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, kw_only=True)
class Header:
    """What the tensors of a sample are like.

    Attributes:
        tree: as JSON has it: a leaf, or leaves nested in ``tuple``, ``list`` or ``dict``.
        leaves: in the order in which their bytes follow each other.
    """

    tree: Any
    leaves: tuple[Leaf, ...]

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample's data as it is sent."""
        return sum(leaf.wire_bytes for leaf in self.leaves)

    def to_bytes(self) -> bytes:
        """The header as it is sent: JSON in UTF-8."""
        return json.dumps(self.tree, separators=(",", ":")).encode()

    def __str__(self) -> str:
        return ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in self.leaves)


def header_of(batch: Batch) -> Header:
    """What the samples of a batch are like.

    Raises:
        BadInput: it holds something that cannot travel.
    """
    tree = _tree_of(batch)
    return Header(tree=tree, leaves=tuple(_leaves_of(tree)))


def pack(batch: Batch) -> tuple[bytes, list[bytes]]:
    """The header, and the data of each sample.

    Raises:
        BadInput: the batch holds something that cannot travel, or tensors of different lengths.
    """
    header = header_of(batch)
    columns = [_bytes_of(tensor) for tensor in leaves_of(batch) if isinstance(tensor, Tensor)]
    if len({len(column) for column in columns}) != 1:
        raise BadInput("The tensors of a batch must have one row a sample, all of them.")
    table = np.ascontiguousarray(np.concatenate(columns, axis=1))
    whole, size = table.tobytes(), table.shape[1]
    return header.to_bytes(), [whole[first : first + size] for first in range(0, len(whole), size)]


def unpack(header: Header, data: Sequence[bytes]) -> Batch:
    """The batch of these samples.

    Raises:
        RunFailed: a sample has another length than the header says.
    """
    size = header.sample_bytes
    if any(len(item) != size for item in data):
        wrong = next(len(item) for item in data if len(item) != size)
        raise RunFailed(
            f"a sample of the stream has {wrong} bytes; its header says {size} ({header}).",
            hint="see what else writes to the stream",
        )
    table = np.frombuffer(b"".join(data), dtype=np.uint8).reshape(len(data), size)
    tensors: list[Tensor] = []
    first = 0
    for leaf in header.leaves:
        # A copy: what came over the network cannot be written to, and tensors can.
        column = table[:, first : first + leaf.wire_bytes].copy()
        first += leaf.wire_bytes
        tensors.append(torch.from_numpy(column.view(leaf.dtype).reshape(len(data), *leaf.shape)))
    return _nested(header.tree, iter(tensors))


@lru_cache(maxsize=64)
def read_header(text: bytes) -> Header:
    """The header that travelled.

    Raises:
        RunFailed: it is none.
    """
    try:
        tree = json.loads(text)
        leaves = tuple(_leaves_of(tree))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        leaves = ()
    if not leaves or not 0 < sum(leaf.wire_bytes for leaf in leaves) <= _MOST_BYTES:
        raise RunFailed(
            f"a sample of the stream has a header that says nothing: {text[:60]!r}.",
            hint="write samples with hetopt's StreamWriter, or as docs/streams.md says",
        )
    return Header(tree=tree, leaves=leaves)


def _tree_of(batch: Batch, depth: int = 0) -> Any:
    if isinstance(batch, Tensor):
        dtype = str(batch.dtype).removeprefix("torch.")
        if dtype not in _DTYPES or batch.dim() < 1:
            raise BadInput(
                f"A {dtype} tensor with {batch.dim()} dimensions cannot travel as a sample.",
                hint=f"give tensors whose first dimension is the sample, of {', '.join(_DTYPES)}",
            )
        return {"dtype": dtype, "shape": list(batch.shape[1:])}
    if depth < _DEEPEST:
        if isinstance(batch, dict):
            return {"dict": {str(key): _tree_of(value, depth + 1) for key, value in batch.items()}}
        if isinstance(batch, (tuple, list)):
            kind = "list" if isinstance(batch, list) else "tuple"
            return {kind: [_tree_of(value, depth + 1) for value in batch]}
    raise BadInput(f"A {type(batch).__name__} cannot travel as a sample.", hint="give tensors, nested as you like")


def _leaves_of(tree: Any, depth: int = 0) -> Iterator[Leaf]:
    if depth > _DEEPEST:
        raise ValueError("nested too deeply")
    if "dtype" in tree:
        shape = tuple(tree["shape"])
        if tree["dtype"] not in _DTYPES or not all(type(n) is int and 0 <= n <= _MOST_BYTES for n in shape):
            raise ValueError("no tensor")
        yield Leaf(dtype=tree["dtype"], shape=shape)
        return
    (kind,) = tree
    children = tree[kind].values() if kind == "dict" else tree[kind]
    if kind not in ("dict", "list", "tuple"):
        raise ValueError("no nesting")
    for child in children:
        yield from _leaves_of(child, depth + 1)


def _nested(tree: Any, tensors: Iterator[Tensor]) -> Batch:
    if "dtype" in tree:
        return next(tensors)
    if "dict" in tree:
        return {key: _nested(child, tensors) for key, child in tree["dict"].items()}
    if "list" in tree:
        return [_nested(child, tensors) for child in tree["list"]]
    return tuple(_nested(child, tensors) for child in tree["tuple"])


def _bytes_of(tensor: Tensor) -> npt.NDArray[np.uint8]:
    """One row of bytes a sample."""
    flat = tensor.detach().cpu().contiguous().reshape(len(tensor), -1)
    return flat.numpy().view(np.uint8).reshape(len(tensor), -1)
