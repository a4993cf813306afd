"""The agent of a machine does its part: waits for its place, trains, tells how it goes, heeds notices and leases.

The metadata client speaks version 2 alone, renews its token, and takes silence for no news.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest

from benchmarks.box.metadata import MetadataService, metadata_service
from hetopt.backends.ec2.bootstrap import NodeConfig, set_timer
from hetopt.backends.ec2.facts import METADATA_ENDPOINT_VARIABLE
from hetopt.backends.ec2.node.agent import is_taken, metadata
from hetopt.backends.ec2.objects import PART_BYTES, S3Objects
from hetopt.backends.host.agent import PLACE_WITHIN_S, Agent, Checkpoints, Uploads
from hetopt.backends.host.protocol import OUTCOME_OBJECT, Latest, Lease, is_over, placement_of, spec_digest
from hetopt.core.errors import RunFailed
from hetopt.core.events.log import EVENTS_FILE, parse_events
from hetopt.core.run_spec import RunSpec, StopRule, WorkerSpec
from tests.ec2.conftest import ACCOUNT, BUCKET, REGION, BotoEdge, Patience
from tests.ec2.followed import latest

ID = "i-0123456789abcdef0"
RESUMABLE = Path(__file__).resolve().parents[1] / "scripts" / "resumable.py"
META = {"/latest/meta-data/instance-id": ID}


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[MetadataService]:
    with metadata_service(META) as service:
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", service.url)
        yield service


class Hasty(Patience):
    """A minute passes at least whenever somebody waits."""

    def sleep(self, seconds: float) -> None:
        super().sleep(max(seconds, 60.0))


@pytest.fixture
def hasty() -> Patience:
    return Hasty(now_s=time.time())


@dataclass
class Commands:
    asked: list[list[str]] = field(default_factory=list)

    def __call__(self, command: list[str]) -> bool:
        self.asked.append(command)
        return True


def agent(
    root: Path,
    objects: S3Objects,
    commands: Commands,
    lifetime_s: float = 600.0,
    steps: int = 1_000_000,
    latest_s: float = 90_000.0,
) -> Agent:
    config = NodeConfig(
        run_id="r",
        region=REGION,
        bucket=BUCKET,
        account_id=ACCOUNT,
        bundle_sha256="0" * 64,
        spec_sha256=spec_digest(spec_of(steps)),
        end_s=time.time() + lifetime_s,
        latest_end_s=time.time() + latest_s,
        has_gpu=False,
        version="0.1.0",
        group_secret="5ec4e7" + 58 * "0",
    )
    (root / "run").mkdir(parents=True)
    models = replace(objects, prefix="models/r")
    return Agent(
        terms=config,
        id=metadata(ID_PATH) or "",
        root=root,
        objects=objects,
        models=models,
        is_taken=is_taken,
        end_at=partial(set_timer, run=commands, units=root),
        turn_s=0.1,
    )


def placement(spec: RunSpec, resume_from: str | None = None, generation: int = 0) -> bytes:
    return json.dumps(
        {
            "generation": generation,
            "resume_from": resume_from,
            "meeting": "127.0.0.1:29417",
            "hosts": {ID: {"host": spec.workers[0].host, "address": "127.0.0.1"}},
            "spec": json.loads(spec.model_dump_json()),
        }
    ).encode()


def spec_of(steps: int, slowdown: float = 1.0) -> RunSpec:
    worker = WorkerSpec(host="h0", type="c7i.large", local_batch_size=16, slowdown=slowdown)
    return RunSpec(
        task="digits", workers=(worker,), stop=StopRule(max_steps=steps), control_period_steps=5, checkpoint_every_s=1
    )


def events_of(objects: S3Objects) -> list[str]:
    text = b"".join(objects.get(name) or b"" for name in objects.names("events/") or ()).decode()
    return [event["event"] for event in parse_events(text.splitlines(keepends=True))]


def named(objects: S3Objects) -> str:
    latest = Latest.of_json(objects.get("ckpt/LATEST"))
    assert latest is not None
    return latest.checkpoint


def test_a_machine_trains_and_what_it_made_is_in_the_bucket(
    objects: S3Objects, tmp_path: Path, service: MetadataService
) -> None:
    commands = Commands()
    objects.put("placement.json", placement(spec_of(40)))
    objects.put("lease.json", json.dumps({"end_s": time.time() + 7200, "stop_training_s": time.time() + 7000}).encode())
    assert agent(tmp_path / "one", objects, commands, steps=40).live() == 0
    names = events_of(objects)
    assert names[-1] == "training_finished"
    assert replace(objects, prefix="models/r").get("model.safetensors")
    assert objects.get("model.safetensors") is None, "what is there goes after a while"
    latest = named(objects)
    parts = ("manifest.json", "rank-0.safetensors", "state.safetensors")
    assert objects.names(f"ckpt/{latest}/") == [f"ckpt/{latest}/{name}" for name in parts]
    state = json.loads(objects.get(f"state/{ID}.json") or b"")
    assert state["does"] == "ended with 0"
    # The lease grants more time than the boot script did.
    assert commands.asked == [["systemctl", "daemon-reload"], ["systemctl", "restart", "hetopt-end.timer"]]
    # Another machine goes on from there.
    objects.put("outcome.json", b"")
    objects.put("placement.json", placement(spec_of(60), latest))
    assert agent(tmp_path / "two", objects, Commands(), steps=60).live() == 0
    names = events_of(objects)
    assert names.count("training_finished") == 2
    assert names.count("run_started") == 2


def test_a_script_runs_beside_its_files_and_ends_with_its_exit_code(
    objects: S3Objects, tmp_path: Path, service: MetadataService, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of(40).model_copy(update={"task": "train.py", "script": ("task/train.py", "small.txt")})
    objects.put("placement.json", placement(spec))
    root = tmp_path / "one"
    agent_of_it = agent(root, objects, Commands())
    agent_of_it.terms = agent_of_it.terms.model_copy(update={"spec_sha256": spec_digest(spec)})
    task = root / "code" / "task"
    task.mkdir(parents=True)
    (task / "small.txt").write_text("carried")
    (task / "resumable.py").write_bytes(RESUMABLE.read_bytes())
    (task / "train.py").write_text(
        "import os, sys\n"
        "print(open(sys.argv[1]).read(), *(os.environ[name] for name in os.environ['NAMES'].split()))\n"
        f"sys.argv[1:] = ['--epochs', '1', '--save-every', '5', '--batch-size', '{spec.global_batch_size}']\n"
        "import resumable\n"
        "open(os.path.join(os.environ['HETOPT_OUTPUT'], 'figures.txt'), 'w').write('of the script')\n"
        "sys.exit(3)\n"
    )
    monkeypatch.setenv("NAMES", "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR")
    assert agent_of_it.live() == 3
    assert events_of(objects)[-1] == "run_failed"
    assert json.loads(objects.get(f"state/{ID}.json") or b"")["does"] == "ended with 3"
    assert is_over(objects.get(OUTCOME_OBJECT), 0), "no other machine can mend that"
    assert replace(objects, prefix="models/r").get("model.safetensors")
    assert replace(objects, prefix="models/r").get("outputs/figures.txt") == b"of the script"
    (log,) = (name for name in objects.names("log/") or () if name.endswith("stdout.log"))
    assert (objects.get(log) or b"").startswith(b"carried 0 1 0 1 127.0.0.1\n")


def test_a_machine_that_nobody_gives_a_place_ends_by_itself(
    objects: S3Objects, tmp_path: Path, service: MetadataService, hasty: Patience
) -> None:
    end_s = time.time() + 90_000  # the run itself goes on
    objects.put("lease.json", json.dumps({"end_s": end_s, "stop_training_s": end_s - 60}).encode())
    one = replace(agent(tmp_path, objects, Commands()), clock=hasty.clock, sleep=hasty.sleep)
    began_s = hasty.now_s
    assert one.live() == 6
    assert PLACE_WITHIN_S <= hasty.now_s - began_s < PLACE_WITHIN_S + 120


@pytest.mark.parametrize("change_s", [3600.0, -200.0])
def test_the_machines_own_end_follows_the_lease_both_ways(
    objects: S3Objects, tmp_path: Path, service: MetadataService, change_s: float
) -> None:
    commands, lasts_s = Commands(), 600.0
    end_s = time.time() + lasts_s + change_s
    objects.put("lease.json", json.dumps({"end_s": end_s, "stop_training_s": 0.0}).encode())
    agent(tmp_path, objects, commands, lifetime_s=lasts_s).live()
    assert abs(timed(tmp_path) - end_s) < 30
    assert len(commands.asked) == 2, "it is set once"


def test_a_notice_ends_training_with_a_checkpoint(objects: S3Objects, tmp_path: Path, service: MetadataService) -> None:
    objects.put("placement.json", placement(spec_of(1_000_000)))
    notice = json.dumps({"action": "terminate", "time": "2030-01-01T00:00:00Z"})
    service.answers["/latest/meta-data/spot/instance-action"] = notice
    assert agent(tmp_path, objects, Commands()).live() == 0
    assert events_of(objects)[-1] == "training_finished"
    assert objects.get("ckpt/LATEST")


def test_a_new_placement_is_followed_at_once(objects: S3Objects, tmp_path: Path, service: MetadataService) -> None:
    """Others were lost without a word: this machine would wait for them for minutes, but the new ones are there."""
    objects.put("placement.json", placement(spec_of(80, slowdown=500.0)))
    one = agent(tmp_path, objects, Commands(), steps=80)

    def replaced() -> None:
        while "training_started" not in (tmp_path / "run" / "events.jsonl").read_text():
            time.sleep(0.2)
        objects.put("placement.json", placement(spec_of(80), generation=1))

    def wait_and_replace() -> None:
        while not (tmp_path / "run" / "events.jsonl").exists():
            time.sleep(0.2)
        replaced()

    thread = threading.Thread(target=wait_and_replace)
    thread.start()
    assert one.live() == 0
    thread.join()
    names = events_of(objects)
    assert names.count("run_started") == 2
    assert names[-1] == "training_finished"
    assert json.loads(objects.get("outcome.json") or b"") == {"generation": 1}


def test_a_run_that_must_end_is_ended(objects: S3Objects, tmp_path: Path, service: MetadataService) -> None:
    """The lifetime ends a run that goes on: hosts are killed, and what they wrote is sent."""
    objects.put("placement.json", placement(spec_of(1_000_000)))
    assert agent(tmp_path, objects, Commands(), lifetime_s=4.0).live() == 6


DAMAGED = [b"", b"{}", b"[]", b'{"end_s": "x"}', b"\xff", b"[" * 100_000, b"9" * 5000, b'"\\ud800"', b"null", b"1e999"]


@pytest.mark.parametrize("data", DAMAGED, ids=lambda data: repr(data[:12]))
def test_a_damaged_message_changes_nothing(data: bytes) -> None:
    assert Lease.of_json(data) is None
    assert placement_of(data, ID) is None
    assert not is_over(data, 0)
    assert Latest.of_json(data) is None


@pytest.mark.parametrize("end", ["1e300", "Infinity", "-1", "NaN", "1e12", '"4102444800"', "true", "null", "9" * 5000])
def test_no_lease_ends_at_no_time(end: str) -> None:
    for told in (f'{{"end_s": {end}, "stop_training_s": 1}}', f'{{"end_s": 1, "stop_training_s": {end}}}'):
        assert Lease.of_json(told.encode()) is None
    assert Lease.of_json(b'{"end_s": 1, "stop_training_s": 1, "more": 1}') is None
    assert Lease.of_json(b'{"end_s": 1800000000, "stop_training_s": 0.0}')


@pytest.mark.parametrize("end_s", [10 * 365 * 86_400.0, 1e10])
def test_no_lease_extends_a_machine_beyond_what_it_was_told_at_boot(
    objects: S3Objects, tmp_path: Path, service: MetadataService, hasty: Patience, end_s: float
) -> None:
    """Whoever wrote it. The agent itself ends then too, whatever the timer does."""
    began_s = hasty.now_s

    def lease() -> bytes:
        return json.dumps({"end_s": began_s + end_s, "stop_training_s": began_s + end_s}).encode()

    assert objects.put("lease.json", lease())
    commands = Commands()
    one = replace(agent(tmp_path, objects, commands, latest_s=700.0), clock=hasty.clock, sleep=hasty.sleep)
    assert one.live() == 6
    assert hasty.now_s < one.terms.latest_end_s + 60
    assert timed(tmp_path) <= one.terms.latest_end_s


def timed(root: Path) -> float:
    """When the machine's own timer ends it."""
    (line,) = [line for line in (root / "hetopt-end.timer").read_text().splitlines() if "OnCalendar" in line]
    return float(line.partition("@")[2])


