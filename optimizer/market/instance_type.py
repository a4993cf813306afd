"""The facts of one machine type, and whether the pinned torch and the boot images drive its GPU; None means unknown.

Compute capabilities of the pinned torch and families of the boot images are dated facts in
`catalogs/aws/software.json`.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeFloat, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from hetopt import catalogs
from hetopt.core.errors import BadInput
from hetopt.optimizer.market.catalog_rows import FACT, HINT, Name, Whole, read_rows
from hetopt.optimizer.plan import AWS, OWN

Architecture = Literal["x86_64", "arm64"]
Confidence = Literal["high", "medium", "low"]

TYPE_COLUMNS = (
    "instance_type",
    "generation",
    "architecture",
    "vcpus",
    "cores",
    "clock_ghz",
    "cpu_vendor",
    "cpu_model",
    "memory_gib",
    "accelerator",
    "accelerator_manufacturer",
    "accelerator_count",
    "accelerator_fraction",
    "accelerator_memory_gib",
    "other_accelerators",
    "network_baseline_gbps",
    "network_peak_gbps",
    "network_cards",
    "efa",
    "placement_group",
    "bare_metal",
    "burstable",
    "spot_supported",
    "local_nvme_gb",
    "ebs_baseline_mbps",
    "coremark_iterations_per_s",
    "source",
)
ACCELERATOR_COLUMNS = {
    "accelerator": "name",
    **{f"accelerator_{part}": part for part in ("manufacturer", "count", "fraction", "memory_gib")},
}
"""Columns of instance_types.csv about a machine's accelerators, with the fields of `Accelerator` that they fill."""
MODEL_COLUMNS = (
    "name",
    "memory_gib",
    "aliases",
    "manufacturer",
    "fp32_tflops",
    "tf32_tensor_tflops",
    "fp16_tensor_tflops",
    "memory_bandwidth_gb_per_s",
    "confidence",
    "source",
    "compute_capability",
)


_BYTES_PER_GIB = 2**30
_Several = Annotated[tuple[str, ...], BeforeValidator(lambda cell: cell.split("|") if isinstance(cell, str) else cell)]
"""Texts of a cell, with bars between."""
_BYTES_PER_S_PER_GBPS = 1e9 / 8


@dataclass(frozen=True, kw_only=True, config=FACT)
class AcceleratorModel:
    """Published peak rates of one whole accelerator: dense (not sparse) TFLOP/s, and GB/s of memory; None: not known.

    Peaks rank devices; a training step reaches a model-dependent share of them, so they are priors and no predictions.

    Attributes:
        name: name in the catalogue and in messages.
        memory_gib: nominal memory.
        aliases: other names of the same model.
        confidence: how far the published figures are to be trusted.
        source: place where they were published.
        compute_capability: NVIDIA's version of what a device can run, such as '8.6'; None for other makers.
    """

    name: Name
    memory_gib: PositiveFloat
    aliases: _Several = ()
    manufacturer: Name
    fp32_tflops: PositiveFloat | None = None
    tf32_tensor_tflops: PositiveFloat | None = None
    fp16_tensor_tflops: PositiveFloat | None = None
    memory_bandwidth_gb_per_s: PositiveFloat | None = None
    confidence: Confidence
    source: Name
    compute_capability: Annotated[str, Field(pattern=r"^\d{1,2}\.\d$")] | None = None


