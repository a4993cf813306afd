"""Filters and sorting of instance types in a region, and the GPUs that can be rented in one region or several."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Literal, TypeVar

from hetopt.core.errors import BadInput
from hetopt.core.formatting import usd
from hetopt.core.plain_text import unknown
from hetopt.optimizer.market.catalog import BANDS, Catalog, Listing, Price
from hetopt.optimizer.market.instance_type import Accelerator, InstanceType, known_gpus

T = TypeVar("T")
AnyMarket = Literal["spot", "on-demand", "any"]
Quantity = Callable[[Listing], float | str | None]


@dataclass(frozen=True, kw_only=True)
class Filter:
    """Test of a listing or offer, with the setting that a person would write for it, such as `` `vcpus_min=8` ``.

    Attributes:
        setting: the text that names the test in messages.
        keeps: returns whether a listing (or an offer) passes.
    """

    setting: str
    keeps: Callable[[Any], bool]


def select(listings: Iterable[T], filters: Sequence[Filter]) -> list[T]:
    """Return the listings, or offers, that pass every filter, in their order."""
    for requirement in filters:
        listings = list(filter(requirement.keeps, listings))
    return list(listings)


def why_none(listings: Sequence[T], filters: Sequence[Filter]) -> str:
    """Return a phrase that blames filters where `select` keeps nothing, such as '12 would without `vcpus_min=8`'.

    If leaving out a single filter does not help, the phrase names the filter that alone keeps fewest. Without listings
    it is 'nothing is known of the region'.

    Args:
        listings: listings to choose from.
        filters: filters that together keep nothing; at least one if there are listings.
    """
    if not listings:
        return "nothing is known of the region"
    left = [
        (len(select(listings, [other for other in filters if other is not requirement])), requirement.setting)
        for requirement in filters
    ]
    blame = sorted((pair for pair in left if pair[0]), reverse=True)
    if blame:
        most, option = blame[0]
        others = "".join(f", {count:,} without {option}" for count, option in blame[1:3])
        return f"{most:,} would without {option}{others}"
    fewest, option = min((len(select(listings, [requirement])), requirement.setting) for requirement in filters)
    return f"{option} alone leaves {fewest:,} of {len(listings):,}, and other filters remove those"


def price_in(listing: Listing, market: AnyMarket) -> Price | None:
    """Return a listing's price, USD an hour, in a market, for 'any' the lower of both; None: not known."""
    prices = [listing.price(name) for name in (("spot", "on-demand") if market == "any" else (market,))]
    return min((price for price in prices if price), key=lambda price: price.usd_per_hour, default=None)


def quantities(market: AnyMarket) -> Mapping[str, Quantity]:
    """Return functions from a listing to a figure to sort by (None: not known), by name, such as 'price-per-gpu'.

    ``market`` is that of the prices, for 'any' the lower of both. Prices are USD an hour, memory GiB, network Gbit/s,
    CoreMark iterations/s; 'name' sorts by instance family.
    """

    def price(listing: Listing) -> float | None:
        cheapest = price_in(listing, market)
        return cheapest.usd_per_hour if cheapest else None

    def price_per(amount: Callable[[InstanceType], float | None]) -> Quantity:
        """Return a function from a listing to its price over an amount of its type; None: either is not known, or 0."""

        def quantity(listing: Listing) -> float | None:
            dollars, units = price(listing), amount(listing.instance_type)
            return dollars / units if dollars is not None and units else None

        return quantity

    return {
        "price": price,
        "price-per-vcpu": price_per(lambda instance: instance.vcpus),
        "price-per-gpu": price_per(_physical_devices),
        "price-per-coremark": price_per(lambda instance: instance.coremark_iterations_per_s),
        "spot-saving": lambda listing: listing.spot_saving,
        "interruption": lambda listing: BANDS[listing.band.label] if listing.band else None,
        "gpus": lambda listing: _physical_devices(listing.instance_type),
        "vcpus": lambda listing: listing.instance_type.vcpus,
        "memory": lambda listing: listing.instance_type.memory_gib,
        "network": lambda listing: listing.instance_type.network_baseline_gbps,
        "coremark": lambda listing: listing.instance_type.coremark_iterations_per_s,
        "name": lambda listing: listing.instance_type.family,
    }


def sort(listings: Iterable[Listing], quantity: Quantity, *, reverse: bool = False) -> list[Listing]:
    """Return listings by ``quantity``, smallest first (``reverse``: largest), equals by family; unknown always last.

    ``quantity`` is one of the functions that `quantities` returns; a listing for which it returns None is unknown.
    """
    in_order = operator.attrgetter("family", "vcpus", "memory_gib", "name")
    return by_quantity(sorted(listings, key=lambda listing: in_order(listing.instance_type)), quantity, reverse=reverse)


def by_quantity(items: Sequence[T], quantity: Callable[[T], float | str | None], *, reverse: bool = False) -> list[T]:
    """Return items by ``quantity``, smallest first (``reverse``: largest), equals in their order; None always last."""
    valued: list[tuple[Any, T]] = [(value, item) for item in items if (value := quantity(item)) is not None]
    valued.sort(key=lambda pair: pair[0], reverse=reverse)
    return [*(item for _, item in valued), *(item for item in items if quantity(item) is None)]


def _physical_devices(instance: InstanceType) -> float | None:
    return instance.accelerator.count * instance.accelerator.fraction if instance.accelerator else None


