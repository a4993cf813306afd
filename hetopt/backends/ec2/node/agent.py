"""The agent of a rented machine: a host's part in a run, with a bucket, the metadata service and a timer of its own.

``python -m hetopt.backends.ec2.node.agent ROOT``, started by the boot script, which shuts the machine down when the
agent ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from hetopt.backends.ec2 import facts
from hetopt.backends.ec2.bootstrap import CONFIG_FILE, UNITS_FOLDER, UNITS_VARIABLE, NodeConfig, Timer
from hetopt.backends.ec2.node.imds import Imds, over_http
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
