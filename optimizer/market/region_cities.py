"""Where AWS's regions are: people ask for Frankfurt and AWS for eu-central-1."""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType

from hetopt.core.errors import BadInput
from hetopt.core.plain_text import unknown

CITIES = MappingProxyType(
    {
        "af-south-1": "Cape Town",
        "ap-east-1": "Hong Kong",
        "ap-east-2": "Taipei",
        "ap-northeast-1": "Tokyo",
        "ap-northeast-2": "Seoul",
        "ap-northeast-3": "Osaka",
        "ap-south-1": "Mumbai",
        "ap-south-2": "Hyderabad",
        "ap-southeast-1": "Singapore",
        "ap-southeast-2": "Sydney",
        "ap-southeast-3": "Jakarta",
        "ap-southeast-4": "Melbourne",
        "ap-southeast-5": "Malaysia",
        "ap-southeast-6": "New Zealand",
        "ap-southeast-7": "Thailand",
        "ca-central-1": "Canada Central",
        "ca-west-1": "Calgary",
        "eu-central-1": "Frankfurt",
        "eu-central-2": "Zurich",
        "eu-north-1": "Stockholm",
        "eu-south-1": "Milan",
        "eu-south-2": "Spain",
        "eu-west-1": "Ireland",
        "eu-west-2": "London",
        "eu-west-3": "Paris",
        "il-central-1": "Tel Aviv",
        "me-central-1": "UAE",
        "me-south-1": "Bahrain",
        "mx-central-1": "Mexico",
        "sa-east-1": "Sao Paulo",
        "us-east-1": "Virginia",
        "us-east-2": "Ohio",
        "us-west-1": "California",
        "us-west-2": "Oregon",
    }
)
"""Names of regions to where they are, in the words of AWS's list (docs.aws.amazon.com, Regions, November 2026)."""


def unknown_region(name: str, regions: Iterable[str], what: str = "region") -> BadInput:
    """Return the error of a name that none of these regions has; a city hints at the region that is there."""
    asked = name.strip().casefold()
    there = [
        f"{CITIES[region]} is {region}" for region in regions if asked and asked in CITIES.get(region, "").casefold()
    ]
    return unknown(name, regions, what, hint="; ".join(there) or None)
