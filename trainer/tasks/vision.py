"""The bundled image task: the 20-layer residual network of section 4.2 on CIFAR-10 (He, Zhang, Ren & Sun, CVPR 2016).

The target is 80 % accuracy, that of the gradient-compression literature, which is modest: ResNet-20 ends at 91.25 %
after 164 epochs (table 6). It is meant for the full training set; a part of it may not be enough to get there.

BatchNorm follows the paper, so the gradient of a batch depends on how it is split over workers (each normalises by its
own share), as in any data-parallel training of these networks.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional

from hetopt.trainer.task import Target, Task
from hetopt.trainer.tasks.cifar import CLASSES, load_cifar
from hetopt.trainer.tasks.recipes import classification, sgd, step_decay


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


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions around a shortcut: relu(body(x) + shortcut(x))."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )
        is_alike = inputs == width and stride == 1
        self.shortcut = nn.Identity() if is_alike else ZeroPadShortcut(inputs, width, stride)

    def forward(self, images: Tensor) -> Tensor:
        """Map [n, inputs, h, w] to [n, width, h / stride, w / stride]."""
        return functional.relu(self.body(images) + self.shortcut(images))


class ResNet20(nn.Module):
    """A 3x3 convolution, three stages of three blocks, a global average and one linear layer.

    269,722 parameters for 10 classes. Implementations that project their shortcuts (option B) count 272,474; the
    paper's CIFAR networks use option A everywhere, "0.27M".
    """

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
        widths = (16, 16, 16, 16, 32, 32, 32, 64, 64, 64)
        self.blocks = nn.Sequential(
            *(ResidualBlock(before, width, width // before) for before, width in pairwise(widths))
        )
        self.head = nn.Linear(widths[-1], classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Map [n, 3, h, w] to logits [n, classes]."""
        features: Tensor = self.blocks(self.stem(images)).mean(dim=(2, 3))
        logits: Tensor = self.head(features)
        return logits


def resnet20_cifar10() -> Task:
    """Return ResNet-20, 0.27 million parameters, with its paper's recipe (64k steps, drops at 32k and 48k)."""
    return classification(
        name="resnet20-cifar10",
        model=partial(ResNet20, CLASSES),
        data=load_cifar,
        optimizer=sgd(0.1, weight_decay=1e-4),
        schedule=step_decay(82, 123, factor=0.1),
        usual_epochs=164,
        target=Target(metric="accuracy", value=0.80),
        batch_size=128,
    )
