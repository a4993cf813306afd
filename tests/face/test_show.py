"""`hetopt show` and `hetopt compare`: plans read again."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hetopt.cli.profile import _show as show_profile
from hetopt.core.profile import Profile
from tests.face.conftest import RECORDED, hetopt

__all__ = ["hetopt"]


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One job's plan on each market."""
    import hetopt

    folder = tmp_path_factory.mktemp("plans")
    paths = {}
    for market in ("spot", "on-demand"):
        plan = hetopt.recommend(RECORDED / "digits.json", budget_usd=5, epochs=20, market=market, types=("c7i.*",))
        paths[market] = folder / f"{market}.json"
        paths[market].write_text(plan.to_json())
    return paths


def test_a_plan_is_shown_as_when_it_was_made(hetopt: Callable[..., Any], tmp_path: Path) -> None:
    again = tmp_path / "plan.json"
    options = ("--budget", "5", "--epochs", "20", "--market", "spot", "--types", "c7i.*")
    made = hetopt("recommend", RECORDED / "digits.json", *options, "-o", again)
    assert hetopt("show", again).out == made.out
    assert hetopt("show", again, "--json").out == again.read_text()
    assert hetopt("show", again, "--explain").out.startswith(made.out)
    assert "branch and bound" in hetopt("show", again, "--explain").out


NEXT = re.compile(r"^(?:next|or): +hetopt (.*)$", re.MULTILINE)


@pytest.mark.parametrize("job", ["--params 110M", "--params 110M --cloud lambda", "--params 7B"])
def test_an_estimate_is_measured_next(
    job: str, hetopt: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is proposed that would refuse the file: launching, exporting."""
    monkeypatch.chdir(tmp_path)
    made = hetopt("estimate", *job.split(), "--samples", "50k", "-o", "plan.json")
    measured, rehearsed, again = NEXT.findall(made.out + hetopt("show", "plan.json").out)
    assert measured == again
    assert measured.startswith("profile -- train.py")
    assert ("GPUs share the model" in measured) == ("7B" in job)
    assert rehearsed == "launch plan.json --on rehearsal --steps 200"


@pytest.mark.parametrize("usual", [None, 5.0])
def test_a_profile_that_saw_no_target_is_planned_by_its_length(
    usual: float | None, hetopt: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    seen = Profile.load(RECORDED / "digits.json")
    missed = tuple(pilot.model_copy(update={"steps_to_target": None}) for pilot in seen.pilots)
    job = seen.job.model_copy(update={"usual_epochs": usual})
    measured, file = seen.model_copy(update={"pilots": missed, "job": job}), Path("profile.json")
    measured.save(file)
    show_profile(measured, file, None, as_json=False)
    [command] = NEXT.findall(capfd.readouterr().out)
    assert ("--epochs N" in command) == (usual is None)
    answer = hetopt(*shlex.split(command.replace("--epochs N", "--epochs 5"), comments=True))
    assert answer.code == 0, answer.err


def test_plans_are_held_side_by_side(hetopt: Callable[..., Any], plans: dict[str, Path]) -> None:
    answer = hetopt("compare", plans["spot"], plans["on-demand"])
    words = " ".join(answer.out.split())
    assert answer.code == 0
    assert "on-demand is" in words
    assert "dearer" in words
    assert "batch size" not in words, "what is the same in both is left out"
    back = " ".join(hetopt("compare", plans["on-demand"], plans["spot"]).out.split())
    assert "cheaper" in back


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (("spot",), "two plans or more"),
        (("spot", "spot"), "two plans or more"),
        (("spot", RECORDED / "digits.json"), "holds a profile, not a plan"),
        (("spot", "missing.json"), "missing.json"),
    ],
)
def test_what_cannot_be_compared_is_said(
    hetopt: Callable[..., Any], plans: dict[str, Path], names: tuple[Any, ...], says: str
) -> None:
    answer = hetopt("compare", *(plans.get(name, name) for name in names))
    assert (answer.code, says in answer.err) == (2, True)
