"""`hetopt launch --stream`: what would run, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.face.conftest import Answer

pytestmark = pytest.mark.usefixtures("small_catalogue")

Hetopt = Callable[..., Answer]


@pytest.fixture
def plan(hetopt: Hetopt, digits_profile: Path, tmp_path: Path) -> Path:
    made = tmp_path / "plan.json"
    answer = hetopt("recommend", digits_profile, "--budget", 5, "--steps", 200, "-o", made)
    assert answer.code == 0, answer.err
    return made


def test_a_plan_runs_on_streams(hetopt: Hetopt, plan: Path) -> None:
    asked = ("launch", plan, "--on", "local", "--slowdown", "1,2", "--dry-run", "--json")
    spec = json.loads(hetopt(*asked, "--stream", "replay(40/80,factor=2,buffer=truncation)").out)["spec"]
    assert spec["stream"]["rates"] == [80.0, 160.0]
    assert spec["batch_policy"] == "rate"
    spec = json.loads(hetopt(*asked, "--stream", "redis(key=cam)", "--batch-policy", "static").out)["spec"]
    assert (spec["stream"]["source"], spec["stream"]["key"], spec["batch_policy"]) == ("redis", "cam", "static")
    shown = hetopt(*asked[:-1], "--stream", "replay(4/8)")
    assert "streams bring 4 to 8 samples/s" in " ".join((shown.out + shown.err).split())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--on", "local", "--batch-policy", "rate"), "follows streams, and there is none"),
        (("--on", "local", "--slowdown", "1,1", "--stream", "replay(4/8/16)"), "3 rates of streams for 2 workers"),
        (("--on", "local", "--stream", "kafka"), "must name a source of samples"),
        (("--on", "ec2", "--stream", "replay(4)"), "--stream is for --on local"),
    ],
)
def test_streams_that_do_not_suit_are_refused(hetopt: Hetopt, plan: Path, options: tuple[str, ...], said: str) -> None:
    answer = hetopt("launch", plan, *options, "--dry-run")
    assert answer.code == 2
    assert said in " ".join(answer.err.split())


def test_a_step_is_predicted_to_wait_for_its_samples(hetopt: Hetopt, plan: Path) -> None:
    """No longer than the slowest stream takes to bring them; fast streams change nothing."""
    asked = ("launch", plan, "--on", "local", "--slowdown", "1,1", "--dry-run", "--json")

    def predicted(*options: str) -> dict[str, Any]:
        told: dict[str, Any] = json.loads(hetopt(*asked, *options).out)["prediction"]
        return told

    without, fast = predicted(), predicted("--stream", "replay(4000000/8000000)")
    assert {name: fast[name] for name in ("step_time_s", "total_s")} == {
        name: without[name] for name in ("step_time_s", "total_s")
    }
    slow = predicted("--stream", "replay(4/40)")
    least_s = 8 / 4  # of a stream that brings fewer, eight samples are waited for
    assert slow["step_time_s"] == {"value": least_s, "low": least_s, "high": least_s}
    waits_s = least_s - without["step_time_s"]["value"]
    assert slow["total_s"]["value"] == pytest.approx(without["total_s"]["value"] + slow["steps"]["value"] * waits_s)
    assert slow["total_s"]["low"] <= slow["total_s"]["value"] <= slow["total_s"]["high"]
