"""Evaluation sums add up over any partition, metrics follow from them, and the optimizer clips the whole gradient."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from hetopt.core.errors import BadInput
from hetopt.trainer.data.fetch import TensorPairs
from hetopt.trainer.task import Target, Task, TaskData, add_sums, evaluation_sums
from hetopt.trainer.tasks.recipes import (
    classification,
    clip_before_step,
    epoch_decay,
    language_model,
    sgd,
    step_decay,
)

SAMPLES = 37
GENERATOR = torch.Generator().manual_seed(0)
VECTORS = TensorPairs(
    torch.randn(SAMPLES, 6, generator=GENERATOR), torch.randint(0, 7, (SAMPLES,), generator=GENERATOR)
)
TOKENS = torch.randint(0, 11, (SAMPLES, 6), generator=GENERATOR)
TEXT = TensorPairs(TOKENS[:, :-1], TOKENS[:, 1:])


def build_classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 7))


def build_tagger() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(11, 8), nn.Dropout(0.5), nn.Linear(8, 11))


CLASSIFIER = classification(
    name="vectors",
    model=build_classifier,
    data=lambda folder: TaskData(train=VECTORS, evaluation=VECTORS),
    optimizer=sgd(0.1),
    target=Target(metric="accuracy", value=0.9),
    batch_size=8,
    evaluation_batch_size=5,
)
TAGGER = language_model(
    name="text",
    model=build_tagger,
    data=lambda folder: TaskData(train=TEXT, evaluation=TEXT),
    optimizer=sgd(0.1),
    target=Target(metric="perplexity", value=2.0, higher_is_better=False),
    batch_size=8,
    evaluation_batch_size=5,
)


@pytest.mark.parametrize(("task", "dataset"), [(CLASSIFIER, VECTORS), (TAGGER, TEXT)])
@settings(max_examples=25)
@given(order=st.permutations(range(SAMPLES)), cuts=st.lists(st.integers(0, SAMPLES), max_size=4))
def test_sums_over_any_partition_equal_the_whole(
    task: Task, dataset: TensorPairs, order: list[int], cuts: list[int]
) -> None:
    model = task.model()
    whole = evaluation_sums(task, model, dataset, range(SAMPLES))
    edges = [0, *sorted(cuts), SAMPLES]
    parts = [evaluation_sums(task, model, dataset, order[start:end]) for start, end in itertools.pairwise(edges)]
    assert add_sums(parts) == pytest.approx(whole, rel=1e-5)


def test_evaluation_does_not_disturb_training() -> None:
    model = CLASSIFIER.model()
    first = evaluation_sums(CLASSIFIER, model, VECTORS, range(SAMPLES))
    assert model.training  # and dropout was off in between:
    assert evaluation_sums(CLASSIFIER, model, VECTORS, range(SAMPLES)) == first
    model.eval()
    evaluation_sums(CLASSIFIER, model, VECTORS, range(3))
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_classification_metrics_are_what_their_names_say() -> None:
    logits = torch.eye(7)[[0, 1, 2, 3]] * 9 - torch.arange(7) * 0.1  # predicts 0..3; class 6 is never in the top five
    labels = torch.tensor([0, 1, 2, 6])
    metrics = CLASSIFIER.metrics(
        {name: float(value) for name, value in CLASSIFIER.evaluate(nn.Identity(), (logits, labels)).items()}, 4
    )
    assert metrics["accuracy"] == 0.75
    assert metrics["top5_accuracy"] == 0.75
    assert metrics["loss"] == pytest.approx(float(nn.functional.cross_entropy(logits, labels)))


def test_few_classes_have_no_top5() -> None:
    sums = CLASSIFIER.evaluate(nn.Identity(), (torch.randn(4, 5), torch.zeros(4, dtype=torch.int64)))
    assert set(sums) == {"loss", "correct"}


def test_perplexity_of_a_uniform_guess_is_the_vocabulary() -> None:
    class Uniform(nn.Module):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return torch.zeros(*tokens.shape, 11)

    sums = evaluation_sums(TAGGER, Uniform(), TEXT, range(SAMPLES))
    assert TAGGER.metrics(sums, SAMPLES)["perplexity"] == pytest.approx(11, rel=1e-5)
    assert sums["tokens"] == SAMPLES * 5
    assert TAGGER.metrics({"loss": 1e6, "tokens": 10.0}, 2)["perplexity"] == math.inf


def test_a_batch_of_another_shape_is_bad_input() -> None:
    with pytest.raises(BadInput, match="two tensors"):
        CLASSIFIER.loss(build_classifier(), {"inputs": torch.zeros(2, 6)})
    with pytest.raises(BadInput, match="two tensors"):
        CLASSIFIER.evaluate(build_classifier(), torch.zeros(2, 6))


@given(norm=st.floats(0.01, 100), scale=st.floats(0.01, 100))
@settings(max_examples=25)
def test_clipping_bounds_the_norm_of_the_whole_gradient_and_keeps_its_direction(norm: float, scale: float) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    before = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, scale)
    gradient = torch.full_like(before, scale)
    clip_before_step(torch.optim.SGD(model.parameters(), lr=1.0), norm).step()
    step = before - torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    expected = gradient * min(1.0, norm / float(gradient.norm()))
    assert torch.allclose(step, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("learning_rate", [0.0, -1.0, math.nan, math.inf])
def test_impossible_learning_rates_are_refused(learning_rate: float) -> None:
    with pytest.raises(BadInput, match="learning rate"):
        sgd(learning_rate)


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        (step_decay(123, 82, factor=0.1), {0: 1, 81.99: 1, 82: 0.1, 122: 0.1, 123: 0.01, 500: 0.01}),
        (epoch_decay(after=4, factor=0.5), {0: 1, 3.99: 1, 4: 0.5, 4.9: 0.5, 5: 0.25, 7.5: 0.0625}),
    ],
)
def test_decay(schedule: Callable[[float], float], factors: dict[float, float]) -> None:
    assert [schedule(epoch) for epoch in factors] == pytest.approx(list(factors.values()))
