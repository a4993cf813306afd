"""Machines together: agents as processes of their own meet, train, lose one of them without a word, and go on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest

from benchmarks._ports import own_port
from benchmarks.box.metadata import metadata_service
from hetopt.backends.ec2.bootstrap import CONFIG_FILE, NodeConfig
from hetopt.backends.ec2.objects import S3Objects
from hetopt.backends.host.protocol import Latest, spec_digest
from hetopt.core.events.log import parse_events
from hetopt.core.run_spec import RunSpec, StopRule, WorkerSpec
from tests.ec2.conftest import ACCOUNT, BUCKET, REGION, BotoEdge
from tests.face.conftest import until

STEPS = 500
SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "resumable.py"
ADDRESSES = {"h0": own_port()[0], "h1": "127.0.0.2"}


def spec_of(
    steps: int,
    slowdown: float = 1.0,
    hosts: Sequence[str] = tuple(ADDRESSES),
    script: tuple[str, ...] = (),
    batches_per_step: int = 1,
) -> RunSpec:
    """What is ordered is one run, on workers that may change."""
    workers = tuple(
        WorkerSpec(host=host, type="c7i.large", local_batch_size=16, threads=1, slowdown=slowdown, device="cpu")
        for host in hosts
    )
    return RunSpec(
        task="resumable.py" if script else "digits",
        script=script,
        workers=workers,
        batches_per_step=batches_per_step,
        stop=StopRule(max_steps=steps),
        control_period_steps=5,
        checkpoint_every_s=2,
        exchange_timeout_s=60,
    )


def placement(
    hosts: dict[str, str],
    spec: RunSpec,
    meeting: str,
    generation: int,
    resume_from: str | None,
    *,
    pauses: bool = False,
) -> bytes:
    return json.dumps(
        {
            "generation": generation,
            "resume_from": resume_from,
            "pauses": pauses,
            "meeting": meeting,
            "hosts": {id_: {"host": host, "address": ADDRESSES[host]} for id_, host in hosts.items()},
            "spec": json.loads(spec.model_dump_json()),
        }
    ).encode()


@dataclass(kw_only=True)
class Machines:
    """Agents of one run, each a process of its own with its folder and its metadata service."""

    folder: Path
    objects: S3Objects
    spec_sha256: str
    agents: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    meetings: dict[int, str] = field(default_factory=dict)
    services: ExitStack = field(default_factory=ExitStack)

    def boot(self, id_: str, script: Path = SCRIPT) -> None:
        root = self.folder / id_
        (root / "run").mkdir(parents=True)
        (root / "code" / "task").mkdir(parents=True)
        shutil.copy(script, root / "code" / "task")
        config = NodeConfig(
            run_id="r",
            region=REGION,
            bucket=BUCKET,
            account_id=ACCOUNT,
            bundle_sha256="0" * 64,
            spec_sha256=self.spec_sha256,
            end_s=time.time() + 900.0,
            latest_end_s=time.time() + 900.0,
            has_gpu=False,
            version="0.1.0",
            group_secret="5ec4e7" + 58 * "0",
        )
        (root / CONFIG_FILE).write_text(config.model_dump_json())
        service = self.services.enter_context(metadata_service({"/latest/meta-data/instance-id": id_}))
        self.agents[id_] = subprocess.Popen(
            [sys.executable, "-m", "hetopt.backends.ec2.node.agent", str(root)],
            env={**os.environ, "AWS_EC2_METADATA_SERVICE_ENDPOINT": service.url, "GLOO_SOCKET_IFNAME": "lo"},
            start_new_session=True,
        )

    def kill(self, id_: str) -> None:
        os.killpg(self.agents[id_].pid, signal.SIGKILL)
        self.agents[id_].wait()

    def place(self, hosts: dict[str, str], spec: RunSpec, generation: int, *, pauses: bool = False) -> int:
        """Tell all machines their places, on from the newest checkpoint; its step."""
        named = Latest.of_json(self.objects.get("ckpt/LATEST"))
        latest = None if named is None else named.checkpoint
        meeting = self.meetings.setdefault(generation, "{}:{}".format(*own_port()))
        self.objects.put("placement.json", placement(hosts, spec, meeting, generation, latest, pauses=pauses))
        return 0 if latest is None else int(latest.removeprefix("step-"))

    def says(self, id_: str, what: str) -> bool:
        return what in (self.objects.get(f"state/{id_}.json") or b"").decode()

    def events(self) -> list[dict[str, object]]:
        text = b"".join(self.objects.get(name) or b"" for name in self.objects.names("events/") or ()).decode()
        return list(parse_events(text.splitlines(keepends=True)))

    def all_end(self, ids: Sequence[str]) -> None:
        until(lambda: all(self.agents[id_].poll() is not None for id_ in ids))
        assert [self.agents[id_].returncode for id_ in ids] == [0] * len(ids)


@pytest.fixture
def machines(cloud: BotoEdge, tmp_path: Path) -> Iterator[Callable[[RunSpec], Machines]]:
    objects = S3Objects.connect(region=REGION, bucket=BUCKET, prefix="runs/r", account_id=ACCOUNT)
    made: list[Machines] = []

    def make(spec: RunSpec) -> Machines:
        made.append(Machines(folder=tmp_path, objects=objects, spec_sha256=spec_digest(spec)))
        return made[-1]

    yield make
    for one in made:
        for id_, agent in one.agents.items():
            if agent.poll() is None:
                one.kill(id_)
        one.services.close()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_machine_that_vanishes_is_replaced_and_training_goes_on(machines: Callable[[RunSpec], Machines]) -> None:
    """From memory; a checkpoint of fewer workers is complete without those that are lost. Then from a checkpoint."""
    run, slow = machines(spec_of(STEPS)), spec_of(STEPS, slowdown=100.0)

    def changes() -> list[tuple[object, object]]:
        return [(event["workers"], event["from"]) for event in run.events() if event["event"] == "workers_changed"]

    run.place({"i-0": "h0", "i-1": "h1"}, slow, 0)
    run.boot("i-0")
    run.boot("i-1")
    until(lambda: run.objects.get("ckpt/LATEST"))
    run.kill("i-1")
    run.place({"i-0": "h0"}, slow, 0)
    until(lambda: changes() == [([0], "memory")])
    named = run.objects.get("ckpt/LATEST")
    until(lambda: run.objects.get("ckpt/LATEST") != named)
    run.place({"i-0": "h0", "i-2": "h1"}, slow, 0)
    run.boot("i-2")
    until(lambda: changes() == [([0], "memory"), ([0, 1], "memory")])
    steps = [event["step"] for event in run.events() if event["event"] == "step"]
    assert steps == sorted(set(steps)), "nothing is done again"
    step = run.place({"i-0": "h0", "i-2": "h1"}, spec_of(STEPS), 1)
    run.all_end(("i-0", "i-2"))
    events = run.events()
    assert [event["step"] for event in events if event["event"] == "training_started"][-1] == step
    assert events[-1]["event"] == "training_finished"
    assert replace(run.objects, prefix="models/r").get("model.safetensors")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_script_goes_on_without_a_machine_and_then_with_another(machines: Callable[[RunSpec], Machines]) -> None:
    """The workers of a script start again where machines are lost or join, each from the newest checkpoint."""
    script = ("task/resumable.py", "--epochs", "30", "--wait", "0.3")
    of = partial(spec_of, STEPS, script=script)
    run = machines(of())
    run.place({"i-0": "h0", "i-1": "h1"}, of(), 0)
    run.boot("i-0")
    run.boot("i-1")
    until(lambda: run.objects.get("ckpt/LATEST"))
    run.kill("i-0")  # with it the log and the worker of rank 0
    alone = run.place({"i-1": "h1"}, of(hosts=("h1",)), 1)
    assert alone > 0
    until(lambda: [event["step"] for event in run.events() if event["event"] == "training_started"] == [0, alone])
    until(lambda: any(event["event"] == "step" and int(str(event["step"])) > alone for event in run.events()))
    run.place({"i-1": "h1"}, of(hosts=("h1",)), 1, pauses=True)
    until(lambda: run.says("i-1", "waiting for machines"))
    paused = run.place({"i-1": "h1", "i-2": "h0"}, of(), 2)
    stopped = [event for event in run.events() if event["event"] == "training_finished"]
    assert [(event["reason"], event["step"]) for event in stopped] == [("stopped", paused)], "nothing was lost by it"
    run.boot("i-2")
    run.all_end(("i-1", "i-2"))
    events = run.events()
    assert [event["step"] for event in events if event["event"] == "training_started"] == [0, alone, paused]
    assert (events[-1]["event"], events[-1]["reason"], events[-1]["step"]) == ("training_finished", "script", 300)
    assert replace(run.objects, prefix="models/r").get("model.safetensors")


FRAMEWORKS = Path(__file__).resolve().parents[2] / "examples" / "frameworks"


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("framework", "hosts", "arguments"),
    [
        ("accelerate", ("h0",), ("--epochs", "1")),
        pytest.param("accelerate", ("h0", "h1"), ("--epochs", "1"), marks=pytest.mark.slow),
        pytest.param("transformers", ("h0", "h1"), ("--samples", "128", "--epochs", "1"), marks=pytest.mark.slow),
        pytest.param("lightning", ("h0", "h1"), ("--epochs", "1"), marks=pytest.mark.slow),
    ],
)
def test_scripts_of_frameworks_train_on_rented_machines(
    framework: str, hosts: tuple[str, ...], arguments: tuple[str, ...], machines: Callable[[RunSpec], Machines]
) -> None:
    pytest.importorskip(framework)
    name = f"with_{framework}.py"
    spec = spec_of(STEPS, hosts=hosts, script=(f"task/{name}", *arguments), batches_per_step=2)
    run = machines(spec)
    ids = {f"i-{number}": host for number, host in enumerate(hosts)}
    run.place(ids, spec, 0)
    for id_ in ids:
        run.boot(id_, FRAMEWORKS / name)
    run.all_end(tuple(ids))
    last = run.events()[-1]
    assert (last["event"], last["reason"]) == ("training_finished", "script")
    assert replace(run.objects, prefix="models/r").get("model.safetensors")
