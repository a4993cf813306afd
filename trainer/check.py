"""What would go wrong with a task on many workers, found on this one before anything is measured or rented."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from hetopt.core.errors import BadInput
from hetopt.trainer.check_findings import Ended, Finding, error, near, place, run, warning
from hetopt.trainer.data.fetch import Batch, MapDataset, fetch, samples_in
from hetopt.trainer.loss_test import probe_loss
from hetopt.trainer.making import make_model, make_optimizer
from hetopt.trainer.normalisation import least_samples
from hetopt.trainer.random_rows import RandomRows
from hetopt.trainer.task import Task, TaskData, is_judged_by_loss
from hetopt.trainer.tasks.load import load_task

T = TypeVar("T")

SAMPLES = 4
"""In half of a trial batch."""

MOST_NAMED = 3


def check(reference: str, folder: Path | None) -> list[Finding]:
    """Try all parts of a task on a few samples; nothing is written."""
    findings: list[Finding] = []
    try:
        task = load_task(reference)
    except BadInput as refused:
        return [error(text=refused.message, hint=refused.hint or "correct the task's file")]
    try:
        for finding in _look(task, folder):
            findings.append(finding)
    except Ended as found:
        findings.append(found.finding)
    return findings


def _look(task: Task, folder: Path | None) -> Iterator[Finding]:
    torch.manual_seed(0)
    data = _data(task, folder)
    yield from _lengths(task, data)
    batch, once, twice = _batches(task, data.train)
    _check_batch_sizes(task, batch, once, twice)
    model = _model(task)
    yield from _parameters(task, model)
    yield from _normalisation(task, model)
    yield from _loss(task, model, once, data.train)
    yield from _gradients(task, model, once)
    yield from _optimizer(task, model)
    yield from _evaluation(task, model, data.evaluation)


def _data(task: Task, folder: Path | None) -> TaskData:
    data = run(task.data, lambda: task.data(folder), "The task's data")
    if not isinstance(data, TaskData):
        raise _another_type(
            "data", data, wanted="TaskData", hint="return TaskData(train=..., evaluation=...)", where=place(task.data)
        )
    return data


def _another_type(part: str, made: object, *, wanted: str, hint: str, where: str) -> Ended:
    """A part of the task that gives something else than it should."""
    text = f"The task's {part} gives a {type(made).__name__}, not {wanted}."
    return Ended(text, hint=hint, where=where)


def _lengths(task: Task, data: TaskData) -> Iterator[Finding]:
    """Lengths that are there, stay, and are enough for a batch."""
    for role, dataset in (("training", data.train), ("evaluation", data.evaluation)):
        where = place(type(dataset).__len__, task.data)
        if isinstance(dataset, IterableDataset):
            raise Ended(
                f"The {role} data is a stream: how many samples an epoch has is unknown.",
                hint="give it by index, or train the loop of your own script with hetopt.trainer.session",
                where=place(type(dataset), task.data),
            )
        length = run(task.data, dataset.__len__, f"The length of the {role} data", where)
        if length != len(dataset) or not isinstance(length, int):
            yield error(
                text=f"The length of the {role} data changes while one looks at it.",
                hint="return the same number of samples every time",
                where=where,
            )
    if len(data.train) < task.batch_size:
        yield warning(
            text=f"A batch of {task.batch_size} is larger than the training data, {len(data.train)} samples.",
            hint="choose a smaller batch_size",
            where=place(task.data),
        )


def _batches(task: Task, dataset: MapDataset) -> tuple[Batch, Batch, Batch]:
    """One sample, a few, and the same few twice."""
    few = list(range(min(SAMPLES, len(dataset))))
    where = place(getattr(type(dataset), "gather", None), type(dataset).__getitem__, task.data)

    def read(indices: list[int]) -> Batch:
        return run(task.data, lambda: fetch(dataset, indices), "Reading training samples", where)

    return read(few[:1]), read(few), read(few + few)


def _check_batch_sizes(task: Task, batch: Batch, once: Batch, twice: Batch) -> None:
    counts = [samples_in(one) for one in (batch, once, twice)]
    expected = [1, (counts[2] or 0) // 2, counts[2]]
    if counts[2] is None:
        raise Ended(
            "A batch of the training data holds no tensor, so its samples cannot be counted.",
            hint="return tensors whose first dimension is the sample",
            where=place(task.data),
        )
    if counts != expected or counts[2] % 2:
        raise Ended(
            f"Batches of 1, n and 2n samples have {counts[0]}, {counts[1]} and {counts[2]} rows.",
            hint="one row a sample, in the first dimension: workers weight their gradients by them",
            where=place(task.data),
        )


def _model(task: Task) -> nn.Module:
    model = run(task.model, lambda: make_model(task), "The task's model")
    if not isinstance(model, nn.Module):
        raise _another_type(
            "model", model, wanted="a torch.nn.Module", hint="return the module itself", where=place(task.model)
        )
    return model


def _parameters(task: Task, model: nn.Module) -> Iterator[Finding]:
    trained = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    if not trained:
        raise Ended(
            "The model has no parameters to train.",
            hint="check requires_grad",
            where=place(task.model),
        )
    for name, parameter in trained:
        if parameter.dtype != torch.float32:
            raise Ended(
                f"Parameter {name} is {str(parameter.dtype).removeprefix('torch.')}.",
                hint="keep parameters float32; the run's precision chooses bf16 or fp16 for the computation",
                where=place(task.model),
            )
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    shared = [both for both in names.values() if len(both) > 1]
    if shared:
        yield warning(
            text=f"{' and '.join(shared[0])} are one parameter: it is summed once, and counted once.",
            hint="nothing to do if that is meant (tied embeddings)",
            where=place(type(model).__init__, task.model),
        )


def _normalisation(task: Task, model: nn.Module) -> Iterator[Finding]:
    """What BatchNorm asks of the batch: a worker's share is never a single sample where the batch allows."""
    least = least_samples(model)
    if task.batch_size < 2 * least and least > 1:
        yield warning(
            text=f"The model has BatchNorm, which needs {least} samples of every worker: a batch of {task.batch_size} "
            "is too small for two workers.",
            hint=f"choose a batch_size of at least {2 * least}, or GroupNorm",
            where=place(task.model),
        )


