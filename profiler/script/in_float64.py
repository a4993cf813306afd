"""A script in float64 where it says float32: two scripts that differ by more there differ by more than rounding."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _push_mode
from torch.utils._pytree import tree_map

FLOAT64 = "float64"
_OURS = "hetopt"


class Float64(TorchFunctionMode):
    """What the script calls torch with, and what it gets, is float64 in the place of float32.

    What hetopt's own modules call stays as it is. A narrower type that the script asks for stays, too.
    """

    def begin(self) -> None:
        """From here on, as long as this process lives."""
        torch.set_default_dtype(torch.float64)
        _push_mode(self)  # type: ignore[no-untyped-call]  # torch's gap

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Every call comes by here."""
        kwargs = kwargs or {}
        if _is_ours():
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name == "float":
            func = Tensor.double
        changes = (name.endswith("_") and not name.endswith("__")) or name in ("__set__", "__setitem__", "__get__")
        if not changes and "out" not in kwargs:
            args, kwargs = tree_map(_widened, (tuple(args), dict(kwargs)))
        return tree_map(_widened_result, func(*args, **kwargs)) if not changes else func(*args, **kwargs)


def _is_ours() -> bool:
    """Whether the call is of a module of hetopt's, which does more than listen to another's."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_name == TorchFunctionMode.__torch_function__.__name__:
        frame = frame.f_back
    return frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == _OURS


def _widened(one: Any) -> Any:
    """Of an argument."""
    if one is torch.float32:
        return torch.float64
    return one.double() if _is_narrow(one) else one


def _widened_result(one: Any) -> Any:
    if not _is_narrow(one):
        return one
    return one.detach().double().requires_grad_(one.requires_grad) if one.is_leaf else one.double()


def _is_narrow(one: Any) -> bool:
    return type(one) is Tensor and one.dtype is torch.float32
