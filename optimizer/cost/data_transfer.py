"""What it costs to bring a data set from the region where it is to the one that trains: once, by the source's price.

AWS charges what leaves a region by the region that it leaves (AWS Global Network FAQ), and nothing for what arrives.
The machines then read a copy in their own region, which is free. The copy is made before the launch: it takes money,
and no time of the run.
"""

from __future__ import annotations

import json
from pathlib import Path

from hetopt.optimizer.cost.bill import BYTES_PER_GB
from hetopt.optimizer.cost.billing import Term
from hetopt.optimizer.plan import CostTerm

FACTS = Path(__file__).resolve().parents[2] / "catalogs" / "aws" / "transfer.json"

ELSEWHERE = "elsewhere"


def data_transfer(data_bytes: float, source: str | None, target: str) -> CostTerm | None:
    """Return the price of bringing the data set from ``source`` to ``target``; absent where it costs nothing."""
    if source is None or source == target or data_bytes <= 0:
        return None
    prices = json.loads(FACTS.read_text(encoding="utf-8"))["terms"]
    price = Term.model_validate(prices.get(source.partition("-")[0], prices[ELSEWHERE]))
    gb = data_bytes / BYTES_PER_GB
    return CostTerm(
        name="data set from another region",
        usd=gb * price.value,
        basis=f"{gb:,.0f} GB from {source} to {target} once, at ${price.value:g} a GB ({price.source}, {price.date})",
    )
