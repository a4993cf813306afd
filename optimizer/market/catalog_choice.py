"""Which catalogue to plan with: the one that is named, the newest refreshed one of the region, or the bundled one."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hetopt.core.paths import home
from hetopt.optimizer.market.catalog import BUNDLED, Catalog, load_catalog
from hetopt.optimizer.market.catalog_folder import refreshed_folders
from hetopt.optimizer.market.clouds import cloud_catalogs
from hetopt.optimizer.plan import AWS

ANY_REGION = "any"
"""What is asked for instead of a region by who has no preference."""

STALE_DAYS = 14
"""Spot prices move by the week; older ones are worth a word."""


def catalogs_home() -> Path:
    """Where refreshed catalogues are kept: ``$HETOPT_HOME/catalogs`` (``~/.hetopt/catalogs``)."""
    return home() / "catalogs" / "aws"


@dataclass(frozen=True, kw_only=True)
class CatalogInUse:
    """A catalogue, and what to know about its age.

    Attributes:
        bundled: whether it is the one that came with hetopt.
        day: of its oldest price in the region; absent without any.
        ages: how old its prices of each kind are, in words; '' without any.
        note: a sentence for the person where prices are old, or none.
    """

    catalog: Catalog
    bundled: bool
    day: datetime.date | None
    ages: str
    note: str | None


def catalog_in_use(
    region: str, directory: Path | None, *, today: datetime.date, home: Path | None = None
) -> CatalogInUse:
    """Load the catalogue to plan with.

    Args:
        region: of AWS.
        directory: that was named; absent: the newest refreshed one, or the bundled one where there is none.
        today: to tell ages.
        home: of refreshed catalogues.

    Raises:
        BadInput: an unknown region, or a file that cannot be used.
    """
    folders = () if directory is not None else refreshed_folders(home or catalogs_home(), region)
    return _in_use(load_catalog(region, directory or (folders[0] if folders else None)), today)


def _in_use(catalog: Catalog, today: datetime.date) -> CatalogInUse:
    oldest = oldest_prices(catalog)
    day = min(oldest.values(), default=None)
    ages = ", ".join(f"{kind} {(today - when).days} days old ({when})" for kind, when in oldest.items())
    note = age_note(catalog, oldest.values(), today=today)
    return CatalogInUse(catalog=catalog, bundled=catalog.directory == BUNDLED, day=day, ages=ages, note=note)


def age_note(catalog: Catalog, dates: Iterable[datetime.date], *, today: datetime.date) -> str | None:
    """A sentence on prices of these days, where one of them is older than `STALE_DAYS`."""
    days = sorted({(today - when).days for when in dates})
    if not days or days[-1] <= STALE_DAYS:
        return None
    whose = "" if catalog.directory == BUNDLED else f" in {catalog.directory}"
    span = " to ".join(str(age) for age in (days[0], days[-1])[: len(days)])
    if catalog.cloud != AWS:
        return (
            f"Prices of {catalog.cloud} are {span} days old: `hetopt catalog import FILE --cloud {catalog.cloud}` "
            "takes newer ones."
        )
    return (
        f"Prices{whose} are {span} days old: `hetopt catalog refresh --region {catalog.region}` reads today's, "
        "without an account."
    )


def regional_catalogs(
    directory: Path | None, *, today: datetime.date, home: Path | None = None
) -> tuple[CatalogInUse, ...]:
    """The catalogue to plan with in each region that it has prices of; arguments and errors as of `catalog_in_use`."""
    base = load_catalog(directory=directory)
    refreshed = {
        region: folders[0]
        for region in base.regions
        if directory is None and (folders := refreshed_folders(home or catalogs_home(), region))
    }
    catalogs = (
        load_catalog(region, refreshed[region]) if region in refreshed else base.in_region(region)
        for region in base.regions
    )
    return tuple(_in_use(catalog, today) for catalog in catalogs if catalog.has_prices)


def clouds_home() -> Path:
    """Return where imported files of other clouds are kept: ``$HETOPT_HOME/catalogs/clouds``."""
    return home() / "catalogs" / "clouds"


def others_in_use(cloud: str, base: Catalog, *, today: datetime.date) -> tuple[CatalogInUse, ...]:
    """Return the catalogue of each region of a cloud beside AWS; arguments and errors as of `cloud_catalogs`."""
    return tuple(_in_use(catalog, today) for catalog in cloud_catalogs(cloud, base, clouds_home()))


def oldest_prices(catalog: Catalog) -> dict[str, datetime.date]:
    """The day of the oldest price of each kind that the catalogue has in its region."""
    kinds: dict[str, list[datetime.date]] = {"on demand": [], "spot": [], "estimates of spot": []}
    for listing in catalog.listings.values():
        if listing.on_demand is not None:
            kinds["on demand"].append(listing.on_demand.date)
        if listing.spot is not None:
            kinds["estimates of spot" if listing.spot.is_estimate else "spot"].append(listing.spot.date)
    return {kind: min(days) for kind, days in kinds.items() if days}
