"""An instance type: what one rentable machine has. Absent (None) means unknown, never zero."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import inf
from pathlib import Path
from typing import Literal, cast, get_args

from hetopt import catalogs
from hetopt.optimizer.market.catalog_rows import Row, read_rows

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
_BYTES_PER_S_PER_GBPS = 1e9 / 8


@dataclass(frozen=True, kw_only=True, slots=True)
class AcceleratorModel:
    """Published peak rates of one whole accelerator, dense (without structured sparsity).

    Peaks rank devices; a training step reaches a model-dependent share of them, so they are priors and no predictions.
    ``compute_capability`` is NVIDIA's version of what a device can run, such as 8.6; absent elsewhere.
    """

    name: str
    memory_gib: float
    aliases: tuple[str, ...]
    manufacturer: str
    fp32_tflops: float | None
    tf32_tensor_tflops: float | None
    fp16_tensor_tflops: float | None
    memory_bandwidth_gb_per_s: float | None
    confidence: Confidence
    source: str
    compute_capability: str | None = None

    def __post_init__(self) -> None:
        """Refuse an impossible device."""
        if self.compute_capability is not None and not re.fullmatch(r"\d{1,2}\.\d", self.compute_capability):
            raise ValueError(f"compute_capability is '{self.compute_capability}', but must be such as 8.6")
        _positive("memory_gib", self.memory_gib)
        for field in ("fp32_tflops", "tf32_tensor_tflops", "fp16_tensor_tflops", "memory_bandwidth_gb_per_s"):
            _positive(field, getattr(self, field))


@dataclass(frozen=True, kw_only=True, slots=True)
class Accelerator:
    """The accelerators of a machine, all alike.

    Attributes:
        count: devices that software sees.
        fraction: the part of a physical device that each of them is; below 1 on partitioned GPUs.
        memory_gib: of one device as software sees it. Nominal for some models, usable for others.
        model: published rates of the whole physical device, where they are known.
    """

    name: str
    manufacturer: str
    count: int
    fraction: float
    memory_gib: float
    model: AcceleratorModel | None = None

    def __post_init__(self) -> None:
        """Refuse an impossible set of devices."""
        if self.count < 1:
            raise ValueError(f"accelerator count is {self.count}, but must be at least 1")
        if not 0 < self.fraction <= 1:
            raise ValueError(f"accelerator fraction is {self.fraction}, but must be above 0 and at most 1")
        _positive("accelerator memory_gib", self.memory_gib)

    @property
    def is_cuda(self) -> bool:
        """Whether torch's CUDA builds can use it."""
        return self.manufacturer == "NVIDIA"

    @property
    def whole(self) -> int:
        """Whole physical devices; a partition counts as none."""
        return self.count if self.fraction == 1 else 0

    @property
    def memory_bytes(self) -> int:
        """Memory of one accelerator, in bytes."""
        return round(self.memory_gib * _BYTES_PER_GIB)

    @property
    def fp32_flops_per_s(self) -> float | None:
        """Peak single-precision rate of one device."""
        return self._rate(self.model.fp32_tflops if self.model else None, 1e12)

    @property
    def tf32_tensor_flops_per_s(self) -> float | None:
        """Peak TF32 matrix rate of one device: what torch uses for float32 convolutions where it exists."""
        return self._rate(self.model.tf32_tensor_tflops if self.model else None, 1e12)

    @property
    def fp16_tensor_flops_per_s(self) -> float | None:
        """Peak half-precision matrix rate of one device."""
        return self._rate(self.model.fp16_tensor_tflops if self.model else None, 1e12)

    @property
    def memory_bandwidth_bytes_per_s(self) -> float | None:
        """Peak memory bandwidth of one device."""
        return self._rate(self.model.memory_bandwidth_gb_per_s if self.model else None, 1e9)

    def _rate(self, whole: float | None, unit: float) -> float | None:
        # A partition is taken to own its fraction of compute and bandwidth; the vendor promises only the memory.
        return None if whole is None else whole * unit * self.fraction


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceType:
    """One type of machine, as its provider describes it.

    Attributes:
        cores: physical cores; ``vcpus`` counts hardware threads.
        clock_ghz: sustained clock.
        other_accelerators: kinds of accelerators that torch does not drive by itself (Neuron, Inference, FPGA).
        network_baseline_gbps: the rate to plan on. ``network_peak_gbps`` is a burst of minutes where it is higher.
        ebs_baseline_mbps: megabits a second to network volumes.
        coremark_iterations_per_s: CoreMark over all vCPUs, a prior for CPU speed.
        owned: one machine of its owner, not a type that can be rented.
        unlike: each of its accelerators, where they are not alike: ``accelerator`` is then the least of them.
        source: where the specification comes from.
    """

    name: str
    vcpus: int
    memory_gib: float
    network_baseline_gbps: float
    architecture: Architecture | None = None
    generation: int | None = None
    cores: int | None = None
    clock_ghz: float | None = None
    cpu_vendor: str | None = None
    cpu_model: str | None = None
    accelerator: Accelerator | None = None
    other_accelerators: tuple[str, ...] = ()
    network_peak_gbps: float | None = None
    network_cards: int | None = None
    efa: bool | None = None
    placement_group: bool | None = None
    bare_metal: bool | None = None
    burstable: bool | None = None
    spot_supported: bool | None = None
    local_nvme_gb: float | None = None
    ebs_baseline_mbps: float | None = None
    coremark_iterations_per_s: float | None = None
    owned: bool = False
    unlike: tuple[Accelerator, ...] = ()
    source: str

    def __post_init__(self) -> None:
        """Refuse an impossible machine."""
        if self.vcpus < 1:
            raise ValueError(f"vcpus is {self.vcpus}, but must be at least 1")
        if self.cores is not None and not 1 <= self.cores <= self.vcpus:
            raise ValueError(f"cores is {self.cores}, but must be between 1 and the {self.vcpus} vcpus")
        _positive("memory_gib", self.memory_gib)
        _positive("network_baseline_gbps", self.network_baseline_gbps)
        _positive("clock_ghz", self.clock_ghz)
        _positive("coremark_iterations_per_s", self.coremark_iterations_per_s)
        if self.network_peak_gbps is not None and not self.network_baseline_gbps <= self.network_peak_gbps < inf:
            raise ValueError(
                f"network_peak_gbps is {self.network_peak_gbps}, below the baseline of {self.network_baseline_gbps}"
            )

    @property
    def family(self) -> str:
        """The part of the name before the dot: machines that differ in size alone."""
        return self.name.partition(".")[0]

    @property
    def memory_bytes(self) -> int:
        """Main memory in bytes."""
        return round(self.memory_gib * _BYTES_PER_GIB)

    @property
    def network_bytes_per_s(self) -> float:
        """Sustained network rate of a machine as it is launched, each direction.

        The published rate is the sum over its network cards, and one interface, which is what machines are launched
        with, reaches one of them (EC2 user guide, network cards).
        """
        cards = max(1, self.network_cards or 1)
        return self.network_baseline_gbps * (_BYTES_PER_S_PER_GBPS / cards)

    @property
    def fabric_bytes_per_s(self) -> float:
        """Sustained network rate of a machine over all its network cards, each direction, as EFA reaches it."""
        return self.network_baseline_gbps * _BYTES_PER_S_PER_GBPS if self.efa else self.network_bytes_per_s

    @property
    def cuda_devices(self) -> int:
        """CUDA devices that software sees on the machine."""
        return self.accelerator.count if self.accelerator is not None and self.accelerator.is_cuda else 0


