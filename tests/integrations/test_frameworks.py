"""Scripts that train with a framework take the steps of one machine on two unequal workers, and report its figures."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.trainer.test_session_cases import LABELS, distance
from torch import Tensor

from hetopt.core.errors import BadInput
from hetopt.integrations.wording import ACCELERATE, LIGHTNING, TRANSFORMERS, in_words
from hetopt.trainer.session.denominators import EARLIER_HINT, NUMBERS_HINT, WEIGHT_HINT
from tests.disturbance import PATIENCE_S


class Case:
    """What became of a script in each of the ways in which it ran."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, name: str) -> dict[str, Any]:
        return {label: torch.load(self.folder / name / f"{label}.pt") for label in LABELS}


NAMES = (
    "trainer_tokens", "trainer_resumed", "trainer_smoothed", "accelerated", "accelerated_tokens", "lightning_module",
    "lightning_manual", "lightning_scheduled",
)  # fmt: skip
REFUSED = {
    "trainer_statistic": (
        "comes back to each of them",
        "self.run.gather(rows)",
        'Trainer(..., session={"accept_inexact": ("whole_batch",)})',
    ),
    "accelerated_statistic": (
        "comes back to each of them",
        "accelerator.run.gather(rows)",
        'Accelerator(session={"accept_inexact"',
    ),
    "lightning_statistic": (
        "comes back to each of them",
        "self.trainer.strategy.run.gather(rows)",
        "HetoptStrategy(accept_inexact=",
    ),
    "accelerated_exam_first": ("prepare the loader that trains before those that evaluate",),
    "lightning_skipped": ("training_step gave None, which skips the batch",),
}
"""What both workers say."""
HINTS = {
    "accelerate": (ACCELERATE, "pass accelerator.backward(loss, weight=n), n being", "accelerator.run.gather("),
    "transformers": (TRANSFORMERS, "num_items_in_batch) of your Trainer return n, n being", "self.run.gather("),
    "lightning": (LIGHTNING, "backward(self, loss) of your module, n being", "self.trainer.strategy.run.gather("),
}
EXAMPLES = ("with_transformers", "with_accelerate", "with_lightning")


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    for name in ("accelerate", "lightning", "transformers"):
        pytest.importorskip(name)
    folder = tmp_path_factory.mktemp("frameworks")
    said = subprocess.run(
        [sys.executable, "-m", "tests.integrations.server", str(folder)],
        cwd=Path(__file__).resolve().parents[2],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=4 * PATIENCE_S,
        check=False,
    )
    assert said.returncode == 0, said.stderr
    return Case(folder)


def far(one: Any, other: Any, where: str = "") -> str:
    """Where two results differ by more than rounding; empty: nowhere. Paths and other texts are not compared."""
    if isinstance(one, dict):
        if set(one) != set(other):
            return f"{where}: {sorted(one)} and {sorted(other)}"
        return next((found for key in one if (found := far(one[key], other[key], f"{where}/{key}"))), "")
    if isinstance(one, list):
        if len(one) != len(other):
            return f"{where}: {len(one)} and {len(other)}"
        pairs = enumerate(zip(one, other, strict=True))
        return next((found for index, pair in pairs if (found := far(*pair, f"{where}/{index}"))), "")
    if isinstance(one, Tensor):
        return "" if torch.allclose(one, other, rtol=1e-3, atol=1e-6) else where
    if isinstance(one, str):
        return ""
    return "" if math.isclose(one, other, rel_tol=1e-5, abs_tol=1e-6) else f"{where}: {one} and {other}"


def check_steps(told: dict[str, Any]) -> None:
    assert {label: one["said"] for label, one in told.items()} == dict.fromkeys(LABELS, "")
    plain = told["plain"]["steps"]
    assert plain
    assert distance(plain, told["alone"]["steps"]) == 0.0
    for label in ("two-0", "two-1"):
        assert distance(plain, told[label]["steps"]) < 1e-5


@pytest.mark.parametrize("name", [*EXAMPLES, "lightning_weighted"])
def test_examples_train_as_the_plain_scripts_that_they_were(name: str, case: Case) -> None:
    check_steps(case(name))


@pytest.mark.parametrize("name", NAMES)
def test_gradients_steps_and_figures_are_those_of_one_machine(name: str, case: Case) -> None:
    told = case(name)
    check_steps(told)
    plain = told["plain"]
    if name != "trainer_resumed":  # which also tells what was saved
        for label in LABELS[1:]:
            assert far(plain["result"], told[label]["result"]) == ""


def test_loggers_of_lightning_write_for_the_leader_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """They ask what Lightning took from the environment as it was imported, which may be before a worker is one."""
    rank_zero = pytest.importorskip("lightning.pytorch.utilities.rank_zero").rank_zero_only
    from hetopt.integrations.lightning import HetoptStrategy

    monkeypatch.setattr(rank_zero, "rank", 0, raising=False)
    for name, value in (("RANK", "1"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    HetoptStrategy()
    assert rank_zero(lambda: "written")() is None


@pytest.mark.parametrize("name", HINTS)
def test_refusals_name_what_the_user_of_a_framework_has(name: str) -> None:
    words, weight, gather = HINTS[name]
    for hint, told in ((WEIGHT_HINT, weight), (NUMBERS_HINT, gather), (EARLIER_HINT, gather)):
        with pytest.raises(BadInput) as refused, in_words(words):
            raise BadInput("The loss is one.", hint=hint)
        assert told in str(refused.value)
        assert not re.search(r"(?<![\w.])run\.|session\(", str(refused.value))


@pytest.mark.parametrize("name", REFUSED)
def test_what_parts_do_not_add_up_to_is_refused_in_frameworks_too(name: str, case: Case) -> None:
    told = case(name)
    assert distance(told["plain"]["steps"], told["alone"]["steps"]) == 0.0
    assert told["alone"]["said"] == ""
    for label in ("two-0", "two-1"):
        assert all(words in told[label]["said"] for words in REFUSED[name]), told[label]["said"]


def test_transformers_checkpoint_goes_on_in_mid_epoch_and_the_leader_alone_saves(case: Case) -> None:
    told = {label: one["result"] for label, one in case("trainer_resumed").items()}
    for label in LABELS[1:]:
        assert far(told["plain"]["parts"], told[label]["parts"]) == ""
    first, second = told["plain"]["parts"]
    assert (len(first["history"]), second["history"][-1]["step"]) == (5, 10)
    assert told["alone"]["saved"] == told["plain"]["saved"]
    # Random numbers are each worker's own; all else is written once.
    extra = set(told["two-0"]["saved"]) - set(told["plain"]["saved"])
    assert {Path(one).name for one in extra} == {"rng_state.pth"}
    assert all("worker-1" in one for one in extra)


def test_trackers_are_given_means_over_all_workers_by_the_leader_alone(case: Case) -> None:
    told = {label: one["result"] for label, one in case("logged").items()}
    plain = told["plain"]["rows"]
    assert [step for step, _ in plain] == list(range(1, 8))
    for label in ("alone", "two-0"):
        for rows in told[label]["rows"].values():
            assert far(plain, rows) == ""
    assert not any(told["two-1"]["rows"].values())
    assert far(plain[-1][1], told["two-1"]["last"]) == ""


def test_tensorboard_reads_what_its_writer_was_given(case: Case) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    plain = case("logged")["plain"]["result"]["rows"]
    read = accumulator.EventAccumulator(str(case.folder / "logged" / "two"))
    read.Reload()
    assert far([row["loss"] for _, row in plain], [one.value for one in read.Scalars("loss")]) == ""
