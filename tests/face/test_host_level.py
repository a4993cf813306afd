"""Runs on this machine teach how fast it is in earnest: a real one, and the same with a log of a slower machine."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hetopt as library
from hetopt.backends.on_this_machine import LocalBackend
from hetopt.backends.options import Local
from hetopt.core.events.log import EVENTS_FILE
from hetopt.core.profile import Profile
from hetopt.optimizer.launch_record import LAUNCH_FILE, Launch
from hetopt.optimizer.plan import Plan
from hetopt.optimizer.step_time.earlier_runs import EarlierRuns, RunOnType, job_named
from hetopt.optimizer.step_time.host_level import RUN_TO_RUN_LOG_SD, followed, host_named, told_of_host
from tests.face.conftest import Answer

SLOWER = 3.0
RECORDED = Path(__file__).resolve().parents[1] / "recorded"


def taken_here(name: str) -> Profile:
    """A recorded profile as if it had been taken on this machine, which it was on one like it."""
    profile = Profile.load(RECORDED / f"{name}.json")
    here = {
        "logical_cpus": len(os.sched_getaffinity(0)),
        "operating_system": f"{platform.system()} {platform.release()}",
    }
    return profile.model_copy(update={"host": profile.host.model_copy(update=here)})


def planned(profile: Profile) -> Plan:
    return library.recommend(profile, budget_usd=2, epochs=8, types="c7i.*", max_workers=2, batch_size=64, trials=0)


def step_events(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / EVENTS_FILE).read_text().splitlines()]
    return [line for line in lines if line["event"] == "step"]


def slow_copy(folder: Path, name: str, *kinds: str) -> None:
    """The same run under another name, whose log says that these times of its steps were three times as long."""
    other = folder.parent / name
    other.mkdir()
    launch = Launch.load(folder / LAUNCH_FILE)
    launch.model_copy(update={"run_id": name}).save(other / LAUNCH_FILE)
    lines = [json.loads(line) for line in (folder / EVENTS_FILE).read_text().splitlines()]
    for line in lines:
        if line["event"] == "step":
            for kind in kinds:
                line[kind] = [SLOWER * worker_s for worker_s in line[kind]]
    (other / EVENTS_FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_run_on_this_machine_teaches_the_next_plan_of_it(
    hetopt: Callable[..., Answer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HETOPT_HOME", str(tmp_path))
    profile, store = taken_here("digits"), tmp_path / "earlier-runs.json"
    before = planned(profile)
    run = library.launch(before, on=Local(slowdowns=(1,)))
    run.wait()
    launch = Launch.load(run.folder / LAUNCH_FILE)
    assert launch.host == host_named(profile.host)
    assert launch.earlier is None

    def learned(name: str) -> RunOnType:
        answer = hetopt("report", name, "--learn", tmp_path / "learned.json")
        assert answer.code == 0, answer.err
        assert "processors computes" in " ".join(answer.err.split())
        return next(one for one in EarlierRuns.load(store).runs if one.run == name)

    found = learned(run.name)
    took_s = statistics.median(max(one["processor_s"]) for one in step_events(run.folder)[1:])
    seen = math.log(took_s / launch.prediction.compute_s)
    assert found.log_factor == pytest.approx(max(-5.0, min(5.0, seen)), abs=1e-3)

    slow_copy(run.folder, "busy", "compute_s")
    assert learned("busy").log_factor == found.log_factor, "others' programs say nothing of its speed"
    store.unlink()
    slow_copy(run.folder, "slow", "compute_s", "processor_s")
    slow = learned("slow").log_factor
    assert slow == pytest.approx(min(5.0, seen + math.log(SLOWER)), abs=1e-3)

    after = planned(profile)
    expected = followed(slow, math.hypot(RUN_TO_RUN_LOG_SD, profile.yardstick_log_sd or 0.0))
    (here, told) = (next(way for way in plan.choices if way.names == ("here",)) for plan in (before, after))
    assert here.earlier is None
    assert told.earlier is not None
    assert told.earlier.log_factor == pytest.approx(expected)
    assert told.total_s.value == pytest.approx(math.exp(expected) * here.total_s.value)
    assert after.chosen == before.chosen, "rented machines are others"
    said = f"Counted in for this machine: {told.earlier.in_words}."
    assert said in after.explanation

    prepared = LocalBackend().prepare(after, after, Local(slowdowns=(1.0,))).launch
    assert said in prepared.notes
    assert prepared.earlier == told.earlier
    again = prepared.model_copy(update={"run_id": "again", "created": launch.created})
    (run.folder.parent / "again").mkdir()
    again.save(run.folder.parent / "again" / LAUNCH_FILE)
    (run.folder.parent / "again" / EVENTS_FILE).write_text((run.folder.parent / "slow" / EVENTS_FILE).read_text())
    found_again = math.log(SLOWER * took_s / prepared.prediction.compute_s) + expected
    assert learned("again").log_factor == pytest.approx(min(5.0, found_again), abs=1e-3), "nothing is counted twice"


def test_a_profile_of_another_machine_learns_nothing_of_this_one() -> None:
    profile = taken_here("digits")
    elsewhere = profile.model_copy(update={"host": profile.host.model_copy(update={"operating_system": "Other 1"})})
    plan = planned(elsewhere)
    launch = LocalBackend().prepare(plan, plan, Local(slowdowns=(1.0,))).launch
    assert (launch.host, launch.earlier) == (None, None)


factors = st.lists(st.floats(-1.5, 1.5), min_size=1, max_size=5)


@given(own=factors, others=factors)
def test_runs_of_the_very_job_count_more_than_those_of_others_and_none_beyond_what_it_found(
    own: list[float], others: list[float]
) -> None:
    profile = Profile.load(RECORDED / "digits.json")
    name, job = host_named(profile.host), job_named(profile.job)

    def kept(*named: tuple[str, float]) -> EarlierRuns:
        return EarlierRuns(
            runs=tuple(
                RunOnType(run=f"{n}", job=job, instance_type=name, log_factor=factor, day="2026-11-27")
                for n, (job, factor) in enumerate(named)
            )
        )

    mine, theirs = [(job, one) for one in own], [(f"job {n}", one) for n, one in enumerate(others)]
    told, both = told_of_host(kept(*mine), profile), told_of_host(kept(*mine, *theirs), profile)
    assert told is not None
    assert both == told
    mean = sum(own) / len(own)
    assert abs(told.log_factor) <= abs(mean)
    assert told.log_factor * mean >= 0
    elsewhere = told_of_host(kept(*theirs), profile)
    assert elsewhere is not None
    assert abs(elsewhere.log_factor) <= abs(sum(others) / len(others)) + 1e-12
    assert told_of_host(None, profile) is None