FORGED = [
    ("spec.task", "evil.py:task"),
    ("spec.data_dir", f"s3://{BUCKET}/runs/attacker/ckpt"),
    ("spec.data_dir", "/etc"),
    ("spec.max_restarts", 3),
    ("hosts.host", "../../../../x"),
    ("hosts.host", "/x"),
    ("hosts.host", "h1"),
    ("hosts.address", "evil.example"),
    ("hosts.address", "127.0.0.1 --rdzv"),
    ("meeting", "127.0.0.1"),
    ("generation", -1),
    ("generation", 10**9),
    ("generation", "0"),
    ("resume_from", "../step-1"),
    ("resume_from", "step-" + "9" * 50),
    ("more", 1),
]


def forged(field: str, value: object) -> bytes:
    told = json.loads(placement(spec_of(1_000_000)))
    holder = {"spec": told["spec"], "hosts": told["hosts"][ID]}.get(field.partition(".")[0], told)
    holder[field.rpartition(".")[2]] = value
    return json.dumps(told).encode()


@pytest.mark.parametrize(("field", "value"), FORGED)
def test_no_placement_makes_a_machine_do_what_was_not_ordered(
    objects: S3Objects, tmp_path: Path, service: MetadataService, hasty: Patience, field: str, value: object
) -> None:
    """The real agent: it takes no part, starts nothing, makes no folder, and ends with its time."""
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'OWNED')!r}, 'w')\n")
    objects.put("placement.json", forged(field, value))
    objects.put("../attacker/ckpt/evil.py".removeprefix("../"), b"x")
    before = sorted(tmp_path.rglob("*"))
    one = replace(agent(tmp_path / "m", objects, Commands()), clock=hasty.clock, sleep=hasty.sleep)
    assert one.live() == 6
    assert sorted(tmp_path.rglob("*")) == sorted([*before, tmp_path / "m", tmp_path / "m" / "run"])