@dataclass(frozen=True, kw_only=True, config=FACT)
class Accelerator:
    """Accelerators of one machine, all alike: how many, the memory of each, and their model's published rates.

    Attributes:
        count: devices that software sees.
        fraction: the part of a physical device that each of them is; below 1 on partitioned GPUs.
        memory_gib: memory of one device as software sees it. Nominal for some models, usable for others.
        model: published rates of the whole physical device; None: not known.
    """

    name: Name
    manufacturer: Name
    count: PositiveInt
    fraction: Annotated[float, Field(gt=0, le=1)]
    memory_gib: PositiveFloat
    model: AcceleratorModel | None = None

    @property
    def is_cuda(self) -> bool:
        """True for NVIDIA's accelerators, which torch's CUDA builds can use."""
        return self.manufacturer == "NVIDIA"

    @property
    def whole(self) -> int:
        """Number of whole physical devices; 0 where each is a part of one (``fraction`` below 1)."""
        return self.count if self.fraction == 1 else 0

    @property
    def memory_bytes(self) -> int:
        """Memory of one accelerator, in bytes."""
        return round(self.memory_gib * _BYTES_PER_GIB)

    @property
    def fp32_flops_per_s(self) -> float | None:
        """Peak single-precision rate of one device, FLOP/s; of a partition its fraction. None: not known."""
        return self._rate(self.model.fp32_tflops if self.model else None, 1e12)

    @property
    def tf32_tensor_flops_per_s(self) -> float | None:
        """Peak TF32 matrix rate of one device, FLOP/s, as torch uses for float32 convolutions.

        None: none, or not known.
        """
        return self._rate(self.model.tf32_tensor_tflops if self.model else None, 1e12)

    @property
    def fp16_tensor_flops_per_s(self) -> float | None:
        """Peak half-precision matrix rate of one device, FLOP/s; of a partition its fraction. None: not known."""
        return self._rate(self.model.fp16_tensor_tflops if self.model else None, 1e12)

    @property
    def memory_bandwidth_bytes_per_s(self) -> float | None:
        """Peak memory bandwidth of one device, bytes/s; of a partition its fraction. None: not known."""
        return self._rate(self.model.memory_bandwidth_gb_per_s if self.model else None, 1e9)

    def _rate(self, whole: float | None, unit: float) -> float | None:
        # A partition is taken to own its fraction of compute and bandwidth; the vendor promises only the memory.
        return None if whole is None else whole * unit * self.fraction


