"""A task refuses the impossible when it is made, and a reference finds the task or says in one sentence why not."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from hetopt.core.errors import BadInput
from hetopt.core.run_rules import BUNDLED
from hetopt.trainer.data.fetch import TensorPairs
from hetopt.trainer.task import Target, TaskData
from hetopt.trainer.tasks.load import load_task
from hetopt.trainer.tasks.recipes import classification, sgd


def small_data(folder: Path | None) -> TaskData:
    pairs = TensorPairs(torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64))
    return TaskData(train=pairs, evaluation=pairs)


SMALL = classification(
    name="small",
    model=lambda: nn.Linear(3, 2),
    data=small_data,
    optimizer=sgd(0.1),
    target=Target(metric="accuracy", value=0.9),
    batch_size=64,
)

TASK_FILE = """
from hetopt.trainer.data.fetch import TensorPairs
from hetopt.trainer.task import Target, TaskData
from hetopt.trainer.tasks.recipes import classification, sgd
import torch

def data(folder):
    pairs = TensorPairs(torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64))
    return TaskData(train=pairs, evaluation=pairs)

def make():
    return classification(name="mine", model=lambda: torch.nn.Linear(3, 2), data=data, optimizer=sgd(0.1),
                          batch_size=8, target=Target(metric="accuracy", value=0.9))

task = make()
number = 3

def broken():
    raise RuntimeError("no such thing\\nsecond line")
"""


# --- Target -----------------------------------------------------------------------------------------------------------


@given(value=st.floats(allow_nan=False, allow_infinity=False), goal=st.floats(allow_nan=False, allow_infinity=False))
def test_a_metric_reaches_its_target_from_exactly_one_side(value: float, goal: float) -> None:
    up = Target(metric="m", value=goal).reached({"m": value})
    down = Target(metric="m", value=goal, higher_is_better=False).reached({"m": value})
    assert up or down
    assert (up and down) == (value == goal)


# --- Task -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"name": ""}, "named"),
        ({"name": "a:b"}, "a:b"),
        ({"model": nn.Linear(1, 1).weight}, "model that cannot be called"),
        ({"data": None}, "data that cannot be called"),
        ({"target": 0.9}, "not a Target"),
        ({"batch_size": 0}, "batch_size 0"),
        ({"batch_size": 1.5}, "batch_size 1.5"),
        ({"evaluation_batch_size": -1}, "evaluation_batch_size -1"),
        ({"learning_rate_rule": "cubic"}, "'cubic'"),
    ],
)
def test_impossible_tasks_are_refused(changes: dict[str, object], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        dataclasses.replace(SMALL, **changes)  # type: ignore[arg-type]  # the wrong types are the point


def test_data_must_be_map_style_and_not_empty() -> None:
    good = TensorPairs(torch.zeros(1, 1), torch.zeros(1))
    with pytest.raises(BadInput, match="training data is a generator"):
        TaskData(train=(x for x in range(3)), evaluation=good)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="evaluation data has no samples"):
        TaskData(train=good, evaluation=TensorPairs(torch.zeros(0, 1), torch.zeros(0)))


@given(batch=st.integers(1, 4096))
def test_learning_rate_rules(batch: int) -> None:
    scale = {
        rule: dataclasses.replace(SMALL, learning_rate_rule=rule).learning_rate_scale(batch)
        for rule in ("none", "linear", "sqrt")
    }
    assert scale["none"] == 1.0
    assert scale["linear"] == batch / 64
    assert scale["sqrt"] ** 2 == pytest.approx(scale["linear"])
    assert SMALL.learning_rate_scale(SMALL.batch_size) == 1.0


# --- load_task --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BUNDLED)
def test_every_bundled_name_loads_the_task_of_that_name(name: str) -> None:
    assert load_task(name).name == name


@pytest.fixture
def user_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with a user's task in it; the import path and loaded modules are put back afterwards."""
    (tmp_path / "mine.py").write_text(TASK_FILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return tmp_path


@pytest.mark.parametrize("attribute", ["task", "make"])
@pytest.mark.parametrize("place", ["mine.py", "mine"])
def test_a_users_task_is_found_in_a_file_or_a_module(user_folder: Path, place: str, attribute: str) -> None:
    assert load_task(f"{place}:{attribute}").name == "mine"


def test_a_file_elsewhere_may_import_its_neighbour(user_folder: Path) -> None:
    folder = user_folder / "deep" / "er"
    folder.mkdir(parents=True)
    (folder / "neighbour.py").write_text("NAME = 'near'")
    (folder / "own.py").write_text("from neighbour import NAME\n" + TASK_FILE.replace('"mine"', "NAME"))
    assert load_task("deep/er/own.py:make").name == "near"


@pytest.mark.parametrize(
    ("reference", "says", "hint"),
    [
        ("digit", "no bundled task called 'digit'", "did you mean 'digits'"),
        ("resnet20-cifar100", "no bundled task", "did you mean 'resnet20-cifar10'"),
        ("zzzzzz", "no bundled task", "choose one of: digits, "),
        ("", "'' is neither a bundled task", "file.py:attribute"),
        ("mine.py", "names a file but no task", "mine.py:task"),
        (":task", "does not name a task", "both parts"),
        ("mine.py:", "does not name a task", "both parts"),
        ("nowhere.py:task", "no file nowhere.py", "path"),
        ("nowhere:task", "no module 'nowhere'", "folder that holds it"),
        ("no.where:task", "no module 'no.where'", "folder that holds it"),
        ("mine.py:taks", "no task in mine.py called 'taks'", "did you mean 'task'"),
        ("mine:number", "of type int, not a hetopt Task", "hetopt.trainer.task.Task"),
        ("mine:data", "missing 1 required positional argument", "Fix"),
        ("mine.py:broken", r"mine.py, line \d+, failed: RuntimeError: no such thing: Fix", "Fix"),
    ],
)
def test_a_reference_that_names_no_task(user_folder: Path, reference: str, says: str, hint: str) -> None:
    with pytest.raises(BadInput, match=says) as caught:
        load_task(reference)
    assert hint in (caught.value.hint or "")
    assert "stand-in" not in (caught.value.hint or ""), "it is for rehearsals, and nobody's job"
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = 1\nraise ValueError('bad day')", r"bad.py, line 2, failed: ValueError: bad day"),
        ("import sys\nsys.exit(3)", r"bad.py, line 2, failed: SystemExit: 3"),
        ("x = (", r"bad.py, line 1, failed: SyntaxError"),
        ("import not_installed_at_all", r"bad.py, line 1, failed: ModuleNotFoundError: No module named"),
        ("assert False", r"bad.py, line 1, failed: AssertionError: \(no message\)"),
    ],
)
@pytest.mark.parametrize("place", ["bad.py", "bad"])
def test_a_users_file_that_fails_is_named_with_its_line(user_folder: Path, place: str, text: str, says: str) -> None:
    (user_folder / "bad.py").write_text(text)
    with pytest.raises(BadInput, match=says):
        load_task(f"{place}:task")


def test_a_package_whose_own_import_fails_is_not_called_missing(user_folder: Path) -> None:
    (user_folder / "package").mkdir()
    (user_folder / "package" / "__init__.py").write_text("import not_installed_at_all")
    (user_folder / "package" / "inner.py").write_text(TASK_FILE)
    with pytest.raises(BadInput, match="No module named 'not_installed_at_all'"):
        load_task("package.inner:task")