@pytest.mark.parametrize("change", ["order", "shares", "fewer", "more"])
def test_what_machines_come_and_go_changes_in_a_run_is_what_was_ordered(change: str) -> None:
    """Resuming, losing machines, getting more and seating them differently change workers, and nothing else."""
    workers = tuple(WorkerSpec(host=f"h{place}", type="t", local_batch_size=8) for place in range(3))
    spec = spec_of(10).model_copy(update={"workers": workers})
    digest = spec_digest(spec)
    changed = {
        "order": workers[::-1],
        "shares": tuple(worker.model_copy(update={"local_batch_size": 4}) for worker in workers),
        "fewer": workers[:1],
        "more": (*workers, WorkerSpec(host="h9", type="u", local_batch_size=1)),
    }[change]
    after = RunSpec.model_validate_json(spec.model_copy(update={"workers": changed}).model_dump_json())
    assert spec_digest(after) == digest
    assert spec_digest(after.model_copy(update={"task": "other"})) != digest


MANIFEST = '{"files": {"state.safetensors": {}, "rank-0.safetensors": {}, "rank-1.safetensors": {}}}'


def test_latest_names_only_what_is_complete(objects: S3Objects, tmp_path: Path) -> None:
    """Two machines: the first has the shared state, the second its own worker's part, each on its own disk."""
    first, second = tmp_path / "a", tmp_path / "b"

    def save(step: int) -> None:
        """As the trainer does: final where rank 0 is, partial elsewhere, the newest two kept on the first."""
        (first / "checkpoint" / f"step-{step}").mkdir(parents=True)
        (second / "checkpoint" / f"step-{step}.partial").mkdir(parents=True)
        for name in ("state.safetensors", "rank-0.safetensors"):
            (first / "checkpoint" / f"step-{step}" / name).write_bytes(b"ones")
        (second / "checkpoint" / f"step-{step}.partial" / "rank-1.safetensors").write_bytes(b"zeros")
        (first / "checkpoint" / f"step-{step}" / "manifest.json").write_text(MANIFEST)
        (first / "checkpoint" / "LATEST").write_text(f"step-{step}\n")

    one = Checkpoints(objects=objects, run_dir=first, leads=True)
    two = Checkpoints(objects=objects, run_dir=second, leads=False)
    assert one.send(ended=False)
    assert two.send(ended=False)
    save(5)
    assert not one.send(ended=False), "the other machine's part is missing"
    assert objects.get("ckpt/LATEST") is None
    # Newer ones come faster than they travel: the one that was picked is finished first.
    for step in (6, 7, 8):
        save(step)
    assert not one.send(ended=False)
    half = second / "checkpoint/step-5.partial/.rank-9.safetensors.partial"
    half.write_bytes(b"half")
    assert two.send(ended=False)
    assert not [name for name in objects.names("ckpt/step-5/") or () if "rank-9" in name], (
        "what is being written is not sent"
    )
    assert not one.send(ended=False), "there is a newer one"
    assert named(objects) == "step-5"
    # The last of all is not missed.
    one.send(ended=False)
    save(9)
    assert two.send(ended=True)
    assert one.send(ended=True)
    assert named(objects) == "step-9"
    assert [path.name for path in (second / "checkpoint").iterdir()] == ["step-9.partial"], "older ones fill no disk"
    # Where a machine is lost, nobody waits for its part of a checkpoint, or sees none of the later ones.
    save(10)
    assert not one.send(ended=False)
    one.give_up()
    assert one.send(ended=False)
    save(11)
    (second / "checkpoint" / "step-10.partial" / "rank-1.safetensors").unlink()
    one.send(ended=False)
    assert two.send(ended=False)
    assert one.send(ended=False)
    assert named(objects) == "step-11"
    third = tmp_path / "c"
    third.mkdir()
    Checkpoints(objects=objects, run_dir=third, leads=False).restore("step-9")
    assert sorted(path.name for path in (third / "checkpoint" / "step-9").iterdir()) == [
        "manifest.json",
        "rank-0.safetensors",
        "rank-1.safetensors",
        "state.safetensors",
    ]
    assert (third / "checkpoint" / "LATEST").read_text() == "step-9\n"
    uploads = Uploads(objects=objects, models=objects, run_dir=third, leads=True)
    with pytest.raises(RunFailed, match="nothing of the checkpoint step-8"):
        uploads.restore("step-8")
    # A bucket that does not answer is no empty one: nothing begins again for that, and nothing is written over.
    silent = replace(uploads, objects=replace(objects, bucket="hetopt-no-such-bucket"))
    with pytest.raises(RunFailed, match="nothing of the checkpoint step-9"):
        silent.restore("step-9")
    with pytest.raises(RunFailed, match="events cannot be read"):
        silent.restore_events()


