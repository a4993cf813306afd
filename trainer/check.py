"""Checks a user's task on this machine for what would go wrong on many workers, before anything is measured or rented.

Each finding names the line of the user's files that it is about.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

import torch
from torch import nn

from hetopt.core.errors import BadInput, HetoptError
from hetopt.trainer.context import Generators
from hetopt.trainer.data.fetch import Batch, MapDataset, fetch, samples_in
from hetopt.trainer.failure import reason_of
from hetopt.trainer.steps.step import LossModule, trainable_parameters
from hetopt.trainer.task import Task, TaskData, make_model, make_optimizer, mean_of
from hetopt.trainer.tasks.load import load_task
from hetopt.trainer.training import TOLERANCE, probe_loss

T = TypeVar("T")

_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


@dataclass(frozen=True, kw_only=True)
class Finding:
    """An error or warning about a user's task: a sentence, a hint, and the ``file:line`` of the user's code.

    Attributes:
        level: ``error``: it cannot be trained, or not rightly; ``warning``: it can, at the price that ``text`` tells.
        text: a sentence.
        hint: what to do.
        where: ``file:line`` of the user's code; empty: not known.
    """

    level: Literal["error", "warning"]
    text: str
    hint: str
    where: str = ""


error = partial(Finding, level="error")


class Ended(Exception):  # not a failure of hetopt's
    """The exception that ends the check of a task before its next parts; its argument is the error `Finding` so far."""


def run(part: Callable[..., object], do: Callable[[], T], what: str, where: str = "") -> T:
    """Return ``do()``, which calls the user's ``part``, named ``what``; turn any exception of it into `Ended`.

    Args:
        part: function or class of the user's that ``do`` calls.
        do: calls it.
        what: names the part, as the subject of the finding's sentence.
        where: ``file:line`` to point at where no line of that file is at fault; empty: that of the definition.

    Raises:
        Ended: ``do`` raised an exception; its argument is an error `Finding` that names the last line of the user's
            file.
    """
    try:
        return do()
    except Exception as failed:
        file = line_of(part).rpartition(":")[0]
        lines = [frame.lineno for frame in traceback.extract_tb(failed.__traceback__) if frame.filename == file]
        location = f"{file}:{lines[-1]}" if lines else where or line_of(part)
        if isinstance(failed, HetoptError):
            finding = error(text=failed.message, hint=failed.hint or "correct that line", where=location)
        else:
            finding = error(text=f"{what} raised {reason_of(failed)}", hint="correct that line", where=location)
        raise Ended(finding) from failed


def line_of(*written: object) -> str:
    """Return ``file:line`` where the first of ``written`` that is the user's own is defined; empty: none is.

    Args:
        written: functions or classes, best first; those of torch or hetopt, and those without Python code, are passed
            over. Of a class, the line of its ``__getitem__``, ``__iter__`` or ``__init__``.
    """
    for code in written:
        function = getattr(code, "__wrapped__", code)
        if isinstance(function, type):
            members = vars(function)
            function = members.get("__getitem__") or members.get("__iter__") or members.get("__init__")
        compiled = getattr(function, "__code__", None)
        if compiled is not None and not compiled.co_filename.startswith(_NOT_THE_USERS):
            return f"{compiled.co_filename}:{compiled.co_firstlineno}"
    return ""


SAMPLES = 4
"""Samples in a trial batch."""
_CPU = torch.device("cpu")

_SUMS = "return sums over samples, as scalars: {'correct': ..., 'loss': ...}; the sums of all workers are added up"
_MEAN = "return the mean over the samples of the batch, or the tuple (sum, count): workers add both up"


def check(reference: str, folder: Path | None) -> list[Finding]:
    """Return the problems of the task ``reference`` on data in ``folder``, tried on at most 16 samples; writes nothing.

    Args:
        reference: names the task, as `load_task` reads it: a bundled name, ``module:attribute`` or
            ``file.py:attribute``.
        folder: folder of its data; None: the task needs none.

    Returns:
        Errors and warnings in the order in which they were found; empty: none. An error after which nothing more can be
        tried is the last. Nothing is raised for what is wrong with the task: a task that cannot be loaded is a finding,
        too.
    """
    findings: list[Finding] = []
    try:
        for finding in _look(load_task(reference), folder):
            findings.append(finding)
    except BadInput as refused:
        findings.append(error(text=refused.message, hint=refused.hint or "correct the task's file"))
    except Ended as ended:
        findings += ended.args
    return findings


def _look(task: Task, folder: Path | None) -> Iterator[Finding]:
    """Yield the problems of a task: of its data, model, loss, optimizer and evaluation, in this order; writes nothing.

    ``folder`` None: the task reads its data without one.

    Raises:
        Ended: a part raised, or gave what no later part can be tried on; its argument is the last finding.
    """
    torch.manual_seed(0)
    data = run(task.data, lambda: task.data(folder), "The task's data")
    _must_be(TaskData, data, task.data, "The task's data", "return TaskData(train=..., evaluation=...)")
    few = list(range(min(SAMPLES, len(data.train))))
    batch = run(task.data, lambda: fetch(data.train, few), "Reading training samples")
    if samples_in(batch) != len(few):
        raise Ended(
            error(
                text=f"A batch of {len(few)} samples has {samples_in(batch) or 'no'} rows.",
                hint="one row a sample, in the first dimension of tensors: workers weight their gradients by them",
                where=line_of(task.data),
            )
        )
    model = run(task.model, lambda: make_model(task), "The task's model")
    _must_be(nn.Module, model, task.model, "The task's model", "return the module itself")
    run(task.model, lambda: trainable_parameters(model), "The task's model")
    yield from _loss(task, model, batch, data.train)
    _optimizer(task, model, batch)
    yield from _evaluation(task, model, data.evaluation)


def _must_be(kind: type, value: object, part: Callable[..., object], what: str, hint: str) -> None:
    """Raise `Ended`, with an error that points at ``part``, if ``value``, which ``part`` returned, is no ``kind``."""
    if not isinstance(value, kind):
        raise Ended(
            error(text=f"{what} gives a {type(value).__name__}, not {kind.__name__}.", hint=hint, where=line_of(part))
        )


def _loss(task: Task, model: nn.Module, batch: Batch, dataset: MapDataset) -> Iterator[Finding]:
    """Yield at most one problem: parts of a batch do not add up to the whole, or samples depend on each other.

    Raises:
        Ended: the loss raised, or is not a finite number.
    """
    where = line_of(task.loss)
    model.eval()  # without dropout, and BatchNorm by its running statistics
    module = LossModule(model, task.loss, "fp32")
    loss = float(run(task.loss, lambda: module(batch), "The task's loss").detach())
    if not math.isfinite(loss):
        hint = "check the data for values that are not finite, and the loss for logarithms of 0"
        raise Ended(error(text=f"The loss of the first samples is {loss}.", hint=hint, where=where))
    samples = min(len(dataset), max(task.batch_size, 2 * SAMPLES))
    test = run(
        task.loss,
        lambda: probe_loss(model, task.loss, lambda places: fetch(dataset, list(places)), samples),
        "The task's loss of a part of a batch",
    )
    if test.problem is not None:
        yield error(text=test.problem.message, hint=test.problem.hint or _MEAN, where=where)
    elif test.note:
        where = where if test.kind == "coupled" else line_of(type(model).__init__, task.model)
        yield Finding(level="warning", text=f"{test.note[0].upper()}{test.note[1:]}.", hint=test.hint, where=where)


def _optimizer(task: Task, model: nn.Module, batch: Batch) -> None:
    """Take one step of a task's optimizer.

    Raises:
        Ended: building the optimizer, the backward pass or the step raised.
    """
    optimizer = run(task.optimizer, lambda: make_optimizer(task, model), "The task's optimizer")
    model.train()
    run(task.loss, lambda: torch.autograd.backward(mean_of(task.loss(model, batch))), "The backward pass")
    run(task.optimizer, optimizer.step, "The optimizer's step")


def _evaluation(task: Task, model: nn.Module, dataset: MapDataset) -> Iterator[Finding]:
    """Yield errors where evaluation sums do not double when samples come twice, and where metrics lack the target's.

    Sums that draw random numbers, or that are the loss's own, are not compared: they may differ, or are checked
    already.

    Raises:
        Ended: ``evaluate`` or ``metrics`` raised, or ``evaluate`` gave no dictionary of sums.
    """
    model.eval()
    few = list(range(min(SAMPLES, len(dataset))))
    evaluate = task.evaluate or task.loss
    where = line_of(evaluate, task.loss)

    def sums(indices: list[int]) -> dict[str, float]:
        """Return the task's sums over a batch; raise `Ended` where it gives none."""
        batch = fetch(dataset, indices)
        with torch.no_grad():
            totals = run(evaluate, lambda: task.sums(model, batch), "The task's evaluate", where)
        _must_be(Mapping, totals, evaluate, "The task's evaluate", _SUMS)
        return {name: float(value) for name, value in totals.items()}

    before = Generators.at(_CPU)
    once, twice = sums(few), sums(few + few)
    wrong = [
        name
        for name, value in once.items()
        if not math.isclose(2 * value, twice[name], rel_tol=TOLERANCE, abs_tol=1e-6)
    ]
    is_known = before.has_drawn(_CPU) or task.evaluate is None  # random, or said of the loss already
    if wrong and not is_known:
        yield error(
            text=f"'{wrong[0]}' of evaluate is no sum over samples: the same samples twice over give "
            f"{twice[wrong[0]]:.6g} instead of {2 * once[wrong[0]]:.6g}.",
            hint=_SUMS,
            where=where,
        )
    metrics = run(task.metrics, lambda: task.metrics(once, len(few)), "The task's metrics")
    if task.target.metric not in metrics:
        yield error(
            text=f"The target metric '{task.target.metric}' is not among the task's metrics: "
            f"{', '.join(sorted(metrics))}.",
            hint="name one of them in Target(metric=...)",
            where=line_of(task.metrics),
        )
