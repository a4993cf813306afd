"""The catalogue of what can be rented: which is in use, what of it is wanted, and the GPUs in it."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from hetopt.api.options import Gpus, Listed, Rentable
from hetopt.core.option import names, options_of, takes
from hetopt.optimizer.market import catalog_filter
from hetopt.optimizer.market.catalog import Catalog, Listing, no_prices
from hetopt.optimizer.market.catalog_choice import ANY_REGION, CatalogInUse, catalog_in_use, regional_catalogs
from hetopt.optimizer.market.gpus import RentableGpu, RentableGpus, rentable_gpus
from hetopt.optimizer.market.offer_filter import Wishes, of_listings

__all__ = ["Found", "RentableGpu", "find", "gpus", "in_use"]


def in_use(region: str = "us-east-1", directory: Path | None = None) -> CatalogInUse:
    """Return the catalogue that is planned with: the one in a folder, the newest refreshed one, or the bundled one.

    Raises:
        BadInput: there is no such region, or a file cannot be used.
    """
    return catalog_in_use(region, directory, today=datetime.datetime.now(datetime.UTC).date())


def in_regions(region: str, directory: Path | None = None) -> tuple[CatalogInUse, ...]:
    """Return the catalogue in use of a region, or for `ANY_REGION` of each that has prices; errors as of `in_use`."""
    if region != ANY_REGION:
        return (in_use(region, directory),)
    return regional_catalogs(directory, today=datetime.datetime.now(datetime.UTC).date())


@dataclass(frozen=True, kw_only=True)
class Found:
    """What of a catalogue was wanted.

    Attributes:
        catalog: that one.
        listings: in the order that was asked for.
        why_none: half a sentence, where there are none.
    """

    catalog: Catalog
    listings: Sequence[Listing]
    why_none: str = ""


@takes(Listed)
def find(**options: Any) -> Found:
    """Return the instance types that meet criteria.

    Args:
        **options: which, and in what order.

    Raises:
        BadInput: a name that nothing has, or prices where the region has none.
    """
    asked = Listed(**options)
    named = {one.name for one in fields(Wishes)}
    wishes = Wishes(**{name: getattr(asked, name) for name in options_of(Rentable) if name in named})
    catalog = in_use(asked.region, asked.catalog).catalog
    listings = list(catalog.listings.values())
    if not catalog.has_prices and (asked.max_hourly_usd is not None or asked.market == "on-demand"):
        raise no_prices(catalog)
    filters = of_listings(catalog, wishes)
    quantity = catalog_filter.quantities(wishes.market)[asked.sort]
    found = catalog_filter.sort(catalog_filter.select(listings, filters), quantity, reverse=asked.reverse)
    why_none = "" if found else catalog_filter.why_none(listings, filters)
    return Found(catalog=catalog, listings=found, why_none=why_none)


@takes(Gpus)
def gpus(only: Sequence[str] | str = (), **options: Any) -> RentableGpus:
    """List the GPUs that can be rented in a region, each with its published facts and the cheapest machine that has it.

    Works offline and without torch, from the catalogue in use; prices have date and source.

    Args:
        only: these, by any of their names. Absent: all.
        **options: which, and in what order.

    Raises:
        BadInput: no GPU is called so, or there is no such region.
    """
    asked = Gpus(**options)
    loaded, *elsewhere = (one.catalog for one in in_regions(asked.region, asked.catalog))
    order = {name: getattr(asked, name) for name in ("market", "sort", "reverse")}
    return rentable_gpus(loaded, names(only, "only"), elsewhere=elsewhere, **order)