def checkpoint_of(run_dir: Path, step: int) -> None:
    """One worker's, whole."""
    folder = run_dir / "checkpoint" / f"step-{step}"
    folder.mkdir(parents=True)
    for name in ("state.safetensors", "rank-0.safetensors"):
        (folder / name).write_bytes(b"ones")
    (folder / "manifest.json").write_text("{}")
    (run_dir / "checkpoint" / "LATEST").write_text(f"step-{step}\n")


def test_the_end_of_a_run_is_told_after_all_that_it_leaves(objects: S3Objects, tmp_path: Path) -> None:
    """The first host may be lost within its last uploads: a run without its model has not ended."""
    (tmp_path / EVENTS_FILE).write_text('{"event": "run_started"}\n{"event": "training_finished"}\n')
    uploads = Uploads(objects=objects, models=objects, run_dir=tmp_path, leads=True)
    assert (uploads.events(ended=False), events_of(objects)) == (True, ["run_started"])
    assert (uploads.events(ended=True), events_of(objects)) == (True, ["run_started", "training_finished"])


def test_who_was_left_behind_names_nothing_over_those_who_go_on(objects: S3Objects, tmp_path: Path) -> None:
    """A first host that is cut off has a newer checkpoint than the one that the others have gone on from."""
    old = Checkpoints(objects=objects, run_dir=tmp_path / "old", leads=True, generation=1)
    new = Checkpoints(objects=objects, run_dir=tmp_path / "new", leads=True, generation=2)
    checkpoint_of(old.run_dir, 50)
    assert old.send(ended=False)
    checkpoint_of(new.run_dir, 40)
    assert new.send(ended=False), "a later generation is right, whatever the earlier one came to"
    assert named(objects) == "step-40"
    checkpoint_of(old.run_dir, 60)
    assert not old.send(ended=True)
    assert objects.get("ckpt/LATEST") == latest("step-40", 2).encode()


