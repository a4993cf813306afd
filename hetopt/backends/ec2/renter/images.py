"""Which machine image a type boots: Amazon Linux 2023 everywhere, with NVIDIA's driver where there is a GPU.

The ids are looked up by public parameters that Amazon keeps: the newest image, in any region. A region without the
parameter is asked for the newest image of that name. Both have Python 3.12 and the AWS command line, which booting
relies on. Names cannot be checked without an account, so each says where it was seen, and when.
"""

from __future__ import annotations

from dataclasses import dataclass

from hetopt.core.errors import BadInput
from hetopt.optimizer.market.instance_type import InstanceType
from hetopt.optimizer.market.software import pinned

ImageKind = str
"""Architecture and accelerator, such as 'x86_64-cpu' or 'arm64-gpu'."""

OWNER = "amazon"
"""Whose images are taken: the account alias that EC2 gives Amazon's own."""

_AL2023_SEEN = (
    "Amazon Linux 2023 user guide, 'AL2023 on EC2', and image names in public Terraform and Packer files, 2026-11-26"
)
_DLAMI_SEEN = (
    "DLAMI developer guide, 'find-dlami-id': the image's title without deep, learning and ami; a public Terraform file "
    "that resolved the x86_64 one on 2026-09-27; titles in the release notes of 2026-10-01; read 2026-11-26"
)


@dataclass(frozen=True, kw_only=True)
class Image:
    """Where images of a kind are found.

    Attributes:
        parameter: of the Systems Manager, which holds the id of the newest.
        name: what their names look like, where there is no such parameter.
        seen: where both names were seen, and when.
    """

    parameter: str
    name: str
    seen: str


def _gpu_parameter(architecture: str) -> str:
    return f"/aws/service/deeplearning/ami/{architecture}/base-oss-nvidia-driver-gpu-amazon-linux-2023/latest/ami-id"


IMAGES: dict[ImageKind, Image] = {
    "x86_64-cpu": Image(
        parameter="/aws/service/ami-amazon-linux-latest/al2023-ami-kernel-default-x86_64",
        name="al2023-ami-2023.*-kernel-*-x86_64",
        seen=_AL2023_SEEN,
    ),
    "arm64-cpu": Image(
        parameter="/aws/service/ami-amazon-linux-latest/al2023-ami-kernel-default-arm64",
        name="al2023-ami-2023.*-kernel-*-arm64",
        seen=_AL2023_SEEN,
    ),
    "x86_64-gpu": Image(
        parameter=_gpu_parameter("x86_64"),
        name="Deep Learning Base OSS Nvidia Driver GPU AMI (Amazon Linux 2023) *",
        seen=_DLAMI_SEEN,
    ),
    "arm64-gpu": Image(
        parameter=_gpu_parameter("arm64"),
        name="Deep Learning ARM64 Base OSS Nvidia Driver GPU AMI (Amazon Linux 2023) *",
        seen=_DLAMI_SEEN,
    ),
}


def architecture_of(kind: ImageKind) -> str:
    """The processor architecture of an image, as EC2 spells it."""
    return kind.rpartition("-")[0]


def image_kind(found: InstanceType) -> ImageKind:
    """The kind of image that a type boots.

    Raises:
        BadInput: its accelerator is not one that torch or the image drives, or its architecture is not known.
    """
    if found.architecture is None:
        raise BadInput(f"the architecture of {found.name} is not known.", hint="plan with other types")
    if found.accelerator is not None and not found.accelerator.is_cuda:
        raise BadInput(
            f"{found.name} has a {found.accelerator.name}, which hetopt cannot train on.",
            hint=f"plan without it: `hetopt recommend PROFILE --exclude {found.name}`",
        )
    objection = pinned().objection(found)
    if objection is not None:
        raise BadInput(
            f"{found.name} cannot be trained on: its {objection}.",
            hint=f"plan without it: `hetopt recommend PROFILE --exclude {found.name}`",
        )
    return f"{found.architecture}-{'gpu' if found.cuda_devices else 'cpu'}"


def has_gpu(kind: ImageKind) -> bool:
    """Whether machines of this image compute on GPUs."""
    return kind.endswith("-gpu")
