"""The usual kinds of task, classifier and language model, with loss, evaluation and metrics; SGD and its schedules.

A user's own classifier is a short file::

    from hetopt.trainer.data.fetch import TensorPairs
    from hetopt.trainer.task import Target, TaskData
    from hetopt.trainer.tasks.recipes import classification, sgd

    def data(folder):
        images, labels, test_images, test_labels = load(folder)
        return TaskData(train=TensorPairs(images, labels), evaluation=TensorPairs(test_images, test_labels))

    task = classification(
        name="mine", model=lambda: MyNet(), data=data, optimizer=sgd(0.1), batch_size=64,
        target=Target(metric="accuracy", value=0.9),
    )
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Optimizer

from hetopt.core.errors import BadInput
from hetopt.core.profile import LearningRateRule
from hetopt.trainer.data.fetch import Batch, inputs_and_targets
from hetopt.trainer.task import OptimizerFactory, Schedule, Target, Task, TaskData, constant


def classification(
    *,
    name: str,
    model: Callable[[], nn.Module],
    data: Callable[[Path | None], TaskData],
    optimizer: OptimizerFactory,
    target: Target,
    batch_size: int,
    learning_rate_rule: LearningRateRule = "sqrt",
    schedule: Schedule = constant,
    evaluation_batch_size: int = 256,
    usual_epochs: float | None = None,
) -> Task:
    """Return a task with cross-entropy loss: batches ``(inputs, labels)``, and a model that returns [samples, classes].

    Arguments mean what the attributes of `Task` mean that have their names. The model returns logits. Metrics:
    ``accuracy``, ``loss`` (mean cross-entropy, nats), and ``top5_accuracy`` where there are more than five classes.
    """
    return Task(
        name=name,
        model=model,
        data=data,
        loss=_cross_entropy,
        optimizer=optimizer,
        evaluate=_classification_sums,
        metrics=_classification_metrics,
        target=target,
        batch_size=batch_size,
        learning_rate_rule=learning_rate_rule,
        schedule=schedule,
        evaluation_batch_size=evaluation_batch_size,
        usual_epochs=usual_epochs,
    )


def language_model(
    *,
    name: str,
    model: Callable[[], nn.Module],
    data: Callable[[Path | None], TaskData],
    optimizer: OptimizerFactory,
    target: Target,
    batch_size: int,
    learning_rate_rule: LearningRateRule = "sqrt",
    schedule: Schedule = constant,
    evaluation_batch_size: int = 32,
    usual_epochs: float | None = None,
) -> Task:
    """Return a task of next-token prediction: batches ``(tokens, next tokens)`` [samples, time], cross-entropy loss.

    Arguments mean what the attributes of `Task` mean that have their names. The model returns logits [samples, time,
    vocabulary]. Every sample has the same number of tokens, so that the mean over samples is the mean over tokens.
    Metrics: ``perplexity`` = exp(summed negative log-likelihood / tokens), and ``loss`` (nats a token).
    """
    return Task(
        name=name,
        model=model,
        data=data,
        loss=_token_cross_entropy,
        optimizer=optimizer,
        evaluate=_language_sums,
        metrics=_language_metrics,
        target=target,
        batch_size=batch_size,
        learning_rate_rule=learning_rate_rule,
        schedule=schedule,
        evaluation_batch_size=evaluation_batch_size,
        usual_epochs=usual_epochs,
    )


def sgd(
    learning_rate: float,
    *,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    max_gradient_norm: float | None = None,
) -> OptimizerFactory:
    """Return a function that builds torch's SGD over all parameters of a model.

    With ``max_gradient_norm`` the gradient of the whole model is scaled down to that norm just before each step
    (Pascanu et al. 2013), which is after the workers' gradients were summed: every replica clips the same gradient.

    Args:
        learning_rate: rate tuned for the task's batch size, above 0.
        momentum: momentum of SGD; 0: none.
        weight_decay: weight decay of SGD; 0: none.
        nesterov: whether the momentum is Nesterov's.
        max_gradient_norm: largest norm of the whole gradient, which is scaled down to it; None: no limit.

    Raises:
        BadInput: the learning rate is not a positive, finite number.
    """
    if not (math.isfinite(learning_rate) and learning_rate > 0):
        raise BadInput(f"The learning rate is {learning_rate}; it must be a positive number.")

    def build(model: nn.Module) -> Optimizer:
        optimizer = SGD(
            model.parameters(), lr=learning_rate, momentum=momentum, weight_decay=weight_decay, nesterov=nesterov
        )
        return optimizer if max_gradient_norm is None else clip_before_step(optimizer, max_gradient_norm)

    return build


def clip_before_step(optimizer: Optimizer, max_norm: float) -> Optimizer:
    """Make every step of an optimizer first clip the norm of its whole gradient, by a hook; return the optimizer.

    Args:
        optimizer: optimizer that is changed.
        max_norm: largest norm of the gradient of all its parameters.
    """

    def clip(stepping: Optimizer, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        parameters = [parameter for group in stepping.param_groups for parameter in group["params"]]
        torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    optimizer.register_step_pre_hook(clip)
    return optimizer


def step_decay(*milestones: float, factor: float) -> Schedule:
    """Return the learning-rate schedule that multiplies by ``factor`` from each milestone (an epoch) on."""
    ordered = sorted(milestones)
    return lambda epoch: factor ** bisect.bisect_right(ordered, epoch)


def epoch_decay(*, after: float, factor: float) -> Schedule:
    """Return the learning-rate schedule that multiplies by ``factor`` at epoch ``after`` and each whole epoch later."""
    return lambda epoch: factor ** max(0, math.floor(epoch - after) + 1)


def _cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    inputs, labels = inputs_and_targets(batch)
    return functional.cross_entropy(model(inputs), labels)


def _classification_sums(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Return sums over a batch of cross entropy, of right answers and, with more than 5 classes, of the top 5."""
    inputs, labels = inputs_and_targets(batch)
    logits = model(inputs)
    sums = {
        "loss": functional.cross_entropy(logits, labels, reduction="sum"),
        "correct": (logits.argmax(dim=1) == labels).sum(),
    }
    if logits.shape[1] > 5:
        sums["top5_correct"] = (logits.topk(5, dim=1).indices == labels[:, None]).sum()
    return sums


def _classification_metrics(sums: Mapping[str, float], samples: int) -> dict[str, float]:
    """Return ``accuracy``, mean ``loss`` and, if summed, ``top5_accuracy``."""
    metrics = {"accuracy": sums["correct"] / samples, "loss": sums["loss"] / samples}
    if "top5_correct" in sums:
        metrics["top5_accuracy"] = sums["top5_correct"] / samples
    return metrics


def _token_cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    tokens, targets = inputs_and_targets(batch)
    return functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def _language_sums(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Return the sum of the cross entropy over a batch's tokens, and their number."""
    tokens, targets = inputs_and_targets(batch)
    loss = functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum")
    return {"loss": loss, "tokens": torch.tensor(targets.numel())}


def _language_metrics(sums: Mapping[str, float], samples: int) -> dict[str, float]:
    loss = sums["loss"] / sums["tokens"]
    return {"perplexity": math.exp(loss) if loss < _LARGEST_EXPONENT else math.inf, "loss": loss}


_LARGEST_EXPONENT = math.log(1e308)
