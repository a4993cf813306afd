"""The GPUs that can be rented: what one of them is, and the cheapest machine that has it, in one region or several."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal

from hetopt.core.formatting import usd
from hetopt.optimizer.market.catalog import Catalog, Listing
from hetopt.optimizer.market.catalog_filter import AnyMarket, by_quantity, has_accelerator, known_accelerator, price_in
from hetopt.optimizer.market.instance_type import Accelerator

GpuSort = Literal[
    "price", "price-per-gpu", "rate-per-usd", "memory", "fp32", "tf32", "bf16", "fp16", "bandwidth", "name"
]

FIRST_CAPABILITY_WITH_BF16 = 8.0
"""Matrix units of Ampere and later multiply bf16, as fast as fp16 (CUDA programming guide, tensor core formats)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RentableGpu:
    """A whole GPU, and the cheapest machine that has it. Absent: not published, or not known.

    Attributes:
        memory_gib: as machines report it, which is a little below the nominal for some.
        compute_capability: NVIDIA's version of what it can run.
        fp32_tflops, tf32_tflops, bf16_tflops, fp16_tflops: peak rates of matrix products, dense.
        bandwidth_gb_per_s: of its memory.
        source: of the rates.
        count: GPUs of the machine.
        machine: with its prices.
    """

    name: str
    memory_gib: float
    compute_capability: str | None
    fp32_tflops: float | None
    tf32_tflops: float | None
    bf16_tflops: float | None
    fp16_tflops: float | None
    bandwidth_gb_per_s: float | None
    source: str | None
    count: int
    machine: Listing

    def __str__(self) -> str:
        """Return the GPU's name and memory, and the cheapest machine that has it."""
        price = self.usd_per_hour()
        asks = "" if price is None else f", {usd(price)} an hour"
        return f"{self.name} {self.memory_gib:.0f} GiB: {self.count} in {self.machine.instance_type.name}{asks}"

    def __repr__(self) -> str:
        return f"<RentableGpu {self}>"

    @property
    def region(self) -> str | None:
        """The region of the machine's prices; None: it has none."""
        price = price_in(self.machine, "any")
        return None if price is None else price.region

    def usd_per_hour(self, market: AnyMarket = "any") -> float | None:
        """Return the hourly price of the whole machine in a market, USD; in any market the lower one."""
        price = price_in(self.machine, market)
        return None if price is None else price.usd_per_hour

    @property
    def half_tflops(self) -> float | None:
        """Peak rate in whichever 16-bit format is faster."""
        return max((rate for rate in (self.bf16_tflops, self.fp16_tflops) if rate is not None), default=None)


class RentableGpus(tuple[RentableGpu, ...]):
    """GPUs in the order that was asked for: a line each when printed."""

    __slots__ = ()

    def __str__(self) -> str:
        return "\n".join(map(str, self))

    __repr__ = __str__


def rentable_gpus(
    catalog: Catalog,
    names: Sequence[str] = (),
    *,
    market: AnyMarket = "any",
    sort: GpuSort = "price",
    reverse: bool = False,
    elsewhere: Sequence[Catalog] = (),
) -> RentableGpus:
    """Return each GPU of a catalogue's region that torch's CUDA builds can use, once.

    Args:
        catalog: with the region.
        elsewhere: catalogues of other regions, where its cheapest machine may be as well.
        names: only these, by any of their names. Absent: all.
        market: on which the cheapest machine is sought.
        sort: smallest first, the unknown last.
        reverse: largest first.

    Raises:
        BadInput: no GPU is called so.
    """
    for name in names:
        known_accelerator(name, catalog.instance_types.values())
    machines: dict[tuple[str, float], list[tuple[Accelerator, Listing]]] = {}
    priced = any(regional.has_prices for regional in (catalog, *elsewhere))
    for listing in (listing for regional in (catalog, *elsewhere) for listing in regional.listings.values()):
        gpu = listing.instance_type.accelerator
        if gpu is None or not gpu.whole or not gpu.is_cuda or listing.zones == 0:
            continue
        if names and not any(has_accelerator(listing.instance_type, name) for name in names):
            continue
        if market != "any" and priced and listing.price(market) is None:
            continue
        machines.setdefault((gpu.name, gpu.memory_gib), []).append((gpu, listing))
    gpus = [_cheapest(alike, market) for alike in machines.values()]
    gpus.sort(key=lambda gpu: (gpu.name, gpu.memory_gib))
    return RentableGpus(by_quantity(gpus, _quantities(market)[sort], reverse=reverse))


def _cheapest(machines: Iterable[tuple[Accelerator, Listing]], market: AnyMarket) -> RentableGpu:
    def dearness(machine: tuple[Accelerator, Listing]) -> tuple[float, int, int]:
        price = price_in(machine[1], market)
        return inf if price is None else price.usd_per_hour, machine[0].count, machine[1].instance_type.vcpus

    gpu, listing = min(machines, key=dearness)
    facts = gpu.model
    capability = None if facts is None else facts.compute_capability
    half = None if facts is None else facts.fp16_tensor_tflops
    has_bf16 = capability is not None and float(capability) >= FIRST_CAPABILITY_WITH_BF16
    return RentableGpu(
        name=gpu.name,
        memory_gib=gpu.memory_gib,
        compute_capability=capability,
        fp32_tflops=None if facts is None else facts.fp32_tflops,
        tf32_tflops=None if facts is None else facts.tf32_tensor_tflops,
        bf16_tflops=half if has_bf16 else None,
        fp16_tflops=half,
        bandwidth_gb_per_s=None if facts is None else facts.memory_bandwidth_gb_per_s,
        source=None if facts is None else facts.source,
        count=gpu.count,
        machine=listing,
    )


def _quantities(market: AnyMarket) -> Mapping[GpuSort, Callable[[RentableGpu], float | str | None]]:
    def ratio(above: float | None, below: float | None) -> float | None:
        return None if above is None or below is None else above / below

    return {
        "price": lambda gpu: gpu.usd_per_hour(market),
        "price-per-gpu": lambda gpu: ratio(gpu.usd_per_hour(market), gpu.count),
        "rate-per-usd": lambda gpu: ratio(ratio(gpu.half_tflops, 1 / gpu.count), gpu.usd_per_hour(market)),
        "memory": lambda gpu: gpu.memory_gib,
        "fp32": lambda gpu: gpu.fp32_tflops,
        "tf32": lambda gpu: gpu.tf32_tflops,
        "bf16": lambda gpu: gpu.bf16_tflops,
        "fp16": lambda gpu: gpu.fp16_tflops,
        "bandwidth": lambda gpu: gpu.bandwidth_gb_per_s,
        "name": lambda gpu: gpu.name,
    }
