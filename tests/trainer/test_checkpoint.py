"""Checkpoints on disk: whole or not at all, the newest whole one counts, and training goes on while one is written."""

from __future__ import annotations

import errno
import io
import json
import os
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from safetensors.torch import load_file

from hetopt.core.errors import BadInput, RunFailed
from hetopt.core.events.log import EventLog, read_events
from hetopt.core.run_spec import RunSpec
from hetopt.trainer.checkpoints.folder import (
    STATE_FILE,
    WRITTEN,
    CheckpointFolder,
    CheckpointSaver,
    FileRecord,
    Manifest,
    RankState,
    SharedState,
    is_due,
    parameters_sha256,
    rank_file,
    run_digest,
    save_tensors,
    write_model,
)
from hetopt.trainer.context import Generators

from .scenarios import toy_spec

DIGEST = "of this run"


def shared(step: int) -> SharedState:
    return SharedState(
        digest=DIGEST,
        step=step,
        training_s=1.5,
        shares=(3, 1),
        model={"weight": torch.arange(4.0)},
        optimizer={"state": {}, "param_groups": []},
        cursor={"dataset_size": 10, "seed": 0, "position": 4 * step},
        policy="model",
        controller={"local_batch_sizes": [3, 1], "lines": []},
        steering={"ratio": 0.01},
        loss_scale=None,
        memory_bounds=(0, 2),
        target_reached=False,
    )


def own(rank: int) -> RankState:
    residual = torch.randn(5, generator=torch.Generator().manual_seed(rank))
    return RankState(memory={"residual": residual}, **vars(Generators.at(torch.device("cpu"))))


@given(st.floats(0.05, 10.0), st.floats(0.5, 30.0))
def test_a_loss_undoes_no_more_than_an_interval(period_s: float, every_s: float) -> None:
    """Periods are alike; what is written counts at the end of the period after, and what was told is a period old."""
    counts_s = begun_s = 0.0
    under_way = False
    for now_s in (period_s * number for number in range(1, 100)):
        assert now_s - counts_s <= max(every_s, 2 * period_s) + 1e-9
        if under_way:
            counts_s, under_way = begun_s, False
        if is_due(now_s - period_s - begun_s, period_s=period_s, every_s=every_s):
            begun_s, under_way = now_s, True


def save(folder: CheckpointFolder, step: int, workers: int = 2, digest: str = DIGEST) -> None:
    files = {rank_file(rank): folder.write(step, rank_file(rank), own(rank)) for rank in range(workers)}
    files[STATE_FILE] = folder.write(step, STATE_FILE, shared(step))
    folder.publish(Manifest(step=step, digest=digest, workers=workers, files=files))


@pytest.fixture
def one(tmp_path: Path) -> Iterator[CheckpointSaver]:
    """Of a run of a single worker."""
    with closing(EventLog(tmp_path / "events.jsonl")) as events:
        here = SimpleNamespace(host="here")
        saver = CheckpointSaver(
            SimpleNamespace(run_dir=tmp_path, rank=0, world_size=1, events=events, clock=lambda: 0.0, worker=here)
        )
        yield saver
        saver.close()


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    return CheckpointFolder(tmp_path)


def begin(one: CheckpointSaver, step: int) -> None:
    one.begin(shared(step), own(0), begun_s=0.0)


def test_what_is_saved_is_loaded(folder: CheckpointFolder) -> None:
    assert folder.newest(DIGEST) == (None, ())
    save(folder, 7)
    assert folder.newest(DIGEST) == (7, ())
    loaded = folder.load_shared(7)
    assert torch.equal(loaded.model["weight"], torch.arange(4.0))
    assert {**vars(loaded), "model": None} == {**vars(shared(7)), "model": None}
    for rank in range(2):
        mine = folder.load_own(7, rank, workers_then=2, workers_now=2)
        assert torch.equal(mine.memory["residual"], own(rank).memory["residual"])


@pytest.mark.parametrize("workers", [1, 2, 4, 5])
def test_residuals_keep_their_sum_when_workers_come_or_go(folder: CheckpointFolder, workers: int) -> None:
    save(folder, 3, workers=4)
    before = sum(own(rank).memory["residual"] for rank in range(4))
    after = sum(
        folder.load_own(3, rank, workers_then=4, workers_now=workers).memory["residual"] for rank in range(workers)
    )
    assert torch.allclose(before, after, rtol=0, atol=1e-6)


