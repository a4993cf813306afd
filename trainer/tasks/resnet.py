"""Residual networks (He, Zhang, Ren & Sun, CVPR 2016): both block types, both stems, shortcuts A and B.

The CIFAR form of section 4.2 is the default of no builder: a network is put together from a stem, stages and a
shortcut. BatchNorm follows the paper, so the gradient of a batch depends on how it is split over workers (each
normalises by its own share), as in any data-parallel training of these networks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

from torch import Tensor, nn
from torch.nn import functional

Shortcut: TypeAlias = Callable[[int, int, int], nn.Module]
"""(input channels, output channels, stride) -> the module that carries the input around a block."""

Block: TypeAlias = Callable[[int, int, int], "ResidualBlock"]
"""(input channels, stage width, stride) -> block."""


class ZeroPadShortcut(nn.Module):
    """Option A: every ``stride``-th pixel, new channels filled with zeros. No parameters."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.new_channels = outputs - inputs
        self.stride = stride

    def forward(self, images: Tensor) -> Tensor:
        """Map [n, inputs, h, w] to [n, outputs, h / stride, w / stride]."""
        strided = images[:, :, :: self.stride, :: self.stride]
        before = self.new_channels // 2
        return functional.pad(strided, (0, 0, 0, 0, before, self.new_channels - before))


def projection_shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    """Return option B: a 1x1 convolution where the shape changes."""
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))


class ResidualBlock(nn.Module):
    """relu(body(x) + shortcut(x)); the shortcut is the identity where body keeps the shape."""

    def __init__(self, body: nn.Module, shortcut: nn.Module, outputs: int) -> None:
        super().__init__()
        self.body = body
        self.shortcut = shortcut
        self.outputs = outputs

    def forward(self, images: Tensor) -> Tensor:
        """Map [n, c, h, w] to [n, outputs, h / stride, w / stride]."""
        return functional.relu(self.body(images) + self.shortcut(images))


def basic_block(inputs: int, width: int, stride: int, *, shortcut: Shortcut) -> ResidualBlock:
    """Return two 3x3 convolutions around a shortcut."""
    body = nn.Sequential(
        nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.Conv2d(width, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
    )
    return ResidualBlock(body, _around(inputs, width, stride, shortcut), width)


def bottleneck_block(inputs: int, width: int, stride: int, *, shortcut: Shortcut) -> ResidualBlock:
    """Return 1x1, 3x3, 1x1 convolutions around a shortcut, four times as wide outside as inside.

    The stride sits on the 3x3 convolution rather than on the first 1x1, as in the implementations that the published
    parameter counts and accuracies of today come from; the count is the same.
    """
    outputs = 4 * width
    body = nn.Sequential(
        nn.Conv2d(inputs, width, 1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.Conv2d(width, width, 3, stride, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.Conv2d(width, outputs, 1, bias=False),
        nn.BatchNorm2d(outputs),
    )
    return ResidualBlock(body, _around(inputs, outputs, stride, shortcut), outputs)


def _around(inputs: int, outputs: int, stride: int, shortcut: Shortcut) -> nn.Module:
    return nn.Identity() if inputs == outputs and stride == 1 else shortcut(inputs, outputs, stride)


def cifar_stem(width: int) -> nn.Module:
    """Return one 3x3 convolution, which keeps the 32x32 pixels."""
    return nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True))


def imagenet_stem(width: int) -> nn.Module:
    """Return a 7x7 convolution and a pooling, each halving the picture."""
    return nn.Sequential(
        nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2, padding=1),
    )


class ResNet(nn.Module):
    """Stem, stages of residual blocks, global average, one linear layer."""

    def __init__(
        self,
        *,
        stem: Callable[[int], nn.Module],
        block: Block,
        widths: Sequence[int],
        depths: Sequence[int],
        classes: int,
    ) -> None:
        """Build stages of ``depths[i]`` blocks of width ``widths[i]``; each stage but the first halves the picture."""
        super().__init__()
        self.stem = stem(widths[0])
        blocks: list[nn.Module] = []
        channels = widths[0]
        for stage, (width, depth) in enumerate(zip(widths, depths, strict=True)):
            for position in range(depth):
                added = block(channels, width, 2 if stage > 0 and position == 0 else 1)
                blocks.append(added)
                channels = added.outputs
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Map [n, 3, h, w] to logits [n, classes]."""
        features: Tensor = self.blocks(self.stem(images)).mean(dim=(2, 3))
        logits: Tensor = self.head(features)
        return logits


def cifar_resnet20(classes: int) -> ResNet:
    """Return the 20-layer network of section 4.2 with the paper's option A: 269,722 parameters for 10 classes.

    Implementations that project their shortcuts (option B) count 272,474; the paper's CIFAR networks use A everywhere,
    "0.27M".
    """
    block = partial(basic_block, shortcut=ZeroPadShortcut)
    return ResNet(stem=cifar_stem, block=block, widths=(16, 32, 64), depths=(3, 3, 3), classes=classes)


def resnet101(classes: int, *, stem: Callable[[int], nn.Module] = imagenet_stem) -> ResNet:
    """Return the 101-layer network: 44,549,160 parameters for 1,000 classes; 42,512,970 with `cifar_stem` for 10."""
    block = partial(bottleneck_block, shortcut=projection_shortcut)
    return ResNet(stem=stem, block=block, widths=(64, 128, 256, 512), depths=(3, 4, 23, 3), classes=classes)