def read_instance_types(directory: Path) -> dict[str, InstanceType]:
    """All types of a catalogue by name, each accelerator with the published rates of its model.

    Raises:
        BadInput: a file is missing, or a line cannot be used.
    """
    models = _read_models(directory / "accelerators.csv")
    types: dict[str, InstanceType] = {}
    for row in read_rows(directory / "instance_types.csv", required=TYPE_COLUMNS):
        try:
            found = _instance_type(row, models)
        except ValueError as error:
            raise row.bad(str(error)) from None
        if found.name in types:
            raise row.bad(f"{found.name} is listed twice")
        types[found.name] = found
    return types


def _read_models(path: Path) -> dict[str, list[AcceleratorModel]]:
    """Return the models of a file by name; one name can stand for several memory sizes."""
    models: dict[str, list[AcceleratorModel]] = {}
    for row in read_rows(path, required=MODEL_COLUMNS):
        try:
            model = _accelerator_model(row)
        except ValueError as error:
            raise row.bad(str(error)) from None
        same_name = models.setdefault(model.name, [])
        if any(other.memory_gib == model.memory_gib for other in same_name):
            raise row.bad(f"{model.name} with {model.memory_gib:g} GiB is listed twice")
        same_name.append(model)
    return models


@cache
def owned_gpus() -> tuple[Accelerator, ...]:
    """Return one GPU of each model that people own and few rent, with its published rates."""
    models = _read_models(Path(next(iter(catalogs.__path__))) / "owned_gpus.csv")
    return tuple(
        Accelerator(
            name=model.name,
            manufacturer=model.manufacturer,
            count=1,
            fraction=1,
            memory_gib=model.memory_gib,
            model=model,
        )
        for same_name in models.values()
        for model in same_name
    )


