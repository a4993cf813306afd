"""The agent of a rented machine: a host's part in a run, with a bucket, the metadata service and a timer of its own.

``python -m hetopt.backends.ec2.node.agent ROOT``, started by the boot script, which shuts the machine down when the
agent ends.

The metadata service (version 2) tells who the machine is, and whether EC2 is about to take it back. Notices are best
effort: an interruption may come without one. 404 is the normal answer where there is none.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hetopt.backends.ec2 import facts
from hetopt.backends.ec2.bootstrap import CONFIG_FILE, UNITS_FOLDER, UNITS_VARIABLE, NodeConfig, Timer
from hetopt.backends.ec2.objects import PriceHistory, S3Objects
from hetopt.backends.host.agent import Agent
from hetopt.backends.host.protocol import MODELS_FOLDER
from hetopt.core.artifact import read_record
from hetopt.core.errors import BadInput


def _run(command: list[str]) -> bool:
    try:
        return subprocess.run(command, check=False, stdin=subprocess.DEVNULL).returncode == 0
    except OSError:
        return False


def main(arguments: list[str]) -> int:
    """Be the agent of this machine.

    Raises:
        BadInput: the folder holds no configuration, or this is no rented machine.
    """
    root = Path(arguments[0])
    config = read_record(NodeConfig, root / CONFIG_FILE, hint="only a machine that hetopt rented has one")
    objects = S3Objects.connect(
        region=config.region, bucket=config.bucket, prefix=config.prefix, account_id=config.account_id
    )
    models = replace(objects, prefix=f"{MODELS_FOLDER}/{config.run_id}")
    imds = Imds(transport=over_http, clock=time.time)
    instance_id = imds.instance_id()
    if instance_id is None:
        raise BadInput("there is no metadata service here.", hint="the agent runs on rented machines only")
    timer = Timer(run=_run, units=Path(os.environ.get(UNITS_VARIABLE, UNITS_FOLDER)), clock=time.time)
    prices = PriceHistory.connect(region=config.region)
    return Agent(
        terms=config,
        id=instance_id,
        root=root,
        objects=objects,
        models=models,
        is_taken=imds.is_taken,
        end_at=timer.set,
        prices=prices,
        notice_every_s=facts.NOTICE_EVERY_S,
    ).live()


_PATHS = facts.METADATA_PATHS
_RENEWED_EARLY_S = 60
_TIMEOUT_S = 2.0

Response = tuple[int, bytes]
Transport = Callable[[str, str, Mapping[str, str]], Response]
"""Method, path and headers in; status and body out. Status 0: the service cannot be reached."""


@dataclass(kw_only=True)
class Imds:
    """Asks the metadata service, with a token that is renewed before it ends, or when the service forgot it."""

    transport: Transport
    clock: Callable[[], float]
    _token: str | None = field(default=None, repr=False)
    _token_until_s: float = field(default=0.0, repr=False)

    def instance_id(self) -> str | None:
        """The id of this machine; None where there is no metadata service."""
        return self._text(_PATHS["id"])

    def is_taken(self) -> bool:
        """Return whether it is announced that EC2 takes this machine back."""
        announced = self._text(_PATHS["interruption"])
        return announced is not None and _object(announced).get("action") in facts.TAKING_ACTIONS

    def _text(self, path: str) -> str | None:
        """What is at a path; None where there is nothing, or nobody answers."""
        for _ in range(2):
            token = self._current_token()
            if token is None:
                return None
            status, body = self.transport("GET", path, {facts.METADATA_HEADERS["token"]: token})
            if status == 200:
                return body.decode("utf-8", errors="replace").strip()
            if status != 401:
                return None
            self._token = None  # the service was restarted, or the token has ended early
        return None

    def _current_token(self) -> str | None:
        if self._token is None or self.clock() >= self._token_until_s - _RENEWED_EARLY_S:
            headers = {facts.METADATA_HEADERS["lifetime"]: str(facts.METADATA_TOKEN_S)}
            status, body = self.transport("PUT", _PATHS["token"], headers)
            if status != 200:
                return None
            self._token = body.decode("ascii", errors="replace").strip()
            self._token_until_s = self.clock() + facts.METADATA_TOKEN_S
        return self._token


def over_http(method: str, path: str, headers: Mapping[str, str]) -> Response:
    """The real transport. Proxies are passed by: the address means this machine."""
    base = os.environ.get(facts.METADATA_ENDPOINT_VARIABLE, facts.METADATA_ENDPOINT).rstrip("/")
    request = urllib.request.Request(f"{base}{path}", method=method, headers=dict(headers))
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_TIMEOUT_S) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, b""
    except (OSError, ValueError):
        return 0, b""


def _object(text: str) -> Mapping[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
