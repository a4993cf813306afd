"""SkyPilot's Python API as far as hetopt calls it (0.14.1), over ssh servers of a test in the place of clouds.

A cluster is a file with the name of the server that it is; its ssh entry is written where SkyPilot's would be included.
"""

from __future__ import annotations

import json
import os
import shutil
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

FOLDER = Path(os.environ["SKY_OF_TEST"])
Task = SimpleNamespace(from_yaml_config=lambda config: config)
StatusRefreshMode = Enum("StatusRefreshMode", ["NONE", "AUTO", "FORCE"])
ClusterStatus = Enum("ClusterStatus", {"UP": "UP"})


class ResourcesUnavailableError(Exception):
    """As SkyPilot raises it where nothing can be had."""


def get(request: Any) -> Any:
    return request()


def api_cancel(request_ids: list[Any]) -> Any:
    return lambda: None


def status(cluster_names: list[str] | None = None, refresh: StatusRefreshMode = StatusRefreshMode.NONE) -> Any:
    names = [name for name in cluster_names or () if (FOLDER / f"{name}.cluster").exists()]
    return lambda: [{"name": name, "status": ClusterStatus.UP, "handle": _handle(name)} for name in names]


def launch(task: dict[str, Any], cluster_name: str, retry_until_up: bool = False) -> Any:
    with (FOLDER / "launched.jsonl").open("a") as log:
        log.write(json.dumps({"cluster": cluster_name, "task": task}) + "\n")
    return lambda: (1, _rented(cluster_name))


def down(cluster_name: str) -> Any:
    return lambda: (FOLDER / f"{cluster_name}.cluster").rename(_handle(cluster_name).free)


def _rented(cluster: str) -> SimpleNamespace:
    free = sorted(FOLDER.glob("*.free"))
    if not free:
        raise ResourcesUnavailableError("Failed to provision all possible launchable resources.")
    shutil.move(free[0], FOLDER / f"{cluster}.cluster")
    handle = _handle(cluster)
    with (FOLDER / "client").open("a") as entries:
        entries.write(f"Host {cluster}\n  StrictHostKeyChecking no\n{handle.entry}")
    return handle


def _handle(cluster: str) -> SimpleNamespace:
    box = json.loads((FOLDER / f"{cluster}.cluster").read_text())
    return SimpleNamespace(
        cached_internal_ips=[box["address"]], entry=box["entry"], free=FOLDER / f"{box['name']}.free"
    )
