"""What was paid for comes home: the trained model is fetched whole, told where it is, and deleted by no rule."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetopt.backends.ec2.objects import S3Objects
from hetopt.backends.ec2.renter.backend import fetch_model
from hetopt.backends.ec2.renter.doctor import bucket_calls
from hetopt.backends.ec2.renter.order import ORDER_FILE, Order
from hetopt.backends.ec2.renter.request import BotoEdge
from hetopt.backends.host.agent import Uploads
from hetopt.core import run_folder
from hetopt.core.errors import BadInput, CloudRefused
from tests.ec2.conftest import ACCOUNT, BUCKET, REGION
from tests.face.conftest import Answer

Make = Callable[..., Order]
RUN = "20261120-000000-digits-0001"


def machine(order: Order) -> Uploads:
    """The machine's side of it, with what it wrote on its own disk."""
    objects = S3Objects.connect(region=REGION, bucket=BUCKET, prefix=f"runs/{RUN}", account_id=ACCOUNT)
    models = replace(objects, prefix=f"models/{RUN}")
    return Uploads(objects=objects, models=models, run_dir=Path(), leads=True, workers=1)


@pytest.fixture
def run_dir(tmp_path: Path, order_for: Make, monkeypatch: pytest.MonkeyPatch) -> Path:
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
    cloud: BotoEdge, run_dir: Path, tmp_path: Path, hetopt: Callable[..., Answer]
) -> None:
    none = hetopt("fetch", RUN)
    assert none.code == 2
    assert "there is no model" in none.err
    send(run_dir, tmp_path, b"weights" * 1000)
    answer = hetopt("fetch", RUN)
    assert answer.code == 0, answer.err
    assert str(run_dir / "model.safetensors") in "".join(answer.out.split())
    assert (run_dir / "model.safetensors").read_bytes() == b"weights" * 1000
    out = tmp_path / "mine.pt"
    told = json.loads(hetopt("fetch", RUN, "-o", out, "--json").out)
    assert told == {"run": RUN, "model": str(out), "bytes": 7000, "outputs": [], "left_out": []}
    assert out.read_bytes() == b"weights" * 1000
    assert not [path for path in (*tmp_path.iterdir(), *run_dir.iterdir()) if "partial" in path.name]
    # One that was trained longer takes its place.
    send(run_dir, tmp_path, b"better" * 2000)
    assert hetopt("fetch", RUN).code == 0
    assert (run_dir / "model.safetensors").read_bytes() == b"better" * 2000


def test_files_that_a_script_wrote_come_back_and_hostile_names_do_not(
    cloud: BotoEdge, run_dir: Path, tmp_path: Path, hetopt: Callable[..., Answer]
) -> None:
    send(run_dir, tmp_path, b"weights")
    there = tmp_path / "machine"
    (there / "outputs" / "pictures").mkdir(parents=True)
    (there / "outputs" / "pictures" / "loss 1.png").write_bytes(b"a picture")
    (there / "outputs" / "table.csv").write_bytes(b"1,2")
    (there / "outputs" / "link").symlink_to("/etc/passwd")
    own = replace(machine(Order.load(run_dir / ORDER_FILE)), run_dir=there)
    assert own.outputs() == []
    assert replace(own, leads=False, run_dir=tmp_path).outputs() == [], "worker 0 writes them"
    for name in ("../../launch.json", "a/../../b", ".."):
        own.models.put(f"outputs/{name}", b"not ours")
    before = sorted(path.name for path in run_dir.iterdir())
    answer = hetopt("fetch", RUN, "--json")
    assert answer.code == 0, answer.err
    told = json.loads(answer.out)
    assert told["outputs"] == ["pictures/loss 1.png", "table.csv"]
    assert len(told["left_out"]) == 3
    assert (run_dir / "outputs" / "pictures" / "loss 1.png").read_bytes() == b"a picture"
    assert sorted(path.name for path in run_dir.iterdir()) == sorted([*before, "model.safetensors", "outputs"])


def test_no_more_outputs_are_carried_than_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(4):
        (tmp_path / f"{number}.txt").write_bytes(b"x" * 10)
    monkeypatch.setattr(run_folder, "MOST_FILES", 3)
    assert len(run_folder.written_in(tmp_path).sizes) == 3
    monkeypatch.setattr(run_folder, "MOST_BYTES", 25)
    found = run_folder.written_in(tmp_path)
    assert list(found.sizes) == ["0.txt", "1.txt"]
    (sentence,) = found.left_out
    assert "'2.txt' would make it more than 25 B" in sentence


def test_what_does_not_arrive_whole_is_not_there(
    cloud: BotoEdge, run_dir: Path, order: Order, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(run_dir, tmp_path, b"weights")
    monkeypatch.setattr(S3Objects, "size_bytes", lambda self, name: 8)
    with pytest.raises(CloudRefused, match="could not be read to its end"):
        fetch_model(order, run_dir)
    assert not (run_dir / "model.safetensors").exists()
    monkeypatch.setattr(S3Objects, "size_bytes", lambda self, name: 10**18)
    with pytest.raises(BadInput, match="has room for"):
        fetch_model(order, run_dir)


def rules() -> list[Mapping[str, Any]]:
    (call,) = [
        one for one in bucket_calls(BUCKET, REGION, ACCOUNT) if one.operation.endswith("lifecycle_configuration")
    ]
    configured: list[Mapping[str, Any]] = call.parameters["LifecycleConfiguration"]["Rules"]
    return configured


def test_no_rule_of_the_bucket_deletes_a_model(run_dir: Path, order: Order, tmp_path: Path) -> None:
    send(run_dir, tmp_path, b"weights")
    key = fetch_model(order, run_dir)[1].removeprefix(f"s3://{BUCKET}/")
    expire = [rule["Filter"]["Prefix"] for rule in rules() if "Expiration" in rule]
    assert expire, "the rest goes"
    assert not any(key.startswith(prefix) for prefix in expire)
    assert not any("data/x".startswith(prefix) for prefix in expire)
    assert any(f"{order.prefix}/ckpt/LATEST".startswith(prefix) for prefix in expire)
