"""`hetopt catalog refresh`: reads today's prices, as AWS publishes them, into a catalogue of one's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetopt.cli.catalog import app
from hetopt.cli.help_screen import OneScreen
from hetopt.cli.options import FIRST_REGION, Json, every_region

if TYPE_CHECKING:
    from hetopt.api.catalog_refreshing import OwnCatalog

LEFT_OUT_SHOWN = 5


@app.command(cls=OneScreen)
def refresh(
    region: Annotated[
        str,
        typer.Option(
            "--region", "-r", callback=every_region("all"), help="AWS region; all: every one, without the account."
        ),
    ] = FIRST_REGION,
    account: Annotated[
        bool,
        typer.Option(
            "--account/--no-account",
            help="Read zones and their spot prices too, if there are AWS credentials.",
        ),
    ] = True,
    profile: Annotated[
        str | None, typer.Option("--profile", metavar="NAME", help="AWS profile; default: as AWS tools do.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Read today's prices of a region into a catalogue of your own; no account is needed, nothing is rented.

    What AWS publishes is read: the price list (70 to 300 MB a region), spot prices and the Spot Advisor's data. It is
    kept under ~/.hetopt/catalogs by region and day, and used from then on. A reading that was interrupted goes on where
    it stopped, and what has not changed is not read again. With AWS credentials, zones, their spot prices and newer
    types come on top (ec2:DescribeInstanceTypes, ec2:DescribeInstanceTypeOfferings, ec2:DescribeAvailabilityZones,
    ec2:DescribeSpotPriceHistory).

    \b
      hetopt catalog refresh --region eu-west-1
      hetopt catalog refresh --region all --no-account
    """
    from hetopt.api import catalog_refreshing
    from hetopt.cli import render

    with render.progress("reading prices") as reporter:
        own = catalog_refreshing.refresh(region, account=account, aws_profile=profile, reporter=reporter)
    if as_json:
        facts = [_facts(one) for one in own]
        render.print_json(facts if region == catalog_refreshing.ALL else facts[0])
        return
    for one in own:
        made = one.made
        zones = f" in {made.zones} zones" if made.zones else ""
        render.note(
            f"{one.region}: {made.types:,} types, {made.on_demand:,} prices on demand, {made.spot:,} on spot{zones}, "
            f"of {one.day}, in {one.folder}."
        )
        shown = made.left_out[: LEFT_OUT_SHOWN if len(own) == 1 else 0]
        for sentence in shown:
            render.note(f"left out: {sentence}")
        if len(made.left_out) > len(shown):
            render.note(f"{len(made.left_out) - len(shown)} more left out or changed (--json names all)")


def _facts(own: OwnCatalog) -> dict[str, Any]:
    return {
        "region": own.region,
        "folder": str(own.folder),
        "date": own.day.isoformat(),
        "types": own.made.types,
        "on_demand_prices": own.made.on_demand,
        "spot_prices": own.made.spot,
        "zones": own.made.zones,
        "left_out": list(own.made.left_out),
    }
