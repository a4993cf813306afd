"""Code that people bring: every example is in order and learns, and a converted script computes what it did."""

from __future__ import annotations

import difflib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hetopt.core.profile import Profile
from hetopt.trainer.check import check
from hetopt.trainer.data.cursor import SampleCursor
from hetopt.trainer.data.fetch import fetch, set_epoch
from hetopt.trainer.task import evaluation_sums
from hetopt.trainer.tasks.load import load_task
from tests.disturbance import PATIENCE_S
from tests.face.test_predict import lines, measured
from tests.forks import Forked

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TASKS = sorted(path.name for path in EXAMPLES.glob("*.py"))
SCRIPT = EXAMPLES / "script"

EPOCHS = {"vision.py": 2, "characters.py": 6, "transformer.py": 6, "diabetes.py": 3}


@pytest.mark.parametrize("name", TASKS)
def test_an_example_is_in_order(name: str) -> None:
    tied = "are one parameter"
    found = [one for one in check(f"{EXAMPLES / name}:task", None) if tied not in one.text]
    assert found == []


@pytest.mark.parametrize("name", TASKS)
def test_an_example_learns(name: str) -> None:
    """The metric of its target is better after a few epochs."""
    task = load_task(f"{EXAMPLES / name}:task")
    torch.manual_seed(0)
    data, model = task.data(None), task.model()
    optimizer = task.optimizer(model)

    def metric() -> float:
        sums = evaluation_sums(task, model, data.evaluation, range(len(data.evaluation)))
        return task.metrics(sums, len(data.evaluation))[task.target.metric]

    before = metric()
    cursor = SampleCursor(len(data.train), 0)
    model.train()
    while cursor.epoch < EPOCHS[name]:
        batch = cursor.take([task.batch_size])
        set_epoch(data.train, batch.epoch, 0)
        optimizer.zero_grad()
        task.loss(model, fetch(data.train, batch.slice(0).copy())).backward()
        optimizer.step()
    after = metric()
    assert after > 1.5 * before if task.target.higher_is_better else after < 0.85 * before


def test_the_conversion_changes_five_lines_at_most() -> None:
    before, after = ((SCRIPT / name).read_text().splitlines() for name in ("train.py", "train_hetopt.py"))
    stripped = [[line.strip() for line in lines[1:] if line.strip()] for lines in (before, after)]
    changed = [line for line in difflib.ndiff(*stripped) if line[0] == "+"]
    assert 0 < len(changed) <= 5, changed


# The examples run: a task of one's own loads by its path, trains to its target, and judges any split alike.


def test_the_example_is_judged_alike_however_it_is_split() -> None:
    task = load_task(f"{EXAMPLES / 'diabetes.py'}:task")
    torch.manual_seed(0)
    data, model = task.data(None), task.model()
    everyone = range(len(data.evaluation))
    whole = evaluation_sums(task, model, data.evaluation, everyone)
    parts = [evaluation_sums(task, model, data.evaluation, everyone[part::3]) for part in range(3)]
    assert {name: sum(part.get(name, 0.0) for part in parts) for name in whole} == pytest.approx(whole)


@pytest.mark.slow
def test_the_example_can_be_profiled(tmp_path: Path) -> None:
    """By the command that its docstring gives, in little time; with step times of somebody else's beside it."""
    output = tmp_path / "diabetes.json"
    (tmp_path / "steps.jsonl").write_text(lines(measured()), encoding="utf-8")
    result = subprocess.run(
        [
            *(sys.executable, "-m", "hetopt.cli.main", "profile", f"{EXAMPLES / 'diabetes.py'}:task"),
            *("--from-samples", str(tmp_path / "steps.jsonl")),
            *("--workers", "1", "--time-budget", "5", "-o", str(output)),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    profile = Profile.load(output)
    assert profile.job.dataset_size == 360
    assert len(profile.samples) == 15


# The Python of README, of the page about the library and of the notebook is run, in order, as a reader would.

REPOSITORY = Path(__file__).resolve().parents[2]
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def run(code: str, folder: Path) -> str:
    """What a script prints that is run in a folder of its own."""
    (folder / "page.py").write_text(code)
    environment = {"HETOPT_HOME": str(folder / "home"), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    with Forked(["page.py"], {**environment, "COLUMNS": "100"}, folder) as process:
        out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err[-3000:]
    return out


SHOWN = re.compile(r"^(?!print)(.*)\Z", re.MULTILINE)
"""The last line of a cell, which a notebook shows."""

SHORTER = {
    'hetopt.profile("digits")': 'hetopt.Profile.load("profile.json")',  # tests/profiler/test_command.py measures one
    'hetopt.profile("digits", time_budget_s=20)': 'hetopt.Profile.load("profile.json")',
    "epochs=20)": "epochs=2)",
    "epochs=4": "epochs=2",
}


def python_of(path: Path) -> str:
    """The Python of a page, or of a notebook, whose answers are printed as it shows them."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return "\n".join(PYTHON.findall(text))
    cells = ["".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    return "\n".join(SHOWN.sub(r"print(\1._repr_html_())", cell) for cell in cells)


@pytest.mark.parametrize("source", ["README.md", "docs/library.md", "examples/notebook.ipynb"])
def test_python_that_is_shown_runs(source: str, tmp_path: Path) -> None:
    shutil.copy(REPOSITORY / "tests" / "recorded" / "digits.json", tmp_path / "profile.json")
    code = python_of(REPOSITORY / source)
    for long, short in SHORTER.items():
        code = code.replace(long, short)
    assert "run time" in run(code, tmp_path)
    assert "run.to_html" not in code or "</html>" in (tmp_path / "run.html").read_text()
