"""What was paid for comes home: the trained model is fetched whole, told where it is, and deleted by no rule.

What is in the bucket was written by machines, or by whoever may write there: it never leaves the run's folder here,
and it never keeps a run from being looked at or ended.

Small messages between renter and machines, damaged in every way: read as they were meant, or as nothing at all.
"""

from __future__ import annotations

import datetime
import json
import resource
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from hetopt.backends.backend import RunHandle
from hetopt.backends.ec2.objects import S3Objects
from hetopt.backends.ec2.renter import calls
from hetopt.backends.ec2.renter.backend import adopt, fetch_model
from hetopt.backends.ec2.renter.doctor import bucket_calls
from hetopt.backends.ec2.renter.launcher import Ec2Launcher
from hetopt.backends.ec2.renter.order import ORDER_FILE, SEEN_FILE, ClusterState, Order
from hetopt.backends.ec2.renter.request import Answer, ApiRefused, BotoEdge, Edge, Request, read_ledger
from hetopt.backends.host.agent import Checkpoints, Uploads
from hetopt.backends.host.protocol import Placements, placement_of
from hetopt.core import run_folder
from hetopt.core.errors import BadInput, CloudRefused
from hetopt.core.run_status import RunState, log_bytes
from hetopt.optimizer.plan import Plan
from tests.ec2.conftest import ACCOUNT, BUCKET, REGION, Patience, leftovers
from tests.ec2.followed import event, latest, put
from tests.face.conftest import Answer as Answered
from tests.profiler.test_paths import HOSTILE
from tests.thinned import few

Make = Callable[..., Order]
RUN = "20261120-000000-digits-0001"


def machine(order: Order) -> Uploads:
    """The machine's side of it, with what it wrote on its own disk."""
    objects = S3Objects.connect(region=REGION, bucket=BUCKET, prefix=f"runs/{RUN}", account_id=ACCOUNT)
    models = replace(objects, prefix=f"models/{RUN}")
    return Uploads(objects=objects, models=models, run_dir=Path(), leads=True)


