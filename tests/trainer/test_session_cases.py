"""Scripts of many kinds train on two unequal workers as on one machine, or are refused in a sentence that says why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.forks import all_end_well

from .cases import hub, meetings, memories, scripts, strangers

Case = Callable[[str, str], dict[str, Any]]

LABELS = ("plain", "alone", "two-0", "two-1")
JUDGED_STEPS = 3
"""Later ones differ by more than rounding, which training amplifies."""


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """What became of a script in one of the ways in which it ran."""
    return served(tmp_path_factory.mktemp("cases"))


@pytest.fixture(scope="module")
def hub_case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """The same, of scripts that need other libraries."""
    for name in ("accelerate", "lightning", "peft", "transformers"):
        pytest.importorskip(name)
    return served(tmp_path_factory.mktemp("hub"), "hub")


def served(folder: Path, *which: str) -> Case:
    all_end_well(["-m", "tests.trainer.cases.server", str(folder), *which])

    def get(name: str, label: str) -> dict[str, Any]:
        path = folder / name / f"{label}.pt"
        assert path.exists(), f"{name} hung ({label})"
        told: dict[str, Any] = torch.load(path)
        return told

    return get


def distance(plain: list[list[Tensor]], other: list[list[Tensor]]) -> float:
    """The largest relative distance of a step's gradients; as many steps of as many optimizers."""
    assert [len(steps) for steps in other] == [len(steps) for steps in plain]
    pairs = [
        pair for one, two in zip(plain, other, strict=True) for pair in list(zip(one, two, strict=True))[:JUDGED_STEPS]
    ]
    return max((float((a - b).norm() / a.norm().clamp_min(1e-12)) for a, b in pairs), default=0.0)


@pytest.mark.parametrize("name", [one.__name__ for one in scripts.EXACT])
def test_gradients_are_those_of_one_machine(name: str, case: Case) -> None:
    check_exact(name, case)


@pytest.mark.parametrize("name", [one.__name__ for one in scripts.THREE])
def test_three_workers_do_as_one_machine_with_other_seeds_too(name: str, case: Case) -> None:
    plain, first, *others = (case(name, label) for label in ("plain-other", "three-0", "three-1", "three-2"))
    assert [one["said"] for one in (plain, first, *others)] == [""] * 4
    assert distance(plain["steps"], case(name, "plain")["steps"]) > 1e-2, "the seeds are others"
    for told in (first, *others):
        assert distance(plain["steps"], told["steps"]) < 1e-5


def test_batches_that_are_drawn_to_evaluate_are_whole_on_all_workers(case: Case) -> None:
    plain, alone, *workers = (case("drawn_batches", label)["result"] for label in LABELS)
    assert plain == alone
    for told in workers:
        assert told == workers[0]
        assert told == pytest.approx(plain, rel=1e-5)


@pytest.mark.parametrize("name", [one.__name__ for one in scripts.NARROW])
def test_narrow_types_round_and_no_more(name: str, case: Case) -> None:
    plain, alone, *workers = (case(name, label)["steps"] for label in LABELS)
    assert distance(plain, alone) == distance(*workers) == 0.0
    assert distance(plain, workers[0]) < 1e-2


def test_rounding_that_is_amplified_is_so_alike_on_all_workers(case: Case) -> None:
    plain, alone, *workers = (case("lbfgs_rounded", label)["steps"] for label in LABELS)
    assert distance(plain, alone) == distance(*workers) == 0.0
    assert distance([steps[:1] for steps in plain], [steps[:1] for steps in workers[0]]) < 1e-5
    assert distance(plain, workers[0]) < 2e-4


@pytest.mark.parametrize("name", [one.__name__ for one in scripts.EXACT if "statistics" in one.__name__])
def test_what_layers_know_of_the_data_is_what_one_machine_knows(name: str, case: Case) -> None:
    plain, alone, *workers = (case(name, label)["result"] for label in LABELS)
    assert torch.equal(plain, alone)
    for told in workers:
        assert torch.equal(told, workers[0])
        assert torch.allclose(told, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [one.__name__ for one in hub.EXACT])
def test_gradients_of_other_libraries_loops_are_too(name: str, hub_case: Case) -> None:
    check_exact(name, hub_case)


@pytest.mark.parametrize("name", [one.__name__ for one in strangers.EXACT])
def test_what_a_refusal_says_is_exact_when_it_is_done(name: str, case: Case) -> None:
    check_exact(name, case)


@pytest.mark.parametrize(("name", "words"), [(one.__name__, words) for one, (words, _) in strangers.REMEDIES.items()])
def test_what_is_of_the_whole_batch_is_refused_with_what_to_do(name: str, words: tuple[str, ...], case: Case) -> None:
    assert case(name, "alone")["said"] == ""
    for label in ("two-0", "two-1"):
        told = case(name, label)
        assert not any(told["steps"]), "before the first step"
        assert all(word in told["said"] for word in words)


