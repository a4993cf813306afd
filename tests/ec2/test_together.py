"""Machines together: agents as processes of their own meet, train, lose one of them without a word, and go on."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.box.metadata import metadata_service
from hetopt.backends.ec2.bootstrap import CONFIG_FILE, NodeConfig
from hetopt.backends.ec2.objects import S3Objects
from hetopt.backends.ec2.protocol import spec_digest
from hetopt.core.events.log import parse_events
from hetopt.core.run_spec import RunSpec, StopRule, WorkerSpec
from tests.ec2.conftest import ACCOUNT, BUCKET, REGION, BotoEdge

STEPS = 500
ADDRESSES = {"h0": "127.0.0.1", "h1": "127.0.0.2"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def spec_of(steps: int, slowdown: float = 1.0) -> RunSpec:
    """What is ordered is one run, on workers that may change."""
    workers = tuple(
        WorkerSpec(host=host, type="c7i.large", local_batch_size=16, threads=1, slowdown=slowdown) for host in ADDRESSES
    )
    return RunSpec(
        task="digits",
        workers=workers,
        stop=StopRule(max_steps=steps),
        control_period_steps=5,
        checkpoint_every_s=2,
        exchange_timeout_s=60,
    )


def placement(hosts: dict[str, str], spec: RunSpec, generation: int, resume_from: str | None) -> bytes:
    return json.dumps(
        {
            "generation": generation,
            "resume_from": resume_from,
            "meeting": f"127.0.0.1:{free_port()}",
            "hosts": {id_: {"host": host, "address": ADDRESSES[host]} for id_, host in hosts.items()},
            "spec": json.loads(spec.model_dump_json()),
        }
    ).encode()


def until(reached: Callable[[], object], within_s: float = 120.0) -> None:
    deadline = time.monotonic() + within_s
    while not reached():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.3)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_machine_that_vanishes_is_replaced_and_training_goes_on(cloud: BotoEdge, tmp_path: Path) -> None:
    objects = S3Objects.connect(region=REGION, bucket=BUCKET, prefix="runs/r", account_id=ACCOUNT)
    agents: dict[str, subprocess.Popen[bytes]] = {}

    def boot(stack: ExitStack, id_: str) -> None:
        root = tmp_path / id_
        (root / "run").mkdir(parents=True)
        config = NodeConfig(
            run_id="r",
            region=REGION,
            bucket=BUCKET,
            account_id=ACCOUNT,
            bundle_sha256="0" * 64,
            spec_sha256=spec_digest(spec_of(STEPS)),
            end_s=time.time() + 900.0,
            latest_end_s=time.time() + 900.0,
            has_gpu=False,
            version="0.1.0",
            group_secret="5ec4e7" + 58 * "0",
        )
        (root / CONFIG_FILE).write_text(config.to_json())
        service = stack.enter_context(metadata_service({"/latest/meta-data/instance-id": id_}))
        agents[id_] = subprocess.Popen(
            [sys.executable, "-m", "hetopt.backends.ec2.node.agent", str(root)],
            env={**os.environ, "AWS_EC2_METADATA_SERVICE_ENDPOINT": service.url, "GLOO_SOCKET_IFNAME": "lo"},
            start_new_session=True,
        )

    def kill(id_: str) -> None:
        os.killpg(agents[id_].pid, signal.SIGKILL)
        agents[id_].wait()

    with ExitStack() as stack:
        try:
            objects.put(
                "placement.json", placement({"i-0": "h0", "i-1": "h1"}, spec_of(STEPS, slowdown=100.0), 0, None)
            )
            boot(stack, "i-0")
            boot(stack, "i-1")
            until(lambda: objects.get("ckpt/LATEST"))
            kill("i-1")
            latest = (objects.get("ckpt/LATEST") or b"").decode().split()[0]
            step = int(latest.removeprefix("step-"))
            objects.put("placement.json", placement({"i-0": "h0", "i-2": "h1"}, spec_of(STEPS), 1, latest))
            boot(stack, "i-2")
            until(lambda: agents["i-0"].poll() is not None and agents["i-2"].poll() is not None, 240)
            assert agents["i-0"].returncode == agents["i-2"].returncode == 0
        finally:
            for id_, agent in agents.items():
                if agent.poll() is None:
                    kill(id_)
    text = b"".join(objects.get(name) or b"" for name in objects.names("events/")).decode()
    events = list(parse_events(text.splitlines(keepends=True)))
    begun = [event for event in events if event["event"] == "training_started"]
    assert [event["step"] for event in begun] == [0, step], "all went on from the one checkpoint"
    assert events[-1]["event"] == "training_finished"
    assert replace(objects, prefix="models/r").get("model.safetensors")