@dataclass(frozen=True, kw_only=True, config=FACT)
class InstanceType:
    """One type of machine, rented or owned: CPUs, memory, accelerators, network and disk; None: not known.

    Attributes:
        cores: physical cores; ``vcpus`` counts hardware threads.
        clock_ghz: sustained clock.
        other_accelerators: kinds of accelerators that torch does not drive by itself (Neuron, Inference, FPGA).
        network_baseline_gbps: the rate to plan on. ``network_peak_gbps`` is a burst of minutes where it is higher.
        ebs_baseline_mbps: megabits a second to network volumes.
        coremark_iterations_per_s: CoreMark over all vCPUs, a prior for CPU speed.
        cloud: cloud that rents the type out; `OWN`: the user's own machine.
        unlike: each accelerator of the machine, where they are not alike; ``accelerator`` is then the least of them.
        part_of: name of the user's machine that this type is, whole or with some of its accelerators; None: a rented
            type.
        source: source of the specification.
        memory_gib: main memory.
        architecture: architecture of the processor.
        efa: whether machines have Amazon's network for machine learning, the Elastic Fabric Adapter.
        placement_group: whether machines can be placed close to each other.
        bare_metal: whether no hypervisor is between program and machine.
        burstable: whether its processors are throttled once credits are used up.
        local_nvme_gb: size of its local disks.
    """

    name: Name
    vcpus: PositiveInt
    memory_gib: PositiveFloat
    network_baseline_gbps: PositiveFloat
    architecture: Architecture | None = None
    generation: Whole | None = None
    cores: PositiveInt | None = None
    clock_ghz: PositiveFloat | None = None
    cpu_vendor: str | None = None
    cpu_model: str | None = None
    accelerator: Accelerator | None = None
    other_accelerators: _Several = ()
    network_peak_gbps: PositiveFloat | None = None
    network_cards: Whole | None = None
    efa: bool | None = None
    placement_group: bool | None = None
    bare_metal: bool | None = None
    burstable: bool | None = None
    spot_supported: bool | None = None
    local_nvme_gb: NonNegativeFloat | None = None
    ebs_baseline_mbps: NonNegativeFloat | None = None
    coremark_iterations_per_s: PositiveFloat | None = None
    cloud: str = AWS
    unlike: tuple[Accelerator, ...] = ()
    part_of: str | None = None
    source: Name

    def __post_init__(self) -> None:
        """Check that cores and network rates go together.

        Raises:
            ValueError: there are more cores than vCPUs, or the peak rate is below the baseline.
        """
        if self.cores is not None and self.cores > self.vcpus:
            raise ValueError(f"cores is {self.cores}, but must be between 1 and the {self.vcpus} vcpus")
        if self.network_peak_gbps is not None and self.network_peak_gbps < self.network_baseline_gbps:
            raise ValueError(
                f"network_peak_gbps is {self.network_peak_gbps}, below the baseline of {self.network_baseline_gbps}"
            )

    @property
    def owned(self) -> bool:
        """True for one machine of its owner; False for a type that can be rented."""
        return self.cloud == OWN

    @property
    def family(self) -> str:
        """The instance family, the part of the name before the dot, such as g5; the whole name without a dot."""
        return self.name.partition(".")[0]

    @property
    def memory_bytes(self) -> int:
        """Main memory in bytes."""
        return round(self.memory_gib * _BYTES_PER_GIB)

    @property
    def network_bytes_per_s(self) -> float:
        """Sustained rate of one network card, bytes/s, each direction, as machines are launched with one interface.

        The published rate is the sum over all cards (EC2 user guide, network cards).
        """
        cards = max(1, self.network_cards or 1)
        return self.network_baseline_gbps * (_BYTES_PER_S_PER_GBPS / cards)

    @property
    def fabric_bytes_per_s(self) -> float:
        """Sustained network rate, bytes/s, each direction: with EFA over all network cards, else of one."""
        return self.network_baseline_gbps * _BYTES_PER_S_PER_GBPS if self.efa else self.network_bytes_per_s

    @property
    def cuda_devices(self) -> int:
        """Number of CUDA devices that software sees on the machine, parts of GPUs included; 0 without an NVIDIA GPU."""
        return self.accelerator.count if self.accelerator is not None and self.accelerator.is_cuda else 0


def read_instance_types(directory: Path) -> dict[str, InstanceType]:
    """Return the types in a catalogue's folder by name, accelerators with the published rates of their model.

    An accelerator without published rates has ``model`` None. The folder's own accelerators.csv, if it has one, adds to
    the bundled one.

    Raises:
        BadInput: a file is missing, a line cannot be used, or a type is listed twice; names the file and the line.
    """
    models = _known_models(directory / REGISTRY)

    def typed(cells: Mapping[str, str]) -> InstanceType:
        """Return the type of a line, its accelerator columns as one accelerator."""
        fields, accelerator = dict[str, Any](cells), _accelerator(cells, models)
        for column in ACCELERATOR_COLUMNS:
            fields.pop(column, None)
        return InstanceType(name=fields.pop("instance_type", ""), accelerator=accelerator, **fields)

    types: dict[str, InstanceType] = {}
    called = {
        "Accelerator": {name: column for column, name in ACCELERATOR_COLUMNS.items()},
        "InstanceType": {"name": "instance_type"},
    }
    for where, instance in read_rows(directory / "instance_types.csv", typed, columns=TYPE_COLUMNS, called=called):
        if instance.name in types:
            raise BadInput(f"{where}: {instance.name} is listed twice.", hint=HINT)
        types[instance.name] = instance
    return types


