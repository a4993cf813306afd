"""What can be rented in a region: instance types with prices and interruption bands, each with date and source."""

import datetime
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from functools import cache, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

import pydantic.dataclasses
from pydantic import BeforeValidator, Field, PositiveFloat

from hetopt import catalogs
from hetopt.core.artifact import Record
from hetopt.core.errors import BadInput
from hetopt.core.paths import inside
from hetopt.core.plain_text import known, unknown
from hetopt.optimizer.market.catalog_rows import FACT, HINT, Name, Sources, Whole, read_rows, read_sources
from hetopt.optimizer.market.instance_type import (
    Accelerator,
    AcceleratorModel,
    InstanceType,
    known_gpus,
    read_instance_types,
)
from hetopt.optimizer.plan import AWS

__all__ = [
    "Accelerator",
    "AcceleratorModel",
    "Catalog",
    "InstanceType",
    "InterruptionBand",
    "Listing",
    "Market",
    "Offer",
    "Price",
    "load_catalog",
    "offers",
]

Market = Literal["spot", "on-demand"]

BUNDLED = catalogs.AWS

Band = Literal["<5%", "5-10%", "10-15%", "15-20%", ">20%"]
BANDS: Mapping[Band, float] = MappingProxyType(
    {"<5%": 0.05, "5-10%": 0.10, "10-15%": 0.15, "15-20%": 0.20, ">20%": 1.0}
)
"""Upper end of each interruption band of AWS: the share of a fleet's machines that AWS took back in a month, 0 to 1."""
# Standard deviations of the log of (price paid / price in the catalogue), and what they were measured on.
SAVING_LOG_SD = {"gpu": 0.33, "cpu": 0.27}
"""Standard deviation of the log of (paid / catalogue price), for spot prices made of the on-demand price less the
published saving: against AWS's spot price feed of August 2026, us-east-1, 49 types with and 676 without a GPU."""
REGION_PRICE_LOG_SD = 0.19
"""Standard deviation of the log of (paid / catalogue price), for one spot price for a region: machines are rented in
one of its zones, and zones differ. 49 zones of 13 pairs of region and type in skypilot-catalog v7 (in the median of
the pairs 0.09)."""


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=FACT)
class RegionRow:
    """One line of a catalogue's regions/REGION.csv: an instance type's zones, prices and interruption band there.

    None: the cell is blank, so nothing is known. ``zones`` 0: no zone of the region offers the type.
    ``spot_saving_percent`` is the published saving against the on-demand price, used where no spot price is given.
    """

    instance_type: Name
    zones: Whole | None = None
    on_demand_usd_per_hour: PositiveFloat | None = None
    spot_usd_per_hour: PositiveFloat | None = None
    spot_saving_percent: Annotated[float, Field(gt=0, lt=100)] | None = None
    interruption_band: Band | None = None


@dataclass(frozen=True, kw_only=True)
class Price:
    """Hourly price of one machine, USD: Linux, shared tenancy, before tax and discounts; with market and region.

    Attributes:
        date: date of the oldest figure the price was made from.
        source: title of the data the price is from, for people.
        is_estimate: made from the on-demand price and a published saving; nobody paid it.
        log_sd: standard deviation of the log of (what will be paid / ``usd_per_hour``); 0 for a list price.
    """

    usd_per_hour: float
    market: Market
    region: str
    date: datetime.date
    source: str
    is_estimate: bool = False
    log_sd: float = 0.0


@dataclass(frozen=True, kw_only=True)
class InterruptionBand:
    """Band, such as '5-10%', of the share of a type's spot machines that the provider took back in a month.

    It ranks instance types. It is no hazard rate of one machine: recorded losses of scarce types are far more
    frequent than even the highest band would suggest.
    """

    label: Band
    date: datetime.date
    source: str


@dataclass(frozen=True, kw_only=True)
class Listing:
    """Availability zones, prices and interruption band of one instance type in one region; None: not known.

    Attributes:
        zones: number of the region's availability zones that offer the type; 0: known to be none, None: not known.
        spot_saving: part of the on-demand price that spot saves, 0 to 1: of the two prices where both are known (below
            0 where spot costs more), else the published one.
        on_demand: price on demand in the region; None: not known.
        spot: spot price in the region, which may be an estimate; None: not known.
        band: how often spot machines are interrupted; None: not known.
    """

    instance_type: InstanceType
    zones: int | None = None
    on_demand: Price | None = None
    spot: Price | None = None
    spot_saving: float | None = None
    band: InterruptionBand | None = None

    @property
    def spot_is_dearer(self) -> bool:
        """True where both prices are known and spot costs no less than on demand.

        False where either price is unknown.
        """
        if self.spot is None or self.on_demand is None:
            return False
        return self.spot.usd_per_hour >= self.on_demand.usd_per_hour

    def price(self, market: Market) -> Price | None:
        """Return one machine's price (USD an hour, date, source) in ``market``, "spot" or "on-demand".

        None: not known.
        """
        return self.spot if market == "spot" else self.on_demand