@pytest.fixture
def fetched(tmp_path: Path, order_for: Make, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HETOPT_HOME", str(tmp_path))
    folder = tmp_path / "runs" / RUN
    folder.mkdir(parents=True)
    order_for(RUN).save(folder / ORDER_FILE)
    return folder


def send(run_dir: Path, tmp_path: Path, content: bytes) -> None:
    there = tmp_path / "machine"
    there.mkdir(exist_ok=True)
    (there / "model.safetensors").write_bytes(content)
    replace(machine(Order.load(run_dir / ORDER_FILE)), run_dir=there).model()


def test_a_model_that_a_machine_sent_is_fetched(
    cloud: BotoEdge, fetched: Path, tmp_path: Path, hetopt: Callable[..., Answered]
) -> None:
    none = hetopt("fetch", RUN)
    assert none.code == 2
    assert "there is no model" in none.err
    send(fetched, tmp_path, b"weights" * 1000)
    answer = hetopt("fetch", RUN)
    assert answer.code == 0, answer.err
    assert str(fetched / "model.safetensors") in "".join(answer.out.split())
    assert (fetched / "model.safetensors").read_bytes() == b"weights" * 1000
    out = tmp_path / "mine.pt"
    told = json.loads(hetopt("fetch", RUN, "-o", out, "--json").out)
    assert told == {"run": RUN, "model": str(out), "bytes": 7000, "outputs": [], "left_out": []}
    assert out.read_bytes() == b"weights" * 1000
    assert not [path for path in (*tmp_path.iterdir(), *fetched.iterdir()) if "partial" in path.name]
    # One that was trained longer takes its place.
    send(fetched, tmp_path, b"better" * 2000)
    assert hetopt("fetch", RUN).code == 0
    assert (fetched / "model.safetensors").read_bytes() == b"better" * 2000


def test_files_that_a_script_wrote_come_back_and_hostile_names_do_not(
    cloud: BotoEdge, fetched: Path, tmp_path: Path, hetopt: Callable[..., Answered]
) -> None:
    send(fetched, tmp_path, b"weights")
    there = tmp_path / "machine"
    (there / "outputs" / "pictures").mkdir(parents=True)
    (there / "outputs" / "pictures" / "loss 1.png").write_bytes(b"a picture")
    (there / "outputs" / "table.csv").write_bytes(b"1,2")
    (there / "outputs" / "link").symlink_to("/etc/passwd")
    own = replace(machine(Order.load(fetched / ORDER_FILE)), run_dir=there)
    assert own.outputs() == []
    assert replace(own, leads=False, run_dir=tmp_path).outputs() == [], "worker 0 writes them"
    for name in ("../../launch.json", "a/../../b", ".."):
        own.models.put(f"outputs/{name}", b"not ours")
    before = sorted(path.name for path in fetched.iterdir())
    answer = hetopt("fetch", RUN, "--json")
    assert answer.code == 0, answer.err
    told = json.loads(answer.out)
    assert told["outputs"] == ["pictures/loss 1.png", "table.csv"]
    assert len(told["left_out"]) == 3
    assert (fetched / "outputs" / "pictures" / "loss 1.png").read_bytes() == b"a picture"
    assert sorted(path.name for path in fetched.iterdir()) == sorted([*before, "model.safetensors", "outputs"])


def test_no_more_outputs_are_carried_than_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(4):
        (tmp_path / f"{number}.txt").write_bytes(b"x" * 10)
    monkeypatch.setattr(run_folder, "MOST_FILES", 3)
    assert len(run_folder.written_in(tmp_path).sizes) == 3
    monkeypatch.setattr(run_folder, "MOST_BYTES", 25)
    found = run_folder.written_in(tmp_path)
    assert list(found.sizes) == ["0.txt", "1.txt"]
    assert "'2.txt' would make it more than 25 B" in "".join(found.left_out)


def test_what_does_not_arrive_whole_is_not_there(
    cloud: BotoEdge, fetched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(fetched, tmp_path, b"weights")
    monkeypatch.setattr(S3Objects, "size_bytes", lambda self, name: 8)
    order = Order.load(fetched / ORDER_FILE)
    with pytest.raises(CloudRefused, match="could not be read to its end"):
        fetch_model(order, fetched)
    assert not (fetched / "model.safetensors").exists()
    monkeypatch.setattr(S3Objects, "size_bytes", lambda self, name: 10**18)
    with pytest.raises(BadInput, match="has room for"):
        fetch_model(order, fetched)


def rules() -> list[Mapping[str, Any]]:
    (call,) = [
        one for one in bucket_calls(BUCKET, REGION, ACCOUNT) if one.operation.endswith("lifecycle_configuration")
    ]
    configured: list[Mapping[str, Any]] = call.parameters["LifecycleConfiguration"]["Rules"]
    return configured


def test_no_rule_of_the_bucket_deletes_a_model(fetched: Path, tmp_path: Path) -> None:
    send(fetched, tmp_path, b"weights")
    order = Order.load(fetched / ORDER_FILE)
    key = fetch_model(order, fetched)[1].removeprefix(f"s3://{BUCKET}/")
    expire = [rule["Filter"]["Prefix"] for rule in rules() if "Expiration" in rule]
    assert expire, "the rest goes"
    assert not any(key.startswith(prefix) for prefix in expire)
    assert not any("data/x".startswith(prefix) for prefix in expire)
    assert any(f"{order.prefix}/ckpt/LATEST".startswith(prefix) for prefix in expire)


def files_outside(folder: Path, inside: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file() and not path.is_relative_to(inside)}


NAMES = ["/{secret}", "h0//{secret}", ".ssh/x", "-x/y.log", "h0/" + "n" * 300]
"""That an HTTP client sends as they are; `..` it takes out itself, and other clients do not."""


class Listing:
    """Lists objects beside those that are there, as other clients can make them."""

    def __init__(self, inner: Edge, folder: str, names: list[str]) -> None:
        self.inner, self.folder, self.names = inner, folder, names

    def __call__(self, request: Request) -> Answer:
        prefix = str(request.parameters.get("Prefix", ""))
        if request.operation == "list_objects_v2" and prefix.endswith(f"/{self.folder}/"):
            found = self.inner(request)
            now = datetime.datetime(2200, 1, 1, tzinfo=datetime.UTC)
            more = [{"Key": f"{prefix}{name}", "LastModified": now, "Size": 8} for name in self.names]
            return {**found, "Contents": [*found.get("Contents", ()), *more]}
        key = str(request.parameters.get("Key", ""))
        if request.operation == "get_object" and any(key.endswith(f"/{self.folder}/{name}") for name in self.names):
            return {"Body": b"attacker", "ETag": '"x"'}
        return self.inner(request)


@pytest.fixture
def handle(launcher: Ec2Launcher, run_dir: Path, plan: Plan) -> RunHandle:
    """Of a run that was started."""
    return launcher.start(plan.run, run_dir, {})


def test_an_object_is_a_file_of_the_run_or_nothing(
    cloud: BotoEdge,
    launcher: Ec2Launcher,
    run_dir: Path,
    order: Order,
    handle: RunHandle,
    patience: Patience,
    tmp_path: Path,
) -> None:
    secret = tmp_path / "authorized_keys"
    secret.write_text("the operator's own key\n")
    (run_dir / "log").mkdir()
    (run_dir / "log" / "link").symlink_to(tmp_path)
    before = files_outside(tmp_path, run_dir)
    for name in NAMES:
        put(cloud, order, f"log/{name.format(secret=secret)}", "the attacker's key\n")
    put(cloud, order, "log/link/authorized_keys", "the attacker's key\n")
    put(cloud, order, "log/h0/host.log", "hello\n")
    patience.now_s += 1e9  # every object is newer than every file
    assert launcher.poll(handle).state is RunState.STARTING
    assert secret.read_text() == "the operator's own key\n"
    assert files_outside(tmp_path, run_dir) == before
    assert (run_dir / "log" / "h0" / "host.log").read_text() == "hello\n", "all others are still read"


@pytest.mark.parametrize("folder", ["log", "events", "state"])
def test_no_key_that_a_bucket_can_hold_leads_anywhere(
    cloud: BotoEdge,
    launcher: Ec2Launcher,
    run_dir: Path,
    handle: RunHandle,
    patience: Patience,
    tmp_path: Path,
    folder: str,
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("mine")
    before = files_outside(tmp_path, run_dir)
    names = [
        *HOSTILE,
        "../../../secret",
        str(secret),
        f"../{run_dir.name}/../../secret",
        "../seen.json",
        "../order.json",
    ]
    order = (run_dir / ORDER_FILE).read_text()
    hostile = replace(launcher, inner=Listing(cloud, folder, names))
    patience.now_s += 60
    assert hostile.poll(handle).state is RunState.STARTING
    assert secret.read_text() == "mine"
    assert files_outside(tmp_path, run_dir) == before
    assert (run_dir / ORDER_FILE).read_text() == order
    assert ClusterState.load(run_dir / SEEN_FILE).machines


def test_an_object_that_is_no_part_of_the_log_is_passed_over(
    cloud: BotoEdge, launcher: Ec2Launcher, run_dir: Path, order: Order, handle: RunHandle, patience: Patience
) -> None:
    """What the disk has no room for is fetched later, and all that follows it."""
    for name in ("x.jsonl", "²³.jsonl", f"{0:015d}.json", "-1.jsonl", f"{'9' * 400}.jsonl", "a/0.jsonl"):
        put(cloud, order, f"events/{name}", "no event")
    log = event("run_started") + 9000 * event("evaluated", step=1) + event("training_started", step=0)
    put(cloud, order, f"events/{0:015d}.jsonl", log)
    patience.now_s += 60
    resource.prlimit(0, resource.RLIMIT_FSIZE, (len(log) // 2, -1))
    with pytest.raises(OSError, match="too large"):
        launcher.poll(handle)
    resource.prlimit(0, resource.RLIMIT_FSIZE, (-1, -1))
    patience.now_s += 60
    assert launcher.poll(handle).state is RunState.RUNNING
    assert log_bytes(run_dir) == len(log)


@pytest.mark.parametrize("name", ["/{outside}/x", "a//{outside}/x", "link/x"])
def test_data_stays_in_its_folder_or_is_refused(objects: S3Objects, tmp_path: Path, name: str) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "data"
    outside.mkdir()
    folder.mkdir()
    (folder / "link").symlink_to(outside)
    assert objects.put("d/" + name.format(outside=str(outside).lstrip("/")), b"x")
    with pytest.raises(BadInput, match="the object"):
        objects.download(f"s3://{BUCKET}/runs/r/d", folder, lambda *_: True)
    assert list(outside.iterdir()) == []


def test_data_is_called_as_people_call_it(objects: S3Objects, tmp_path: Path) -> None:
    for name in ("train images/Bär (1).png", ".meta", "日本.bin"):
        objects.put(f"d/{name}", b"x")
    objects.put("d/train images/", b"")  # as consoles show folders
    objects.download(f"s3://{BUCKET}/runs/r/d", tmp_path / "data", lambda *_: True)
    found = {
        path.relative_to(tmp_path / "data").as_posix() for path in (tmp_path / "data").rglob("*") if path.is_file()
    }
    assert found == {"train images/Bär (1).png", ".meta", "日本.bin"}


def test_a_checkpoint_has_its_own_files_alone(objects: S3Objects, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    there = ("state.safetensors", "rank-0.safetensors", "manifest.json", "/x.pt", "x/rank-1.safetensors", "evil.py")
    for name in there:
        objects.put(f"ckpt/step-4/{name}", b"x")
    Checkpoints(objects=objects, run_dir=run_dir, leads=True).restore("step-4")
    found = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file())
    folder = "run/checkpoint"
    assert found == [
        f"{folder}/LATEST",
        *(f"{folder}/step-4/{name}" for name in ("manifest.json", "rank-0.safetensors", "state.safetensors")),
    ]


def test_what_is_in_the_way_of_a_checkpoint_does_not_end_the_next(objects: S3Objects, tmp_path: Path) -> None:
    """Keys that only look like checkpoints are not numbers."""
    one = Checkpoints(objects=objects, run_dir=tmp_path, leads=True)
    for name in ("step-x/state.safetensors", "step-/y", f"step-{'9' * 500}/z", "step-²/z"):
        objects.put(f"ckpt/{name}", b"x")
    folder = tmp_path / "checkpoint" / "step-7"
    folder.mkdir(parents=True)
    for name in ("state.safetensors", "rank-0.safetensors", "manifest.json"):
        objects.put(f"ckpt/step-7/{name}", b"x")
        (folder / name).write_bytes(b"x")
    (tmp_path / "checkpoint" / "LATEST").write_text("step-7\n")
    assert one.send(ended=True)
    assert objects.get("ckpt/LATEST") == latest("step-7").encode()


class Unreadable:
    """A bucket that gives nonsense, or nothing, for whatever is read of it; all else is the cloud's."""

    def __init__(self, inner: Edge, answer: bytes | str) -> None:
        self.inner, self.answer, self.done = inner, answer, list[str]()

    def __call__(self, request: Request) -> Answer:
        self.done.append(request.operation)
        if request.service == "s3" and request.operation in ("get_object", "list_objects_v2"):
            if isinstance(self.answer, str):
                raise ApiRefused(request, self.answer, "the bucket does not answer")
            if request.operation == "get_object":
                return {"Body": self.answer, "ETag": '"x"'}
        return self.inner(request)


GARBAGE = [b"", b"{}", b"[" * 100_000, b"9" * 5000, b"\xff\xfe", b'{"end_s": 1e400, "stop_training_s": 0}']


@pytest.mark.parametrize("answer", few(5, ["AccessDenied", *GARBAGE, "SlowDown"]), ids=lambda answer: repr(answer[:8]))
def test_stopping_waits_for_nothing_that_is_read(
    cloud: BotoEdge,
    launcher: Ec2Launcher,
    run_dir: Path,
    order: Order,
    handle: RunHandle,
    patience: Patience,
    answer: bytes | str,
) -> None:
    for name in ("events/x.jsonl", "log//x", f"events/{0:015d}.jsonl", "lease.json", "placement.json", "outcome.json"):
        put(cloud, order, name, "nonsense")
    told: list[str] = []
    edge = Unreadable(cloud, answer)
    replace(launcher, inner=edge, tell=told.append).stop(handle)
    assert leftovers(cloud) == []
    assert ClusterState.load(run_dir / SEEN_FILE).cleared
    ends = edge.done.index("terminate_instances")
    reads = [place for place, name in enumerate(edge.done) if name in ("get_object", "list_objects_v2")]
    assert all(place > ends for place in reads), "giving back comes first"
    assert not isinstance(answer, str) or any("could not be read" in one for one in told)


def test_a_bucket_that_cannot_be_written_keeps_no_machine(
    cloud: BotoEdge, launcher: Ec2Launcher, run_dir: Path, handle: RunHandle
) -> None:
    told: list[str] = []

    def edge(request: Request) -> Answer:
        if request.service == "s3":
            raise ApiRefused(request, "AccessDenied", "no")
        return cloud(request)

    replace(launcher, inner=edge, tell=told.append).stop(handle)
    assert leftovers(cloud) == []
    assert any("without a last checkpoint" in one for one in told)


@pytest.mark.parametrize(
    "body", few(4, [b'{"hosts": {}, "spec": {}}', *GARBAGE, b"null", b'"x"']), ids=lambda body: repr(body[:8])
)
@pytest.mark.parametrize("name", ["placement.json", "order.json", "plan.json"])
def test_a_run_whose_objects_are_nonsense_is_not_adopted_in_one_sentence(
    cloud: BotoEdge,
    launcher: Ec2Launcher,
    run_dir: Path,
    order: Order,
    plan: Plan,
    tmp_path: Path,
    name: str,
    body: bytes,
) -> None:
    launcher.start(plan.run, run_dir, {})
    cloud(calls.put_object(order, "test", f"{order.prefix}/{name}", body, "nonsense"))
    folder = tmp_path / "elsewhere" / order.run_id
    with pytest.raises(BadInput):
        adopt(cloud, folder, bucket=BUCKET, account_id=ACCOUNT, now_s=0.0)
    assert not folder.exists(), "nothing is left that looks like a run"


@pytest.mark.parametrize("body", [b"nonsense", b"[" * 100_000, b"\xff"], ids=lambda body: repr(body[:8]))
def test_a_run_whose_machines_write_nonsense_is_looked_at(
    cloud: BotoEdge,
    launcher: Ec2Launcher,
    run_dir: Path,
    order: Order,
    handle: RunHandle,
    patience: Patience,
    body: bytes,
) -> None:
    for name in ("lease.json", "outcome.json", "state/i-0.json", "ckpt/LATEST", "ckpt/WANTED", "log/h0/host.log"):
        cloud(calls.put_object(order, "test", f"{order.prefix}/{name}", body, "nonsense"))
    patience.now_s += 60
    assert launcher.poll(handle).state is RunState.STARTING


@pytest.mark.parametrize("name", ["seen.json", "launch.json"])
def test_a_damaged_folder_keeps_no_machine(
    cloud: BotoEdge,
    run_dir: Path,
    launcher: Ec2Launcher,
    plan: Plan,
    tmp_path: Path,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    hetopt: Callable[..., Answered],
) -> None:
    """The command itself, with the run's own files in pieces."""
    monkeypatch.setenv("HETOPT_HOME", str(tmp_path))
    launcher.start(plan.run, run_dir, {})
    assert leftovers(cloud)
    (run_dir / name).write_text("{")
    answer = hetopt("stop", run_dir.name)
    assert leftovers(cloud) == []
    assert "Traceback" not in answer.err


SPEC = {
    "task": "digits",
    "workers": [{"host": "a-0", "type": "local", "local_batch_size": 1}],
    "stop": {"max_steps": 1},
}
PLACEMENT = {
    "generation": 1,
    "meeting": "10.0.0.1",
    "resume_from": "step-3",
    "pauses": False,
    "hosts": {"i-1": {"host": "a-0", "address": "10.0.0.1"}},
    "spec": SPEC,
}
WRONG = [None, True, -1, 1e400, 10**400, "", "x", "\ud800", "a\nb", "../../x", [], {}, [[]], {"a": {}}, "9" * 5000]


@st.composite
def damaged(draw: st.DrawFn, good: Any) -> bytes:
    value = json.loads(json.dumps(good))
    inner = value
    while isinstance(inner, dict) and inner:
        key = draw(st.sampled_from(sorted(inner)))
        if not isinstance(inner[key], dict) or draw(st.booleans()):
            if draw(st.booleans()):
                inner[key] = draw(st.sampled_from(WRONG))
            else:
                del inner[key]
            break
        inner = inner[key]
    text = json.dumps(value)
    cut = draw(st.sampled_from([None, None, len(text) // 2]))
    return (text[:cut] + draw(st.sampled_from(["", "", "\x00", "[" * 50_000, "]"]))).encode("utf-8", "surrogatepass")


@given(damaged(PLACEMENT))
def test_a_placement_is_one_or_none(data: bytes) -> None:
    found = placement_of(data, "i-1")
    assert found is None or (found.node.host and isinstance(found.node.address, str))
    together = Placements.of_json(data)
    assert together is None or together.hosts


def test_a_ledger_passes_over_what_it_did_not_write(tmp_path: Any) -> None:
    lines = ["[" * 100_000, "9" * 5000, '{"ids": 5}', '"\\ud800"', "null"]
    (tmp_path / "ledger").write_text("\n".join(lines))
    assert read_ledger(tmp_path / "ledger") == []
