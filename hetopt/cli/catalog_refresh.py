"""`hetopt catalog refresh`: reads today's types and prices of a region with the person's own AWS account."""

from __future__ import annotations

from typing import Annotated

import typer

from hetopt.cli.catalog import Json
from hetopt.cli.options import FIRST_REGION, Region

LEFT_OUT_SHOWN = 10


def refresh(
    region: Region = FIRST_REGION,
    profile: Annotated[
        str | None, typer.Option("--profile", metavar="NAME", help="AWS profile; default: as AWS tools do.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Read types, zones and prices of a region from AWS into a catalogue of your own; nothing is rented.

    It is kept under ~/.hetopt/catalogs by region and day, and used from then on. A reading that was interrupted goes on
    where it stopped. It needs ec2:DescribeInstanceTypes, ec2:DescribeInstanceTypeOfferings,
    ec2:DescribeAvailabilityZones, ec2:DescribeSpotPriceHistory and pricing:GetProducts.

    \b
      hetopt catalog refresh --region eu-west-1
    """
    from hetopt.api import catalog_refreshing
    from hetopt.cli import render

    with render.progress(f"reading {region}") as reporter:
        own = catalog_refreshing.refresh(region, aws_profile=profile, reporter=reporter)
    made = own.made
    if as_json:
        render.print_json(
            {
                "region": region,
                "folder": str(own.folder),
                "date": own.day.isoformat(),
                "types": made.types,
                "on_demand_prices": made.on_demand,
                "spot_prices": made.spot,
                "left_out": list(made.left_out),
            }
        )
        return
    render.note(
        f"{made.types:,} types of {region}, with {made.on_demand:,} on-demand prices and {made.spot:,} spot prices of "
        f"today, are in {own.folder}."
    )
    for sentence in made.left_out[:LEFT_OUT_SHOWN]:
        render.note(f"left out: {sentence}")
    if len(made.left_out) > LEFT_OUT_SHOWN:
        render.note(f"and {len(made.left_out) - LEFT_OUT_SHOWN} more (--json names all)")