@dataclass(frozen=True, kw_only=True)
class Offer:
    """An instance type at its price in one market, which a plan can rent, with its on-demand price.

    ``on_demand`` is the price on demand of the same type, whatever the market; None: not known.

    ``band`` is the interruption band of a spot offer; None on demand, and on the spot market where it is unknown.
    """

    instance_type: InstanceType
    price: Price
    band: InterruptionBand | None
    on_demand: Price | None = None

    @property
    def in_words(self) -> str:
        """The offer in words: 'g5.xlarge spot'; of a machine of one's own the name alone."""
        is_owned = self.instance_type.owned
        return self.instance_type.name if is_owned else f"{self.instance_type.name} {self.price.market}"

    @property
    def is_of_aws(self) -> bool:
        """True where AWS rents the machine out, so that AWS's quotas count its vCPUs."""
        return self.instance_type.cloud == AWS

    @property
    def worst_usd_per_hour(self) -> float:
        """The highest hourly price to reckon with, USD: the larger of the offer's and the on-demand price, if known."""
        return max(self.price.usd_per_hour, 0.0 if self.on_demand is None else self.on_demand.usd_per_hour)


class Caveat(Record):
    """Warning about a figure of some instance types, from a catalogue's caveats.csv.

    Attributes:
        types: names or shell patterns of the instance types that it is about.
        about: the figure, in a word.
        note: the warning, a sentence for people.
    """

    types: Annotated[
        tuple[str, ...],
        BeforeValidator(lambda cell: cell.split() if isinstance(cell, str) else cell),
        Field(min_length=1),
    ]
    about: str
    note: str


@dataclass(frozen=True, kw_only=True)
class Catalog:
    """All instance types of a cloud, and their prices and zones in one region, as read from a folder.

    Attributes:
        directory: folder that the catalogue was read from.
        region: region of the prices, such as us-east-1; "own" for machines of one's own.
        regions: every region that the catalogue knows something about.
        instance_types: every type of the cloud by name, whether or not the region has it.
        listings: zones and prices in ``region``, by type name; types of which nothing is known there are missing.
        sources: sources of the figures of each file.
        all_caveats: caveats in the order of the file (see `caveats` for those of one type).
        cloud: cloud that rents the machines out, such as "aws"; "own": nobody does.
    """

    directory: Path
    region: str
    regions: tuple[str, ...]
    instance_types: Mapping[str, InstanceType] = field(repr=False)
    listings: Mapping[str, Listing] = field(repr=False)
    sources: Sources = field(repr=False)
    all_caveats: tuple[Caveat, ...] = field(repr=False)
    cloud: str = AWS

    def instance_type(self, name: str) -> InstanceType:
        """Return the instance type of this name, such as 'g5.xlarge', whether or not the region has it.

        Raises:
            BadInput: the catalogue has no type of that name; hints at names that are close.
        """
        gpu = name if name.casefold() in {gpu.name.casefold() for gpu in known_gpus()} else "any"
        hint = f"see `hetopt catalog list`; for the machines with a GPU `hetopt catalog list --gpus {gpu}`"
        return self.instance_types[known(name, self.instance_types, "instance type", hint=hint)]

    def listing(self, name: str) -> Listing:
        """Return a type's zones and prices in this region; where nothing is known of it there, all of these are None.

        Raises:
            BadInput: the catalogue has no type of that name; hints at names that are close.
        """
        return self.listings.get(name) or Listing(instance_type=self.instance_type(name))

    def price(self, name: str, market: Market) -> Price | None:
        """Return a type's price (USD an hour, date, source) in this region and market; None: not known.

        Raises:
            BadInput: the catalogue has no type of that name.
        """
        return self.listing(name).price(market)

    @property
    def has_prices(self) -> bool:
        """True where some type has an on-demand or a spot price in this region."""
        return any(listing.on_demand or listing.spot for listing in self.listings.values())

    def in_region(self, region: str) -> Self:
        """Return the same catalogue with the listings of another region, read anew from the catalogue's folder.

        Raises:
            BadInput: the catalogue has no such region, or that region's file cannot be used; names the file and the
                line.
        """
        return replace(self, region=region, listings=_read_region(self, region))

    def priced(self, usd_per_hour: Mapping[str, float], *, today: datetime.date) -> Self:
        """Return a copy with on-demand prices that the user gives, USD an hour by instance type, dated ``today``.

        Zones and spot prices stay as they are; the source of a given price is 'your own'.

        Args:
            usd_per_hour: price of one machine, by instance type; other types keep the prices they have.
            today: the date of those prices.

        Raises:
            BadInput: a name is that of no type of the catalogue.
        """
        listings = dict(self.listings)
        for name, usd in usd_per_hour.items():
            price = Price(usd_per_hour=usd, market="on-demand", region=self.region, date=today, source="your own")
            listings[name] = replace(self.listing(name), on_demand=price)
        return replace(self, listings=listings)

    def caveats(self, name: str) -> tuple[Caveat, ...]:
        """Return the warnings about a type's figures: those of caveats.csv, then its source's own; empty: none.

        Raises:
            BadInput: the catalogue has no type of that name.
        """
        source = self.sources.by_name[self.instance_type(name).source]
        return (
            *(caveat for caveat in self.all_caveats if any(fnmatchcase(name, pattern) for pattern in caveat.types)),
            *([Caveat(types=(name,), about="specification", note=source.caveat)] if source.caveat else []),
        )