def _accelerator_model(row: Row) -> AcceleratorModel:
    confidence = row.text("confidence")
    if confidence not in get_args(Confidence):
        raise ValueError(f"confidence is '{confidence}', but must be {', '.join(get_args(Confidence))}")
    return AcceleratorModel(
        name=row.required("name"),
        memory_gib=row.number("memory_gib"),
        aliases=tuple(alias for alias in row.text("aliases").split("|") if alias),
        manufacturer=row.required("manufacturer"),
        fp32_tflops=row.optional_number("fp32_tflops"),
        tf32_tensor_tflops=row.optional_number("tf32_tensor_tflops"),
        fp16_tensor_tflops=row.optional_number("fp16_tensor_tflops"),
        memory_bandwidth_gb_per_s=row.optional_number("memory_bandwidth_gb_per_s"),
        confidence=cast("Confidence", confidence),
        source=row.required("source"),
        compute_capability=row.text("compute_capability") or None,
    )


def _accelerator(row: Row, models: Mapping[str, list[AcceleratorModel]]) -> Accelerator:
    memory_gib = row.number("accelerator_memory_gib")
    # One name can stand for several memory sizes (A100): the nearest, as usable memory is a little below nominal.
    same_name = models.get(row.text("accelerator"), [])
    return Accelerator(
        name=row.text("accelerator"),
        manufacturer=row.required("accelerator_manufacturer"),
        count=row.count("accelerator_count"),
        fraction=row.number("accelerator_fraction"),
        memory_gib=memory_gib,
        model=min(same_name, key=lambda model: abs(model.memory_gib - memory_gib), default=None),
    )


def _instance_type(row: Row, models: Mapping[str, list[AcceleratorModel]]) -> InstanceType:
    architecture = row.text("architecture") or None
    if architecture not in (None, *get_args(Architecture)):
        raise ValueError(f"architecture is '{architecture}', but must be {' or '.join(get_args(Architecture))}")
    return InstanceType(
        name=row.required("instance_type"),
        vcpus=row.count("vcpus"),
        memory_gib=row.number("memory_gib"),
        network_baseline_gbps=row.number("network_baseline_gbps"),
        architecture=cast("Architecture | None", architecture),
        generation=row.optional_count("generation"),
        cores=row.optional_count("cores"),
        clock_ghz=row.optional_number("clock_ghz"),
        cpu_vendor=row.text("cpu_vendor") or None,
        cpu_model=row.text("cpu_model") or None,
        accelerator=_accelerator(row, models) if row.has("accelerator") else None,
        other_accelerators=tuple(row.text("other_accelerators").split("|")) if row.has("other_accelerators") else (),
        network_peak_gbps=row.optional_number("network_peak_gbps"),
        network_cards=row.optional_count("network_cards"),
        efa=row.flag("efa"),
        placement_group=row.flag("placement_group"),
        bare_metal=row.flag("bare_metal"),
        burstable=row.flag("burstable"),
        spot_supported=row.flag("spot_supported"),
        local_nvme_gb=row.optional_number("local_nvme_gb"),
        ebs_baseline_mbps=row.optional_number("ebs_baseline_mbps"),
        coremark_iterations_per_s=row.optional_number("coremark_iterations_per_s"),
        source=row.required("source"),
    )


def _positive(field: str, value: float | None) -> None:
    if value is not None and not 0 < value < inf:
        raise ValueError(f"{field} is {value}, but must be a number above 0")
