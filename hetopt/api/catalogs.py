"""The catalogue of what can be rented: which is in use, what of it is wanted, and the GPUs in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from hetopt.api.options import REGION, Gpus, Listed, Rentable
from hetopt.core.option import names, options_of, takes
from hetopt.core.plain_text import known
from hetopt.optimizer.market import catalog_filter, clouds
from hetopt.optimizer.market.catalog import Catalog, Listing, load_catalog, no_prices
from hetopt.optimizer.market.catalog_filter import RentableGpu, RentableGpus, rentable_gpus
from hetopt.optimizer.market.catalog_folder import ANY_REGION, clouds_home, in_use, regional_catalogs
from hetopt.optimizer.market.clouds import ANY_CLOUD
from hetopt.optimizer.market.offer_filter import Wishes, of_listings
from hetopt.optimizer.plan import AWS

__all__ = ["MatchingTypes", "RentableGpu", "find", "gpus", "in_use"]


def in_regions(asked: Rentable | Gpus) -> tuple[Catalog, ...]:
    """Return the catalogues of the region and cloud that options name, at least one; AWS's come first.

    Args:
        asked: options with ``region`` (``any``: one catalogue for each region that has prices), ``catalog`` (a folder;
            None: the newest refreshed catalogue, else the bundled one) and ``cloud`` (``any``: AWS and all others). For
            a cloud other than AWS the default region means all of that cloud's regions.

    Raises:
        BadInput: there is no such region or cloud, or a catalogue's file cannot be read.
    """
    region, directory, cloud = asked.region, asked.catalog, asked.cloud
    aws: tuple[Catalog, ...] = ()
    if cloud in (AWS, ANY_CLOUD):
        aws = (in_use(region, directory),) if region != ANY_REGION else regional_catalogs(directory)
        if cloud == AWS:
            return aws
    base = aws[0] if aws else load_catalog(directory=directory)
    cloud_catalogs = clouds.cloud_catalogs(cloud, base, clouds_home())
    if cloud == ANY_CLOUD or region in (ANY_REGION, REGION):
        return (*aws, *cloud_catalogs)
    regions = {catalog.region: catalog for catalog in cloud_catalogs}
    return (regions[known(region if ":" in region else f"{cloud}:{region}", regions, "region")],)


@dataclass(frozen=True, kw_only=True)
class MatchingTypes:
    """The instance types that passed filters, from all catalogues that were searched.

    Attributes:
        catalog: the first of these catalogues, for its date and region.
        listings: the types with their prices, in the order asked for; empty: none passed.
        why_none: half a sentence on which filter leaves none, where there are none; else empty.
    """

    catalog: Catalog
    listings: Sequence[Listing]
    why_none: str = ""


@takes(Listed)
def find(**options: Any) -> MatchingTypes:
    """Return the instance types that pass the filters, with prices, in the order asked for; also why there are none.

    Works offline, from the catalogue in use.

    Args:
        **options: fields of `Listed`: filters, region and order.

    Raises:
        BadInput: a filter names a type or GPU that no catalogue has, the region or cloud is unknown, or filters ask for
            prices in a region that has none.
    """
    asked = Listed(**options)
    named = {wish.name for wish in fields(Wishes)}
    wishes = Wishes(**{name: getattr(asked, name) for name in options_of(Rentable) if name in named})
    catalog, *elsewhere = in_regions(asked)
    listings = [listing for region_catalog in (catalog, *elsewhere) for listing in region_catalog.listings.values()]
    if not catalog.has_prices and (asked.max_hourly_usd is not None or asked.market == "on-demand"):
        raise no_prices(catalog)
    filters = of_listings(catalog, wishes)
    quantity = catalog_filter.quantities(wishes.market)[asked.sort]
    matching = catalog_filter.sort(catalog_filter.select(listings, filters), quantity, reverse=asked.reverse)
    why_none = "" if matching else catalog_filter.why_none(listings, filters)
    return MatchingTypes(catalog=catalog, listings=matching, why_none=why_none)


@takes(Gpus)
def gpus(only: Sequence[str] | str = (), **options: Any) -> RentableGpus:
    """List the GPUs that can be rented in a region, each with its published facts and the cheapest machine that has it.

    Works offline and without torch, from the catalogue in use; prices have date and source.

    Args:
        only: list only these GPUs, by any of their names, as a sequence or a text with commas; empty: all.
        **options: which, and in what order.

    Raises:
        BadInput: no GPU has a name in ``only``, or there is no such region or cloud.
    """
    asked = Gpus(**options)
    loaded, *elsewhere = in_regions(asked)
    order = {name: getattr(asked, name) for name in ("market", "sort", "reverse")}
    return rentable_gpus(loaded, names(only, "only"), elsewhere=elsewhere, **order)


def import_cloud(file: Path | str, cloud: str) -> dict[str, Any]:
    """Write another cloud's machines and prices into the user's home folder, where planning finds them; return counts.

    An earlier import of the same cloud is replaced.

    Args:
        file: CSV file in the columns of SkyPilot's catalogue.
        cloud: name to keep the machines under, such as ``lambda``.

    Returns:
        ``cloud``, as given; ``types`` and ``regions``, how many there are now; ``unknown_gpus``, names of the GPUs
            whose machines were left out because hetopt knows no facts of them, or they are not NVIDIA's.

    Raises:
        BadInput: the file cannot be read or lacks columns, or ``cloud`` is no name that a cloud may have.
    """
    catalogs, unknown_gpus = clouds.import_cloud(Path(file), cloud, load_catalog(), clouds_home())
    types = {name for catalog in catalogs for name in catalog.listings}
    return {"cloud": cloud, "types": len(types), "regions": len(catalogs), "unknown_gpus": list(unknown_gpus)}