def load_catalog(region: str = "us-east-1", directory: Path | None = None) -> Catalog:
    """Return the catalogue in folder ``directory`` (None: the bundled one) with the prices of ``region``.

    The bundled catalogue is kept in memory for up to four regions; a named folder is read at each call.

    Raises:
        BadInput: the catalogue has no such region, or a file is missing or cannot be used; names the file and the line.
    """
    return _bundled(region) if directory is None else _read(region, directory)


@lru_cache(maxsize=4)
def _bundled(region: str) -> Catalog:
    """Return the bundled catalogue of a region, read once: its files do not change while the process lives."""
    return _read(region, BUNDLED)


def _read(region: str, directory: Path) -> Catalog:
    """Read the catalogue of a region from its folder.

    Raises:
        BadInput: a file cannot be read or used, or there is no such region.
    """
    sources = read_sources(directory / "sources.json")
    types = read_instance_types(directory)
    for source in {instance.source for instance in types.values()} - set(sources.by_name):
        raise BadInput(
            f"{directory / 'instance_types.csv'} names the source '{source}', which sources.json does not describe.",
            hint="describe it in sources.json",
        )
    catalog = Catalog(
        directory=directory,
        region=region,
        regions=tuple(sorted(path.stem for path in (directory / "regions").glob("*.csv"))),
        instance_types=types,
        listings={},
        sources=sources,
        all_caveats=tuple(
            caveat
            for _, caveat in read_rows(
                directory / "caveats.csv", Caveat.model_validate, columns=("types", "about", "note")
            )
        ),
    )
    return catalog.in_region(region)


def offers(catalog: Catalog, market: Market | None = None) -> tuple[Offer, ...]:
    """Return an offer per type and market to rent in the region, spot only if it is cheaper; refuse a region with none.

    Left out: types without a price, types that none of the region's zones offers, and spot where it is not sold or
    costs no less than on demand, which cannot be interrupted.

    Args:
        catalog: catalog with the region's listings.
        market: the only market to look at, "spot" or "on-demand"; None: both.

    Raises:
        BadInput: nothing is left, as the catalogue has no such price for the region.
    """
    rentable = []
    for listing in catalog.listings.values():
        if listing.zones == 0:
            continue
        if (
            listing.spot is not None
            and market != "on-demand"
            and listing.instance_type.spot_supported is not False
            and not listing.spot_is_dearer
        ):
            rentable.append(
                Offer(
                    instance_type=listing.instance_type,
                    price=listing.spot,
                    band=listing.band,
                    on_demand=listing.on_demand,
                )
            )
        if listing.on_demand is not None and market != "spot":
            price = listing.on_demand
            rentable.append(Offer(instance_type=listing.instance_type, price=price, band=None, on_demand=price))
    if not rentable:
        raise no_prices(catalog, market)
    return tuple(rentable)


def no_prices(catalog: Catalog, market: Market | None = None) -> BadInput:
    """Return, not raise, the error of a region without prices; its hint is the command that reads them.

    ``market`` is the market without prices, as the message names it; None: neither has any.
    """
    return BadInput(
        f"The catalogue has no {f'{market} ' if market else ''}prices for {catalog.region}.",
        hint=f"read today's, without an account: `hetopt catalog refresh --region {catalog.region}`",
    )


