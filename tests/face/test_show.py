"""`hetopt show` and `hetopt compare`: plans read again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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
