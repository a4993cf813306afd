"""The catalogue of what can be rented: which is in use, what of it is wanted, and the GPUs in it."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from hetopt.api.values import chosen, names, positive
from hetopt.optimizer.market import catalog_filter
from hetopt.optimizer.market.catalog import Catalog, Listing, no_prices
from hetopt.optimizer.market.catalog_choice import ANY_REGION, CatalogInUse, catalog_in_use, regional_catalogs
from hetopt.optimizer.market.catalog_filter import AnyMarket, Criteria
from hetopt.optimizer.market.gpus import GpuSort, RentableGpu, RentableGpus, rentable_gpus

__all__ = ["Criteria", "Found", "RentableGpu", "find", "gpus", "in_use"]


def in_use(region: str = "us-east-1", directory: Path | None = None) -> CatalogInUse:
    """The catalogue that is planned with: the one in a folder, the newest refreshed one, or the bundled one.

    Raises:
        BadInput: there is no such region, or a file cannot be used.
    """
    return catalog_in_use(region, directory, today=datetime.datetime.now(datetime.UTC).date())


def in_regions(region: str, directory: Path | None = None) -> tuple[Catalog, ...]:
    """The catalogue in use of a region, or for `ANY_REGION` of each that has prices; errors as of `in_use`."""
    if region != ANY_REGION:
        return (in_use(region, directory).catalog,)
    today = datetime.datetime.now(datetime.UTC).date()
    return tuple(one.catalog for one in regional_catalogs(directory, today=today))


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


def find(criteria: Criteria, *, region: str, directory: Path | None, sort: str, reverse: bool) -> Found:
    """The instance types that meet criteria.

    Args:
        criteria: all of which count.
        region: of the prices.
        directory: of another catalogue than that in use.
        sort: by which of `catalog_filter.quantities`, smallest first, the unknown last.
        reverse: largest first.

    Raises:
        BadInput: a name that nothing has, or prices where the region has none.
    """
    catalog = in_use(region, directory).catalog
    listings = list(catalog.listings.values())
    if not catalog.has_prices and (criteria.price_max_usd_per_hour is not None or criteria.market == "on-demand"):
        raise no_prices(catalog)
    filters = criteria.filters(catalog)
    quantity = catalog_filter.quantities(criteria.market)[sort]
    found = catalog_filter.sort(catalog_filter.select(listings, filters), quantity, reverse=reverse)
    why_none = "" if found else catalog_filter.why_none(listings, filters)
    return Found(catalog=catalog, listings=found, why_none=why_none)


def gpus(
    only: Sequence[str] | str = (),
    *,
    region: str = "us-east-1",
    market: AnyMarket = "any",
    memory_min_gib: float | None = None,
    price_max_usd_per_hour: float | str | None = None,
    sort: GpuSort = "price",
    reverse: bool = False,
    catalog: Path | str | None = None,
) -> RentableGpus:
    """The GPUs that can be rented in a region, each with its published facts and the cheapest machine that has it.

    Works offline and without torch, from the catalogue in use; prices have date and source.

    Args:
        only: these, by any of their names. Absent: all.
        region: of AWS; ``"any"``: the cheapest machine of all regions that have prices.
        market: on which the cheapest machine is sought: ``"spot"``, ``"on-demand"`` or ``"any"`` (the lower price).
        memory_min_gib: of one GPU.
        price_max_usd_per_hour: of the cheapest machine.
        sort: ``"price"`` (of the machine), ``"price-per-gpu"``, ``"rate-per-usd"`` (16-bit TFLOP/s a dollar an hour),
            ``"memory"``, ``"fp32"``, ``"tf32"``, ``"bf16"``, ``"fp16"``, ``"bandwidth"`` or ``"name"``; smallest first,
            the unknown last.
        reverse: largest first.
        catalog: folder of another catalogue.

    Raises:
        BadInput: no GPU is called so, or there is no such region.
    """
    loaded, *elsewhere = in_regions(region, None if catalog is None else Path(catalog))
    return rentable_gpus(
        loaded,
        names(only, "only"),
        market=chosen(market, get_args(AnyMarket), "market") or "any",
        memory_min_gib=positive(memory_min_gib, "memory_min_gib", "GiB"),
        price_max_usd_per_hour=positive(price_max_usd_per_hour, "price_max_usd_per_hour", "USD an hour"),
        sort=chosen(sort, get_args(GpuSort), "order") or "price",
        reverse=reverse,
        elsewhere=elsewhere,
    )
