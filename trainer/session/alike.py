"""What has to be the same on all workers: taken from rank 0 when a session begins, compared while it goes on."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from hetopt.core.errors import BadInput, HetoptError, RunFailed
from hetopt.trainer.agreement import gather_numbers
from hetopt.trainer.comm.peers import workers
from hetopt.trainer.likeness import CLOSE, Groups, is_option, options_of, parameters_of, tensors_mark
from hetopt.trainer.session.several import Optimizers


def take_parameters(model: nn.Module, optimizer: Groups) -> None:
    """Take rank 0's parameters and buffers, also those that only the optimizer knows."""
    known = {id(one) for one in model.parameters()}
    others = [one for group in optimizer.param_groups for one in group["params"] if id(one) not in known]
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers(), *others]:
            _broadcast(tensor)


def take_optimizer(optimizer: Optimizer, rank: int) -> None:
    """Take rank 0's options and state: a checkpoint that only rank 0 has loaded is everybody's.

    Raises:
        BadInput: the state holds other things than numbers and tensors, or the optimizers are not of one kind.
    """
    layout = _told(_layout(optimizer) if rank == 0 else None)
    if layout["kind"] != type(optimizer).__name__ or layout["sizes"] != _sizes(optimizer):
        raise BadInput(
            f"The optimizer is {type(optimizer).__name__} of groups of {_sizes(optimizer)} parameters, and worker 0's "
            f"{layout['kind']} of {layout['sizes']}.",
            hint="make the same optimizer of the same parameters on every worker",
        )
    if layout["problem"]:
        raise BadInput(
            f"The optimizer's state ({layout['problem']}) is no number or tensor, so that the workers cannot take over "
            "worker 0's.",
            hint="begin the session before the optimizer's first step",
        )
    for group, options in zip(optimizer.param_groups, layout["options"], strict=True):
        for key, value in options.items():
            if isinstance(group.get(key), Tensor):
                with torch.no_grad():
                    _broadcast(group[key])
            else:
                group[key] = tuple(value) if isinstance(value, list) else value
    parameters = parameters_of(optimizer)
    if rank:
        optimizer.state.clear()
    for index, entries in layout["state"]:
        own = optimizer.state[parameters[index]]
        for key, (kind, shape, beside) in entries.items():
            if kind == "number":
                own[key] = shape
                continue
            if rank:
                device = parameters[index].device if beside else "cpu"
                own[key] = torch.empty(shape, dtype=getattr(torch, kind), device=device)
            _broadcast(own[key])


def _broadcast(tensor: Tensor) -> None:
    staged = tensor.detach().cpu().contiguous()
    if staged.is_complex():
        staged = torch.view_as_real(staged)
    dist.broadcast(staged, src=0)
    tensor.detach().copy_(torch.view_as_complex(staged) if tensor.is_complex() else staged)


def _told(layout: dict[str, Any] | None) -> dict[str, Any]:
    """What rank 0 says, as JSON."""
    data = b"" if layout is None else json.dumps(layout).encode()
    length = torch.tensor([len(data)])
    dist.broadcast(length, src=0)
    text = torch.frombuffer(bytearray(data or bytes(int(length))), dtype=torch.uint8)
    dist.broadcast(text, src=0)
    told: dict[str, Any] = json.loads(bytes(text.tolist()))
    return told


def _layout(optimizer: Optimizer) -> dict[str, Any]:
    problem, state = "", []
    for index, parameter in enumerate(parameters_of(optimizer)):
        entries: dict[str, tuple[str, Any, bool]] = {}
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                beside = value.device == parameter.device
                entries[key] = (str(value.dtype).removeprefix("torch."), list(value.shape), beside)
            elif value is None or isinstance(value, (bool, int, float)):
                entries[key] = ("number", value, False)
            else:
                problem = f"{key}, a {type(value).__name__}"
        if entries:
            state.append((index, entries))
    options = [
        {key: 0.0 if isinstance(value, Tensor) else value for key, value in group.items() if is_option(value)}
        for group in optimizer.param_groups
    ]
    kind = type(optimizer).__name__
    return {"kind": kind, "sizes": _sizes(optimizer), "problem": problem, "options": options, "state": state}


def _sizes(optimizer: Optimizer) -> list[int]:
    return [len(group["params"]) for group in optimizer.param_groups]


