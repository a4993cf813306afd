"""`hetopt catalog refresh`: reads today's types and prices of a region with the person's own AWS account."""

from __future__ import annotations

import typer

from hetopt.cli.catalog import JSON, REGION


def refresh(
    region: str = REGION,
    profile: str | None = typer.Option(
        None, "--profile", metavar="NAME", help="AWS profile; default: as AWS tools do."
    ),
    json_: bool = JSON,
) -> None:
    """Read types, zones and prices of a region from AWS into a catalogue of your own; nothing is rented.

    It is kept under ~/.hetopt/catalogs by region and day, and used from then on. A reading that was interrupted goes on
    where it stopped. It needs ec2:DescribeInstanceTypes, ec2:DescribeInstanceTypeOfferings,
    ec2:DescribeAvailabilityZones, ec2:DescribeSpotPriceHistory and pricing:GetProducts.

    \b
      hetopt catalog refresh --region eu-west-1
    """
    import datetime

    from hetopt.cli import render
    from hetopt.core.errors import BadInput, CloudRefused
    from hetopt.core.extras import install_command
    from hetopt.core.paths import inside
    from hetopt.optimizer.market.catalog import BUNDLED
    from hetopt.optimizer.market.catalog_choice import catalog_in_use, catalogs_home
    from hetopt.optimizer.market.catalog_folder import write_catalog
    from hetopt.optimizer.market.catalog_refresh import refreshed

    try:
        from hetopt.optimizer.market import pricing
    except ModuleNotFoundError as error:
        if error.name not in ("boto3", "botocore"):
            raise
        raise BadInput("Asking AWS needs boto3, which is not installed.", hint=install_command("aws")) from None
    from hetopt.optimizer.market.answer_store import AnswerStore

    now = datetime.datetime.now(datetime.UTC)
    pricing.check_region(region)
    home = inside(catalogs_home(), region, what="region")
    store = AnswerStore.open(home / "reading", now)
    try:
        with render.progress(f"reading {region}") as live:
            answers = pricing.read_region(
                region,
                store,
                pricing.session(profile),
                told=lambda part, items: live(f"{part}, {items:,}", None),
            )
    except CloudRefused:
        if inside(BUNDLED, f"regions/{region}.csv", what="region").exists():
            kept = catalog_in_use(region, None, today=now.date())
            age = f", {(now.date() - kept.day).days} days old ({kept.day})" if kept.day else ", which has no prices"
            render.note(f"In use stays {'the bundled catalogue' if kept.bundled else kept.catalog.directory}{age}.")
        raise
    day = store.begun.date()
    made = refreshed(answers, region, day, BUNDLED)
    folder = write_catalog(home / day.isoformat(), made.files, region)
    store.remove()
    if json_:
        render.print_json(
            {
                "region": region,
                "folder": str(folder),
                "date": day.isoformat(),
                "types": made.types,
                "on_demand_prices": made.on_demand,
                "spot_prices": made.spot,
                "left_out": list(made.left_out),
            }
        )
        return
    render.note(
        f"{made.types:,} types of {region}, with {made.on_demand:,} on-demand prices and {made.spot:,} spot prices of "
        f"today, are in {folder}."
    )
    for sentence in made.left_out[:10]:
        render.note(f"left out: {sentence}")
    if len(made.left_out) > 10:
        render.note(f"and {len(made.left_out) - 10} more (--json names all)")
