"""The networks are the published ones: parameter counts, shapes, and they learn."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from hetopt.trainer.tasks.digits import digits_network
from hetopt.trainer.tasks.language import LSTMLanguageModel
from hetopt.trainer.tasks.load import load_task
from hetopt.trainer.tasks.vision import (
    VGG,
    ResNet,
    ZeroPadShortcut,
    basic_block,
    cifar_resnet20,
    cifar_stem,
    cifar_vgg,
    imagenet_stem,
    projection_shortcut,
    resnet101,
)

IMAGENET = {"classes": 1000, "image_size": 224, "head_width": 4096}


def parameter_count(build: Callable[[], nn.Module]) -> int:
    with torch.device("meta"):  # shapes without memory
        return sum(parameter.numel() for parameter in build().parameters())


def option_b_resnet20() -> nn.Module:
    block = partial(basic_block, shortcut=projection_shortcut)
    return ResNet(stem=cifar_stem, block=block, widths=(16, 32, 64), depths=(3, 3, 3), classes=10)


def resnet18() -> nn.Module:
    block = partial(basic_block, shortcut=projection_shortcut)
    return ResNet(stem=imagenet_stem, block=block, widths=(64, 128, 256, 512), depths=(2, 2, 2, 2), classes=1000)


def zaremba(width: int) -> nn.Module:
    return LSTMLanguageModel(vocabulary_size=10_000, width=width, layers=2, dropout=0.5, initial_range=0.05)


@pytest.mark.parametrize(
    ("build", "published"),
    [
        # The counts of torchvision's ImageNet models, for 1,000 classes.
        pytest.param(resnet18, 11_689_512, id="resnet18-imagenet"),
        pytest.param(partial(resnet101, 1000), 44_549_160, id="resnet101-imagenet"),
        pytest.param(partial(VGG, 11, **IMAGENET), 132_863_336, id="vgg11-imagenet"),
        pytest.param(partial(VGG, 16, **IMAGENET), 138_357_544, id="vgg16-imagenet"),
        # He et al. 2016, table 6: 0.27M; implementations count 269,722 with option A and 272,474 with option B.
        pytest.param(partial(cifar_resnet20, 10), 269_722, id="resnet20-option-a"),
        pytest.param(option_b_resnet20, 272_474, id="resnet20-option-b"),
        # The CIFAR form with a 3x3 stem, as commonly implemented.
        pytest.param(partial(resnet101, 10, stem=cifar_stem), 42_512_970, id="resnet101-cifar10"),
        # Convolutions 9,220,480 and 14,714,688; then 512 -> 512 -> 512 -> classes.
        pytest.param(partial(cifar_vgg, 11, 10), 9_220_480 + 2 * 262_656 + 5_130, id="vgg11-cifar10"),
        pytest.param(partial(cifar_vgg, 16, 100), 14_714_688 + 2 * 262_656 + 51_300, id="vgg16-cifar100"),
        # Zaremba et al. 2014: "66M" and "4.65M"; PyTorch's second bias adds 8 x width.
        pytest.param(partial(zaremba, 1500), 66_022_000 + 8 * 1500, id="lstm-large"),
        pytest.param(partial(zaremba, 200), 4_651_600 + 8 * 200, id="lstm-small"),
        pytest.param(digits_network, 98_250, id="digits"),
    ],
)
def test_parameter_counts(build: Callable[[], nn.Module], published: int) -> None:
    assert parameter_count(build) == published


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("digits", 98_250),
        ("resnet20-cifar10", 269_722),
        ("resnet101-cifar10", 42_512_970),
        ("vgg11-cifar10", 9_750_922),
        ("vgg16-cifar100", 15_291_300),
        ("lstm-small", 4_653_200),
        ("lstm-ptb", 66_034_000),
        ("stand-in", 250_000),
    ],
)
def test_a_bundled_task_builds_the_network_it_names(name: str, count: int) -> None:
    assert parameter_count(load_task(name).model) == count


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
        ("resnet101-cifar10", lambda: image_batch(10, 2, 3, 16, 16)),
        ("vgg11-cifar10", lambda: image_batch(10, 8, 3, 32, 32)),
        ("vgg16-cifar100", lambda: image_batch(100, 8, 3, 32, 32)),
        ("lstm-small", lambda: text_batch(4, 8)),
        ("lstm-ptb", lambda: text_batch(1, 4)),
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
