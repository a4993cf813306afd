"""What it costs to bring a data set from the region where it is to the one that trains: once, by the source's price.

AWS charges what leaves a region by the region that it leaves (AWS Global Network FAQ), and nothing for what arrives.
The machines then read a copy in their own region, which is free. The copy is made before the launch: it takes money,
and no time of the run.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hetopt.optimizer.cost.bill import BYTES_PER_GB
from hetopt.optimizer.cost.billing import Term

FACTS = Path(__file__).resolve().parents[2] / "catalogs" / "aws" / "transfer.json"

ELSEWHERE = "elsewhere"


@dataclass(frozen=True, kw_only=True)
class DataTransfer:
    """The bill of bringing a data set to another region, and how it was computed."""

    usd: float
    basis: str


@cache
def _prices() -> dict[str, Term]:
    terms = json.loads(FACTS.read_text(encoding="utf-8"))["terms"]
    return {name: Term.model_validate(term) for name, term in terms.items()}


def data_transfer(data_bytes: float, source: str | None, target: str) -> DataTransfer | None:
    """To ``target`` from ``source``; absent where there is nothing to be brought, or nobody said from where."""
    if source is None or source == target or data_bytes <= 0:
        return None
    prices = _prices()
    price = prices.get(source.partition("-")[0], prices[ELSEWHERE])
    gb = data_bytes / BYTES_PER_GB
    return DataTransfer(
        usd=gb * price.value,
        basis=f"{gb:,.0f} GB from {source} to {target} once, at ${price.value:g} a GB ({price.source}, {price.date})",
    )
