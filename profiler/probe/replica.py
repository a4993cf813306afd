"""A model of the task that is stepped again and again and never learns: what step times are measured on."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.optim import Optimizer

from hetopt.core.memory import Precision
from hetopt.core.run_spec import RunSpec
from hetopt.trainer.steps.step import Autocast, LossModule, trainable_parameters
from hetopt.trainer.task import Task, make_optimizer
from hetopt.trainer.training import build_model


@dataclass(frozen=True, kw_only=True, eq=False)
class Replica:
    """Model and optimizer; the gradients of all parameters are views into the flat fp32 ``gradient``."""

    loss: LossModule
    optimizer: Optimizer
    gradient: Tensor
    task: Task
    device: torch.device

    @classmethod
    def build(cls, task: Task, spec: RunSpec, device: torch.device) -> Replica:
        """Build one on every rank at the same time, computing in fp32.

        The optimizer does all its work with a learning rate of zero, so the weights stay where they began, and however
        many steps are timed, activations and gradients stay those of a sane model.
        """
        model = build_model(task, device, spec.seed)
        parameters = trainable_parameters(model)
        sizes = [parameter.numel() for parameter in parameters]
        gradient = torch.zeros(sum(sizes), device=device)
        for parameter, view in zip(parameters, torch.split(gradient, sizes), strict=True):
            parameter.grad = view.view_as(parameter)
        optimizer = make_optimizer(task, model)
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        loss = LossModule(model, task.loss, Autocast(device_type=device.type, precision="fp32"))
        return cls(loss=loss, optimizer=optimizer, gradient=gradient, task=task, device=device)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of the parameters, in the order of the gradient; a number counts as a vector of one."""
        return tuple(tuple(one.shape) or (1,) for one in trainable_parameters(self.loss.model))

    def computing_in(self, precision: Precision) -> Replica:
        """The same model, computing in another precision."""
        autocast = Autocast(device_type=self.device.type, precision=precision)
        return replace(self, loss=LossModule(self.loss.model, self.task.loss, autocast))
