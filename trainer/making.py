"""A task's model and optimizer, made and looked at: what several workers cannot train is refused before they begin."""

from __future__ import annotations

import inspect

from torch import nn
from torch.optim import Optimizer

from hetopt.core.errors import BadInput
from hetopt.trainer.task import Task


def make_model(task: Task) -> nn.Module:
    """The task's model; its embeddings give dense gradients: the same numbers, which can be summed as they are."""
    model = task.model()
    for module in model.modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            module.sparse = False
    return model


def make_optimizer(task: Task, model: nn.Module) -> Optimizer:
    """The task's optimizer for a model.

    Raises:
        BadInput: it is none, or steps by a function that computes the loss.
    """
    optimizer = task.optimizer(model)
    if not isinstance(optimizer, Optimizer):
        raise BadInput(
            f"The task's optimizer gives a {type(optimizer).__name__}, not a torch.optim.Optimizer.",
            hint="give one with a parameter group for each part; several losses and optimizers are a script, whose "
            "session takes them all",
        )
    if needs_closure(optimizer):
        raise BadInput(
            f"{type(optimizer).__name__} computes several gradients in a step, by a function that a task has not.",
            hint="use an optimizer whose step() needs no closure, or keep your loop and begin a session in it",
        )
    return optimizer


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether a step calls a function of the script that computes the loss (LBFGS)."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
