"""What the software of rented machines drives: compute capabilities of the pinned torch, families of the boot images.

A GPU that can be rented is not one that can be trained on. The facts are dated, in `catalogs/aws/software.json`; a test
holds them against the torch that is pinned, and against the installed one where that is built for CUDA.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hetopt.optimizer.market.instance_type import Architecture, InstanceType
from hetopt.optimizer.plan import AWS

FACTS = Path(__file__).resolve().parents[2] / "catalogs" / "aws" / "software.json"

_WHEEL_NAMES: dict[Architecture, str] = {"x86_64": "x86-64", "arm64": "aarch64"}


@dataclass(frozen=True, kw_only=True)
class Software:
    """CUDA devices and instance families that the pinned torch and the boot images support.

    Attributes:
        torch: its version.
        capabilities: that its wheel has kernels for, by the processor's architecture.
        families: of instance types that each kind of GPU image supports, by that architecture.
    """

    torch: str
    capabilities: dict[str, tuple[str, ...]]
    families: dict[str, tuple[str, ...]]

    def objection(self, instance: InstanceType) -> str | None:
        """Return why a type's accelerator cannot be trained on, to stand after "its"; None: there is no objection."""
        accelerator, architecture = instance.accelerator, instance.architecture
        if accelerator is None or not accelerator.is_cuda or architecture is None:
            return None
        if accelerator.model is None:
            return f"{accelerator.name} is no GPU of the catalogue's accelerators.csv"
        capability = accelerator.model.compute_capability
        wheel = f"torch {self.torch} for {_WHEEL_NAMES[architecture]}"
        if capability is None:
            return f"{accelerator.name} has no known compute capability to hold against {wheel}"
        if not any(runs(kernels, capability) for kernels in self.capabilities[architecture]):
            return f"{accelerator.name} (compute capability {capability}) is not supported by {wheel}"
        if instance.cloud == AWS and instance.family not in self.families[architecture]:
            return f"{accelerator.name} is not supported by the boot image, of all machines of {instance.family}"
        return None


@cache
def pinned() -> Software:
    """Return the software facts that the catalogue's file pins."""
    facts = json.loads(FACTS.read_text(encoding="utf-8"))
    return Software(
        torch=facts["torch"]["version"],
        capabilities={name: tuple(some) for name, some in facts["torch"]["compute_capabilities"].items()},
        families={kind.removesuffix("-gpu"): tuple(image["families"]) for kind, image in facts["images"].items()},
    )


def runs(kernels: str, capability: str) -> bool:
    """Return whether a device runs kernels: those of its major version, with no higher a minor one."""
    (major, minor), (device_major, device_minor) = (
        tuple(map(int, version.split("."))) for version in (kernels, capability)
    )
    return major == device_major and minor <= device_minor
