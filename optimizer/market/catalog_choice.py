"""Which catalogue to plan with: the one that is named, the newest refreshed one of the region, or the bundled one."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from pathlib import Path

from hetopt.core.paths import home
from hetopt.optimizer.market.catalog import BUNDLED, Catalog, load_catalog
from hetopt.optimizer.market.catalog_folder import refreshed_folders
from hetopt.optimizer.plan import AWS

ANY_REGION = "any"
"""What is asked for instead of a region by who has no preference."""

STALE_DAYS = 14
"""Spot prices move by the week; older ones are worth a word."""


def catalogs_home() -> Path:
    """Return the folder of refreshed catalogues: ``$HETOPT_HOME/catalogs`` (``~/.hetopt/catalogs``)."""
    return home() / "catalogs" / "aws"


def in_use(region: str = "us-east-1", directory: Path | None = None) -> Catalog:
    """Return the catalogue that is planned with: the one in a folder, the newest refreshed one, or the bundled one.

    Raises:
        BadInput: there is no such region, or a file cannot be used.
    """
    folders = () if directory is not None else refreshed_folders(catalogs_home(), region)
    return load_catalog(region, directory or (folders[0] if folders else None))


def age_note(catalog: Catalog, dates: Iterable[datetime.date], *, today: datetime.date) -> str | None:
    """Return a sentence on the age of prices, where one is older than `STALE_DAYS`."""
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


def regional_catalogs(directory: Path | None) -> tuple[Catalog, ...]:
    """Return the catalogue to plan with in each region that has prices; arguments and errors as of `in_use`."""
    base = load_catalog(directory=directory)
    refreshed = [directory is None and refreshed_folders(catalogs_home(), region) for region in base.regions]
    catalogs = (
        load_catalog(region, folders[0]) if folders else base.in_region(region)
        for region, folders in zip(base.regions, refreshed, strict=True)
    )
    return tuple(catalog for catalog in catalogs if catalog.has_prices)


def clouds_home() -> Path:
    """Return the folder of imported price files of other clouds: ``$HETOPT_HOME/catalogs/clouds``."""
    return home() / "catalogs" / "clouds"


def oldest_price(catalogs: Iterable[Catalog]) -> datetime.date:
    """Return the day of the oldest price that some catalogues have in their regions, of one price at least."""
    listings = (listing for catalog in catalogs for listing in catalog.listings.values())
    return min(price.date for listing in listings for price in (listing.on_demand, listing.spot) if price is not None)
