"""`Task`: what a user brings to be trained, how it is checked, and how its metrics are summed over any split.

What several workers cannot train is refused before they begin. A run's learning rate is the task's own, times a scale
for the global batch, times the task's schedule. In evaluation each worker sums over a part, and the sums make the
metrics of the whole.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeAlias, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from hetopt.core.batch_partition import largest_remainder, minimum_local_batch
from hetopt.core.errors import BadInput, RunFailed
from hetopt.core.memory import Sharding
from hetopt.core.profile import LearningRateRule
from hetopt.core.training_laws import learning_rate_scale
from hetopt.trainer.agreement import gather_numbers
from hetopt.trainer.data.fetch import Batch, MapDataset, fetch, samples_in, to_device
from hetopt.trainer.sharding import blocks_of, is_sharded, recompute, reshard

Loss: TypeAlias = "Tensor | tuple[Tensor, Tensor | float]"
"""Mean loss over the samples of a batch; or a sum, and the number of things that it is of (tokens, pixels, weights)."""


def mean_of(loss: Loss) -> Tensor:
    """Return a task's loss as a scalar mean; of a tuple ``(sum, count)`` their quotient.

    A count of 0 is taken as 1e-12.
    """
    if not isinstance(loss, tuple):
        return loss
    summed, count = loss
    return summed / torch.as_tensor(count, dtype=summed.dtype, device=summed.device).clamp(min=_LEAST_COUNT)


_LEAST_COUNT = 1e-12
"""Of a batch in which nothing counts: its sum is 0."""

OptimizerFactory: TypeAlias = Callable[[nn.Module], Optimizer]
Schedule: TypeAlias = Callable[[float], float]


def constant(epoch: float) -> float:
    """Return 1, the factor on the learning rate at every epoch: the schedule of a constant rate."""
    return 1.0


@dataclass(frozen=True, kw_only=True)
class Target:
    """The metric, and the value of it, at which a model is good enough, and whether higher values are better.

    Attributes:
        metric: name of the metric.
        value: value of the metric at which the model is good enough, finite.
        higher_is_better: whether values above ``value`` reach the target, else values below it.

    Raises:
        BadInput: ``value`` is not finite.
    """

    metric: str
    value: float
    higher_is_better: bool = True

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise BadInput(f"The target for {self.metric} is {self.value}; it must be a finite number.")

    def reached(self, metrics: Mapping[str, float]) -> bool:
        """Return whether metrics reach the target; False for NaN, and for `NO_TARGET`.

        Raises:
            BadInput: the target's metric is not among them.
        """
        if self.metric not in metrics:
            raise BadInput(
                f"The target metric '{self.metric}' is not one that the task computes.",
                hint=f"It computes: {', '.join(sorted(metrics)) or 'none'}.",
            )
        value = metrics[self.metric]
        is_good = value >= self.value if self.higher_is_better else value <= self.value
        return is_good and self != NO_TARGET


NO_TARGET = Target(metric="loss", value=0.0, higher_is_better=False)
"""Target of a task that is trained for a time, not to a value; no metrics reach it."""


def mean_loss(sums: Mapping[str, float], samples: int) -> dict[str, float]:
    """Return the metric ``loss`` from evaluation sums: the mean per item that the loss counts, else per sample.

    NaN: nothing was counted.

    Args:
        sums: sums over the evaluation data, by name; ``loss`` must be there.
        samples: number of samples of the evaluation data.
    """
    count = sums.get(_COUNT, float(samples))
    return {"loss": sums["loss"] / count if count else math.nan}


_COUNT = "counted"


def _summed_loss(result: Loss, batch: Batch) -> Mapping[str, Tensor]:
    """Return a batch's ``loss`` summed over its samples, or, of a tuple, its sum and its count."""
    if isinstance(result, tuple):
        summed, count = result
        return {"loss": summed.double(), _COUNT: torch.as_tensor(count, dtype=torch.float64)}
    return {"loss": result.double() * samples_in(batch)}


@dataclass(frozen=True, kw_only=True)
class TaskData:
    """The training and the evaluation data of a task, both map-style, with a line for people that says what was found.

    Attributes:
        train: training data.
        evaluation: evaluation data.
        description: one line on what was found, for people.

    Raises:
        BadInput: a dataset has no length or no items by index, or is empty.
    """

    train: MapDataset
    evaluation: MapDataset
    description: str = ""

    def __post_init__(self) -> None:
        """Check the data.

        Raises:
            BadInput: a data set is not map-style, or empty.
        """
        for role, dataset in (("training", self.train), ("evaluation", self.evaluation)):
            if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
                raise BadInput(
                    f"The {role} data is a {type(dataset).__name__}, which is not a map-style dataset.",
                    hint="It needs __len__ and __getitem__, because every epoch visits each sample exactly once.",
                )
            if len(dataset) == 0:
                raise BadInput(f"The {role} data has no samples.")


