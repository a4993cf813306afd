"""The bundled image tasks: ResNet-20, ResNet-101 and VGG-11 on CIFAR-10, VGG-16 on CIFAR-100.

The targets of the two large ones are those of the gradient-compression literature (GraVAC, Tyagi & Swany 2023: 80%
top-1 and 90% top-5). The small ones take the same 80%, which is modest: ResNet-20 ends at 91.25% after 164 epochs
(He et al. 2016, table 6). All are meant for the full training set; a part of it may not be enough to get there.

Residual networks (He, Zhang, Ren & Sun, CVPR 2016): both block types, both stems, shortcuts A and B.

The CIFAR form of section 4.2 is the default of no builder: a network is put together from a stem, stages and a
shortcut. BatchNorm follows the paper, so the gradient of a batch depends on how it is split over workers (each
normalises by its own share), as in any data-parallel training of these networks.

VGG networks (Simonyan & Zisserman, ICLR 2015), configurations A (11 layers) and D (16 layers).

They have no normalisation; dropout in the head draws from each worker's own generator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import MappingProxyType
from typing import TypeAlias

from torch import Tensor, nn
from torch.nn import functional

from hetopt.trainer.task import Target, Task
from hetopt.trainer.tasks.cifar import CIFAR10, CIFAR100, load_cifar
from hetopt.trainer.tasks.recipes import classification, sgd, step_decay

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


_POOL = 0
_CONFIGURATIONS = MappingProxyType(
    {
        11: (64, _POOL, 128, _POOL, 256, 256, _POOL, 512, 512, _POOL, 512, 512, _POOL),
        16: (64, 64, _POOL, 128, 128, _POOL, 256, 256, 256, _POOL, 512, 512, 512, _POOL, 512, 512, 512, _POOL),
    }
)
"""Weight layers -> output channels of the 3x3 convolutions in order; 0 is a 2x2 pooling (table 1 of the paper)."""


class VGG(nn.Module):
    """3x3 convolutions with five poolings, then three linear layers."""

    def __init__(self, depth: int, *, classes: int, image_size: int, head_width: int) -> None:
        """Build configuration ``depth`` (11 or 16) for square images of ``image_size`` pixels, a multiple of 32.

        ``head_width`` is the width of the two hidden linear layers: 4096 in the paper.
        """
        super().__init__()
        features: list[nn.Module] = []
        channels = 3
        for outputs in _CONFIGURATIONS[depth]:
            if outputs == _POOL:
                features.append(nn.MaxPool2d(2))
            else:
                features += [nn.Conv2d(channels, outputs, 3, padding=1), nn.ReLU(inplace=True)]
                channels = outputs
        self.features = nn.Sequential(*features)
        last = nn.Linear(head_width, classes)
        self.head = nn.Sequential(
            nn.Linear(channels * (image_size // 32) ** 2, head_width),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(head_width, head_width),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            last,
        )
        # The paper starts deep configurations from a trained shallow one, and notes that the initialisation of Glorot &
        # Bengio makes that unnecessary; He et al. 2015 is its form for rectifiers.
        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        nn.init.normal_(last.weight, std=0.01)

    def forward(self, images: Tensor) -> Tensor:
        """Map [n, 3, image_size, image_size] to logits [n, classes]."""
        logits: Tensor = self.head(self.features(images).flatten(1))
        return logits


def cifar_vgg(depth: int, classes: int) -> VGG:
    """Return the network for 32x32 images, its head 512 wide as the features are.

    Parameters: 9,750,922 for 11 layers and 10 classes; 15,291,300 for 16 layers and 100 classes.
    """
    return VGG(depth, classes=classes, image_size=32, head_width=512)


def resnet20_cifar10() -> Task:
    """Return ResNet-20, 0.27 million parameters, with its paper's recipe (64k steps, drops at 32k and 48k)."""
    return classification(
        name="resnet20-cifar10",
        model=partial(cifar_resnet20, CIFAR10.classes),
        data=partial(load_cifar, CIFAR10),
        optimizer=sgd(0.1, weight_decay=1e-4),
        schedule=step_decay(82, 123, factor=0.1),
        usual_epochs=164,
        target=Target(metric="accuracy", value=0.80),
        batch_size=128,
    )


def resnet101_cifar10() -> Task:
    """Return ResNet-101 with a 3x3 stem, 42.5 million parameters (170 MB)."""
    return classification(
        name="resnet101-cifar10",
        model=partial(resnet101, CIFAR10.classes, stem=cifar_stem),
        data=partial(load_cifar, CIFAR10),
        optimizer=sgd(0.1, weight_decay=1e-4),
        schedule=step_decay(110, 150, factor=0.1),
        usual_epochs=180,
        target=Target(metric="accuracy", value=0.80),
        batch_size=128,
        evaluation_batch_size=128,
    )


def vgg11_cifar10() -> Task:
    """Return VGG-11 with a 512-wide head, 9.8 million parameters (39 MB)."""
    return classification(
        name="vgg11-cifar10",
        model=partial(cifar_vgg, 11, CIFAR10.classes),
        data=partial(load_cifar, CIFAR10),
        optimizer=sgd(0.02, weight_decay=5e-4),
        schedule=step_decay(75, 110, factor=0.1),
        usual_epochs=150,
        target=Target(metric="accuracy", value=0.80),
        batch_size=128,
    )


def vgg16_cifar100() -> Task:
    """Return VGG-16 with a 512-wide head, 15.3 million parameters (61 MB).

    The 528 MB (MiB, in fact) that compression papers quote are those of the ImageNet head: 4,096 wide, on images of
    224 pixels.
    """
    return classification(
        name="vgg16-cifar100",
        model=partial(cifar_vgg, 16, CIFAR100.classes),
        data=partial(load_cifar, CIFAR100),
        optimizer=sgd(0.02, weight_decay=5e-4),
        schedule=step_decay(75, 110, factor=0.1),
        usual_epochs=150,
        target=Target(metric="top5_accuracy", value=0.90),
        batch_size=128,
    )