def _loss(task: Task, model: nn.Module, once: Batch, dataset: MapDataset) -> Iterator[Finding]:
    """A scalar, finite, of the model, and one whose parts add up to the whole."""
    where = place(task.loss)
    model.eval()  # without dropout, and BatchNorm by its running statistics
    told = run(task.loss, lambda: task.loss(model, once), "The task's loss")
    first = told[0] if isinstance(told, tuple) and len(told) == 2 else told
    if not isinstance(first, Tensor) or first.dim():
        said = f"has shape {tuple(first.shape)}" if isinstance(first, Tensor) else f"is a {type(first).__name__}"
        raise Ended(f"The loss {said}; it must be a scalar tensor.", hint=_MEAN, where=where)
    if not first.requires_grad:
        raise Ended("The loss does not depend on the model.", hint="check the loss", where=where)
    if not bool(torch.isfinite(first)):
        raise Ended(
            f"The loss of the first samples is {float(first.detach())}.",
            hint="check the data for values that are not finite, and the loss for logarithms of 0",
            where=where,
        )
    if isinstance(told, tuple) and not 0 <= float(told[1]) < math.inf:
        raise Ended(
            f"The loss counts {float(told[1])}; a count must be 0 or more, and finite.",
            hint=_MEAN,
            where=where,
        )
    samples = min(len(dataset), max(task.batch_size, 2 * SAMPLES))
    test = run(
        task.loss,
        lambda: probe_loss(model, task.loss, lambda places: fetch(dataset, list(places)), samples),
        "The task's loss of a part of a batch",
    )
    if test.problem is not None:
        yield error(text=test.problem.message, hint=test.problem.hint or _MEAN, where=where)
    elif test.note:
        where = where if test.kind == "coupled" else place(type(model).__init__, task.model)
        yield warning(text=f"{test.note[0].upper()}{test.note[1:]}.", hint=test.hint, where=where)


_MEAN = "return the mean over the samples of the batch, or the tuple (sum, count): workers add both up"