@dataclass(frozen=True, kw_only=True)
class Task:
    """A user's training job: model, data, loss, optimizer, batch size, and what counts as done.

    The trainer splits a global batch over workers in unequal shares that may change between steps, so the parts are
    written per batch and know nothing of workers.

    Model, data, loss, optimizer and batch size have to be said. A task without ``evaluate`` and ``metrics`` is judged
    by its mean loss.

    Attributes:
        name: what reports call it.
        model: builds the model, on the CPU; called with torch's generator seeded by the run, once on every worker.
        data: opens the data in the folder that the user gave (None: none was given).
        loss: forward pass, and the MEAN loss over the samples of the batch, a scalar. If it is a mean over anything
            else (tokens that are not padding, pixels, class weights): the tuple ``(sum, count)``; sums and counts of
            all workers are added before one is divided by the other. Where a cross entropy leaves targets out, or
            weights them, its count is found without being stated. A run begins with a test: the first batch, whole
            against two unequal parts. A sum over samples is refused; of a loss that couples samples (contrastive), as
            of layers that normalise by the batch, the run says by how much shares differ from one machine.
        optimizer: builds the optimizer with the learning rate tuned for ``batch_size``.
        evaluate: per-batch SUMS, scalars (for instance how many are correct, the summed loss), so that sums over any
            partition of the evaluation data add up to the same whole. Runs in eval mode without gradients. None: the
            summed loss.
        metrics: named metrics from the summed values and the number of samples.
        target: metric and value to reach; the usual target, a mean loss of at most 0, stands for none: such a task is
            planned for epochs or steps.
        batch_size: samples of the global batch that the learning rate was tuned at.
        learning_rate_rule: how the learning rate follows the global batch size: in proportion ("linear", Goyal et
            al. 2017), by its square root ("sqrt", Krizhevsky 2014), or not at all ("none").
        schedule: factor on the learning rate after so many epochs (a real number, counted in samples seen), so that it
            means the same at every batch size and after a resume.
        evaluation_batch_size: samples a worker evaluates at a time.
        usual_epochs: how long the task is trained where nothing else is asked for. What a plan is made for when no
            measurement says how many steps the target takes.
        shard: what the devices of a machine share of the model: ``none``; ``grads``: gradients and optimizer state;
            ``full``: weights as well; ``auto``: everything where one device cannot hold a replica. A run may say
            otherwise.
        blocks: class of the modules that the model is sharded and computed again by; None: the modules that its lists
            repeat (see `hetopt.trainer.sharding.blocks_of`).
        checkpoint_activations: whether a block keeps its inputs alone for the backward pass, which computes it again.

    Raises:
        BadInput: a part is not what it has to be: no function, an impossible name, size or number, or an unknown word.
    """

    name: str = "task"
    model: Callable[[], nn.Module]
    data: Callable[[Path | None], TaskData]
    loss: Callable[[nn.Module, Batch], Loss]
    optimizer: OptimizerFactory
    batch_size: int
    evaluate: Callable[[nn.Module, Batch], Mapping[str, Tensor]] | None = None
    metrics: Callable[[Mapping[str, float], int], dict[str, float]] = mean_loss
    target: Target = NO_TARGET
    learning_rate_rule: LearningRateRule = "sqrt"
    schedule: Schedule = constant
    evaluation_batch_size: int = 256
    usual_epochs: float | None = None
    shard: Sharding = "none"
    blocks: type[nn.Module] | None = None
    checkpoint_activations: bool = False

    def __post_init__(self) -> None:
        """Check the fields.

        Raises:
            BadInput: a name, function, target, size, number or choice cannot be.
        """
        if not self.name or ":" in self.name:
            raise BadInput(f"A task cannot be named '{self.name}'.", hint="Give it a non-empty name without a colon.")
        evaluates = ("evaluate",) if self.evaluate is not None else ()
        for part in ("model", "data", "loss", "optimizer", *evaluates, "metrics", "schedule"):
            if not callable(getattr(self, part)):
                raise BadInput(
                    f"Task '{self.name}' has a {part} that cannot be called.",
                    hint=f"Give a function (for a ready object: {part}=lambda ...: object).",
                )
        if not isinstance(self.target, Target):
            raise BadInput(
                f"Task '{self.name}' has a target that is not a Target.",
                hint="For example target=Target(metric='accuracy', value=0.9).",
            )
        for part in ("batch_size", "evaluation_batch_size"):
            size = getattr(self, part)
            if not isinstance(size, int) or size < 1:
                raise BadInput(f"Task '{self.name}' has {part} {size!r}; it must be a positive whole number.")
        if self.usual_epochs is not None and not 0 < self.usual_epochs < math.inf:
            raise BadInput(f"Task '{self.name}' has usual_epochs {self.usual_epochs!r}; it must be a positive number.")
        for part, names in (("learning_rate_rule", get_args(LearningRateRule)), ("shard", get_args(Sharding))):
            if getattr(self, part) not in names:
                raise BadInput(
                    f"Task '{self.name}' has the unknown {part} {getattr(self, part)!r}.",
                    hint=f"Choose one of {', '.join(names)}.",
                )

    def sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return the evaluation's sums over a batch, by name: those of ``evaluate``, or else of the loss."""
        return _summed_loss(self.loss(model, batch), batch) if self.evaluate is None else self.evaluate(model, batch)

    def learning_rate_scale(self, batch_size: int) -> float:
        """Return the factor on the tuned learning rate, by the task's rule, at a global batch of ``batch_size``.

        Args:
            batch_size: samples of all workers in a step.
        """
        return learning_rate_scale(self.learning_rate_rule, batch_size, self.batch_size)


