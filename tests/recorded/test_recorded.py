"""Profiles that hetopt recorded itself; ``pytest tests/recorded --record`` makes them anew."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import pytest

from hetopt.backends.prediction import predict_on_local
from hetopt.core.errors import BadInput
from hetopt.core.profile import Profile
from hetopt.optimizer.market.catalog import load_catalog
from hetopt.optimizer.plan import Goal, Plan
from hetopt.optimizer.recommendation.recommend import Options, PlanRequest, recommend

HERE = Path(__file__).resolve().parent
NOW = datetime(2026, 11, 20, tzinfo=UTC)

# task -> the folder of its data below the shared data, where it needs any
RECORDINGS = {"digits": None, "resnet20-cifar10": "cifar10", "lstm-small": "wikitext-2"}


@pytest.mark.parametrize("task", RECORDINGS)
def test_record(task: str, recording: bool, request: pytest.FixtureRequest) -> None:
    """Measure anew when asked to; otherwise the file must be what this version of hetopt writes."""
    path = HERE / f"{task}.json"
    if recording:
        data = RECORDINGS[task]
        where = ["--data", str(request.getfixturevalue("shared_data") / data)] if data is not None else []
        command = [
            sys.executable,
            "-m",
            "hetopt.cli.main",
            "profile",
            task,
            *where,
            "-o",
            str(path),
            "--force",
        ]
        subprocess.run(command, check=True)
        # Where the data lay says nothing to others.
        Profile.load(path).model_copy(update={"data_dir": None}).save(path)
    text = path.read_text()
    assert Profile.from_json(text, origin=path.name).to_json() == text
    assert Profile.load(path).job.task == task


@pytest.fixture(params=sorted(path.stem for path in HERE.glob("*.json")))
def profile(request: pytest.FixtureRequest) -> Profile:
    return Profile.load(HERE / f"{request.param}.json")


def _made(task: str, budget_usd: float) -> Plan:
    goal = Goal(budget_usd=budget_usd, ends="epochs", amount=10.0)
    profile = Profile.load(HERE / f"{task}.json")
    return recommend(PlanRequest(profile, load_catalog(), goal, Options()), seed=0, now=NOW)


_plan = cache(_made)


def test_a_recording_is_a_real_measurement(profile: Profile) -> None:
    assert profile.profiling_s > 1
    assert len(profile.devices) >= 1
    for device in profile.devices:
        assert len(device.step_times) >= 3
        # More samples take longer: true over the whole ladder even where neighbours scatter.
        assert device.step_times[-1].step_time_s > device.step_times[0].step_time_s
        for point in device.step_times:
            assert min(point.samples_s) <= point.step_time_s <= max(point.samples_s)
    assert {link.collective for link in profile.links} >= {"all_reduce", "all_gather"}
    assert [point.gain for point in profile.gain] == sorted(point.gain for point in profile.gain)


def test_a_plan_from_it_keeps_its_budget_and_survives_the_round_trip(profile: Profile) -> None:
    plan = _plan(profile.job.task, 20.0)
    assert plan.chosen.prediction.cost_usd.high <= 20
    assert Plan.from_json(plan.to_json(), origin="plan") == plan
    assert json.loads(plan.to_json())["profile"]["job"]["task"] == profile.job.task


def test_the_same_seed_gives_the_same_plan(profile: Profile) -> None:
    assert _made(profile.job.task, 20.0) == _plan(profile.job.task, 20.0)


def test_a_larger_budget_never_gives_a_slower_plan(profile: Profile) -> None:
    small, large = (_plan(profile.job.task, budget_usd) for budget_usd in (5.0, 20.0))
    assert large.chosen.prediction.total_s.value <= small.chosen.prediction.total_s.value


def test_a_slower_worker_gets_a_smaller_share_and_a_longer_prediction(profile: Profile) -> None:
    plan = _plan(profile.job.task, 20.0)
    equal, unequal = (predict_on_local(plan, paces) for paces in ((1.0, 1.0), (1.0, 3.0)))
    fast, slow = (worker.local_batch_size for worker in unequal.run.workers)
    assert fast > slow
    assert equal.run.global_batch_size == unequal.run.global_batch_size == plan.chosen.global_batch_size
    assert unequal.prediction.training_s.value > equal.prediction.training_s.value


def test_a_plan_of_a_version_that_is_not_read_any_more_is_refused_with_what_makes_it_anew(tmp_path: Path) -> None:
    kept = json.loads(_plan("digits", 20.0).to_json())
    file = tmp_path / "plan.json"
    for version, said in ((0, "which this hetopt cannot read"), (99, "this hetopt reads up to")):
        file.write_text(json.dumps({**kept, "schema_version": version}), encoding="utf-8")
        with pytest.raises(BadInput, match=said) as refused:
            Plan.load(file)
        assert refused.value.hint
    file.write_text(json.dumps({**kept, "schema_version": 0}), encoding="utf-8")
    with pytest.raises(BadInput) as refused:
        Plan.load(file)
    assert "hetopt recommend" in (refused.value.hint or "")