def _read_region(catalog: Catalog, region: str) -> dict[str, Listing]:
    """Read the listings of a region by instance type.

    Raises:
        BadInput: there is no such region, its file cannot be used, or it names a type twice or one that is unknown.
    """
    if region not in catalog.regions:
        raise unknown_region(region, catalog.regions)
    path = inside(catalog.directory, f"regions/{region}.csv", what="region")
    columns = [column.name for column in fields(RegionRow)]

    @cache
    def origin(column: str) -> tuple[datetime.date, str]:
        source = catalog.sources.of(f"regions/{region}.csv", column)[0]
        return source.day, source.title

    listings: dict[str, Listing] = {}
    for where, row in read_rows(path, lambda cells: RegionRow(**dict[str, Any](cells)), columns=columns, required=1):
        instance = catalog.instance_types.get(row.instance_type)
        if instance is None:
            raise BadInput(f"{where}: {row.instance_type} is not in instance_types.csv.", hint=HINT)
        if instance.name in listings:
            raise BadInput(f"{where}: {instance.name} is listed twice.", hint=HINT)
        listings[instance.name] = _listing(row, instance, region, origin)
    return listings


def _listing(
    row: RegionRow, instance: InstanceType, region: str, origin: Callable[[str], tuple[datetime.date, str]]
) -> Listing:
    """Return the listing of one line of a region's file: prices, saving and interruption band; None: not published.

    Where the line has no spot price, spot is estimated from the published saving.

    Args:
        row: row of the file.
        instance: instance that the row is of.
        region: region of the file.
        origin: gives the date and the title of a column's source.
    """
    on_demand = spot = saving = band = None
    if row.on_demand_usd_per_hour is not None:
        date, title = origin("on_demand_usd_per_hour")
        on_demand = Price(
            usd_per_hour=row.on_demand_usd_per_hour,
            market="on-demand",
            region=region,
            date=date,
            source=title,
        )
    if (percent := row.spot_saving_percent) is not None:
        saving = percent / 100
        if on_demand is not None:
            date, title = origin("spot_saving_percent")
            spot = Price(
                usd_per_hour=round(on_demand.usd_per_hour * (1 - saving), 6),
                market="spot",
                region=region,
                date=min(date, on_demand.date),
                source=f"on-demand price of {on_demand.date} less {percent:g} % ({title})",
                is_estimate=True,
                log_sd=SAVING_LOG_SD["gpu" if instance.accelerator else "cpu"],
            )
    if row.spot_usd_per_hour is not None:
        date, title = origin("spot_usd_per_hour")
        spot = Price(
            usd_per_hour=row.spot_usd_per_hour,
            market="spot",
            region=region,
            date=date,
            source=title,
            log_sd=REGION_PRICE_LOG_SD,
        )
        if on_demand is not None:
            saving = 1 - spot.usd_per_hour / on_demand.usd_per_hour
    if row.interruption_band is not None:
        date, title = origin("interruption_band")
        band = InterruptionBand(label=row.interruption_band, date=date, source=title)
    return Listing(
        instance_type=instance, zones=row.zones, on_demand=on_demand, spot=spot, spot_saving=saving, band=band
    )


CITIES = MappingProxyType(
    {
        "af-south-1": "Cape Town",
        "ap-east-1": "Hong Kong",
        "ap-east-2": "Taipei",
        "ap-northeast-1": "Tokyo",
        "ap-northeast-2": "Seoul",
        "ap-northeast-3": "Osaka",
        "ap-south-1": "Mumbai",
        "ap-south-2": "Hyderabad",
        "ap-southeast-1": "Singapore",
        "ap-southeast-2": "Sydney",
        "ap-southeast-3": "Jakarta",
        "ap-southeast-4": "Melbourne",
        "ap-southeast-5": "Malaysia",
        "ap-southeast-6": "New Zealand",
        "ap-southeast-7": "Thailand",
        "ca-central-1": "Canada Central",
        "ca-west-1": "Calgary",
        "eu-central-1": "Frankfurt",
        "eu-central-2": "Zurich",
        "eu-north-1": "Stockholm",
        "eu-south-1": "Milan",
        "eu-south-2": "Spain",
        "eu-west-1": "Ireland",
        "eu-west-2": "London",
        "eu-west-3": "Paris",
        "il-central-1": "Tel Aviv",
        "me-central-1": "UAE",
        "me-south-1": "Bahrain",
        "mx-central-1": "Mexico",
        "sa-east-1": "Sao Paulo",
        "us-east-1": "Virginia",
        "us-east-2": "Ohio",
        "us-west-1": "California",
        "us-west-2": "Oregon",
    }
)
"""Names of regions to where they are, in the words of AWS's list (docs.aws.amazon.com, Regions, November 2026)."""


def unknown_region(name: str, regions: Iterable[str], what: str = "region") -> BadInput:
    """Return, not raise, the error of a name that no region has; a city, such as Frankfurt, hints at its region.

    Args:
        name: name as somebody wrote it.
        regions: the names that there are; close ones are part of the hint.
        what: word for a region in the message.
    """
    asked = name.strip().casefold()
    there = [
        f"{CITIES[region]} is {region}" for region in regions if asked and asked in CITIES.get(region, "").casefold()
    ]
    return unknown(name, regions, what, hint="; ".join(there) or None)