def name_options(optimizer: Groups, step: int, world_size: int) -> HetoptError:
    """Which option of the optimizer is not the same on all workers; all of them ask."""
    own = options_of(optimizer)
    names = [name for name, _ in own]
    who, index, values = _first_difference([value for _, value in own], world_size, CLOSE)
    if index is None:
        return RunFailed(f"the workers' optimizers have other options at step {step}.", hint=_ALIKE)
    return RunFailed(
        f"{names[index]} is {values[who[0]]:g} on {workers(who)} and {_usual(values, who):g} on the others at step "
        f"{step}.",
        hint="drive schedulers by what all workers share: scheduler.step(run.mean(loss)) instead of the own loss",
    )


def name_structure(optimizer: Groups, names: dict[int, str], step: int, world_size: int) -> HetoptError:
    """Which parameter only some workers train; all of them ask."""
    parameters = parameters_of(optimizer)
    who, index, values = _first_difference([float(one.requires_grad) for one in parameters], world_size)
    if index is None:
        return RunFailed(f"the workers' optimizers have other numbers of parameters at step {step}.", hint=_ALIKE)
    name = names.get(id(parameters[index]), f"number {index} of the optimizer")
    does = "trains" if values[who[0]] else "does not train"
    return RunFailed(
        f"{workers(who)} {does} parameter {name} at step {step}, unlike the others.",
        hint="change requires_grad on all workers at the same step",
    )


_ALIKE = "run the same code on every worker, with the same arguments"


def check_replicas(
    named: Sequence[tuple[str, nn.Parameter]], optimizer: Optimizers | None, step: int, world_size: int
) -> None:
    """Compare parameters, gradients and optimizer state with the other workers, bit by bit.

    Args:
        named: the parameters.
        optimizer: about to step by the gradients; None: none is, and only parameters count.
        step: of the session.
        world_size: workers.

    Raises:
        RunFailed: some differ; all workers raise it.
    """
    of_each: dict[str, list[list[Tensor]]] = {"parameter {}": [[one] for _, one in named]}
    if optimizer is not None:
        states = [optimizer.state_of(one) for _, one in named]
        of_each["the gradient of {}"] = [_dense(one.grad) for _, one in named]
        of_each["the optimizer's state of {}"] = [
            [state[key] for key in sorted(state) if isinstance(state[key], Tensor)] for state in states
        ]
    marks = [float(tensors_mark(one for own in each for one in own)) for each in of_each.values()]
    rows = gather_numbers([float(len(named)), *marks], world_size)
    if all(row == rows[0] for row in rows):
        return
    if len({row[0] for row in rows}) > 1:
        raise RunFailed(f"the workers' models have other numbers of parameters at step {step}.", hint=_ALIKE)
    for what, each in of_each.items():
        who, index, _ = _first_difference([float(tensors_mark(own)) for own in each], world_size)
        if index is not None:
            raise RunFailed(
                f"{what.format(named[index][0])} is not the same on {workers(who)} as on the others at step {step}.",
                hint="change parameters and gradients by what all workers share (run.backward, run.mean), load "
                "checkpoints on every worker or before the session begins, and step with the same learning rate "
                "everywhere",
            )


def _dense(gradient: Tensor | None) -> list[Tensor]:
    if gradient is None:
        return [torch.tensor([torch.nan])]
    return [gradient if gradient.layout == torch.strided else gradient.to_dense()]


def _first_difference(
    own: Sequence[float], world_size: int, close: float = 0.0
) -> tuple[list[int], int | None, list[float]]:
    """The workers that differ from most where the first difference is, that place, and all workers' values there."""
    lengths = gather_numbers([len(own)], world_size)
    if len({row[0] for row in lengths}) > 1:
        return [], None, []
    rows = gather_numbers(own, world_size)
    for index, column in enumerate(zip(*rows, strict=True)):
        if not all(math.isclose(value, column[0], rel_tol=close) or value == column[0] for value in column):
            usual = max(column, key=column.count)
            return [rank for rank, value in enumerate(column) if value != usual], index, list(column)
    return [], None, []


def _usual(values: Sequence[float], who: Sequence[int]) -> float:
    return next(value for rank, value in enumerate(values) if rank not in who)
