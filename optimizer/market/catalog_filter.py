"""Filters over what can be rented, quantities it can be sorted by, and which wish nothing fulfils."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from hetopt.core.plain_text import unknown
from hetopt.optimizer.market.catalog import BANDS, Listing, Price
from hetopt.optimizer.market.instance_type import Accelerator, InstanceType

T = TypeVar("T")
AnyMarket = Literal["spot", "on-demand", "any"]
Quantity = Callable[[Listing], float | str | None]


@dataclass(frozen=True, kw_only=True)
class Filter:
    """One requirement, with the setting that a person would write for it, such as `` `vcpus_min=8` ``."""

    setting: str
    keeps: Callable[[Any], bool]


def select(listings: Iterable[T], filters: Sequence[Filter]) -> list[T]:
    """Return the listings, or offers, that every filter keeps, in order."""
    return [listing for listing in listings if all(requirement.keeps(listing) for requirement in filters)]


def why_none(listings: Sequence[T], filters: Sequence[Filter]) -> str:
    """Return how many types each filter alone stands in the way of where `select` keeps none, the worst first."""
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
    """Return a listing's price in a market; in any market the lower one."""
    prices = [listing.price(name) for name in (("spot", "on-demand") if market == "any" else (market,))]
    return min((price for price in prices if price), key=lambda price: price.usd_per_hour, default=None)


def quantities(market: AnyMarket) -> Mapping[str, Quantity]:
    """Return the sort keys of listings, by name. A key gives none where the catalogue does not know the quantity."""

    def price(listing: Listing) -> float | None:
        cheapest = price_in(listing, market)
        return cheapest.usd_per_hour if cheapest else None

    def price_per(amount: Callable[[InstanceType], float | None]) -> Quantity:
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
    """Return listings smallest first (``reverse``: largest), equals by family and size; the unknown is always last."""
    in_order = operator.attrgetter("family", "vcpus", "memory_gib", "name")
    return by_quantity(sorted(listings, key=lambda listing: in_order(listing.instance_type)), quantity, reverse=reverse)


def by_quantity(items: Sequence[T], quantity: Callable[[T], float | str | None], *, reverse: bool = False) -> list[T]:
    """Return items smallest first (``reverse``: largest), equals as they came; the unknown is last either way."""
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


def has_accelerator(found: InstanceType, name: str) -> bool:
    """Return whether a type's accelerators have this name, in any spelling."""
    return found.accelerator is not None and is_called(found.accelerator, name)


def is_called(accelerator: Accelerator, name: str) -> bool:
    """Return whether an accelerator has this name, in any spelling, with or without its maker's."""
    return _plain(_MAKER.sub("", name)) in {_plain(other) for other in _names(accelerator)}


_MAKER = re.compile(r"^\s*(?:nvidia\s+)?(?:geforce\s+)?", re.IGNORECASE)
"""What drivers and people put before a model's name."""


def known_accelerator(name: str, types: Iterable[InstanceType]) -> None:
    """Refuse the name of an accelerator that no type has.

    Raises:
        BadInput: hints at names that are close, and lists all without their other spellings.
    """
    accelerators = [instance.accelerator for instance in types if instance.accelerator]
    names = {spelling for accelerator in accelerators for spelling in _names(accelerator)}
    if _plain(name) not in {_plain(other) for other in names}:
        every = ", ".join(sorted({accelerator.name for accelerator in accelerators}))
        raise unknown(name, sorted(names), "accelerator", hint=f"choose one of: {every}")
