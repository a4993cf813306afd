"""A table of losses: what the test at a run's start finds in each; its weights give the whole gradient of parts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.nn import functional

from hetopt.core.errors import BadInput
from hetopt.trainer.data.fetch import Batch
from hetopt.trainer.steps.step import LossModule
from hetopt.trainer.task import Loss
from hetopt.trainer.training import LossTest, probe_loss

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


def of_tokens(model: nn.Module, batch: tuple[Tensor, ...], **options: str) -> Tensor:
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


@pytest.mark.parametrize("name", ["samples", "tokens", "class weights", "counted tokens"])
@given(first=st.integers(1, SAMPLES - 1))
@settings(deadline=None, max_examples=8)
def test_unequal_parts_with_their_weights_give_the_whole_gradient(name: str, first: int) -> None:
    """As steps weigh them: by samples, or by what the loss module counted."""
    model, loss, _ = CASES[name]
    module = LossModule(model, loss, FP32)
    found = probe_loss(model, loss, read, SAMPLES)
    module.follow(counts=found.kind == "counted", targets_per_sample=found.targets_per_sample)
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
    module.follow(counts=found.kind == "counted", targets_per_sample=found.targets_per_sample)
    features, labels, tokens = data()
    module((features, labels, tokens))
    labels[0] = -100
    with pytest.raises(BadInput, match="leaves targets out"):
        module((features, labels, tokens))
