"""Twelve questions that people ask, as `hetopt recommend` answers them: each on one screen of 80 columns.

They are read by a person whenever they are recorded anew (`--record`): is it plausible, does it say what matters?
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hetopt.core.profile import Profile
from tests.few_types import all_types

from .conftest import RECORDED, Answer
from .described import BERT, GPT2, NCF, RESNET101

MOST_LINES, COLUMNS = 23, 80
"""A terminal of 24 lines, less the one that is typed."""

QUESTIONS: dict[str, tuple[str | Profile, str, int]] = {
    "a-second": ("digits", "--budget 5", 0),
    "hours": ("resnet20-cifar10", "--epochs 2000 --budget 5", 0),
    "cpu-only": ("resnet20-cifar10", "--epochs 2000 --deadline 1h --gpus none", 0),
    "arm": ("lstm-small", "--epochs 400 --deadline 2h --arch arm64", 0),
    "gpu": (BERT, "--epochs 3 --budget 20", 0),
    "on-demand": (BERT, "--epochs 3 --deadline 2h --on-demand", 0),
    "new-account": (BERT, "--epochs 3 --budget 20 --quota default", 2),
    "days": (GPT2, "--epochs 10 --budget 300 --deadline 3d --quota p=0 --quota g=64", 0),
    "thousand-workers": (RESNET101, "--epochs 90 --deadline 6h --gpus any --max-workers 1024", 0),
    "sure": (BERT, "--epochs 3 --budget 4 --confidence 0.99", 0),
    "one-worker": (GPT2, "--epochs 10 --budget 200 --max-workers 1", 0),
    "far-data": (RESNET101, "--epochs 90 --budget 900 --region eu-central-1 --data 150GB --data-region us-east-1", 0),
    "any-region": ("resnet20-cifar10", "--epochs 20000 --budget 20 --region any --data 9GB --data-region us-east-1", 0),
    "minutes": (NCF, "--epochs 20 --budget 10 --deadline 20m", 0),
}
"""By name: the job, what is asked, and the exit code."""


@pytest.mark.parametrize("name", QUESTIONS)
def test_an_answer_is_one_screen_and_has_not_changed(
    name: str,
    hetopt: Callable[..., Answer],
    golden: Callable[[str, str], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HETOPT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    all_types(monkeypatch)
    job, asked, code = QUESTIONS[name]
    file = RECORDED / f"{job}.json"
    if isinstance(job, Profile):
        file = tmp_path / "profile.json"
        job.save(file)
    told = hetopt("recommend", file, *asked.split())
    assert told.code == code, told.err
    lines = [line.rstrip() for line in told.out.splitlines()]
    assert len(lines) <= MOST_LINES
    assert max(map(len, lines), default=0) <= COLUMNS
    refused = "" if code == 0 else told.err[told.err.index("error:") :]
    golden(f"question-{name}.txt", "\n".join([f"$ hetopt recommend PROFILE {asked}", *lines, refused]).rstrip() + "\n")
