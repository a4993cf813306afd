"""The one place that talks to AWS: a request becomes a call of botocore, and whatever goes wrong an `ApiRefused`.

botocore tries calls again by itself, and capacity that is not there arrives as a fault of the server: it would ask an
exhausted pool five times. So it gets one attempt for everything that makes or removes, and `Retrying` decides.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping
from typing import Any

from hetopt.backends.ec2.renter.errors import ApiRefused
from hetopt.backends.ec2.renter.request import Answer, Request
from hetopt.core.errors import BadInput
from hetopt.core.extras import install_command

_CONNECT_TIMEOUT_S = 10
_READ_TIMEOUT_S = 60


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
        except (BotoCoreError, HTTPClientError) as error:
            raise ApiRefused(request, type(error).__name__, str(error), endpoint=endpoint) from None
        except ResponseParserError as error:
            raise ApiRefused(request, "ResponseParserError", str(error), endpoint=endpoint) from None
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