def _names(accelerator: Accelerator) -> tuple[str, ...]:
    return (accelerator.name, *(accelerator.model.aliases if accelerator.model else ()))


def _plain(name: str) -> str:
    """Return the letters and digits of a name: 'RTX-PRO-4500' becomes 'rtxpro4500'."""
    return "".join(character for character in name.casefold() if character.isalnum())


def has_accelerator(instance: InstanceType, name: str) -> bool:
    """Return whether an instance type has an accelerator of this name in any spelling (see `is_called`).

    False without one.
    """
    return instance.accelerator is not None and is_called(instance.accelerator, name)


def is_called(accelerator: Accelerator, name: str) -> bool:
    """Return whether an accelerator has this name in any spelling, maker and memory optional: 'NVIDIA a100 40GB'."""
    names, nominal = _names(accelerator), accelerator.model.memory_gib if accelerator.model else accelerator.memory_gib
    sizes = ("", *(f"{size:.0f}{unit}" for size in (nominal, accelerator.memory_gib) for unit in ("gib", "gb")))
    return _plain(_MAKER.sub("", name)) in {_plain(other) + size for other in names for size in sizes}


_MAKER = re.compile(r"^\s*(?:(?:nvidia|apple|amd)\s+)?(?:(?:geforce|instinct)\s+)?", re.IGNORECASE)
"""What drivers and people put before a model's name."""


def known_accelerator(name: str, types: Iterable[InstanceType]) -> None:
    """Raise BadInput if no accelerator of ``types`` is called ``name``; return nothing.

    Raises:
        BadInput: no accelerator is called so; names similar ones or, if hetopt knows such a GPU, those of ``types``.
    """
    accelerators = [instance.accelerator for instance in types if instance.accelerator]
    if not any(is_called(accelerator, name) for accelerator in accelerators):
        every = ", ".join(sorted({accelerator.name for accelerator in accelerators}))
        owned = next((gpu for gpu in known_gpus() if is_called(gpu, name)), None)
        if owned is not None:
            raise BadInput(f"no machine here has the {owned.name}.", hint=f"choose one of: {every}")
        names = {spelling for accelerator in (*accelerators, *known_gpus()) for spelling in _names(accelerator)}
        raise unknown(name, sorted(names), "accelerator", hint=f"choose one of: {every}")


GpuSort = Literal[
    "price", "price-per-gpu", "rate-per-usd", "memory", "fp32", "tf32", "bf16", "fp16", "bandwidth", "name"
]

FIRST_CAPABILITY_WITH_BF16 = 8.0
"""Matrix units of Ampere and later multiply bf16, as fast as fp16 (CUDA programming guide, tensor core formats)."""


@dataclass(frozen=True, kw_only=True)
class RentableGpu:
    """GPU model that can be rented, its memory and peak rates, and the cheapest machine with it; None: not known.

    Attributes:
        name: name of the model, such as A10G.
        memory_gib: memory of one GPU as machines report it, a little below the nominal for some.
        compute_capability: NVIDIA's compute capability, such as '8.6'.
        fp32_tflops, tf32_tflops, bf16_tflops, fp16_tflops: peak rates of matrix products of one GPU, dense.
        bandwidth_gb_per_s: bandwidth of its memory.
        source: source of the rates.
        count: GPUs of the machine.
        machine: the cheapest machine with this GPU, with its prices.
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
        """The region of the machine's prices; None: no price of it is known."""
        price = price_in(self.machine, "any")
        return None if price is None else price.region

    def usd_per_hour(self, market: AnyMarket = "any") -> float | None:
        """Return the whole machine's price in a market, USD an hour, the lower of both for 'any'; None: not known."""
        price = price_in(self.machine, market)
        return None if price is None else price.usd_per_hour

    @property
    def half_tflops(self) -> float | None:
        """Peak rate, TFLOP/s, in bf16 or fp16, whichever is faster; None: neither is known."""
        return max((rate for rate in (self.bf16_tflops, self.fp16_tflops) if rate is not None), default=None)


class RentableGpus(tuple[RentableGpu, ...]):
    """Tuple of `RentableGpu` in the order that was asked for, which prints as a line per GPU."""

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
    """Return each whole NVIDIA GPU that can be rented in some regions, once, with the cheapest machine that has it.

    GPUs of one name and different memory are different GPUs. Of machines without a price, the one with fewest GPUs is
    taken.

    Args:
        catalog: catalog of the region.
        names: only these GPUs, by any of their names; empty: all.
        market: in which the cheapest machine is sought, 'any': in both. Where any price is known at all, machines that
            have none in a named market are left out.
        sort: figure to sort by, the smallest first, the unknown last.
        reverse: sort the largest first; the unknown stay last.
        elsewhere: catalogues of other regions, whose GPUs and machines count as well.

    Returns:
        One entry for each GPU; empty where the regions have none.

    Raises:
        BadInput: one of ``names`` is that of no GPU of ``catalog``.
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
    """Return a GPU with its published facts, None where not published, and the cheapest machine that has it.

    Ties go to fewer GPUs, then to fewer vCPUs; machines without a price come last.
    """

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
    """Return functions from a GPU to a figure to sort by, None where not known, by the figure's name.

    Prices are of the whole machine in a market, USD an hour; ``rate-per-usd`` counts all of its GPUs.
    """

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
