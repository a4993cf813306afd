from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hetopt.profiler.errors import BadInput
from hetopt.trainer.checkpoint import (
    CheckpointFolder,
    RankState,
    SharedState,
    parameters_sha256,
    run_digest,
    save_model,
)
from hetopt.trainer.spec import RunSpec

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
        learning_rate={"value": 2.0},
        memory_bounds=(0, 2),
        target_reached=False,
    )


def own(rank: int) -> RankState:
    residual = torch.randn(5, generator=torch.Generator().manual_seed(rank))
    return RankState.now({"residual": residual}, torch.device("cpu"))


def save(folder: CheckpointFolder, step: int, workers: int = 2) -> None:
    """As if by several ranks: all others first, then the leader, whose barrier they have passed."""
    for rank in reversed(range(workers)):
        folder.save(
            shared=shared(step) if rank == 0 else None, rank=rank, own=own(rank), step=step, barrier=lambda: None
        )


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    assert folder.latest_step() is None
    save(folder, 7)
    assert folder.latest_step() == 7
    loaded = folder.load_shared(7, DIGEST)
    assert torch.equal(loaded.model["weight"], torch.arange(4.0))
    assert {**vars(loaded), "model": None} == {**vars(shared(7)), "model": None}
    for rank in range(2):
        mine = folder.load_own(7, rank, workers_then=2, workers_now=2)
        assert torch.equal(mine.memory["residual"], own(rank).memory["residual"])


def test_random_sequences_go_on(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    save(folder, 1)
    expected = torch.rand(3)
    folder.load_own(1, 0, workers_then=2, workers_now=2).restore_generators(torch.device("cpu"))
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("workers", [1, 2, 4, 5])
def test_residuals_keep_their_sum_when_workers_come_or_go(tmp_path: Path, workers: int) -> None:
    folder = CheckpointFolder(tmp_path)
    save(folder, 3, workers=4)
    before = sum(own(rank).memory["residual"] for rank in range(4))
    after = sum(
        folder.load_own(3, rank, workers_then=4, workers_now=workers).memory["residual"] for rank in range(workers)
    )
    assert torch.allclose(before, after, rtol=0, atol=1e-6)


def test_the_two_newest_are_kept_and_leftovers_removed(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    (tmp_path / "checkpoint" / "step-1.partial").mkdir(parents=True)
    for step in (5, 10, 100):
        save(folder, step)
    names = sorted(path.name for path in (tmp_path / "checkpoint").iterdir())
    assert names == ["LATEST", "step-10", "step-100"]


def test_a_checkpoint_is_the_latest_only_when_every_rank_has_written(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    save(folder, 1)

    class Lost(Exception):
        """A rank that died."""

    def die() -> None:
        raise Lost

    with pytest.raises(Lost):
        folder.save(shared=shared(2), rank=0, own=own(0), step=2, barrier=die)
    assert folder.latest_step() == 1
    assert not folder.path(2).exists()
    save(folder, 2)
    assert folder.latest_step() == 2


@pytest.mark.parametrize("name", ["state.pt", "rank-0.pt"])
@pytest.mark.parametrize("spoil", ["truncate", "empty", "text", "remove"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str, spoil: str) -> None:
    folder = CheckpointFolder(tmp_path)
    save(folder, 1)
    path = folder.path(1) / name
    data = path.read_bytes()
    contents = {"truncate": data[: len(data) // 2], "empty": b"", "text": b"hello"}
    if spoil == "remove":
        path.unlink()
    else:
        path.write_bytes(contents[spoil])
    with pytest.raises(BadInput) as refused:
        folder.load_shared(1, DIGEST) if name == "state.pt" else folder.load_own(1, 0, workers_then=2, workers_now=3)
    assert str(path) in refused.value.message


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    save(folder, 1)
    with pytest.raises(BadInput, match="another task"):
        folder.load_shared(1, "of another run")


def test_nothing_in_a_checkpoint_is_run(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    save(folder, 1)
    torch.save({"schema": 1, "digest": DIGEST, "model": print}, folder.path(1) / "state.pt")
    with pytest.raises(BadInput, match=r"damaged|not a checkpoint"):
        folder.load_shared(1, DIGEST)


@pytest.mark.parametrize("text", ["", "step-", "step-9\n", "../../etc", "step-9 x"])
def test_a_latest_that_names_nothing_is_refused(tmp_path: Path, text: str) -> None:
    folder = CheckpointFolder(tmp_path)
    save(folder, 1)
    (tmp_path / "checkpoint" / "LATEST").write_text(text)
    with pytest.raises(BadInput, match="no checkpoint"):
        folder.latest_step()


def test_workers_and_the_stop_rule_may_change_between_attempts_the_task_may_not() -> None:
    def digest(**changes: object) -> str:
        return run_digest(RunSpec.model_validate_json(json.dumps(toy_spec(**changes))))

    assert digest() == digest(shares=(1, 1), stop={"max_epochs": 9})
    assert len({digest(), digest(task="easy"), digest(seed=1), digest(compression={"name": "topk", "ratio": 0.1})}) == 4


def test_a_fingerprint_tells_the_smallest_difference(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 3)
    before = parameters_sha256(model)
    save_model(tmp_path / "model.pt", model)
    model.weight.data[0, 0] = torch.nextafter(model.weight.data[0, 0], torch.tensor(9.0))
    assert parameters_sha256(model) != before
    model.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    assert parameters_sha256(model) == before
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]
