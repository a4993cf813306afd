"""The agent of a rented machine: that of a host, with a bucket, the metadata service and a shutdown timer.

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
import urllib.request
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from hetopt.backends.ec2 import facts
from hetopt.backends.ec2.bootstrap import CONFIG_FILE, UNITS_FOLDER, UNITS_VARIABLE, NodeConfig, set_timer
from hetopt.backends.ec2.objects import S3Objects
from hetopt.backends.host.agent import Agent
from hetopt.backends.host.protocol import MODELS_FOLDER
from hetopt.core.artifact import read_record
from hetopt.core.errors import BadInput


def _run(command: list[str]) -> bool:
    """Run a command to its end; return whether it could be started and succeeded."""
    try:
        return subprocess.run(command, check=False, stdin=subprocess.DEVNULL).returncode == 0
    except OSError:
        return False


def main(arguments: list[str]) -> int:
    """Run the agent of this rented machine in the folder ``arguments[0]`` until it ends; return the exit code.

    Raises:
        BadInput: the folder holds no configuration of a rented machine, or no metadata service answers.
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
    units = Path(os.environ.get(UNITS_VARIABLE, UNITS_FOLDER))
    return Agent(
        terms=config,
        id=instance_id,
        root=root,
        objects=objects,
        models=models,
        is_taken=is_taken,
        end_at=partial(set_timer, run=_run, units=units),
    ).live()


_PATHS = facts.METADATA_PATHS
_TIMEOUT_S = 2.0


def _request(method: str, path: str, headers: Mapping[str, str]) -> str | None:
    """Return a value of the machine's metadata service, asked past any proxy; None: no such value, or no such service.

    Args:
        method: method of HTTP.
        path: path of the value, after the service's address.
        headers: headers of the request.
    """
    base = os.environ.get(facts.METADATA_ENDPOINT_VARIABLE, facts.METADATA_ENDPOINT).rstrip("/")
    request = urllib.request.Request(f"{base}{path}", method=method, headers=dict(headers))
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_TIMEOUT_S) as response:
            return str(response.read().decode("utf-8", errors="replace")).strip()
    except (OSError, ValueError):  # 404 is one of the first
        return None


def metadata(path: str) -> str | None:
    """Ask the EC2 metadata service, with a new token, for the text at a path; None: no such value, or no answer."""
    token = _request("PUT", _PATHS["token"], {facts.METADATA_HEADERS["lifetime"]: str(facts.METADATA_TOKEN_S)})
    return None if token is None else _request("GET", path, {facts.METADATA_HEADERS["token"]: token})


def is_taken() -> bool:
    """Return whether EC2 has announced that it takes this machine back; False also if nothing answers."""
    try:
        announced = json.loads(metadata(_PATHS["interruption"]) or "{}")
    except ValueError:
        return False
    return isinstance(announced, dict) and announced.get("action") in facts.TAKING_ACTIONS


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
