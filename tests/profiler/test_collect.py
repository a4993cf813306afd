"""From recorded event logs to profiles: what a whole log gives, and what truncated or damaged ones are refused for."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from hetopt.core.errors import RunFailed
from hetopt.core.profile import Evaluation, Profile
from hetopt.core.run_spec import ProbeSchedule
from hetopt.profiler.collect import collect, progress, refusals, steps_to_target
from hetopt.profiler.schedule import make_schedule

RECORDED = Path(__file__).parent / "recorded"

Event = dict[str, object]


@pytest.fixture(scope="module")
def schedule() -> ProbeSchedule:
    return ProbeSchedule.model_validate_json((RECORDED / "schedule.json").read_text())


@pytest.fixture
def events() -> list[Event]:
    return [json.loads(line) for line in (RECORDED / "events.jsonl").read_text().splitlines()]


def profile_of(events: list[Event], schedule: ProbeSchedule) -> Profile:
    began = events[0]["time_s"]
    assert isinstance(began, float)
    return collect(
        events, schedule, device_type="local", started_at_s=began - 5.0, hetopt_version="0.1.0", data_dir="/data"
    )


def of_kind(events: list[Event], name: str) -> Iterator[Event]:
    return (event for event in events if event["event"] == name)


def test_a_whole_log_gives_a_whole_profile(events: list[Event], schedule: ProbeSchedule) -> None:
    profile = profile_of(events, schedule)
    assert profile.startup_s == pytest.approx(5.0)
    assert profile.profiling_s > 5.0
    assert profile.seed == schedule.seed
    assert profile.data_dir == "/data"
    assert [device.workers_per_host for device in profile.devices] == [1, 2]
    assert len(profile.links) == 3
    assert len(profile.pilots) == 2
    assert Profile.from_json(profile.to_json(), origin="memory") == profile


@given(speeds=st.lists(st.floats(0.5, 2.0), min_size=8, max_size=8))
def test_a_machine_that_changes_its_speed_is_profiled_as_it_is_in_the_mean(
    schedule: ProbeSchedule, speeds: list[float]
) -> None:
    """Steps that took longer while arithmetic took longer, too, are those of the same machine."""
    recorded = [json.loads(line) for line in (RECORDED / "events.jsonl").read_text().splitlines()]
    steady, changing, slower = json.loads(json.dumps(recorded)), json.loads(json.dumps(recorded)), []
    for place, event in enumerate(recorded):
        if event["event"] == "sweep_point":
            for rank, worker in enumerate(event["workers"]):
                slower.append(factor := speeds[(place + rank) % len(speeds)])
                steady[place]["workers"][rank]["yardstick_s"] = 0.002
                changed = {"contention": 1 + factor, "yardstick_s": 0.002 * factor}
                changing[place]["workers"][rank] |= changed | {
                    name: [factor * time_s for time_s in worker[name]] for name in ("samples_s", "phases_s")
                }
    mean = sum(slower) / len(slower)
    before, now = profile_of(steady, schedule), profile_of(changing, schedule)
    assert before.devices == profile_of(recorded, schedule).devices
    assert profile_of(recorded, schedule).yardstick_s is None
    assert before.yardstick_s == pytest.approx(0.002)
    assert now.yardstick_s == pytest.approx(0.002 * mean)
    assert now.contention == pytest.approx(math.exp(statistics.fmean(math.log1p(factor) for factor in slower)))
    assert now.contention_log_sd == pytest.approx(statistics.stdev(map(math.log1p, slower)))
    assert profile_of(recorded, schedule).contention is profile_of(recorded, schedule).yardstick_log_sd is None
    assert before.yardstick_log_sd == 0
    assert now.yardstick_log_sd == pytest.approx(statistics.stdev(map(math.log, slower)))
    for device, usual in zip(now.devices, before.devices, strict=True):
        for point, same in zip(device.step_times, usual.step_times, strict=True):
            assert point.step_time_s == pytest.approx(mean * same.step_time_s)
            assert point.forward_s == pytest.approx(mean * same.forward_s)


def test_a_pilot_that_averaged_parameters_says_how(events: list[Event], schedule: ProbeSchedule) -> None:
    last = next(place for place, event in enumerate(events) if event["event"] == "pilot" and event["ended"])

    def pilots(synchronised: int | None) -> list[tuple[str, int, float]]:
        ended = {**events[last], "sync": "local-sgd(4)", "workers": 2, "synchronised": synchronised}
        profiled = profile_of([*events[:last], ended, *events[last + 1 :]], schedule).pilots
        return [(pilot.sync.policy, pilot.sync.workers, pilot.sync.share) for pilot in profiled if pilot.sync]

    steps = events[last]["step"]
    assert isinstance(steps, int)
    assert pilots(steps // 4) == [("local-sgd(4)", 2, pytest.approx(1 / 4, rel=0.1))]
    assert pilots(None) == [], "its workers never met"


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.99])
def test_a_truncated_log_is_refused_in_one_sentence(events: list[Event], schedule: ProbeSchedule, share: float) -> None:
    with pytest.raises(RunFailed, match="ended before it was finished"):
        profile_of(events[: int(share * len(events))] or events[:1], schedule)


@pytest.mark.parametrize("name", ["host_facts", "job_facts"])
def test_a_log_without_facts_is_refused(events: list[Event], schedule: ProbeSchedule, name: str) -> None:
    with pytest.raises(RunFailed, match=f"damaged at '{name}': it is missing"):
        profile_of([event for event in events if event["event"] != name], schedule)


def test_a_log_without_any_step_says_that_nothing_fits(events: list[Event], schedule: ProbeSchedule) -> None:
    with pytest.raises(RunFailed, match="not even the smallest batch fits"):
        profile_of([event for event in events if event["event"] != "sweep_point"], schedule)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("sweep_point", "workers", [{"samples_s": [-1.0]}]),
        ("link_point", "payload_bytes", 0),
        ("pilot", "epoch", "all"),
        ("gain_sample", "gains", [0.5]),
        ("job_facts", "parameters", None),
    ],
)
def test_a_damaged_event_is_named(
    events: list[Event], schedule: ProbeSchedule, name: str, field: str, value: object
) -> None:
    next(of_kind(events, name))[field] = value
    with pytest.raises(RunFailed, match=f"damaged at '{name}'"):
        profile_of(events, schedule)


def test_a_batch_that_ran_out_of_memory_lowers_the_limit(events: list[Event], schedule: ProbeSchedule) -> None:
    before = profile_of(events, schedule).devices[0]
    kept = [e for e in events if not (e["event"] == "sweep_point" and e["sweep"] == 0 and e["local_batch_size"] == 32)]
    exhausted: Event = {
        "event": "sweep_ended",
        "time_s": events[-1]["time_s"],
        "sweep": 0,
        "local_batch_size": 32,
    }
    device = profile_of([*kept[:-1], exhausted, kept[-1]], schedule).devices[0]
    assert device.memory_limit_bytes < before.memory_limit_bytes
    assert device.memory_limit_bytes >= max(point.peak_memory_bytes or 0 for point in device.step_times)


def test_progress_never_falls(events: list[Event], schedule: ProbeSchedule) -> None:
    seen = [progress(events[:count], schedule)[1] for count in range(len(events) + 1)]
    assert seen == sorted(seen)
    assert seen[0] == 0
    assert seen[-1] == 1


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.floats(0, 1))
def test_steps_to_target_lies_between_the_evaluations_around_it(metrics: list[float], target: float) -> None:
    log = tuple(Evaluation(step=10 * (place + 1), metric=metric) for place, metric in enumerate(metrics))
    steps = steps_to_target(log, target=target, higher_is_better=True)
    reached = next((one.step for one in log if one.metric >= target), None)
    if reached is None:
        assert steps is None
    else:
        assert steps is not None
        assert max(1, reached - 10) <= steps <= reached


@given(st.integers(1, 8), st.integers(1, 96), st.integers(1, 2048), st.integers(8, 10**6), st.floats(5, 3600))
def test_a_schedule_of_any_host_and_task_is_possible_and_within_its_time(
    workers: int, cpus: int, batch_size: int, dataset_size: int, time_budget_s: float
) -> None:
    made = make_schedule(
        seed=0,
        workers=workers,
        logical_cpus=cpus,
        batch_size=batch_size,
        dataset_size=dataset_size,
        time_budget_s=time_budget_s,
    )
    concurrent = [sweep.concurrent_workers for sweep in made.sweeps]
    assert concurrent == ([1, workers] if workers > 1 else [1])
    assert sum(sweep.time_limit_s for sweep in made.sweeps) <= time_budget_s
    assert made.time_limit_s == time_budget_s
    assert made.pilots
    for pilot in made.pilots:
        assert 1 <= pilot.global_batch_size <= dataset_size
        assert pilot.time_limit_s < time_budget_s
    assert (made.network is not None) == (workers > 1)


def test_a_precision_in_which_a_pilot_diverges_is_left_out(events: list[Event], schedule: ProbeSchedule) -> None:
    number = len(schedule.pilots)
    lost: list[Event] = [{**next(of_kind(events, "pilot")), "pilot": number, "precision": "bf16", "ended": "diverged"}]
    pilot = schedule.pilots[0].model_copy(update={"precision": "bf16"})
    grown = schedule.model_copy(update={"pilots": (*schedule.pilots, pilot)})
    profile = profile_of([*events[:-1], *lost, events[-1]], grown)
    assert (profile.precisions, profile.precision_trials) == (("fp32",), ())
    assert refusals(lost) == ("bf16 is left out: a pilot diverged in it, and did not in fp32",)
