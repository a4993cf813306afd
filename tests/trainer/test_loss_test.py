"""A table of losses: what the test at a run's start finds in each, and what it says."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hetopt.core.errors import BadInput
from hetopt.trainer.data.fetch import Batch
from hetopt.trainer.loss_test import LossTest, probe_loss
from hetopt.trainer.session.mixing import Outputs
from hetopt.trainer.task import Loss, Task, TaskData

SAMPLES, FEATURES, CLASSES = 12, 6, 5


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
    "tokens": (network(), of_tokens, "read"),
    "class weights": (
        network(),
        lambda m, b: functional.cross_entropy(m(b[0]), b[1], weight=torch.arange(1.0, 1 + CLASSES)),
        "read",
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
    assert LossTest.from_list(found.to_list()) == found
    assert model.training, "the model is as before"
    assert torch.equal(drawn, torch.get_rng_state()), "so are random numbers"
    assert all(parameter.grad is None for parameter in model.parameters())
    refused = {"sum": "is a sum over samples", "coupled": "is no mean over samples"}
    problem = found.problem(())
    assert (problem is None) == (kind not in refused)
    if problem is not None:
        assert refused[kind] in problem.message
        assert problem.hint
    if kind == "coupled":
        assert found.off > 1e-3, "how far off it is"
        assert found.problem(("whole_batch",)) is None


def test_batch_statistics_are_named_with_how_far_off_they_are() -> None:
    model = network(nn.BatchNorm1d(8))
    before = {name: one.clone() for name, one in model.state_dict().items()}
    found = probe_loss(model, CASES["samples"][1], read, SAMPLES)
    assert found.kind == "mean"
    assert found.statistics_off is not None
    assert found.statistics_off > 0.01
    assert "1 (BatchNorm1d) normalises each worker's samples" in found.note(model, ())
    assert not found.note(model, ("batch_statistics",))
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())


@pytest.mark.parametrize(
    ("name", "couples"),
    {
        "samples": "separate",
        "tokens": "separate",
        "noise": "separate",
        "contrastive": "coupled",
        "root": "coupled",
    }.items(),
)
def test_a_session_sees_whether_samples_are_coupled(name: str, couples: str) -> None:
    model, loss, _ = CASES[name]
    outputs = Outputs(model)
    found = loss(model, data())
    assert isinstance(found, Tensor)
    assert outputs.look(found, SAMPLES) == couples
    found.backward()


def test_hinges_on_differences_of_samples_are_not_called_separate() -> None:
    """They have no second derivative that could tell."""
    model = network()
    outputs = Outputs(model)
    scores = model(data()[0]).sum(1)
    assert outputs.look(functional.relu(0.1 - (scores.view(-1, 1) - scores.view(1, -1))).mean(), SAMPLES) == "unclear"


def test_what_is_accepted_has_a_name() -> None:
    def make(accepted: object) -> Task:
        return Task(
            model=network,
            data=lambda folder: TaskData(train=[0], evaluation=[0]),
            loss=contrastive,
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
            batch_size=4,
            accept_inexact=accepted,  # type: ignore[arg-type]  # as a user may write it
        )

    assert make("whole_batch").accept_inexact == ("whole_batch",)
    with pytest.raises(BadInput, match="accept_inexact of task 'task' must name batch_statistics or whole_batch"):
        make(("everything",))
