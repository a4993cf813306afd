"""A table of losses: what the test at a run's start finds in each; its weights give the whole gradient of parts.

Steps in lower precision: any split gives one machine's gradient to rounding; what a task cannot bear is found.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.nn import functional

from hetopt.core.errors import BadInput
from hetopt.core.memory import Precision
from hetopt.core.run_spec import Compression
from hetopt.profiler.probe.run import _objection
from hetopt.profiler.probe.sweep import Replica
from hetopt.trainer.comm.exchange import Exchange
from hetopt.trainer.data.cursor import MicroBatch, SampleCursor
from hetopt.trainer.data.fetch import Batch
from hetopt.trainer.steps.local_batch import BatchReader
from hetopt.trainer.steps.step import FusedStep, LossModule, LossScale
from hetopt.trainer.steps.stopwatch import Slowdown, Stopwatch
from hetopt.trainer.task import Loss, Task
from hetopt.trainer.training import LossTest, probe_loss
from tests.trainer_pieces.runs import run_of

from . import toy_task

SAMPLES, FEATURES, CLASSES = 12, 6, 5
FP32 = "fp32"


def data() -> tuple[Tensor, Tensor, Tensor]:
    """Features, labels, and padded tokens."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 9, (SAMPLES, 1), generator=generator)
    tokens = torch.randint(1, CLASSES, (SAMPLES, 8), generator=generator)
    return (
        torch.randn(SAMPLES, FEATURES, generator=generator),
        torch.randint(0, CLASSES, (SAMPLES,), generator=generator),
        tokens * (torch.arange(8) < lengths),
    )


def read(places: Sequence[int]) -> Batch:
    """Some of them."""
    return tuple(one[list(places)] for one in data())


def network(*between: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 8), *between, nn.Tanh(), nn.Linear(8, CLASSES))


def of_tokens(model: nn.Module, batch: tuple[Tensor, ...], **options: str | float) -> Tensor:
    tokens = functional.one_hot(batch[2], FEATURES).float()
    logits = model(tokens[:, :-1]).flatten(0, 1)
    return functional.cross_entropy(logits, batch[2][:, 1:].flatten(), ignore_index=0, **options)  # type: ignore[arg-type]


def contrastive(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    one, other = (functional.normalize(model(x)) for x in (batch[0], batch[0].flip(1)))
    return functional.cross_entropy(one @ other.T / 0.1, torch.arange(len(one)))


def noisy(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """As autoencoders and diffusion draw, also in evaluation mode."""
    found = model(batch[0] + 0.1 * torch.randn(len(batch[0]), FEATURES)) + torch.randn_like(batch[0])[:, :CLASSES]
    return functional.dropout(found, 0.3).square().mean() + found.new_empty(len(found), 1).normal_().mul(found).mean()


Case = tuple[nn.Module, Callable[..., Loss], str]

CASES: dict[str, Case] = {
    "samples": (network(), lambda m, b: functional.cross_entropy(m(b[0]), b[1]), "mean"),
    "dropout": (network(nn.Dropout(0.5)), lambda m, b: functional.cross_entropy(m(b[0]), b[1]), "mean"),
    "layer norm": (network(nn.LayerNorm(8)), lambda m, b: functional.cross_entropy(m(b[0]), b[1]), "mean"),
    "noise": (network(), noisy, "mean"),
    "tokens": (network(), of_tokens, "counted"),
    "class weights": (
        network(),
        lambda m, b: functional.cross_entropy(m(b[0]), b[1], weight=torch.arange(1.0, 1 + CLASSES)),
        "counted",
    ),
    "smoothed tokens": (network(), lambda m, b: of_tokens(m, b, label_smoothing=0.2), "counted"),
    "smoothed class weights": (
        network(),
        lambda m, b: (
            functional.cross_entropy(m(b[0]), b[1], weight=torch.arange(1.0, 1 + CLASSES), label_smoothing=0.2) / 2
        ),
        "counted",
    ),
    "counted tokens": (network(), lambda m, b: (of_tokens(m, b, reduction="sum"), (b[2][:, 1:] != 0).sum()), "counted"),
    "counted wrongly": (network(), lambda m, b: (of_tokens(m, b, reduction="sum"), len(b[0]) ** 2), "coupled"),
    "sum": (network(), lambda m, b: functional.cross_entropy(m(b[0]), b[1], reduction="sum"), "sum"),
    "contrastive": (network(), contrastive, "coupled"),
    "root": (network(), lambda m, b: m(b[0]).square().mean().sqrt(), "coupled"),
    "load balance": (network(), lambda m, b: m(b[0]).softmax(1).mean(0).square().sum(), "coupled"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_a_loss_is_a_mean_over(name: str) -> None:
    model, loss, kind = CASES[name]
    drawn = torch.get_rng_state()
    found = probe_loss(model, loss, read, SAMPLES)
    assert found.kind == kind
    assert LossTest(**json.loads(json.dumps(asdict(found)))) == found
    assert model.training, "the model is as before"
    assert torch.equal(drawn, torch.get_rng_state()), "so are random numbers"
    assert all(parameter.grad is None for parameter in model.parameters())
    assert (found.problem is not None) == (kind == "sum")
    assert bool(found.note) == (kind == "coupled")
    if kind == "coupled":
        assert found.off > 1e-3, "how far off it is"


def test_batch_norm_is_measured_in_training_mode() -> None:
    model = network(nn.BatchNorm1d(8))
    before = {name: one.clone() for name, one in model.state_dict().items()}
    found = probe_loss(model, CASES["samples"][1], read, SAMPLES)
    assert found.kind == "mean"
    assert found.off > 0.01
    assert "layers normalise each worker's samples by themselves" in found.note
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())


@pytest.mark.parametrize(
    "name", ["samples", "tokens", "class weights", "smoothed tokens", "smoothed class weights", "counted tokens"]
)
@given(first=st.integers(1, SAMPLES - 1))
@settings(deadline=None, max_examples=8)
def test_unequal_parts_with_their_weights_give_the_whole_gradient(name: str, first: int) -> None:
    """As steps weigh them: by samples, or by what the loss module counted."""
    model, loss, _ = CASES[name]
    module = LossModule(model, loss, FP32)
    found = probe_loss(model, loss, read, SAMPLES)
    module.is_counted, module.targets_per_sample = found.kind == "counted", found.targets_per_sample
    parameters = list(model.parameters())

    def computed(begin: int, end: int) -> tuple[Tensor, float]:
        batch = read(range(begin, end))
        mean: Tensor = module(batch)
        flat = torch.cat([one.flatten() for one in torch.autograd.grad(mean, parameters)])
        return flat.double(), float(end - begin) if module.count is None else float(module.count)

    whole, total = computed(0, SAMPLES)
    parts = [computed(0, first), computed(first, SAMPLES)]
    assert sum(weight for _, weight in parts) == pytest.approx(total)
    mean = sum((weight / total * gradient for gradient, weight in parts), torch.zeros_like(whole))
    assert float((mean - whole).norm() / whole.norm()) < 1e-5


def test_targets_left_out_later_than_in_the_first_batch_are_refused() -> None:
    """Parts were weighed by samples until then, which is wrong from there on."""
    model = network()

    loss = CASES["samples"][1]
    module = LossModule(model, loss, FP32)
    found = probe_loss(model, loss, read, SAMPLES)
    module.is_counted, module.targets_per_sample = found.kind == "counted", found.targets_per_sample
    features, labels, tokens = data()
    module((features, labels, tokens))
    labels[0] = -100
    with pytest.raises(BadInput, match="leaves targets out"):
        module((features, labels, tokens))


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
