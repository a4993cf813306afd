"""The networks are the published ones: parameter counts, shapes, and they learn."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hetopt.trainer.tasks.load import load_task
from hetopt.trainer.tasks.vision import ZeroPadShortcut


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("digits", 98_250),
        # He et al. 2016, table 6: 0.27M.
        ("resnet20-cifar10", 269_722),
        # Zaremba et al. 2014: "4.65M"; PyTorch's second bias adds 8 x width.
        ("lstm-small", 4_651_600 + 8 * 200),
        ("stand-in", 250_000),
    ],
)
def test_a_bundled_task_builds_the_network_it_names(name: str, published: int) -> None:
    with torch.device("meta"):  # shapes without memory
        assert sum(parameter.numel() for parameter in load_task(name).model().parameters()) == published


def test_the_zero_pad_shortcut_strides_and_pads() -> None:
    images = torch.rand(2, 16, 8, 8)
    carried = ZeroPadShortcut(16, 32, 2)(images)
    assert carried.shape == (2, 32, 4, 4)
    assert torch.equal(carried[:, 8:24], images[:, :, ::2, ::2])
    assert carried[:, :8].abs().sum() == carried[:, 24:].abs().sum() == 0


def image_batch(classes: int, samples: int, *shape: int) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, *shape), torch.arange(samples) % classes


def text_batch(samples: int, length: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 10_000, (samples, length + 1))
    return tokens[:, :-1], tokens[:, 1:]


@pytest.mark.parametrize(
    ("name", "batch"),
    [
        ("digits", lambda: image_batch(10, 16, 1, 8, 8)),
        ("resnet20-cifar10", lambda: image_batch(10, 8, 3, 32, 32)),
        ("lstm-small", lambda: text_batch(4, 8)),
    ],
)
def test_three_steps_on_one_batch_lower_its_loss(name: str, batch: Callable[[], tuple[Tensor, Tensor]]) -> None:
    task = load_task(name)
    torch.manual_seed(0)
    model = task.model()
    data = batch()
    # Far below the tuned rate: these are three steps on two samples. At a tenth of it the deepest network goes up or
    # down with the rounding of the processor.
    optimizer = task.optimizer(model)
    for group in optimizer.param_groups:
        group["lr"] *= 0.03

    def loss() -> float:
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(1)  # the same dropout each time
            return float(task.loss(model, data))

    before = loss()
    for _ in range(3):
        optimizer.zero_grad()
        torch.manual_seed(1)
        torch.autograd.backward(task.loss(model, data))
        optimizer.step()
    assert loss() < before
