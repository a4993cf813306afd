"""`hetopt catalog refresh`: reads today's prices, as AWS publishes them, into a catalogue of one's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetopt.api.options import REGION
from hetopt.cli.catalog import app
from hetopt.cli.help_screen import OneScreen
from hetopt.cli.options import Json, every_region

if TYPE_CHECKING:
    from hetopt.api.catalog_refreshing import OwnCatalog

LEFT_OUT_SHOWN = 5


@app.command(cls=OneScreen)
def refresh(
    region: Annotated[
        str,
        typer.Option("--region", "-r", callback=every_region("all"), help="AWS region; all: every one."),
    ] = REGION,
    as_json: Json = False,
) -> None:
    """Read today's prices of a region into a catalogue of your own; no account is needed, nothing is rented.

    What AWS publishes is read: the price list (70 to 300 MB a region), spot prices and the Spot Advisor's data. It is
    kept under ~/.hetopt/catalogs by region and day, and used from then on. What has not changed
    is not read again.

    \b
      hetopt catalog refresh --region eu-west-1
      hetopt catalog refresh --region all
    """
    from hetopt.api import catalog_refreshing
    from hetopt.cli import render

    with render.progress("reading prices") as reporter:
        own = catalog_refreshing.refresh(region, reporter=reporter)
    if as_json:
        facts = [_facts(one) for one in own]
        render.print_json(facts if region == catalog_refreshing.ALL else facts[0])
        return
    for one in own:
        made = one.made
        render.note(
            f"{one.region}: {made.types:,} types, {made.on_demand:,} prices on demand, {made.spot:,} on spot, "
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
        "left_out": list(own.made.left_out),
    }
