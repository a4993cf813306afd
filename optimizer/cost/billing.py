"""The prices beside the machine's own: billing rules, volumes, addresses, transfer and storage, each with its date."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Annotated

from pydantic import Field

from hetopt.core.artifact import Record, validated
from hetopt.core.errors import BadInput
from hetopt.optimizer.market.catalog import BUNDLED, Catalog
from hetopt.optimizer.market.catalog_rows import HINT, read_object
from hetopt.optimizer.market.instance_type import Confidence
from hetopt.optimizer.plan import AWS


class Term(Record):
    """One figure of the provider's price list."""

    value: Annotated[float, Field(ge=0, strict=True)]
    unit: str
    date: datetime.date
    source: str
    confidence: Confidence
    note: str | None = None


class Billing(Record):
    """The terms of one provider, in the region that they were read for.

    Attributes:
        minimum_billed_s: a machine is paid for at least this long, then by the second.
        spot_free_if_interrupted_within_s: a machine that EC2 takes back in its first hour is free. Never plan on it.
        hours_per_month: turns monthly into hourly prices.
    """

    region: str
    minimum_billed_s: Term
    spot_free_if_interrupted_within_s: Term
    hours_per_month: Term
    ebs_gp3_usd_per_gb_month: Term
    public_ipv4_usd_per_hour: Term
    nat_gateway_usd_per_gb: Term
    s3_usd_per_gb_month: Term
    s3_usd_per_1000_puts: Term
    s3_usd_per_1000_gets: Term


def load_billing(directory: Path | None = None) -> Billing:
    """Read billing.json of the catalogue in ``directory`` (absent: the bundled one).

    Raises:
        BadInput: the file is missing, incomplete or cannot be used.
    """
    path = (directory or BUNDLED) / "billing.json"
    data = read_object(path)
    terms = data.pop("terms", None)
    if not isinstance(terms, dict):
        raise BadInput(f"{path}: terms is not a JSON object.", hint=HINT)
    return validated(Billing, {**terms, **data}, origin=str(path), hint=HINT)


def terms_of(catalog: Catalog) -> Billing:
    """Return the billing terms of a catalogue's cloud beside machine prices.

    Of other clouds than AWS nothing is known: there, and on one's own machines, an hour costs what it costs, by the
    second, and nothing else.

    Raises:
        BadInput: the catalogue's file cannot be used.
    """
    billing = load_billing(catalog.directory)
    if catalog.cloud == AWS:
        return billing
    free = {
        name: getattr(billing, name).model_copy(update={"value": 0.0})
        for name in Billing.model_fields
        if name not in ("region", "hours_per_month") and "_free_" not in name
    }
    return billing.model_copy(update=free)