@pytest.fixture(scope="module")
def more_case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Scripts of tutorials."""
    return served(tmp_path_factory.mktemp("more"), "more")


@pytest.mark.slow
@pytest.mark.parametrize("name", [one.__name__ for one in strangers.MORE])
def test_scripts_of_tutorials_train_as_on_one_machine(name: str, more_case: Case) -> None:
    check_exact(name, more_case)
    plain, *others = (more_case(name, label)["steps"] for label in ("plain-other", "three-0", "three-1", "three-2"))
    for one in others:
        assert distance(plain, one) < 1e-5


@pytest.fixture(scope="module")
def memory_case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Scripts that keep something of a batch for the next."""
    return served(tmp_path_factory.mktemp("memories"), "memories")


@pytest.mark.parametrize("name", [one.__name__ for one in memories.EXACT])
def test_what_is_kept_of_all_samples_or_row_by_row_is_exact(name: str, memory_case: Case) -> None:
    check_exact(name, memory_case)


@pytest.mark.parametrize(("name", "word"), [(one.__name__, word) for one, word in memories.REFUSED.items()])
def test_what_is_kept_of_own_samples_is_refused_where_a_loss_meets_it(name: str, word: str, memory_case: Case) -> None:
    assert memory_case(name, "alone")["said"] == ""
    told = [memory_case(name, label) for label in ("two-0", "two-1")]
    steps = 2 if name.startswith("from_the_second") else 1
    assert [len(rows) for one in told for rows in one["steps"]] == [steps] * 2, "no step by such a loss"
    assert all("an earlier batch" in one["said"] and "run.gather(rows.detach())" in one["said"] for one in told)
    assert any(word in one["said"] for one in told)


def test_parameters_that_are_changed_by_own_samples_are_named_at_once(memory_case: Case) -> None:
    assert memory_case("changed_by_hand", "alone")["said"] == ""
    for label in ("two-0", "two-1"):
        said = memory_case("changed_by_hand", label)["said"]
        assert "memories.py, line" in said
        assert "changes parameter 0.weight by this worker's samples" in said
        assert "run.backward(loss)" in said


@pytest.fixture(scope="module")
def meeting_case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Scripts in which samples meet others of their batch."""
    return served(tmp_path_factory.mktemp("meetings"), "meetings")


@pytest.mark.parametrize("name", [one.__name__ for one in meetings.EXACT])
def test_samples_that_meet_all_others_or_none_are_exact(name: str, meeting_case: Case) -> None:
    check_exact(name, meeting_case)


@pytest.mark.parametrize(
    ("name", "words", "steps"),
    [
        (one.__name__, words, steps)
        for steps, some in ((0, meetings.REFUSED), (1, meetings.LATER), (256, meetings.MUCH_LATER))
        for one, words in some.items()
    ],
)
def test_samples_that_meet_others_of_their_share_alone_are_refused_at_once(
    name: str, words: tuple[str, ...], steps: int, meeting_case: Case
) -> None:
    assert meeting_case(name, "alone")["said"] == ""
    told = [meeting_case(name, label) for label in ("two-0", "two-1")]
    assert [sum(map(len, one["steps"])) for one in told] == [steps] * 2
    assert any(all(word in one["said"] for word in words) for one in told), told[0]["said"]
    assert all("of parts are not the gradient of the batch" in one["said"] or "samples" in one["said"] for one in told)


def check_exact(name: str, case: Case) -> None:
    told = {label: case(name, label) for label in LABELS}
    assert {label: one["said"] for label, one in told.items()} == dict.fromkeys(LABELS, "")
    assert distance(told["plain"]["steps"], told["alone"]["steps"]) == 0.0
    for label in ("two-0", "two-1"):
        if name == "loaded_on_one" and label == "two-1":
            continue  # it did not do the steps before the session
        assert distance(told["plain"]["steps"], told[label]["steps"]) < 1e-5


@pytest.mark.parametrize(("name", "words"), [(one.__name__, words) for one, words in scripts.REFUSED.items()])
def test_what_cannot_be_is_said_in_a_sentence(name: str, words: tuple[str, ...], case: Case) -> None:
    check_refused(name, words, case)


@pytest.mark.parametrize(("name", "words"), [(one.__name__, words) for one, words in hub.REFUSED.items()])
def test_what_other_libraries_have_wrapped_is_too(name: str, words: tuple[str, ...], hub_case: Case) -> None:
    check_refused(name, words, hub_case)


def check_refused(name: str, words: tuple[str, ...], case: Case) -> None:
    said = [case(name, label)["said"] for label in ("two-0", "two-1")]
    if name.startswith("fail"):
        assert "a bad sample" in said.pop()
    for one in said:
        assert all(word in one for word in words), one
        assert name == "group_made_later" or len(one.splitlines()) == 1, one


@pytest.mark.parametrize("name", ["drawn", "drawn_by_readers"])
def test_no_two_samples_draw_alike_and_alone_nothing_changes(name: str, case: Case) -> None:
    plain, alone, *workers = (case(name, label)["result"] for label in LABELS)
    assert torch.equal(plain, alone)
    together = torch.cat(workers)
    assert len(together) == len(plain) == 64
    for column in together.T:
        assert len(set(column.tolist())) == 64
