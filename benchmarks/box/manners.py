"""Refusals and image names of EC2 that moto leaves out, for every moto server that stands in for it.

Each rule says where it was read: a call that the real service refuses must not succeed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moto.core.responses import ActionResult
from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models.amis import Ami, AmiBackend
from moto.ec2.responses.fleets import Fleets
from moto.ssm.exceptions import ParameterNotFound
from moto.ssm.responses import SimpleSystemManagerResponse

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


def teach() -> None:
    """Patch this process's moto to refuse as EC2 does, and to have images of true names."""
    plain_create = Fleets.create_fleet

    def load(self: AmiBackend) -> None:
        """Replace the images by AWS's of today, under the ids that the parameters give."""
        self.amis.clear()
        for id_, (name, architecture, gigabytes) in zip(PARAMETERS.values(), TITLES, strict=True):
            self.amis[id_] = _image(self, id_, name, architecture, "/dev/xvda", gigabytes)
        self.amis[UBUNTU] = _image(self, UBUNTU, "ubuntu-noble-24.04-amd64-server", "x86_64", "/dev/sda1", 8)

    def get_parameter(self: SimpleSystemManagerResponse) -> ActionResult:
        """Answer with an image's id; raise `ParameterNotFound` for another name."""
        name = self._get_param("Name")
        if name not in PARAMETERS:
            raise ParameterNotFound(f"Parameter {name} not found.")
        return ActionResult({"Parameter": {"Name": name, "Type": "String", "Value": PARAMETERS[name], "Version": 1}})

    def create_fleet(self: Fleets) -> ActionResult:
        """Refuse a capacity unit without instance requirements, then create the fleet.

        'You can specify this parameter only when using attributed-based instance type selection' (API model)."""
        target = self._get_param("TargetCapacitySpecification", {})
        overrides = [
            override for each in self._get_param("LaunchTemplateConfigs", []) for override in each.get("Overrides", [])
        ]
        if "TargetCapacityUnitType" in target and not all("InstanceRequirements" in override for override in overrides):
            raise EC2ClientError(
                "InvalidParameterCombination", "TargetCapacityUnitType may be given with InstanceRequirements only."
            )
        return plain_create(self)

    def disks(self: Ami) -> list[dict[str, Any]]:
        size = getattr(self, "gigabytes", 8)
        return [{"DeviceName": self.root_device_name, "Ebs": {"SnapshotId": self.ebs_snapshot.id, "VolumeSize": size}}]

    Ami.block_device_mappings = property(disks)  # type: ignore[method-assign,assignment]
    AmiBackend._load_amis = load  # type: ignore[method-assign]  # on purpose, here and below
    SimpleSystemManagerResponse.get_parameter = get_parameter  # type: ignore[method-assign]
    Fleets.create_fleet = create_fleet  # type: ignore[method-assign]


def _image(backend: AmiBackend, id_: str, name: str, architecture: str, root_device: str, gigabytes: int) -> Ami:
    """Return a public image of Amazon's, in moto's terms, that remembers its size."""
    image = Ami(
        backend,
        id_,
        name=name,
        owner_alias="amazon",
        owner_id="137112412989",
        public=True,
        architecture=architecture,
        virtualization_type="hvm",
        root_device_type="ebs",
        root_device_name=root_device,
    )
    image.gigabytes = gigabytes  # type: ignore[attr-defined]  # read by what `teach` puts in the place of moto's 15 GB
    return image  # pyright: ignore[reportReturnType]  # moto's models have a `__new__` of their own
