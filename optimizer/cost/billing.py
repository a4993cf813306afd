"""The prices beside the machine's own: billing rules, volumes, addresses, transfer and storage, each with its date."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, cast, get_args, overload

from hetopt.core.errors import BadInput
from hetopt.optimizer.market.catalog import BUNDLED
from hetopt.optimizer.market.catalog_rows import HINT, read_object
from hetopt.optimizer.market.instance_type import Confidence

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, slots=True)
class Term:
    """One figure of the provider's price list."""

    value: float
    unit: str
    date: datetime.date
    source: str
    confidence: Confidence
    note: str | None = None

    def __post_init__(self) -> None:
        """Refuse what is no figure."""
        if not 0 <= self.value < inf:
            raise ValueError(f"value is {self.value}, but must be a number of 0 or more")
        if self.confidence not in get_args(Confidence):
            raise ValueError(f"confidence is '{self.confidence}', but must be {', '.join(get_args(Confidence))}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Billing:
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
    terms, region = data.get("terms"), data.get("region")
    if not isinstance(terms, dict) or not isinstance(region, str):
        raise BadInput(f"{path} needs a region and an object of terms.", hint=HINT)
    names = [field.name for field in fields(Billing) if field.name != "region"]
    return Billing(region=region, **read_terms(path, terms, names))


def read_terms(path: Path, terms: Mapping[str, object], names: Iterable[str]) -> dict[str, Term]:
    """Dated figures of a file by name: these names, and no other.

    Raises:
        BadInput: one is missing, unknown or cannot be used.
    """
    expected = set(names)
    if different := sorted(expected ^ set(terms)):
        verb = "lacks the term" if different[0] in expected else "has the unknown term"
        raise BadInput(f"{path} {verb} {different[0]}.", hint=HINT)
    return {name: _term(path, name, term) for name, term in terms.items()}


def _term(path: Path, name: str, term: object) -> Term:
    """One entry of the file; a record's refusal and a missing or mistyped field become one sentence."""
    texts = ("unit", "date", "source", "confidence")
    if (
        not isinstance(term, dict)
        or not set(texts) | {"value"} <= set(term) <= {*texts, "value", "note"}
        or not all(isinstance(text, str) for key, text in term.items() if key != "value")
        or isinstance(term["value"], bool)
        or not isinstance(term["value"], int | float)
    ):
        raise BadInput(f"{path}: {name} needs a numeric value, a unit, a date, a source and a confidence.", hint=HINT)
    try:
        return Term(
            value=float(term["value"]),
            unit=term["unit"],
            date=datetime.date.fromisoformat(term["date"]),
            source=term["source"],
            confidence=cast("Confidence", term["confidence"]),
            note=term.get("note"),
        )
    except ValueError as error:
        raise BadInput(f"{path}: {name}: {error}.", hint=HINT) from None


@overload
def is_free(up_s: float, *, taken_back: bool, within_s: float) -> bool: ...
@overload
def is_free(up_s: NDArray[np.float64], *, taken_back: NDArray[np.bool_], within_s: float) -> NDArray[np.bool_]: ...
def is_free(
    up_s: float | NDArray[np.float64], *, taken_back: bool | NDArray[np.bool_], within_s: float
) -> bool | NDArray[np.bool_]:
    """Whether EC2 takes nothing for a spot machine, because it took it back early; for one machine or many.

    Args:
        up_s: from running to stopped.
        taken_back: by EC2; a machine that its owner stops is paid for.
        within_s: `Billing.spot_free_if_interrupted_within_s`.
    """
    return taken_back & (up_s < within_s)
