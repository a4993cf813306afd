"""Reads what one region offers, and what it costs, from the AWS APIs: page by page, at the rate that AWS allows."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any, Protocol, cast

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, ProfileNotFound

from hetopt.core.errors import CloudRefused
from hetopt.optimizer.market.catalog_refresh import OFFERINGS, SPECIFICATIONS, SPOT, Answers

HISTORY_DAYS = 7
"""Of spot prices: long enough to see them move, short enough to be read in a minute."""

_HINTS = {
    "OptInRequired": "enable the region for the account, choose another, or sign in again",
    "AuthFailure": "enable the region for the account, choose another, or sign in again",
    "UnauthorizedOperation": "allow ec2:{operation}, then run it again",
    "RequestLimitExceeded": "wait a minute, then run it again",
    "ExpiredToken": "sign in, check `aws sts get-caller-identity`, then run it again",
    "RequestExpired": "sign in, check `aws sts get-caller-identity`, then run it again",
}
"""What to do about the errors that people meet, by AWS's code."""


class Session(Protocol):
    """The part of a boto3 session that is needed; tests bring one whose clients answer by themselves."""

    def client(self, service_name: str, **options: Any) -> Any:
        """A client of the service."""
        ...

    def get_credentials(self) -> Any:
        """The credentials that were found, or none."""
        ...


def session(profile: str | None) -> Session:
    """A session of the person's own credentials, found as every AWS tool finds them.

    Raises:
        CloudRefused: there is no profile of that name.
    """
    try:
        return cast(Session, boto3.Session(profile_name=profile))
    except ProfileNotFound:
        raise CloudRefused(
            f"There is no AWS profile '{profile}'.",
            hint="see `aws configure list-profiles`, or leave `aws_profile` out",
        ) from None


def read_region(
    region: str,
    made: Session,
    now: datetime.datetime,
    *,
    told: Callable[[str, int], None] = lambda part, items: None,
) -> Answers:
    """Ask what there is in a region: types, where they are offered, zones, and spot prices of the last days.

    Args:
        region: of AWS.
        made: the session.
        now: until when spot prices are asked for.
        told: is told what is read, and how many items of it are there.

    Raises:
        CloudRefused: AWS cannot be reached, or refuses.
    """
    # Adaptive: backs off by itself, with jitter, and slows down when it is throttled.
    config = Config(
        retries={"mode": "adaptive", "total_max_attempts": 8},
        connect_timeout=10,
        read_timeout=60,
        user_agent_extra="hetopt",
    )
    client = made.client("ec2", region_name=region, config=config)

    def ask(part: str, method: str, result: str, **parameters: Any) -> tuple[Any, ...]:
        found: list[Any] = []
        token: dict[str, str] = {}
        while True:
            answer = getattr(client, method)(**parameters, **token)
            found += answer[result]
            told(part, len(found))
            if not answer.get("NextToken"):
                return tuple(found)
            token = {"NextToken": answer["NextToken"]}

    since = now - datetime.timedelta(days=HISTORY_DAYS)
    try:
        return Answers(
            instance_types=ask(SPECIFICATIONS, "describe_instance_types", "InstanceTypes", MaxResults=100),
            offerings=ask(
                OFFERINGS,
                "describe_instance_type_offerings",
                "InstanceTypeOfferings",
                LocationType="availability-zone-id",
                MaxResults=1000,
            ),
            zones=ask("describe-availability-zones", "describe_availability_zones", "AvailabilityZones"),
            # Changes since then, and what was in effect: the last of each zone is the price of now.
            spot_prices=ask(
                SPOT,
                "describe_spot_price_history",
                "SpotPriceHistory",
                ProductDescriptions=["Linux/UNIX"],
                StartTime=since.isoformat(),
                EndTime=now.isoformat(),
                MaxResults=1000,
            ),
        )
    except ClientError as error:
        code, operation = str(error.response.get("Error", {}).get("Code", "Unknown")), error.operation_name
        hint = _HINTS.get(code, "look at the AWS health dashboard, then run it again")
        raise CloudRefused(
            f"AWS refused {operation} in {region} ({code}).", hint=hint.format(operation=operation)
        ) from None
    except NoCredentialsError:
        raise CloudRefused("There are no AWS credentials.", hint="run `aws configure` or `aws sso login`") from None
    except BotoCoreError as error:
        raise CloudRefused(
            f"AWS could not be asked in {region} ({type(error).__name__}).",
            hint="look at the network connection, sign in again with `aws sso login`, then run it again",
        ) from None
