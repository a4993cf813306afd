"""What torch is called with while a script computes a batch, and where its samples are in what it is given."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode, _push_mode

REDUCTIONS = {
    "mean", "std", "var", "sum", "nansum", "nanmean", "median", "quantile", "norm", "vector_norm", "var_mean",
    "std_mean", "logsumexp", "prod", "bincount", "histc", "count_nonzero", "max", "min", "amax", "amin", "aminmax",
}  # fmt: skip
CHOICES = {"topk": 2, "kthvalue": 2, "sort": 1, "argsort": 1, "msort": 1}
"""They compare values along a dimension, the last unless their argument at this place says another."""

_MULTIPLES = 2
"""Of so few rows almost everything has a multiple."""

SHAPED = {"expand_as", "view_as", "reshape_as", "type_as", "to"}
"""They take no value of their second tensor."""

MAKERS = {"zeros", "ones", "empty", "full", "arange", "eye", "linspace", "rand", "randn", "randint", "randperm"}
"""They take sizes of what they are given, and no values (but for one)."""

_DIM_AT = {"norm": 2, "quantile": 2, "vector_norm": 2}
"""Place of the dimension among the arguments, where it is not the second."""


class Listener(TorchFunctionMode):
    """Hears the script's calls of torch, for a few batches.

    Args:
        rows: samples that the script was given.
        is_sure: whether they are only where a dimension is as long as they are many, not several times that.

    Attributes:
        rows: of the present batch.
        is_listening: whether the calls are the script's.
    """

    def __init__(self, rows: int, *, is_sure: bool = False) -> None:
        super().__init__()
        self._is_sure = is_sure
        self.rows = rows
        self.is_listening = True

    @staticmethod
    def can_listen(model: nn.Module) -> bool:
        """Whether nothing is compiled, which would be compiled anew for it."""
        frames: Any = sys.modules.get("torch._dynamo.eval_frame")
        compiles = any(one is not None for one in getattr(frames, "cached_backends", {}).values())
        return not compiles and not any(
            hasattr(one, "_orig_mod") or getattr(one, "_compiled_call_impl", None) is not None
            for one in model.modules()
        )

    def begin(self) -> None:
        """Listen from here on."""
        _push_mode(self)  # type: ignore[no-untyped-call]  # torch's gap

    def end(self) -> bool:
        """Listen no more.

        Returns:
            Whether it is out of torch's way; the script may have put something above it meanwhile.
        """
        self.is_listening = False
        if _get_current_function_mode() is not self:  # type: ignore[no-untyped-call]  # torch's gap
            return False
        _pop_mode()  # type: ignore[no-untyped-call]  # likewise
        return True

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """See torch: every call of the script comes by here."""
        named = dict(kwargs or {})
        result = func(*args, **named)
        if self.is_listening:
            with torch._C.DisableTorchFunction():  # no other listener hears this
                self.hear(getattr(func, "__name__", ""), args, named, result)
        return result

    def hear(self, name: str, args: Sequence[Any], named: Mapping[str, Any], result: Any) -> None:
        """The script has called torch.

        Args:
            name: of the function.
            args: of the call.
            named: likewise.
            result: of it.
        """
        raise NotImplementedError

    def row_dims(self, tensor: Tensor) -> list[int]:
        """Dimensions in which the samples may be: the first or, of sequences that come first, the second. Where none
        is as long as they are many, each may have several rows (its tokens)."""
        sizes = tensor.shape[:2]
        exact = [dim for dim, size in enumerate(sizes) if size == self.rows]
        if exact or self._is_sure or self.rows <= _MULTIPLES:
            return exact
        return [dim for dim, size in enumerate(sizes) if size and size % self.rows == 0][:1]

    def selects_rows(self, args: Sequence[Any]) -> bool:
        """Whether this worker's rows are taken of what all have: by `split`."""
        index = args[1][0] if isinstance(args[1], tuple) and args[1] else args[1]
        if isinstance(index, slice) and isinstance(index.start, int) and isinstance(index.stop, int):
            return index.step is None and index.stop - index.start == self.rows
        return isinstance(index, Tensor) and index.dtype == torch.int64 and index.shape[:1] == (self.rows,)

    def is_over_rows(self, name: str, args: Sequence[Any], named: Mapping[str, Any]) -> bool:
        """Whether a call reduces or compares over the samples."""
        own = args[0] if args else named.get("input")
        if not isinstance(own, Tensor) or unwrapped(own).dim() > own.dim():
            return False
        rows = self.row_dims(own)
        if not rows:
            return False
        at = CHOICES.get(name, _DIM_AT.get(name, 1))
        dim = named.get("dim", named.get("axis", args[at] if len(args) > at else -1 if name in CHOICES else None))
        if isinstance(dim, Tensor):  # the larger of two
            return False
        dims = range(own.dim()) if dim is None else dim if isinstance(dim, (list, tuple)) else [dim]
        return set(rows) <= {one % own.dim() for one in dims}


def unwrapped(tensor: Tensor) -> Tensor:
    """The tensor inside those of ``torch.func``, which has a dimension more where they are mapped over one."""
    inside = torch._C._functorch
    while inside.is_functorch_wrapped_tensor(tensor):
        tensor = inside.get_unwrapped(tensor)
    return tensor


def tensors_in(given: Any) -> Iterator[Tensor]:
    """Those in arguments or results, however deep."""
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, Mapping):
        yield from tensors_in(list(given.values()))
    elif isinstance(given, (list, tuple)):
        for one in given:
            yield from tensors_in(one)
