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
from dataclasses import replace
from pathlib import Path

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
    instance_id = metadata(_PATHS["id"])
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
        is_taken=is_taken,
        end_at=timer.set,
        prices=prices,
        notice_every_s=facts.NOTICE_EVERY_S,
    ).live()


_PATHS = facts.METADATA_PATHS
_TIMEOUT_S = 2.0

Response = tuple[int, bytes]
Transport = Callable[[str, str, Mapping[str, str]], Response]
"""Method, path and headers in; status and body out. Status 0: the service cannot be reached."""


def over_http(method: str, path: str, headers: Mapping[str, str]) -> Response:
    """Request a path of the metadata service, past any proxy (its address is this machine); return status and body."""
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


def metadata(path: str, transport: Transport = over_http) -> str | None:
    """Return the metadata service's value at a path, by a token for this question; None: no value, or no answer."""
    status, token = transport("PUT", _PATHS["token"], {facts.METADATA_HEADERS["lifetime"]: str(facts.METADATA_TOKEN_S)})
    if status != 200:
        return None
    asker = {facts.METADATA_HEADERS["token"]: token.decode("ascii", errors="replace").strip()}
    status, body = transport("GET", path, asker)
    return body.decode("utf-8", errors="replace").strip() if status == 200 else None


def is_taken(transport: Transport = over_http) -> bool:
    """Return whether EC2 has announced that it takes this machine back."""
    try:
        announced = json.loads(metadata(_PATHS["interruption"], transport) or "{}")
    except ValueError:
        return False
    return isinstance(announced, dict) and announced.get("action") in facts.TAKING_ACTIONS


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