def evaluation_sums(
    task: Task,
    model: nn.Module,
    dataset: MapDataset,
    indices: Sequence[int],
    device: torch.device | str = "cpu",
    *,
    passes: int = 0,
) -> dict[str, float]:
    """Return a task's evaluation sums by name over the samples at ``indices``, computed in eval mode.

    Over any partition of the data the results of the parts add up to the result of the whole (to rounding), so workers
    evaluate a part each. Replicas must agree on buffers as well as parameters. The model's mode is restored.

    Args:
        task: how to evaluate.
        model: model on the device.
        dataset: the evaluation data.
        indices: indices of the samples to evaluate.
        device: device to compute on; the model is there already.
        passes: batches to compute at least, as all devices that share a model do; those beyond ``indices`` count
            nothing. Without samples and passes the dictionary is empty, with passes alone its sums are 0.

    Raises:
        BadInput: the samples cannot be collated.
    """
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            total: Any = Counter()  # of numbers of any kind
            for number in range(max(passes, -(-len(indices) // task.evaluation_batch_size))):
                start = number * task.evaluation_batch_size
                part = indices[start : start + task.evaluation_batch_size]
                sums = task.sums(model, to_device(fetch(dataset, part if len(part) else range(1)), device))
                total.update({key: float(value) if len(part) else 0.0 for key, value in sums.items()})
            return dict(total)
    finally:
        model.train(was_training)


def make_model(task: Task) -> nn.Module:
    """Return a new model of the task, on the CPU, with dense embedding gradients.

    If the task says so, its blocks keep their inputs alone for backward, and are computed again there.

    Raises:
        BadInput: blocks are to be computed again, and the model has none.
    """
    model = task.model()
    for module in model.modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            module.sparse = False
    if task.checkpoint_activations:
        recompute(blocks_of(model, task.blocks))
    return model


def make_optimizer(task: Task, model: nn.Module) -> Optimizer:
    """Return a new optimizer of the task for a model.

    Raises:
        BadInput: what the task gives is no torch optimizer, or its step needs a closure.
    """
    optimizer = task.optimizer(model)
    if not isinstance(optimizer, Optimizer):
        raise BadInput(
            f"The task's optimizer gives a {type(optimizer).__name__}, not a torch.optim.Optimizer.",
            hint="give one with a parameter group for each part; several losses and optimizers are a script, whose "
            "session takes them all",
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:  # as of LBFGS
        raise BadInput(
            f"{type(optimizer).__name__} computes several gradients in a step, by a function that a task has not.",
            hint="use an optimizer whose step() needs no closure, or keep your loop and begin a session in it",
        )
    return optimizer


_SCALAR_STEPS = 16
"""Multiplications of a loss by numbers (a GradScaler's, 1 / accumulation) that are looked through."""

_SCALED_BY = ("MulBackward0", "MulBackward1", "DivBackward0", "ToCopyBackward0")


def cross_entropy_weight(loss: Tensor) -> Tensor | None:
    """Return the total weight of the targets that a mean cross entropy was divided by; None: it is not recognised.

    It is read off the graph of the loss, through up to 16 multiplications by numbers. Not recognised are sums over
    targets, targets that are probabilities of classes, and a cross entropy that another term was added to.
    """
    node: Any = loss.grad_fn
    for _ in range(_SCALAR_STEPS):
        name = "" if node is None else node.name()
        if name in ("NllLossBackward0", "NllLoss2DBackward0"):
            return node._saved_total_weight if node._saved_reduction == 1 else None
        inputs = [inner for inner, _ in getattr(node, "next_functions", ()) if inner is not None]
        # torch smooths labels by adding a mean over the same targets; nothing else is multiplied by MulBackward1.
        is_smoothed = name == "AddBackward0" and [inner.name() for inner in inputs] == ["MulBackward1"] * 2
        if not is_smoothed and (name not in _SCALED_BY or len(inputs) != 1):
            return None
        node = inputs[0]
    return None


LEAST_SAMPLES = 2
"""Fewest samples of which a mean and a variance can be taken."""


def batch_norms(model: nn.Module) -> list[nn.Module]:
    """Return the BatchNorm layers of a model, which normalise over the samples of a batch."""
    return [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]


def least_samples(model: nn.Module) -> int:
    """Return the fewest samples that a worker can train a step with: 2 if the model has BatchNorm, else 1."""
    return LEAST_SAMPLES if batch_norms(model) else 1


def least_share(model: nn.Module, batch_size: int, workers: int) -> int:
    """Return the minimum local batch size in samples: what the model needs, or 1 where the batch is too small."""
    return minimum_local_batch(least_samples(model), batch_size, workers)


def normalises_apart(model: nn.Module) -> bool:
    """Return whether BatchNorm layers of a model, other than SyncBatchNorm, normalise each worker's samples alone."""
    return any(not isinstance(norm, nn.SyncBatchNorm) for norm in batch_norms(model))


class LearningRate:
    """The learning rates of an optimizer: the task's, times its schedule, times a scale that the run decides.

    Args:
        task: task whose schedule counts.
        optimizer: fresh optimizer, which has the rates of the parameter groups.
        stretch: epochs of the run that count as one epoch in the schedule.
    """

    def __init__(self, task: Task, optimizer: Optimizer, stretch: float = 1.0) -> None:
        self._schedule, self._stretch = task.schedule, stretch
        self._base = [float(group["lr"]) for group in optimizer.param_groups]

    def apply(self, optimizer: Optimizer, epoch: float, scale: float) -> None:
        """Set an optimizer's learning rates, in place, after ``epoch`` epochs: own rate x ``scale`` x schedule."""
        factor = scale * self._schedule(epoch / self._stretch)
        for group, rate in zip(optimizer.param_groups, self._base, strict=True):
            group["lr"] = rate * factor


def evaluate(
    task: Task, model: nn.Module, dataset: MapDataset, *, shares: Sequence[float], rank: int, device: torch.device
) -> dict[str, float]:
    """Return the task's metrics, by name, of the whole evaluation data; each worker computes a part and must call it.

    Args:
        task: how to evaluate.
        model: the same on every rank, buffers included (see `average_buffers`).
        dataset: the evaluation data.
        shares: local batch sizes, or other weights of the workers, in rank order; each worker evaluates samples in
            proportion.
        rank: rank of this worker.
        device: device of this worker.

    Raises:
        RunFailed: a metric is NaN or infinite.
        BadInput: the samples cannot be collated.
    """
    world_size = len(shares)
    parts = largest_remainder(list(shares), len(dataset), minimum=[0] * world_size, maximum=[None] * world_size)
    last = list(accumulate(parts))[rank]
    # A worker without samples still has to know which sums there are; devices that share a model compute alike.
    passes = -(-max(parts) // task.evaluation_batch_size) if is_sharded(model.parameters()) else 1
    sums = evaluation_sums(task, model, dataset, range(last - parts[rank], last), device, passes=passes)
    reshard(model)
    names = sorted(sums)
    rows = gather_numbers([sums[name] for name in names], world_size)
    metrics = task.metrics(dict(zip(names, map(sum, zip(*rows, strict=True)), strict=True)), len(dataset))
    for name, value in metrics.items():
        if not math.isfinite(value):
            raise RunFailed(
                f"the evaluation gives {name} = {value}.", hint="lower the learning rate, or check the task's evaluate"
            )
    return metrics


def float_buffers(model: nn.Module) -> list[Tensor]:
    """Return the floating-point buffers of a model, taken to be averages over samples as BatchNorm's statistics are."""
    return [buffer for buffer in model.buffers() if buffer.is_floating_point() and buffer.numel()]


def average_buffers(model: nn.Module, weight: float, world_size: int) -> None:
    """Replace a model's floating-point buffers, in place, by a weighted mean over workers; every worker must call it.

    Every worker's statistics come from its own samples; ``weight`` is its share of the batch, and the weights sum to 1.
    Counters are the same everywhere and stay.

    Args:
        model: model whose buffers are overwritten.
        weight: weight of this worker in the mean; those of all sum to 1.
        world_size: number of workers; with 1 nothing is done.
    """
    buffers = float_buffers(model)
    if world_size == 1 or not buffers:
        return
    flat = torch.cat([buffer.detach().reshape(-1).to("cpu", torch.float64) for buffer in buffers]).mul_(weight)
    dist.all_reduce(flat)
    with torch.no_grad():
        for buffer, mean in zip(buffers, torch.split(flat, [buffer.numel() for buffer in buffers]), strict=True):
            buffer.copy_(mean.view(buffer.shape))
