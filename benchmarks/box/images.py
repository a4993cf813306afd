"""Images that stand-ins for EC2 have, under the names that AWS gives them."""

from __future__ import annotations

from collections.abc import Mapping

_DLAMI = "/aws/service/deeplearning/ami/{}/base-oss-nvidia-driver-gpu-amazon-linux-2023/latest/ami-id"
_AL2023 = "/aws/service/ami-amazon-linux-latest/al2023-ami-kernel-default-{}"

PARAMETERS: Mapping[str, str] = {
    _AL2023.format("x86_64"): "ami-0a12023000000c86a",
    _AL2023.format("arm64"): "ami-0a12023000000ca64",
    _DLAMI.format("x86_64"): "ami-0d1a111000000086a",
    _DLAMI.format("arm64"): "ami-0d1a1110000000a64",
}
"""Under the names that AWS has (DLAMI developer guide, 'find-dlami-id'; AL2023 user guide; 2026-11-26)."""

TITLES = (
    ("al2023-ami-2023.12.20260928.0-kernel-6.12-x86_64", "x86_64", 8),
    ("al2023-ami-2023.12.20260928.0-kernel-6.12-arm64", "arm64", 8),
    ("Deep Learning Base OSS Nvidia Driver GPU AMI (Amazon Linux 2023) 20260929", "x86_64", 75),
    ("Deep Learning ARM64 Base OSS Nvidia Driver GPU AMI (Amazon Linux 2023) 20260929", "arm64", 75),
)
UBUNTU = "ami-0ab0000000000022"
"""An image of Canonical's, whose root device has another name."""
