"""Where a script's training loop is heard: its loaders, backward passes and optimizers.

Optimizers by torch's own global hooks; loaders and backward passes have none, so the functions that every script goes
through are wrapped. Nothing is computed in another way than the script would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import DataLoader

PAST_THE_END = "Tried to step "
"""How OneCycleLR begins to say that it was given no more steps. Measuring does more of them than the script would have
done, so its schedule then stays at its end."""


class Listener(Protocol):
    """Is told what a script does, in the script's own thread."""

    def makes_loader(self, loader: DataLoader[Any]) -> None: ...
    def makes_optimizer(self) -> None: ...
    def asks_for_batch(self, loader: DataLoader[Any]) -> None: ...
    def got_batch(self, loader: DataLoader[Any], batch: Any) -> None: ...
    def begins_pass(self, loader: DataLoader[Any]) -> None: ...
    def begins_backward(self) -> None: ...
    def ended_backward(self, loss: Tensor | None) -> None: ...
    def scales_loss(self, loss: Tensor) -> None: ...
    def clips(self, norm: float) -> None: ...
    def begins_step(self, optimizer: Optimizer, *, by_closure: bool) -> None: ...
    def ended_step(self, optimizer: Optimizer) -> None: ...
    def schedules(self) -> bool:
        """Whether the learning rate may change now."""
        ...


def listen(listener: Listener) -> None:
    """Hear everything from here on; for the rest of the process."""
    register_optimizer_step_pre_hook(
        lambda optimizer, arguments, options: listener.begins_step(
            optimizer, by_closure=len(arguments) > 1 or options.get("closure") is not None
        )
    )
    register_optimizer_step_post_hook(lambda optimizer, arguments, options: listener.ended_step(optimizer))
    _replace(DataLoader, "__init__", lambda make: _made(make, listener.makes_loader))
    _replace(Optimizer, "__init__", lambda make: _made(make, lambda optimizer: listener.makes_optimizer()))
    _replace(DataLoader, "__iter__", lambda iterate: lambda loader: _passes(loader, iterate, listener))
    _replace(torch.autograd, "backward", lambda backward: _backward(backward, listener))
    _replace(LRScheduler, "step", lambda step: _step_of_schedule(step, listener))
    _replace(torch.amp.GradScaler, "scale", lambda scale: _scale(scale, listener))
    for module in (nn.utils, nn.utils.clip_grad):
        _replace(module, "clip_grad_norm_", lambda clip: _clip(clip, listener))
    be_alone()


def be_alone() -> None:
    """A script that makes a process group, or starts a process for each GPU, is its only worker from here on."""
    _replace(dist, "init_process_group", _alone)
    for name in ("spawn", "start_processes"):
        _replace(torch.multiprocessing, name, lambda start: _here)


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    setattr(owner, name, make(getattr(owner, name)))


def _made(make: Callable[..., None], tell: Callable[[Any], None]) -> Callable[..., None]:
    @wraps(make)
    def made(thing: Any, *arguments: Any, **options: Any) -> None:
        make(thing, *arguments, **options)
        tell(thing)

    return made


def _passes(loader: DataLoader[Any], iterate: Callable[[DataLoader[Any]], Iterator[Any]], heard: Listener) -> Any:
    heard.begins_pass(loader)
    batches = iterate(loader)
    while True:
        heard.asks_for_batch(loader)
        try:
            batch = next(batches)
        except StopIteration:
            return
        heard.got_batch(loader, batch)
        yield batch


def _backward(backward: Callable[..., None], heard: Listener) -> Callable[..., None]:
    def told(tensors: Any, *arguments: Any, **options: Any) -> None:
        heard.begins_backward()
        backward(tensors, *arguments, **options)
        first = tensors if isinstance(tensors, Tensor) else tensors[0] if tensors else None
        heard.ended_backward(first.detach() if isinstance(first, Tensor) and first.numel() == 1 else None)

    return told


def _step_of_schedule(step: Callable[..., None], heard: Listener) -> Callable[..., None]:
    def told(schedule: LRScheduler, *arguments: Any, **options: Any) -> None:
        if not heard.schedules():
            return
        try:
            step(schedule, *arguments, **options)
        except ValueError as error:
            if not str(error).startswith(PAST_THE_END):
                raise

    return told


def _scale(scale: Callable[..., Any], heard: Listener) -> Callable[..., Any]:
    def told(scaler: Any, outputs: Any) -> Any:
        if isinstance(outputs, Tensor):
            heard.scales_loss(outputs.detach())
        return scale(scaler, outputs)

    return told


def _clip(clip: Callable[..., Tensor], heard: Listener) -> Callable[..., Tensor]:
    def told(*arguments: Any, **options: Any) -> Tensor:
        norm = clip(*arguments, **options)
        heard.clips(float(norm))
        return norm

    return told


def _alone(init: Callable[..., None]) -> Callable[..., None]:
    def told(backend: str | None = None, *arguments: Any, **options: Any) -> None:
        init(backend, store=HashStore(), rank=0, world_size=1)  # and nothing listens

    return told


def _here(fn: Callable[..., None], args: tuple[Any, ...] = (), *_: Any, **__: Any) -> None:
    fn(0, *args)
