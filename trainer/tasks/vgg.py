"""VGG networks (Simonyan & Zisserman, ICLR 2015), configurations A (11 layers) and D (16 layers).

They have no normalisation; dropout in the head draws from each worker's own generator.
"""

from __future__ import annotations

from types import MappingProxyType

from torch import Tensor, nn

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
