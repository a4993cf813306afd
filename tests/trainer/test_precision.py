"""Steps in lower precision: any split gives one machine's gradient to rounding; what a task cannot bear is found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

from hetopt.core.memory import Precision
from hetopt.core.run_spec import Compression
from hetopt.profiler.probe.run import _objection
from hetopt.profiler.probe.sweep import Replica
from hetopt.trainer.comm.exchange import Exchange
from hetopt.trainer.data.cursor import MicroBatch, SampleCursor
from hetopt.trainer.steps.local_batch import BatchReader
from hetopt.trainer.steps.step import FusedStep, LossModule, LossScale
from hetopt.trainer.steps.stopwatch import Slowdown, Stopwatch
from hetopt.trainer.task import Task
from tests.trainer_pieces.runs import run_of

from . import toy_task

CPU = torch.device("cpu")
ROUNDING: Mapping[Precision, float] = {"fp32": 2**-23, "bf16": 2**-8, "fp16": 2**-11}
"""Of one number: half a unit in the last place, relative."""


def gradient(parts: Sequence[MicroBatch], samples: int, precision: Precision) -> Tensor:
    """What one worker adds to the sum over all, of a step of so many samples."""
    torch.manual_seed(0)
    task = toy_task.wide()
    model = task.model()
    parameters = list(model.parameters())
    step = FusedStep(
        module=LossModule(model, task.loss, precision),
        reader=BatchReader(dataset=task.data(None).train, device=CPU, seed=0),
        exchange=Exchange(Compression(), sum(parameter.numel() for parameter in parameters)),
        stopwatch=Stopwatch(CPU),
        pace=Slowdown(),
    )
    scale = LossScale(value=2.0**10).value if precision == "fp16" else None
    assert step.run(parts, samples, scale).finite
    return torch.cat([parameter.grad.flatten() for parameter in parameters if parameter.grad is not None])


@settings(deadline=None, max_examples=8)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=3), st.sampled_from(["fp32", "bf16", "fp16"]))
def test_an_unequal_split_is_one_machine_to_rounding(shares: list[int], precision: Precision) -> None:
    samples = sum(shares)
    batch = SampleCursor(toy_task.TRAINING_SAMPLES, 0).take(shares)
    slices = [batch.slice(rank) for rank in range(len(shares))]
    parts = [MicroBatch(epoch=0, indices=indices) for indices in slices]
    summed = torch.stack([gradient([part], samples, precision) for part in parts]).sum(dim=0)
    whole = gradient([MicroBatch(epoch=0, indices=[i for part in parts for i in part.indices])], samples, precision)
    alone = [MicroBatch(epoch=0, indices=[i]) for part in parts for i in part.indices]
    exact = [gradient([one], samples, "fp32") for one in alone]
    # Products are rounded wherever the batch is cut; gradients of samples that cancel leave their errors behind.
    size = sum(float(one.norm()) for one in exact)
    assert (summed - whole).norm() <= 4 * ROUNDING[precision] * size
    assert (summed - torch.stack(exact).sum(dim=0)).norm() <= 8 * ROUNDING[precision] * size


class Strict(nn.Linear):
    """Takes what it makes for fp32."""

    def forward(self, x: Tensor) -> Tensor:
        made = super().forward(x)
        if made.dtype != torch.float32:
            raise RuntimeError(f"expected Float but found {made.dtype}.\nmore of this")
        return made


def replica_of(task: Task) -> Replica:
    return Replica.build(task, run_of(1), CPU)


def test_what_a_task_cannot_be_computed_in_is_said_in_a_few_words() -> None:
    usual = toy_task.wide()
    strict = replace(usual, model=lambda: Strict(6, 1), loss=lambda model, batch: model(batch[0]).square().mean())
    reader = BatchReader(dataset=usual.data(None).train, device=CPU, seed=0)
    batch = reader.read(MicroBatch(epoch=0, indices=range(2)))
    replica = replica_of(strict)
    assert _objection(replica, batch) == ""
    said = _objection(replica.computing_in("bf16"), batch)
    assert said == "the task fails in it: expected Float but found torch.bfloat16"
    assert _objection(replica_of(usual).computing_in("bf16"), batch) == ""
    with torch.no_grad():
        next(replica.loss.model.parameters()).fill_(1e30)
    assert _objection(replica, batch) == "the task's loss is inf in it"
