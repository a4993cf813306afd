"""Workers that disagree say so before the first step; one that is lost in an exchange is named by the others."""

from __future__ import annotations

import ast
import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from hetopt.core.errors import BadInput
from hetopt.trainer.agreement import meet_one_version
from hetopt.trainer.comm.peers import explain_loss, in_words, workers
from tests.forks import ended
from tests.sources import modules

from . import peers_program as program


def outcome(world_size, folder, way):
    """What each worker said that was not lost."""
    ranks = range(world_size)
    done = ended(
        *(["-m", "tests.trainer_pieces.peers_program", str(rank), str(world_size), str(folder), way] for rank in ranks)
    )
    assert [one.returncode for one in done] == [9 if rank == program.LOST else 0 for rank in range(world_size)]
    return {
        rank: json.loads((folder / f"rank-{rank}.json").read_text())
        for rank in range(world_size)
        if rank != program.LOST
    }


def test_a_worker_that_dies_is_named_and_is_not_this_worker_s_failure(tmp_path):
    said = outcome(2, tmp_path, "die")[0]
    assert said["kind"] == "LostPeer"
    assert said["loss"].startswith("a worker at 127.0.0.1 left in the middle of an exchange: ")
    assert said["peer_loss"]


def test_a_worker_that_hangs_is_named_by_roll_call_and_disagreement_is_no_hang(tmp_path):
    for said in outcome(3, tmp_path, "hang").values():
        assert said["disagreement"].startswith("Worker 1 would exchange gradients by topk 0.01 by all_gather")
        assert "the others by identity by all_reduce" in said["disagreement"]
        assert said["kind"] == "HungPeer"
        assert said["loss"] == "worker 1 did not come to an exchange in time."
        assert not said["peer_loss"]


@pytest.mark.parametrize(
    ("error", "start"),
    [
        ("Read error [10.0.0.2]:48012: Connection reset by peer", "a worker at 10.0.0.2 left"),
        ("Connection closed by peer [10.0.0.9]:1", "a worker at 10.0.0.9 left"),
        ("Timed out waiting 5000ms for recv operation to complete", "the workers did not all come"),
    ],
)
def test_what_a_backend_says_is_read(error, start):
    assert str(explain_loss(RuntimeError(error), None, 0, range(3))).startswith(start)


def test_a_connection_that_breaks_before_anybody_is_known_is_said_in_words_once() -> None:
    raw = "[/pytorch/pair.cc:553] Connection closed by peer [10.77.0.101]:17824. This is typically caused by ..."
    said = in_words(raw)
    assert said.startswith("a worker at 10.77.0.101 left in the middle of an exchange: ")
    assert in_words(said) == said
    assert in_words("index out of range") == "index out of range"
    assert workers([1, 2, 5]) == "workers 1, 2 and 5"


def met(*versions: str) -> list[str]:
    """What each of some workers is told when they meet in one store."""
    store = dist.HashStore()

    def worker(rank: int) -> str:
        try:
            meet_one_version(store, rank, len(versions), versions[rank])
        except BadInput as refused:
            return refused.message
        return ""

    with ThreadPoolExecutor(len(versions)) as pool:
        return list(pool.map(worker, range(len(versions))))


def test_workers_of_one_version_meet_and_of_two_are_all_refused():
    assert met("1.0", "1.0", "1.0") == ["", "", ""]
    (said,) = set(met("1.0", "1.1", "1.0"))
    assert said.endswith("worker 0 has 1.0, worker 1 has 1.1, worker 2 has 1.0.")


def test_nobody_makes_a_group_before_versions_were_compared():
    for name, path in modules().items():
        if not name.startswith("hetopt.trainer"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef):
                continue
            calls = [each.func for each in ast.walk(node) if isinstance(each, ast.Call)]
            called = {each.attr if isinstance(each, ast.Attribute) else getattr(each, "id", "") for each in calls}
            assert "init_process_group" not in called or "meet_one_version" in called, f"{name}.{node.name}"
