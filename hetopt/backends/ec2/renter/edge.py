"""Where requests become calls of AWS: boto3 makes them, what may help is tried again, what changes is in a ledger.

botocore tries calls again by itself, and capacity that is not there arrives as a fault of the server: it would ask an
exhausted pool five times. So it gets one attempt for everything that makes or removes, and `Retrying` decides: the same
call with the same token, later, and never at an exhausted pool. What makes things carries a token, or a name that only
one thing can have, so the second call answers what the first one made. What removes is the same twice.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from hetopt.backends.ec2 import facts
from hetopt.backends.ec2.renter.errors import ApiRefused
from hetopt.backends.ec2.renter.ledger import LEDGER_FILE, Ledger, LedgerEdge, remember_region
from hetopt.backends.ec2.renter.request import Answer, Edge, Request
from hetopt.core.errors import BadInput
from hetopt.core.extras import install_command

_RENEWED = frozenset(
    {"assume-role", "assume-role-with-web-identity", "container-role", "custom-process", "iam-role", "login", "sso"}
)
"""Sources of credentials that botocore asks again before they end, as long as whoever logged in may."""

_CONNECT_TIMEOUT_S = 10
_READ_TIMEOUT_S = 60


@dataclass(frozen=True, kw_only=True)
class Login:
    """Where credentials came from, and until when they hold.

    Attributes:
        source: as botocore calls it, such as 'env' or 'sso'.
        end_s: seconds since the epoch; None: they say nothing.
        is_temporary: whether they end at all.
    """

    source: str
    end_s: float | None
    is_temporary: bool


class BotoEdge:
    """Carries out requests in one region. Clients are made when they are needed first."""

    def __init__(self, region: str, *, connect_timeout_s: float = _CONNECT_TIMEOUT_S) -> None:
        """Prepare, without a call.

        Raises:
            BadInput: boto3 is not installed.
        """
        try:
            import boto3
        except ImportError:
            raise BadInput("renting needs boto3, which is not installed.", hint=install_command("aws")) from None
        self.region = region
        self._connect_timeout_s = connect_timeout_s
        self._session_class = boto3.Session
        self._session: Any = None
        self._clients: dict[str, Any] = {}
        self.clock_offset_s: float | None = None
        """How far this machine's clock is ahead of AWS's, by the last answer."""

    def __call__(self, request: Request) -> Answer:
        """Make the call.

        Raises:
            ApiRefused: it did not succeed.
        """
        from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError
        from botocore.parsers import ResponseParserError

        endpoint = os.environ.get("AWS_ENDPOINT_URL", f"{request.service} in {self.region}")
        try:
            client = self._client(request.service, reads=request.reads_only)
            answer: dict[str, Any] = self._call(client, request)
        except ClientError as error:
            self._see_clock(error.response.get("ResponseMetadata", {}))
            told = error.response.get("Error", {})
            raise ApiRefused(
                request, str(told.get("Code", "Unknown")), str(told.get("Message", "")), endpoint=endpoint
            ) from None
        except (BotoCoreError, HTTPClientError, ResponseParserError) as error:
            raise ApiRefused(request, type(error).__name__, str(error), endpoint=endpoint) from None
        except ValueError as error:  # an address that is none; parameters are refused by names of their own
            raise ApiRefused(request, ValueError.__name__, str(error), endpoint=endpoint) from None
        self._see_clock(answer.pop("ResponseMetadata", {}))
        return answer

    def _call(self, client: Any, request: Request) -> dict[str, Any]:
        """All pages of it, where it has several."""
        if request.reads_only and client.can_paginate(request.operation):
            pages = client.get_paginator(request.operation).paginate(**request.parameters)
            return _joined(list(pages))
        answer: dict[str, Any] = getattr(client, request.operation)(**request.parameters)
        body = answer.get("Body")
        if body is not None and hasattr(body, "read"):
            answer["Body"] = body.read()
        return answer

    def _client(self, service: str, *, reads: bool) -> Any:
        from botocore.config import Config

        name = f"{service} {reads}"
        if name not in self._clients:
            retries = {"mode": "adaptive", "total_max_attempts": 5} if reads else {"total_max_attempts": 1}
            config = Config(
                retries=retries,
                connect_timeout=self._connect_timeout_s,
                read_timeout=_READ_TIMEOUT_S,
                user_agent_extra="hetopt",
                # A pool of sockets for each client of a command that lives for seconds is not worth its keep.
                max_pool_connections=4,
            )
            if self._session is None:
                self._session = self._session_class(region_name=self.region)
            self._clients[name] = self._session.client(service, config=config)
        return self._clients[name]

    def login(self) -> Login:
        """The credentials of the calls. Those that botocore renews by itself end when their source does."""
        if self._session is None:
            self._session = self._session_class(region_name=self.region)
        found = self._session.get_credentials()
        if found is None:
            return Login(source="none", end_s=None, is_temporary=False)
        renews = found.method in _RENEWED
        ends = None if renews else getattr(found, "_expiry_time", None)
        return Login(
            source=str(found.method),
            end_s=None if ends is None else ends.timestamp(),
            is_temporary=not renews and found.token is not None,
        )

    def _see_clock(self, metadata: Mapping[str, Any]) -> None:
        import email.utils
        import time

        date = metadata.get("HTTPHeaders", {}).get("date")
        if date is None:
            return
        try:
            there = email.utils.parsedate_to_datetime(date)
        except ValueError:
            return
        if there.tzinfo is None:
            there = there.replace(tzinfo=datetime.UTC)
        self.clock_offset_s = time.time() - there.timestamp()


def _joined(pages: list[dict[str, Any]]) -> dict[str, Any]:
    """Pages of an answer as one: lists run on, the rest is that of the first page."""
    if not pages:
        return {}
    answer = dict(pages[0])
    for page in pages[1:]:
        for key, value in page.items():
            if isinstance(value, list):
                answer[key] = [*answer.get(key, []), *value]
    return answer


ATTEMPTS = 6
FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 20.0
LISTED_WITHIN_S = 30.0
PATIENCE_S = 300.0
"""For what goes away by itself: interfaces leave a group when their machines have ended, which takes minutes."""


@dataclass(frozen=True, kw_only=True)
class Retrying:
    """Makes calls again where that can help, waiting longer each time, by a random part of the wait (full jitter)."""

    inner: Edge
    sleep: Callable[[float], None]
    random: Random
    attempts: int = ATTEMPTS
    patience_s: float = PATIENCE_S

    def __call__(self, request: Request) -> Answer:
        """Make the call, several times if need be.

        Raises:
            ApiRefused: as it was refused last.
        """
        waited_s, attempt, unanswered = 0.0, 0, False
        while True:
            attempt += 1
            try:
                return self.inner(request)
            except ApiRefused as refused:
                if refused.code in request.tolerates:
                    return {}
                # Whatever it says: an attempt before it that nobody answered may have been carried out.
                unanswered = unanswered or refused.reaction == "again" or _name_is_taken(refused.code)
                refused.may_be_done = unanswered
                if request.if_exists is not None and _name_is_taken(refused.code):
                    return _nested(request.result, self._found(request.if_exists, refused))
                passing = refused.code in request.passing and waited_s < self.patience_s
                again = refused.reaction == "again" and attempt < self.attempts
                if not (passing or again):
                    raise
            wait_s = wait_before(attempt, self.random)
            self.sleep(wait_s)
            waited_s += wait_s

    def _found(self, lookup: Request, refused: ApiRefused) -> Answer:
        """What bears the name already, if it is of this run. Lists may not show for seconds what was just made."""
        waited_s, attempt = 0.0, 0
        while True:
            attempt += 1
            answer = self(lookup)
            try:
                return lookup.entity(answer)
            except (KeyError, IndexError):
                if waited_s >= LISTED_WITHIN_S:
                    raise refused from None
            wait_s = wait_before(attempt, self.random)
            self.sleep(wait_s)
            waited_s += wait_s


def _nested(path: tuple[str | int, ...], entity: Answer) -> Answer:
    """An answer in which the entity is where the call that makes it would have put it."""
    for key in reversed(path):
        entity = {str(key): entity}
    return entity


def wait_before(attempt: int, random: Random) -> float:
    """Seconds to wait after so many attempts: up to twice as long each time."""
    ceiling = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** min(attempt - 1, 10))
    return random.uniform(ceiling / 2, ceiling)


def _name_is_taken(code: str) -> bool:
    return code in facts.NAME_TAKEN.value


def connect(region: str) -> Edge:
    """An edge for calls that belong to no run, or only read."""
    return Retrying(inner=BotoEdge(region), sleep=time.sleep, random=Random())


def connect_run(
    region: str, run_dir: Path, home: Path, inner: Edge | None = None, clock: Callable[[], float] = time.time
) -> Edge:
    """An edge whose calls are in the ledger of a run.

    Args:
        region: where it rents.
        run_dir: the run's folder, which holds its ledger.
        home: where the regions that were ever used are kept.
        inner: instead of `connect`.
        clock: seconds since the epoch.
    """
    remember_region(home, region)
    ledger = Ledger(path=run_dir / LEDGER_FILE, region=region, clock=clock)
    return LedgerEdge(inner=inner or connect(region), ledger=ledger)


def headers_of_s3(operation: str, parameters: Mapping[str, Any]) -> Mapping[str, str]:
    """The headers that botocore writes for a call of S3; none of one that clients make in several."""
    model = _storage()
    name = "".join(word.capitalize() for word in operation.split("_"))
    if name not in model.operation_names:
        return {}
    from botocore.serialize import create_serializer

    told = create_serializer("rest-xml", include_validation=False).serialize_to_request(
        dict(parameters), model.operation_model(name)
    )
    headers: Mapping[str, str] = told["headers"]
    return headers


@cache
def _storage() -> Any:
    import botocore.session

    return botocore.session.get_session().get_service_model("s3")
