"""Where a script's training loop is heard: its loaders, backward passes and optimizers.

Optimizers by torch's own global hooks; loaders and backward passes have none, so the functions that every script goes
through are wrapped. Nothing is computed in another way than the script would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import DataLoader

from hetopt.trainer.ddp.lifetime import keep_modules

if TYPE_CHECKING:
    from hetopt.profiler.script.observer import Observer

PAST_THE_END = "Tried to step "
"""How OneCycleLR begins to say that it was given no more steps. Measuring does more of them than the script would have
done, so its schedule then stays at its end."""


def listen(observer: Observer) -> None:
    """Let an observer hear everything from here on; for the rest of the process."""
    register_optimizer_step_pre_hook(lambda optimizer, *_: observer.begins_step(optimizer))
    register_optimizer_step_post_hook(lambda optimizer, *_: observer.ended_step(optimizer))
    observer.hook = nn.modules.module.register_module_forward_pre_hook(lambda module, inputs: observer.calls(inputs))
    _replace(DataLoader, "__iter__", lambda iterate: lambda loader: _passes(loader, iterate, observer))
    _replace(torch.autograd, "backward", lambda backward: _backward(backward, observer))
    _replace(LRScheduler, "step", lambda step: _step_of_schedule(step, observer))
    be_alone()


def be_alone() -> None:
    """A script that makes a process group, or starts a process for each GPU, is its only worker from here on."""
    keep_modules()
    _replace(dist, "init_process_group", _alone)
    for name in ("spawn", "start_processes"):
        _replace(torch.multiprocessing, name, lambda start: _here)


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    setattr(owner, name, make(getattr(owner, name)))


def _passes(loader: DataLoader[Any], iterate: Callable[[DataLoader[Any]], Iterator[Any]], heard: Observer) -> Any:
    heard.begins_pass(loader)
    batches = iterate(loader)
    while True:
        heard.asks_for_batch()
        try:
            batch = next(batches)
        except StopIteration:
            return
        heard.got_batch(loader, batch)
        yield batch


def _backward(backward: Callable[..., None], heard: Observer) -> Callable[..., None]:
    def passed(*arguments: Any, **options: Any) -> None:
        heard.begins_backward()
        backward(*arguments, **options)
        heard.ended_backward()

    return passed


def _step_of_schedule(step: Callable[..., None], heard: Observer) -> Callable[..., None]:
    def stepped(schedule: LRScheduler, *arguments: Any, **options: Any) -> None:
        if not heard.schedules():
            return
        try:
            step(schedule, *arguments, **options)
        except ValueError as error:
            if not str(error).startswith(PAST_THE_END):
                raise

    return stepped


def _alone(init: Callable[..., None]) -> Callable[..., None]:
    def begun(backend: str | None = None, *arguments: Any, **options: Any) -> None:
        init(backend, store=HashStore(), rank=0, world_size=1)  # and nothing listens

    return begun


def _here(fn: Callable[..., None], args: tuple[Any, ...] = (), *_: Any, **__: Any) -> None:
    fn(0, *args)
