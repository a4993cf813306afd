"""The bundled image tasks: ResNet-20, ResNet-101 and VGG-11 on CIFAR-10, VGG-16 on CIFAR-100.

The targets of the two large ones are those of the gradient-compression literature (GraVAC, Tyagi & Swany 2023: 80%
top-1 and 90% top-5). The small ones take the same 80%, which is modest: ResNet-20 ends at 91.25% after 164 epochs
(He et al. 2016, table 6). All are meant for the full training set; a part of it may not be enough to get there.
"""

from __future__ import annotations

from functools import partial

from hetopt.trainer.task import Target, Task
from hetopt.trainer.tasks.cifar import CIFAR10, CIFAR100, load_cifar
from hetopt.trainer.tasks.recipes import classification, sgd, step_decay
from hetopt.trainer.tasks.resnet import cifar_resnet20, cifar_stem, resnet101
from hetopt.trainer.tasks.vgg import cifar_vgg


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
