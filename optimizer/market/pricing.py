"""Reads what one region offers, and what it costs, from the AWS APIs: page by page, at a gentle rate, and resumably."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, cast

import boto3
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    EndpointConnectionError,
    NoCredentialsError,
    PartialCredentialsError,
    ProfileNotFound,
    SSOError,
    TokenRetrievalError,
)

from hetopt.core.errors import CloudRefused
from hetopt.optimizer.market.answer_store import AnswerStore
from hetopt.optimizer.market.catalog_refresh import OFFERINGS, SPECIFICATIONS, SPOT, Answers

ZONES = "describe-availability-zones"
HISTORY_DAYS = 7
"""Of spot prices: long enough to see them move, short enough to be read in a minute."""

PAUSE_S = 0.25
"""Between two pages: a quarter of what a region refills for reading calls, so that nothing else is crowded out."""

ATTEMPTS = 8
_STALE_TOKENS = frozenset(
    {"InvalidNextToken", "InvalidPaginationToken", "ExpiredNextTokenException", "InvalidParameterValue"}
)
_THROTTLED = frozenset({"RequestLimitExceeded", "Throttling", "ThrottlingException", "TooManyRequestsException"})
_DENIED = frozenset({"UnauthorizedOperation", "AccessDenied", "AccessDeniedException"})
_NOT_ENABLED = frozenset({"OptInRequired", "AuthFailure"})
_EXPIRED = frozenset(
    {"ExpiredToken", "ExpiredTokenException", "RequestExpired", "InvalidClientTokenId", "UnrecognizedClientException"}
)


class Session(Protocol):
    """The part of a boto3 session that is needed; tests bring one whose clients answer by themselves."""

    def client(self, service_name: str, **options: Any) -> Any:
        """A client of the service."""
        ...

    def get_credentials(self) -> Any:
        """The credentials that were found, or none."""
        ...


@dataclass(frozen=True, kw_only=True)
class Part:
    """One call, page by page.

    Attributes:
        name: of the call, which names its pages in the store.
        method: of boto3's client.
        result: the field of an answer that holds its items.
        parameters: of the call.
        permission: that the account needs.
    """

    name: str
    method: str
    result: str
    parameters: dict[str, Any]
    permission: str


def parts(region: str, now: datetime.datetime) -> tuple[Part, ...]:
    """What has to be asked to know a region at a time."""
    since = now - datetime.timedelta(days=HISTORY_DAYS)
    return (
        Part(
            name=SPECIFICATIONS,
            method="describe_instance_types",
            result="InstanceTypes",
            parameters={"MaxResults": 100},
            permission="ec2:DescribeInstanceTypes",
        ),
        Part(
            name=OFFERINGS,
            method="describe_instance_type_offerings",
            result="InstanceTypeOfferings",
            parameters={"LocationType": "availability-zone-id", "MaxResults": 1000},
            permission="ec2:DescribeInstanceTypeOfferings",
        ),
        Part(
            name=ZONES,
            method="describe_availability_zones",
            result="AvailabilityZones",
            parameters={},
            permission="ec2:DescribeAvailabilityZones",
        ),
        Part(
            name=SPOT,
            method="describe_spot_price_history",
            result="SpotPriceHistory",
            # Changes since then, and what was in effect: the last of each zone is the price of now.
            parameters={
                "ProductDescriptions": ["Linux/UNIX"],
                "StartTime": since.isoformat(),
                "EndTime": now.isoformat(),
                "MaxResults": 1000,
            },
            permission="ec2:DescribeSpotPriceHistory",
        ),
    )


def session(profile: str | None) -> Session:
    """A session of the person's own credentials, found as every AWS tool finds them.

    Raises:
        CloudRefused: there is no such profile.
    """
    try:
        made = cast(Session, boto3.Session(profile_name=profile))
    except ProfileNotFound:
        raise CloudRefused(
            f"There is no AWS profile '{profile}'.",
            hint="see `aws configure list-profiles`, or leave `aws_profile` out",
        ) from None
    return made


def read_region(
    region: str,
    store: AnswerStore,
    made: Session,
    *,
    told: Callable[[str, int], None] = lambda part, items: None,
    sleep: Callable[[float], None] = time.sleep,
) -> Answers:
    """Ask for everything that the store does not hold yet.

    Args:
        region: of AWS.
        store: pages are kept there as they come; what it holds already is not asked again. Prices are those of when it
            was begun.
        made: session to make clients with.
        told: is told the name of the call and the number of items so far, after each page.
        sleep: between pages.

    Raises:
        CloudRefused: credentials, permission, rate or network; what was read stays in the store.
    """
    found: dict[str, tuple[Any, ...]] = {}
    client: Any = None
    try:
        for part in parts(region, store.begun):
            if client is None and not store.progress(part.name).complete:
                # Adaptive: backs off by itself, with jitter, and slows down when it is throttled.
                config = Config(
                    retries={"mode": "adaptive", "total_max_attempts": ATTEMPTS},
                    connect_timeout=10,
                    read_timeout=60,
                    user_agent_extra="hetopt",
                )
                client = made.client("ec2", region_name=region, config=config)
            for items in _pages(part, client, store, sleep):
                told(part.name, items)
            found[part.name] = store.progress(part.name).items
    except (BotoCoreError, ClientError) as error:
        raise _refused(error, region) from None
    return Answers(
        instance_types=found[SPECIFICATIONS],
        offerings=found[OFFERINGS],
        spot_prices=found[SPOT],
        zones=found[ZONES],
    )


def _pages(part: Part, client: Any, store: AnswerStore, sleep: Callable[[float], None]) -> Iterator[int]:
    """Ask for the pages that are missing, and yield the number of items after each."""
    progress = store.progress(part.name)
    count, token = len(progress.items), progress.next_token
    resumed = token is not None
    while not progress.complete:
        try:
            answer = getattr(client, part.method)(**part.parameters, **({"NextToken": token} if token else {}))
        except ClientError as error:
            if not resumed or error.response.get("Error", {}).get("Code") not in _STALE_TOKENS:
                raise
            # The token of an earlier reading has died: this part is read from its start.
            store.forget(part.name)
            count, token, resumed = 0, None, False
            continue
        resumed = False
        items, token = answer[part.result], answer.get("NextToken") or None
        store.add(part.name, items, token)
        count += len(items)
        yield count
        if token is None:
            return
        sleep(PAUSE_S)


def _refused(error: BotoCoreError | ClientError, region: str) -> CloudRefused:
    """One sentence, and what to do; what was read so far is kept in any case."""
    again = "then run it again: it goes on where it stopped"
    if isinstance(error, ClientError):
        told = error.response.get("Error", {})
        code, operation = str(told.get("Code", "Unknown")), error.operation_name
        needed = next(
            (
                part.permission
                for part in parts(region, datetime.datetime.now(datetime.UTC))
                if part.permission.endswith(operation)
            ),
            operation,
        )
        if code in _NOT_ENABLED:
            return CloudRefused(
                f"AWS does not accept these credentials in {region} ({code}).",
                hint="enable the region for the account, choose another, or sign in again",
            )
        if code in _DENIED:
            return CloudRefused(
                f"AWS does not let this user call {operation} ({code}).", hint=f"allow {needed}, {again}"
            )
        if code in _EXPIRED:
            return CloudRefused(
                f"AWS does not accept the credentials ({code}).",
                hint=f"sign in, check `aws sts get-caller-identity`, {again}",
            )
        if code in _THROTTLED:
            return CloudRefused(f"AWS limits the rate of {operation} ({code}).", hint=f"wait a minute, {again}")
        return CloudRefused(f"AWS refused {operation}: {code}.", hint=f"look at the AWS health dashboard, {again}")
    if isinstance(error, NoCredentialsError | PartialCredentialsError):
        return CloudRefused("There are no AWS credentials.", hint=f"run `aws configure` or `aws sso login`, {again}")
    if isinstance(error, TokenRetrievalError | SSOError):
        return CloudRefused("The AWS sign-in has ended.", hint=f"run `aws sso login`, {again}")
    if isinstance(error, EndpointConnectionError):
        return CloudRefused(f"AWS cannot be reached in {region}.", hint=f"look at the network connection, {again}")
    return CloudRefused(f"AWS could not be asked ({type(error).__name__}).", hint=again)