def test_a_large_file_travels_in_parts_and_is_whole_or_not_there(
    objects: S3Objects, cloud: BotoEdge, tmp_path: Path
) -> None:
    large, back = tmp_path / "large", tmp_path / "back"
    large.write_bytes(os.urandom(PART_BYTES + 1))
    assert objects.send("ckpt/step-1/rank-0.safetensors", large)
    tag = objects.client.head_object(Bucket=BUCKET, Key="runs/r/ckpt/step-1/rank-0.safetensors")["ETag"].strip('"')
    assert tag.endswith("-2"), "its tag says how many parts it had"
    assert objects.fetch("ckpt/step-1/rank-0.safetensors", back)
    assert back.read_bytes() == large.read_bytes()
    assert not objects.fetch("ckpt/step-2/rank-0.safetensors", tmp_path / "none")
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["back", "large"]
    with pytest.raises(FileNotFoundError):
        objects.send("ckpt/step-1/rank-1.safetensors", tmp_path / "none")
    nowhere = replace(objects, bucket="hetopt-no-such-bucket")
    assert not nowhere.send("ckpt/step-1/rank-0.safetensors", back)


def test_data_comes_once_with_word_of_how_far_it_is_and_ends_when_the_machine_must(
    objects: S3Objects, cloud: BotoEdge, tmp_path: Path
) -> None:
    for number in range(20):
        objects.put(f"data/{number}", bytes(1000))
    told: list[tuple[int, int]] = []

    def hear(done: int, total: int) -> bool:
        told.append((done, total))
        return True

    url, folder = f"s3://{BUCKET}/runs/r/data", tmp_path / "data"
    assert objects.download(url, folder, hear)
    assert told[-1] == (20_000, 20_000)
    assert told == sorted(told), "it only grows"
    (folder / "3").write_bytes(bytes(999))
    (folder / "4").write_bytes(1000 * b"x")
    told.clear()
    assert objects.download(url, folder, hear)
    assert told[0][0] >= 19_000, "only what is not there in its size is fetched again"
    assert (folder / "3").read_bytes() == bytes(1000)
    assert (folder / "4").read_bytes() == 1000 * b"x"
    assert not objects.download(url, tmp_path / "other", lambda *_: False)
    assert len(list((tmp_path / "other").glob("*"))) < 20


ID_PATH = "/latest/meta-data/instance-id"
ACTION = "/latest/meta-data/spot/instance-action"


def test_notices_over_http(monkeypatch: pytest.MonkeyPatch) -> None:
    with metadata_service({ID_PATH: "i-0123"}) as service:
        monkeypatch.setenv(METADATA_ENDPOINT_VARIABLE, service.url)
        assert metadata(ID_PATH) == "i-0123"
        assert not is_taken(), "404 is the normal answer"
        service.answers[ACTION] = json.dumps({"action": "terminate", "time": "2026-11-20T08:24:00Z"})
        assert is_taken()
        service.tokens.clear()
        assert is_taken(), "no token is kept"
        assert service.refused == 0
        for text in ("", "not json", "[]", '{"action": "none"}', '{"action": 3, "time": null}'):
            service.answers[ACTION] = text
            assert not is_taken(), text
    monkeypatch.setenv(METADATA_ENDPOINT_VARIABLE, "http://127.0.0.1:9")
    assert (metadata(ID_PATH), is_taken()) == (None, False)
