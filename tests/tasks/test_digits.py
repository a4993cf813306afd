"""The digits task: a fixed split of real data, gradients that add up over any split of a batch, a target it reaches."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from sklearn.datasets import load_digits
from torch import Tensor, nn

from hetopt.trainer.data.fetch import TensorPairs, fetch
from hetopt.trainer.task import TaskData, evaluation_sums
from hetopt.trainer.tasks.digits import _table
from hetopt.trainer.tasks.load import load_task

TASK = load_task("digits")


@pytest.fixture(scope="module")
def data() -> TaskData:
    return TASK.data(None)


def pairs(dataset: object) -> TensorPairs:
    assert isinstance(dataset, TensorPairs)
    return dataset


def test_the_split_is_fixed_stratified_and_disjoint(data: TaskData) -> None:
    train, evaluation = pairs(data.train), pairs(data.evaluation)
    assert (len(train), len(evaluation)) == (1_438, 359)
    assert train.inputs.shape[1:] == (1, 8, 8)
    assert (float(train.inputs.min()), float(train.inputs.max())) == (0.0, 1.0)
    per_class = torch.bincount(evaluation.targets)
    assert int(per_class.max() - per_class.min()) <= 2
    seen = {tuple(image.flatten().tolist()) for image in train.inputs}
    assert not any(tuple(image.flatten().tolist()) in seen for image in evaluation.inputs)
    assert torch.equal(pairs(TASK.data(None).evaluation).inputs, evaluation.inputs)


def test_the_file_is_what_scikit_learn_loads() -> None:
    loaded = load_digits()
    assert torch.equal(_table(), torch.from_numpy(np.column_stack((loaded.data, loaded.target))))


def gradient(model: nn.Module, dataset: TensorPairs, indices: list[int]) -> Tensor:
    model.zero_grad()
    torch.autograd.backward(TASK.loss(model, fetch(dataset, indices)))
    return torch.cat(
        [parameter.grad.flatten().double() for parameter in model.parameters() if parameter.grad is not None]
    )


@settings(max_examples=15, deadline=None)
@given(cuts=st.lists(st.integers(1, 47), min_size=1, max_size=4, unique=True))
def test_weighted_gradients_of_any_split_add_up_to_that_of_the_batch(data: TaskData, cuts: list[int]) -> None:
    train = pairs(data.train)
    torch.manual_seed(0)
    model = TASK.model()
    batch = list(range(0, 48 * 7, 7))
    whole = gradient(model, train, batch)
    edges = [0, *sorted(cuts), 48]
    total = torch.zeros_like(whole)
    for start, end in itertools.pairwise(edges):
        total += (end - start) / 48 * gradient(model, train, batch[start:end])
    assert float((total - whole).norm() / whole.norm()) < 1e-6


def test_the_target_is_reached_within_ten_epochs(data: TaskData) -> None:
    batch_size = 256
    torch.manual_seed(0)
    model = TASK.model()
    optimizer = TASK.optimizer(model)
    for group in optimizer.param_groups:
        group["lr"] *= TASK.learning_rate_scale(batch_size)
    for _ in range(10):
        order = torch.randperm(len(data.train)).tolist()
        for start in range(0, len(order), batch_size):
            optimizer.zero_grad()
            torch.autograd.backward(TASK.loss(model, fetch(data.train, order[start : start + batch_size])))
            optimizer.step()
        sums = evaluation_sums(TASK, model, data.evaluation, range(len(data.evaluation)))
        if TASK.target.reached(TASK.metrics(sums, len(data.evaluation))):
            return
    pytest.fail("the target was not reached in ten epochs")