def _gradients(task: Task, model: nn.Module, once: Batch) -> Iterator[Finding]:
    model.train()
    model.zero_grad(set_to_none=True)
    told = run(task.loss, lambda: task.loss(model, once), "The task's loss in training mode")
    loss = told[0] if isinstance(told, tuple) else told
    run(task.loss, loss.backward, "The backward pass")
    unused = [name for name, one in model.named_parameters() if one.requires_grad and one.grad is None]
    if unused:
        more = f" and {len(unused) - MOST_NAMED} more" if len(unused) > MOST_NAMED else ""
        yield warning(
            text=f"The loss does not use {', '.join(unused[:MOST_NAMED])}{more}: gradients cannot travel while "
            "backward still runs.",
            hint="set requires_grad=False on parameters that are not trained",
            where=place(type(model).forward, task.loss),
        )
    broken = [
        name
        for name, one in model.named_parameters()
        if one.grad is not None and not one.grad.to_dense().isfinite().all()
    ]
    if broken:
        yield error(
            text=f"The gradient of {broken[0]} is not finite.",
            hint="check the loss for square roots and divisions at 0",
            where=place(task.loss),
        )


def _optimizer(task: Task, model: nn.Module) -> Iterator[Finding]:
    optimizer = run(task.optimizer, lambda: make_optimizer(task, model), "The task's optimizer")
    own = {id(one) for group in optimizer.param_groups for one in group["params"]}
    known = {id(one) for one in model.parameters()}
    left = [name for name, one in model.named_parameters() if one.requires_grad and id(one) not in own]
    if left:
        yield warning(
            text=f"The optimizer leaves {', '.join(left[:MOST_NAMED])} as they are, yet their gradients are sent.",
            hint="set requires_grad=False on them, or give them to the optimizer",
            where=place(task.optimizer),
        )
    if own - known:
        yield error(
            text="The optimizer has parameters that are not the model's.",
            hint="build it from the model it is given: lambda model: SGD(model.parameters(), ...)",
            where=place(task.optimizer),
        )
    # With the gradients that are there: SparseAdam takes no dense ones, others need a function or a state of their own.
    run(task.optimizer, optimizer.step, "The optimizer's step")


def _evaluation(task: Task, model: nn.Module, dataset: MapDataset) -> Iterator[Finding]:
    """Sums, which double when the samples come twice; and metrics that the target is among."""
    model.eval()
    few = list(range(min(SAMPLES, len(dataset))))
    # Those of a task without its own are its loss's.
    where = place(task.evaluate, task.loss)

    def sums(indices: list[int]) -> dict[str, float]:
        batch = fetch(dataset, indices)
        with torch.no_grad(), RandomRows(0, len(indices), len(few)):
            told = run(task.evaluate, lambda: task.evaluate(model, batch), "The task's evaluate", where)
        if not isinstance(told, Mapping) or not told:
            said = f"a {type(told).__name__}, not a dictionary of sums" if not isinstance(told, Mapping) else "no sums"
            raise Ended(f"The task's evaluate gives {said}.", hint=_SUMS, where=where)
        return {name: float(value) for name, value in told.items()}

    once, twice = sums(few), sums(few + few)
    wrong = [name for name, value in once.items() if not near(2 * value, twice[name])]
    if wrong:
        said = warning if is_judged_by_loss(task) else error  # which was said of the loss
        yield said(
            text=f"'{wrong[0]}' of evaluate is no sum over samples: the same samples twice over give "
            f"{twice[wrong[0]]:.6g} instead of {2 * once[wrong[0]]:.6g}.",
            hint=_SUMS,
            where=where,
        )
    metrics = run(task.metrics, lambda: task.metrics(once, len(few)), "The task's metrics")
    if not isinstance(metrics, dict) or task.target.metric not in metrics:
        named = ", ".join(sorted(metrics)) if isinstance(metrics, dict) else "nothing"
        yield error(
            text=f"The target metric '{task.target.metric}' is not among the task's metrics: {named}.",
            hint="name one of them in Target(metric=...)",
            where=place(task.metrics),
        )


_SUMS = "return sums over samples, as scalars: {'correct': ..., 'loss': ...}; the sums of all workers are added up"