def _read_models(path: Path) -> dict[str, list[AcceleratorModel]]:
    """Return the models of a file by name; one name can stand for several memory sizes.

    Raises:
        BadInput: the file is missing or cannot be used, or has a name twice with one size.
    """
    models: dict[str, list[AcceleratorModel]] = {}
    for where, model in read_rows(path, lambda cells: AcceleratorModel(**dict[str, Any](cells)), columns=MODEL_COLUMNS):
        same_name = models.setdefault(model.name, [])
        if any(other.memory_gib == model.memory_gib for other in same_name):
            raise BadInput(f"{where}: {model.name} with {model.memory_gib:g} GiB is listed twice.", hint=HINT)
        same_name.append(model)
    return models


REGISTRY = "accelerators.csv"
"""Name of the file of all known accelerators, rented or owned; a catalogue's folder may have one with others."""


@cache
def _registered() -> Mapping[str, list[AcceleratorModel]]:
    return _read_models(catalogs.FOLDER / REGISTRY)


def _known_models(path: Path) -> Mapping[str, list[AcceleratorModel]]:
    """Return accelerator models by name: those of the catalogue's own file, if it exists, before the bundled ones."""
    extra = _read_models(path) if path.exists() else {}
    return {name: [*extra.get(name, []), *_registered().get(name, [])] for name in {**_registered(), **extra}}


@cache
def known_gpus() -> tuple[Accelerator, ...]:
    """Return one whole accelerator of each model in the bundled accelerators.csv, with its published rates.

    Accelerators of all makers are among them. The file is read once in a process.
    """
    return tuple(
        Accelerator(
            name=model.name,
            manufacturer=model.manufacturer,
            count=1,
            fraction=1,
            memory_gib=model.memory_gib,
            model=model,
        )
        for same_name in _registered().values()
        for model in same_name
    )


def _accelerator(cells: Mapping[str, str], models: Mapping[str, list[AcceleratorModel]]) -> Accelerator | None:
    """Return the accelerators of a line, with the published model of the nearest memory size; None: no accelerator."""
    if "accelerator" not in cells:
        return None
    figures: dict[str, Any] = {name: cells[column] for column, name in ACCELERATOR_COLUMNS.items() if column in cells}
    accelerator = Accelerator(**figures)
    # One name can stand for several memory sizes (A100): the nearest, as usable memory is a little below nominal.
    same_name = models.get(accelerator.name, [])
    model = min(same_name, key=lambda model: abs(model.memory_gib - accelerator.memory_gib), default=None)
    return replace(accelerator, model=model)


FACTS = catalogs.AWS / "software.json"

_WHEEL_NAMES: dict[Architecture, str] = {"x86_64": "x86-64", "arm64": "aarch64"}


@dataclass(frozen=True, kw_only=True)
class Software:
    """GPUs, by compute capability, and instance families that the pinned torch and the boot images support.

    Attributes:
        torch: version of the pinned torch.
        capabilities: compute capabilities that its wheel has kernels for, by the processor's architecture.
        families: instance families that the boot image with a GPU driver supports, by that architecture.
    """

    torch: str
    capabilities: dict[str, tuple[str, ...]]
    families: dict[str, tuple[str, ...]]

    def objection(self, instance: InstanceType) -> str | None:
        """Return why a type's GPU cannot be trained on, as a clause to stand after "its"; None: no reason is known.

        None for types without an NVIDIA GPU, and for types whose architecture is unknown.
        """
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
    """Return which GPUs the pinned torch and the boot images support, from catalogs/aws/software.json, read once."""
    facts = json.loads(FACTS.read_text(encoding="utf-8"))
    return Software(
        torch=facts["torch"]["version"],
        capabilities={name: tuple(some) for name, some in facts["torch"]["compute_capabilities"].items()},
        families={kind.removesuffix("-gpu"): tuple(image["families"]) for kind, image in facts["images"].items()},
    )


def runs(kernels: str, capability: str) -> bool:
    """Return whether a GPU of ``capability`` ('8.6') runs kernels built for ``kernels``: same major, no newer minor."""
    (major, minor), (device_major, device_minor) = (
        tuple(map(int, version.split("."))) for version in (kernels, capability)
    )
    return major == device_major and minor <= device_minor
