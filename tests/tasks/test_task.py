"""A task refuses the impossible when it is made, and a reference finds the task or says in one sentence why not.

Evaluation sums add up over any partition, metrics follow from them, and the optimizer clips the whole gradient.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from hetopt.core.errors import BadInput
from hetopt.core.run_rules import BUNDLED
from hetopt.trainer.data.fetch import TensorPairs
from hetopt.trainer.task import NO_TARGET, Target, Task, TaskData, evaluation_sums
from hetopt.trainer.tasks.load import load_task
from hetopt.trainer.tasks.recipes import (
    classification,
    clip_before_step,
    epoch_decay,
    language_model,
    sgd,
    step_decay,
)


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
    assert not NO_TARGET.reached({"loss": value})
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
        ("nowhere.py:task", "nowhere.py is not there", "path"),
        ("nowhere:task", "no module 'nowhere'", "folder that holds it"),
        ("no.where:task", "no module 'no.where'", "folder that holds it"),
        ("mine.py:taks", "no task in mine.py called 'taks'", "did you mean 'task'"),
        ("mine:number", "of type int, not a hetopt Task", "hetopt.trainer.task.Task"),
        ("mine:data", "missing 1 required positional argument", "Fix"),
        ("mine.py:broken", r"mine.py, line \d+ failed: RuntimeError: no such thing second line: Fix", "Fix"),
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
        ("x = 1\nraise ValueError('bad day')", r"bad.py, line 2 failed: ValueError: bad day"),
        ("import sys\nsys.exit(3)", r"bad.py, line 2 failed: SystemExit: 3"),
        ("x = (", r"bad.* failed: SyntaxError: .* \(bad.py, line 1\)"),
        ("import not_installed_at_all", r"bad.py, line 1 failed: ModuleNotFoundError: No module named"),
        ("assert False", r"bad.py, line 1 failed: AssertionError"),
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


SAMPLES = 37
GENERATOR = torch.Generator().manual_seed(0)
VECTORS = TensorPairs(
    torch.randn(SAMPLES, 6, generator=GENERATOR), torch.randint(0, 7, (SAMPLES,), generator=GENERATOR)
)
TOKENS = torch.randint(0, 11, (SAMPLES, 6), generator=GENERATOR)
TEXT = TensorPairs(TOKENS[:, :-1], TOKENS[:, 1:])


def build_classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 7))


def build_tagger() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(11, 8), nn.Dropout(0.5), nn.Linear(8, 11))


CLASSIFIER = classification(
    name="vectors",
    model=build_classifier,
    data=lambda folder: TaskData(train=VECTORS, evaluation=VECTORS),
    optimizer=sgd(0.1),
    target=Target(metric="accuracy", value=0.9),
    batch_size=8,
    evaluation_batch_size=5,
)
TAGGER = language_model(
    name="text",
    model=build_tagger,
    data=lambda folder: TaskData(train=TEXT, evaluation=TEXT),
    optimizer=sgd(0.1),
    target=Target(metric="perplexity", value=2.0, higher_is_better=False),
    batch_size=8,
    evaluation_batch_size=5,
)


@pytest.mark.parametrize(("task", "dataset"), [(CLASSIFIER, VECTORS), (TAGGER, TEXT)])
@settings(max_examples=25)
@given(order=st.permutations(range(SAMPLES)), cuts=st.lists(st.integers(0, SAMPLES), max_size=4))
def test_sums_over_any_partition_equal_the_whole(
    task: Task, dataset: TensorPairs, order: list[int], cuts: list[int]
) -> None:
    model = task.model()
    whole = evaluation_sums(task, model, dataset, range(SAMPLES))
    edges = [0, *sorted(cuts), SAMPLES]
    parts = [evaluation_sums(task, model, dataset, order[start:end]) for start, end in itertools.pairwise(edges)]
    assert {name: sum(part.get(name, 0.0) for part in parts) for name in whole} == pytest.approx(whole, rel=1e-5)


def test_evaluation_does_not_disturb_training() -> None:
    model = CLASSIFIER.model()
    first = evaluation_sums(CLASSIFIER, model, VECTORS, range(SAMPLES))
    assert model.training  # and dropout was off in between:
    assert evaluation_sums(CLASSIFIER, model, VECTORS, range(SAMPLES)) == first
    model.eval()
    evaluation_sums(CLASSIFIER, model, VECTORS, range(3))
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_classification_metrics_are_what_their_names_say() -> None:
    logits = torch.eye(7)[[0, 1, 2, 3]] * 9 - torch.arange(7) * 0.1  # predicts 0..3; class 6 is never in the top five
    labels = torch.tensor([0, 1, 2, 6])
    metrics = CLASSIFIER.metrics(
        {name: float(value) for name, value in CLASSIFIER.sums(nn.Identity(), (logits, labels)).items()}, 4
    )
    assert metrics["accuracy"] == 0.75
    assert metrics["top5_accuracy"] == 0.75
    assert metrics["loss"] == pytest.approx(float(nn.functional.cross_entropy(logits, labels)))


def test_few_classes_have_no_top5() -> None:
    sums = CLASSIFIER.sums(nn.Identity(), (torch.randn(4, 5), torch.zeros(4, dtype=torch.int64)))
    assert set(sums) == {"loss", "correct"}


def test_perplexity_of_a_uniform_guess_is_the_vocabulary() -> None:
    class Uniform(nn.Module):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return torch.zeros(*tokens.shape, 11)

    sums = evaluation_sums(TAGGER, Uniform(), TEXT, range(SAMPLES))
    assert TAGGER.metrics(sums, SAMPLES)["perplexity"] == pytest.approx(11, rel=1e-5)
    assert sums["tokens"] == SAMPLES * 5
    assert TAGGER.metrics({"loss": 1e6, "tokens": 10.0}, 2)["perplexity"] == math.inf


def test_a_batch_of_another_shape_is_bad_input() -> None:
    with pytest.raises(BadInput, match="two tensors"):
        CLASSIFIER.loss(build_classifier(), {"inputs": torch.zeros(2, 6)})
    with pytest.raises(BadInput, match="two tensors"):
        CLASSIFIER.sums(build_classifier(), torch.zeros(2, 6))


@given(norm=st.floats(0.01, 100), scale=st.floats(0.01, 100))
@settings(max_examples=25)
def test_clipping_bounds_the_norm_of_the_whole_gradient_and_keeps_its_direction(norm: float, scale: float) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    before = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, scale)
    gradient = torch.full_like(before, scale)
    clip_before_step(torch.optim.SGD(model.parameters(), lr=1.0), norm).step()
    step = before - torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    expected = gradient * min(1.0, norm / float(gradient.norm()))
    assert torch.allclose(step, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("learning_rate", [0.0, -1.0, math.nan, math.inf])
def test_impossible_learning_rates_are_refused(learning_rate: float) -> None:
    with pytest.raises(BadInput, match="learning rate"):
        sgd(learning_rate)


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        (step_decay(123, 82, factor=0.1), {0: 1, 81.99: 1, 82: 0.1, 122: 0.1, 123: 0.01, 500: 0.01}),
        (epoch_decay(after=4, factor=0.5), {0: 1, 3.99: 1, 4: 0.5, 4.9: 0.5, 5: 0.25, 7.5: 0.0625}),
    ],
)
def test_decay(schedule: Callable[[float], float], factors: dict[float, float]) -> None:
    assert [schedule(epoch) for epoch in factors] == pytest.approx(list(factors.values()))
