"""Requirements on machines to rent, the offers that fulfil them, and the requirement to blame where none does."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import translate
from typing import get_args

from hetopt.core.errors import BadInput, setting
from hetopt.core.grammar import call
from hetopt.optimizer.market.catalog import Catalog, InstanceType, Listing, Market, Offer, offers
from hetopt.optimizer.market.catalog_filter import (
    AnyMarket,
    Filter,
    has_accelerator,
    known_accelerator,
    price_in,
    select,
    why_none,
)
from hetopt.optimizer.market.instance_type import Architecture, pinned

ANY_GPU, NO_GPU = "any", "none"


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """Requirements on the machines to rent: types, GPUs, market, price, zone. None or empty: no requirement.

    Attributes:
        types: names or shell patterns of instance types, any of which will do.
        exclude: names or patterns of instance types that will not do.
        gpus: names of accelerators, any of which will do, each perhaps with how many a machine has (``L4:4``) or has at
            least (``L4:4+``); without a number any number will do. ``any`` is any CUDA device, ``none`` a machine
            without.
        architecture: architecture of the processor.
        market: market in which machines may be rented.
        max_hourly_usd: most USD an hour of the whole cluster, so of each machine too.
        zone: the availability zone of all machines, such as ``us-east-1a``.
    """

    types: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    architecture: Architecture | None = None
    market: AnyMarket = "any"
    max_hourly_usd: float | None = None
    zone: str | None = None


def narrow(catalog: Catalog, wishes: Wishes) -> tuple[Offer, ...]:
    """Return the region's offers that fulfil every requirement, at least one; refuse requirements that none fulfils.

    Raises:
        BadInput: the region has no prices, a name or a pattern means nothing in this catalogue, a GPU is not written
            NAME, NAME:COUNT or NAME:COUNT+, the zone is of another region, or nothing fulfils the requirements: the
            message says how many offers would without the requirements that are most in the way.
    """
    if (zone := wishes.zone) is not None and zone[:-1] != catalog.region:
        raise BadInput(
            f"{setting('zone', zone)} and {setting('region', catalog.region)} exclude each other.",
            hint=f"name the region of that zone, or a zone of {catalog.region}, such as {catalog.region}a",
        )
    filters, everything = _of_types(catalog, wishes), offers(catalog)
    if wishes.market != "any":
        sold = setting("market", wishes.market)
        filters.insert(0, Filter(setting=sold, keeps=lambda offer: offer.price.market == wishes.market))
    if (dollars := wishes.max_hourly_usd) is not None:
        dear = setting("max_hourly_usd", dollars)
        filters.append(Filter(setting=dear, keeps=lambda offer: offer.price.usd_per_hour <= dollars))
    left = select(everything, filters)
    if not left:
        raise _nothing_left(catalog, everything, wishes, filters)
    return tuple(left)


def of_listings(catalog: Catalog, wishes: Wishes) -> list[Filter]:
    """Return requirements as filters over listings; market 'spot' also keeps types with a known saving and no price.

    ``zone`` is not among them.

    Raises:
        BadInput: a name or a pattern that means nothing in this catalogue.
    """
    filters, market, dollars = _of_types(catalog, wishes), wishes.market, wishes.max_hourly_usd

    def is_sold(listing: Listing) -> bool:
        return price_in(listing, market) is not None or (market == "spot" and listing.spot_saving is not None)

    def is_cheap(listing: Listing) -> bool:
        price = price_in(listing, market)
        return price is not None and price.usd_per_hour <= (dollars or math.inf)

    if market != "any":
        filters.append(Filter(setting=setting("market", market), keeps=is_sold))
    if dollars is not None:
        filters.append(Filter(setting=setting("max_hourly_usd", dollars), keeps=is_cheap))
    return filters


@dataclass(frozen=True, kw_only=True)
class Unpriced:
    """Count of types, by region, that fulfil the requirements, and of those without a price, for a sentence.

    Attributes:
        types: number of types that fulfil the requirements, summed over the regions.
        missing: how many of them have no price in the wanted market.
        where: the region, or '3 regions'.
        refresh: value of `hetopt catalog refresh --region` that reads their prices.
    """

    types: int
    missing: int
    where: str
    refresh: str

    @classmethod
    def of(cls, catalogs: Sequence[Catalog], wishes: Wishes) -> Unpriced:
        """Return how many trainable types of some regions fulfil the requirements, and how many have no price.

        Trainable is a type that the pinned software drives. Without catalogues both numbers are 0.

        Raises:
            BadInput: a name or a pattern in ``wishes`` means nothing in a catalogue.
        """
        markets = get_args(Market) if wishes.market == "any" else (wishes.market,)
        asked = [
            any(map(listing.price, markets))
            for catalog in catalogs
            for listing in select(map(catalog.listing, catalog.instance_types), _of_types(catalog, wishes))
            if pinned().objection(listing.instance_type) is None
        ]
        several = len(catalogs) > 1
        return cls(
            types=len(asked),
            missing=asked.count(False),
            where=f"{len(catalogs)} regions" if several else "".join(catalog.region for catalog in catalogs),
            refresh="all" if several else "".join(catalog.region for catalog in catalogs),
        )

    @property
    def is_most(self) -> bool:
        """True where more than half of the types have no price, so that with prices another plan may well be better."""
        return 2 * self.missing > self.types

    @property
    def counted(self) -> str:
        """The count in words: '1,301 of 1,331 instance types have no price in eu-west-1'."""
        what = "offers (a type in a region)" if self.refresh == "all" else "instance types"
        return f"{self.missing:,} of {self.types:,} {what} have no price in {self.where}"

    @property
    def in_words(self) -> str:
        """The count of unpriced types as a sentence of a plan, with the command that reads the prices."""
        return f"{self.counted} and were not compared; `hetopt catalog refresh --region {self.refresh}` reads prices."


def _of_types(catalog: Catalog, wishes: Wishes) -> list[Filter]:
    """Return the requirements on instance types as filters over offers or listings.

    Raises:
        BadInput: a name or a pattern means nothing in this catalogue, or a GPU is not written NAME, NAME:COUNT or
            NAME:COUNT+.
    """
    filters: list[Filter] = []

    def wish(name: str, value: str, keeps: Callable[[InstanceType], bool]) -> None:
        filters.append(Filter(setting=setting(name, value), keeps=lambda item: keeps(item.instance_type)))

    for name, patterns in (("types", wishes.types), ("exclude", wishes.exclude)):
        for pattern in patterns:
            _means_something(catalog, name, pattern)
    if wishes.types:
        chosen = _pattern(wishes.types)
        wish("types", ",".join(wishes.types), lambda instance: chosen.match(instance.name) is not None)
    if wishes.exclude:
        left_out = _pattern(wishes.exclude)
        wish("exclude", ",".join(wishes.exclude), lambda instance: left_out.match(instance.name) is None)
    if wishes.gpus:
        kept = [_gpu(catalog, text) for text in wishes.gpus]
        wish("gpus", ",".join(wishes.gpus), lambda instance: any(keeps(instance) for keeps in kept))
    if wishes.architecture is not None:
        wish("architecture", wishes.architecture, lambda instance: instance.architecture == wishes.architecture)
    return filters


def _nothing_left(catalog: Catalog, everything: Sequence[Offer], wishes: Wishes, filters: Sequence[Filter]) -> BadInput:
    """Return, not raise, the error of wishes that no offer fulfils; names the wishes most in the way."""
    where = f"in {catalog.region}"
    refresh = f"`hetopt catalog refresh --region {catalog.region}` reads today's prices"
    chosen = _pattern(wishes.types)
    if wishes.types and not any(chosen.match(offer.instance_type.name) for offer in everything):
        return BadInput(f"{','.join(wishes.types)} has no price {where}.", hint=f"{refresh}; or name other `types`")
    asked = " and ".join(requirement.setting for requirement in filters)
    return BadInput(
        f"Nothing that can be rented {where} fulfils {asked}: of {len(everything):,} offers "
        f"{why_none(everything, filters)}.",
        hint=f"loosen one of them, or see `hetopt catalog list --region {catalog.region}`",
    )


def _pattern(patterns: Sequence[str]) -> re.Pattern[str]:
    """Return a regular expression that matches what any of these shell patterns matches."""
    return re.compile("|".join(map(translate, patterns)))


def _means_something(catalog: Catalog, name: str, pattern: str) -> None:
    """Raise BadInput unless a name is, or a pattern matches, an instance type of the catalogue.

    Raises:
        BadInput: no type matches; names similar to a name.
    """
    if not any(map(_pattern([pattern]).match, catalog.instance_types)):
        if any(character in pattern for character in "*?["):
            raise BadInput(
                f"{setting(name, pattern)} matches no instance type of the catalogue.",
                hint="patterns are those of a shell, such as 'g5.*' or '*.xlarge', in quotes",
            )
        catalog.instance_type(pattern)


def _gpu(catalog: Catalog, text: str) -> Callable[[InstanceType], bool]:
    """Return a test of whether a machine has the accelerators that one part of ``gpus`` asks for.

    ``any`` counts NVIDIA GPUs of every kind, and ``none`` asks for machines without an accelerator. A name without a
    number asks for one or more.

    Raises:
        BadInput: the text is not NAME, NAME:COUNT or NAME:COUNT+, or no machine has a GPU of that name.
    """
    item = call(text, "`gpus`")
    name, number = item.name, "".join(item.values) or "1+"
    digits = number.removesuffix("+")
    if len(item.values) > 1 or item.pairs or not digits.isdecimal() or not int(digits[:9]) > 0:
        raise BadInput(
            f"`gpus` must be NAME, NAME:COUNT or NAME:COUNT+, got {text!r}.",
            hint='for example `gpus="L4:4"`, or `gpus="L4:4+"` for four or more',
        )
    least = int(digits[:9])
    most = math.inf if number.endswith("+") else least
    if name.casefold() == NO_GPU:
        return lambda instance: instance.accelerator is None
    if name.casefold() == ANY_GPU:
        return lambda instance: least <= instance.cuda_devices <= most
    known_accelerator(name, catalog.instance_types.values())
    return lambda instance: (
        has_accelerator(instance, name)
        and instance.accelerator is not None
        and least <= instance.accelerator.count <= most
    )