def test_the_two_newest_are_kept_and_leftovers_removed(folder: CheckpointFolder, tmp_path: Path) -> None:
    (tmp_path / "checkpoint" / "step-1.partial").mkdir(parents=True)
    for step in (5, 10, 100):
        save(folder, step)
    names = sorted(path.name for path in (tmp_path / "checkpoint").iterdir())
    assert names == ["LATEST", "step-10", "step-100"]
    assert (tmp_path / "checkpoint" / "LATEST").read_text() == "step-100\n"


def test_what_others_have_begun_meanwhile_is_left_alone(folder: CheckpointFolder) -> None:
    """The last worker to hear that all parts are there may be the one that publishes them."""
    early = {rank_file(1): folder.write(10, rank_file(1), own(1))}
    save(folder, 9)
    assert folder.newest(DIGEST) == (9, ())
    files = {name: folder.write(10, name, state) for name, state in ((rank_file(0), own(0)), (STATE_FILE, shared(10)))}
    folder.publish(Manifest(step=10, digest=DIGEST, workers=2, files={**early, **files}))
    assert folder.newest(DIGEST) == (10, ())


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_one_that_is_torn_or_altered_anywhere_is_passed_over_and_named(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = CheckpointFolder(tmp_path_factory.mktemp("run"))
    save(folder, 1)
    save(folder, 2)
    name = data.draw(st.sampled_from([STATE_FILE, rank_file(0), rank_file(1), "manifest.json"]))
    path = folder.path(2) / name
    content = path.read_bytes()
    place = data.draw(st.integers(0, len(content) - 1))
    how = data.draw(st.sampled_from(["truncate", "flip", "remove"]))
    if how == "remove":
        path.unlink()
    elif how == "truncate":
        path.write_bytes(content[:place])
    elif name != "manifest.json":  # a blank more or less in it changes nothing
        path.write_bytes(content[:place] + bytes([content[place] ^ 0x20]) + content[place + 1 :])
    else:
        path.write_bytes(content.replace(b'"sha256": "', b'"sha256": "0', 1))
    found = folder.newest(DIGEST)
    if name == "manifest.json" and how == "truncate" and place == len(content) - 1:
        assert found == (2, ()), "the last newline says nothing"
        return
    whole, torn = found
    assert (whole, [step for step, _ in torn]) == (1, [2])
    assert name in torn[0][1]


def test_when_none_is_whole_the_run_does_not_start_over_in_silence(folder: CheckpointFolder) -> None:
    save(folder, 1)
    (folder.path(1) / STATE_FILE).write_bytes(b"hello")
    with pytest.raises(BadInput, match=rf"No checkpoint in .* is whole: in that of step 1, {STATE_FILE} has 5 bytes"):
        folder.newest(DIGEST)


def test_one_of_another_run_or_version_is_refused(folder: CheckpointFolder) -> None:
    save(folder, 1)
    with pytest.raises(BadInput, match="another task"):
        folder.newest("of another run")
    path = folder.path(1) / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema_version": 3}))
    with pytest.raises(BadInput, match="schema 3, which this hetopt cannot read"):
        folder.newest(DIGEST)


def test_nothing_in_a_checkpoint_is_run(folder: CheckpointFolder) -> None:
    """Even where the hashes were made to fit; and none with code in it is written."""
    evil: Any = {**vars(shared(1)), "model": print}
    buffer = io.BytesIO()
    torch.save(evil, buffer)
    folder.partial(1).mkdir(parents=True)
    (folder.partial(1) / STATE_FILE).write_bytes(buffer.getvalue())
    files = {STATE_FILE: FileRecord.of(buffer.getvalue())}
    folder.publish(Manifest(step=1, digest=DIGEST, workers=1, files=files))
    assert folder.newest(DIGEST) == (1, ())
    with pytest.raises(BadInput, match=rf"{STATE_FILE} is damaged"):
        folder.load_shared(1)
    with pytest.raises(TypeError, match="cannot be packed"):
        folder.write(2, STATE_FILE, SharedState(**evil))


def test_a_model_keeps_every_name_of_its_state(tmp_path: Path) -> None:
    """Tied weights, views and buffers; what is loaded is what was saved."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 3))
    model[2].weight = model[0].weight
    model[0].weight.data = torch.arange(9.0).view(3, 3).t()
    before = parameters_sha256(model.named_parameters())
    write_model(tmp_path, model.state_dict(), stopped=False)
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o077 == 0, "what was learned is its owner's alone"
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    loaded = load_file(tmp_path / "model.safetensors")
    assert loaded.keys() == model.state_dict().keys()
    assert all(torch.equal(loaded[name], value) for name, value in model.state_dict().items())
    model[1].bias.data[0] = torch.nextafter(model[1].bias.data[0], torch.tensor(9.0))
    assert parameters_sha256(model.named_parameters()) != before
    model.load_state_dict(loaded)
    assert parameters_sha256(model.named_parameters()) == before, "a fingerprint tells the smallest difference"


def test_what_is_written_is_what_was_when_it_began(tmp_path: Path, one: CheckpointSaver) -> None:
    state = shared(4)
    gate = threading.Event()
    one._thread.submit(gate.wait)
    one.begin(state, own(0), begun_s=0.0)
    state.model["weight"].add_(1)  # training goes on
    assert one.progress == 0.0
    one.conclude([one.progress])
    assert one.is_busy, "its part is not on disk yet"
    gate.set()
    one.finish()
    assert torch.equal(CheckpointFolder(tmp_path).load_shared(4).model["weight"], torch.arange(4.0))
    assert one.saved_step == 4
    assert [event["event"] for event in read_events(tmp_path / "events.jsonl")] == ["checkpoint_saved"]


def test_it_is_published_only_when_every_worker_has_written(tmp_path: Path, one: CheckpointSaver) -> None:
    begin(one, 1)
    one._under_way.parts.result()  # type: ignore[union-attr]
    one.conclude([WRITTEN, 0.0])
    assert one.is_busy
    assert CheckpointFolder(tmp_path).newest(DIGEST) == (None, ())
    one.conclude([WRITTEN])
    assert not one.is_busy
    assert CheckpointFolder(tmp_path).newest(DIGEST) == (1, ())


def full_disk(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("where", ["save_tensors", "CheckpointFolder.publish"])
def test_where_the_disk_is_full_an_older_checkpoint_gives_way_and_the_newest_whole_one_never(
    tmp_path: Path, one: CheckpointSaver, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    for step in (1, 2):
        begin(one, step)
        assert one.finish() is None
    monkeypatch.setattr(f"hetopt.trainer.checkpoints.folder.{where}", full_disk)
    gives_way = where == "save_tensors"  # what a worker writes is as large as a checkpoint, and its manifest is small
    for step in (3, 4):
        begin(one, step)
        assert one.finish() == "worker 0 on here: No space left on device"
        assert (one.saved_step, CheckpointFolder(tmp_path).newest(DIGEST)) == (2, (2, ()))
    assert CheckpointFolder(tmp_path).path(1).exists() is not gives_way


def test_the_trained_model_is_worth_more_than_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a stopped run is worth less than the newest, which it goes on from."""
    folder, written = CheckpointFolder(tmp_path), save_tensors

    def needs_the_room_of_all_but(kept: int) -> None:
        def write(*arguments: Any) -> None:
            if len(folder._steps()) > kept:
                full_disk()
            written(*arguments)

        monkeypatch.setattr("hetopt.trainer.checkpoints.folder.save_tensors", write)

    for step in (1, 2):
        save(folder, step)
    needs_the_room_of_all_but(0)
    with pytest.raises(RunFailed, match="No space left on device"):
        write_model(tmp_path, torch.nn.Linear(3, 3).state_dict(), stopped=True)
    assert folder.newest(DIGEST) == (2, ())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint"], "whole or not at all"
    needs_the_room_of_all_but(1)
    write_model(tmp_path, torch.nn.Linear(3, 3).state_dict(), stopped=True)
    needs_the_room_of_all_but(0)
    write_model(tmp_path, torch.nn.Linear(3, 3).state_dict(), stopped=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "model.safetensors"]


def test_workers_and_the_stop_rule_may_change_between_attempts_the_task_may_not() -> None:
    def digest(**changes: object) -> str:
        return run_digest(RunSpec.model_validate_json(json.dumps(toy_spec(**changes))))

    assert digest() == digest(shares=(1, 1), stop={"max_epochs": 9})
    assert len({digest(), digest(task="easy"), digest(seed=1), digest(compression={"name": "topk", "ratio": 0.1})}) == 4
