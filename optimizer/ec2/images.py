"""Which machine image a type boots: Amazon Linux 2023 everywhere, with NVIDIA's driver where there is a GPU.

The ids are looked up by public parameters that Amazon keeps (user guides of AL2023 and of the Deep Learning AMIs,
2026-09): the newest image, in any region. Both have Python 3.12 and the AWS command line, which booting relies on.
"""

from __future__ import annotations

from dataclasses import dataclass

from hetopt.optimizer.market.instance_type import InstanceType
from hetopt.profiler.errors import BadInput

ImageKind = str
"""Architecture and accelerator, such as 'x86_64-cpu' or 'arm64-gpu'."""


@dataclass(frozen=True, kw_only=True)
class Image:
    """Where to look an image up, and what must be known of it.

    Attributes:
        root_device: the name that its root volume is mapped by.
    """

    parameter: str
    root_device: str = "/dev/xvda"


IMAGES: dict[ImageKind, Image] = {
    "x86_64-cpu": Image(parameter="/aws/service/ami-amazon-linux-latest/al2023-ami-kernel-default-x86_64"),
    "arm64-cpu": Image(parameter="/aws/service/ami-amazon-linux-latest/al2023-ami-kernel-default-arm64"),
    "x86_64-gpu": Image(
        parameter="/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-al2023/latest/ami-id"
    ),
    "arm64-gpu": Image(parameter="/aws/service/deeplearning/ami/arm64/base-oss-nvidia-driver-gpu-al2023/latest/ami-id"),
}


def image_kind(found: InstanceType) -> ImageKind:
    """The kind of image that a type boots.

    Raises:
        BadInput: its accelerator is not one that torch drives, or its architecture is not known.
    """
    if found.architecture is None:
        raise BadInput(f"the architecture of {found.name} is not known.", hint="plan with other types")
    if found.accelerator is not None and not found.accelerator.is_cuda:
        raise BadInput(
            f"{found.name} has a {found.accelerator.name}, which hetopt cannot train on.",
            hint=f"plan without it: `hetopt recommend PROFILE --exclude {found.name}`",
        )
    return f"{found.architecture}-{'gpu' if found.cuda_devices else 'cpu'}"


def has_gpu(kind: ImageKind) -> bool:
    """Whether machines of this image compute on GPUs."""
    return kind.endswith("-gpu")
