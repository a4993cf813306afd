"""SkyPilot's Python API as far as hetopt calls it (0.14.1), over ssh servers of a test in the place of clouds.

A machine is a file with its address, which has the cluster's name while it is rented.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

FOLDER = Path(os.environ["SKY_OF_TEST"])
Task = SimpleNamespace(from_yaml_config=lambda config: config)
StatusRefreshMode = SimpleNamespace(NONE="NONE", FORCE="FORCE")


def get(request):
    return request()


def api_cancel(request_ids):
    return lambda: request_ids


def status(cluster_names=(), refresh=StatusRefreshMode.NONE):
    there = [name for name in cluster_names if (FOLDER / name).exists()]
    return lambda: [{"name": one, "status": SimpleNamespace(value="UP"), "handle": _handle(one)} for one in there]


def launch(task, cluster_name, retry_until_up=False):
    with (FOLDER / "tasks.jsonl").open("a") as log:
        log.write(json.dumps(task) + "\n")
    return lambda: (1, _handle((FOLDER / f"box{cluster_name[-1]}").rename(FOLDER / cluster_name).name))


def down(cluster_name):
    return lambda: (FOLDER / cluster_name).rename(FOLDER / f"box{cluster_name[-1]}")


def _handle(cluster):
    return SimpleNamespace(cached_internal_ips=[(FOLDER / cluster).read_text()])
