"""A real probe: two worker processes under the local launcher measure a small task, and a profile comes of it.

From recorded event logs to profiles: what a whole log gives, and what truncated or damaged ones are refused for.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from benchmarks._in_process import train_here
from hetopt.backends.processes import LocalLauncher
from hetopt.core.comm.compression_text import spell
from hetopt.core.comm.options import timed_as, tried_ways, whole_ways
from hetopt.core.errors import BadInput, RunFailed
from hetopt.core.events.log import EVENTS_FILE, Event, EventLog, read_events
from hetopt.core.profile import Evaluation, Profile
from hetopt.core.run_spec import (
    CompressorProbe,
    NetworkProbe,
    PilotProbe,
    ProbeSchedule,
    RunSpec,
    StopRule,
    Sweep,
    WorkerSpec,
)
from hetopt.profiler.collect import collect, progress, refusals, steps_to_target
from hetopt.profiler.probe.run import run_probe
from hetopt.profiler.records import FINISHED
from hetopt.profiler.schedule import make_schedule
from hetopt.trainer.checkpoints.folder import begin_from
from hetopt.trainer.context import WorkerContext
from tests.launched import over

HERE = Path(__file__).parent
TASK = f"{HERE / 'tiny_task.py'}:task"
SIZES = (2, 8, 32)

SCHEDULE = ProbeSchedule(
    seed=3,
    sweeps=tuple(
        Sweep(
            concurrent_workers=workers,
            threads_per_worker=1,
            local_batch_sizes=SIZES,
            warmup_steps=2,
            timed_steps=6,
            time_limit_s=20.0,
            precision=precision,
        )
        for precision, workers in (("fp32", 1), ("fp32", 2), ("bf16", 1), ("tf32", 1))
    ),
    network=NetworkProbe(payload_bytes=(4_096, 262_144), warmup=1, most_rounds=2),
    compressors=CompressorProbe(
        names=tuple(dict.fromkeys((*CompressorProbe().names, *(timed_as(way) for way in whole_ways())))),
        ratios=(0.1, 0.01),
        repeats=2,
    ),
    exchanges=tuple(spell(way) for way in tried_ways()),
    pilots=(
        PilotProbe(global_batch_size=16, time_limit_s=20.0, max_epochs=30, sample_every_steps=10),
        PilotProbe(global_batch_size=64, time_limit_s=20.0, max_epochs=30, repeat=1),
        PilotProbe(global_batch_size=16, time_limit_s=20.0, max_epochs=30, sync="local-sgd(4)"),
        PilotProbe(global_batch_size=16, time_limit_s=20.0, max_epochs=30, precision="bf16"),
        PilotProbe(global_batch_size=16, time_limit_s=20.0, max_epochs=30, precision="tf32"),
    ),
    gain_ratios=(0.01, 0.1, 0.5, 1.0),
    time_limit_s=60.0,
)


def spec_of(schedule: ProbeSchedule) -> RunSpec:
    worker = WorkerSpec(host="localhost", type="local", local_batch_size=8, threads=1)
    return RunSpec(task=TASK, seed=3, workers=(worker, worker), stop=StopRule(max_steps=1), probe=schedule)


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory, recording: bool) -> tuple[list[Event], Profile]:
    folder, started_at_s = tmp_path_factory.mktemp("probe"), time.time()
    launcher = LocalLauncher()
    handle = launcher.start(spec_of(SCHEDULE), folder, {})
    try:
        over(launcher, handle.run_dir)
    finally:
        launcher.stop(handle)
    events = read_events(folder / EVENTS_FILE)
    assert events, (folder / "log" / "host.log").read_text()
    assert events[-1]["event"] == FINISHED, events[-1]
    if recording:
        (HERE / "recorded").mkdir(exist_ok=True)
        (HERE / "recorded" / "schedule.json").write_text(SCHEDULE.model_dump_json(indent=2) + "\n")
        lines = [json.dumps(event) + "\n" for event in events]
        (HERE / "recorded" / "events.jsonl").write_text("".join(lines).replace(str(HERE), "tests/profiler"))
    profile = collect(events, SCHEDULE, device_type="local", started_at_s=started_at_s, hetopt_version="0.1.0")
    return events, profile


def test_everything_on_the_schedule_was_measured(probed: tuple[list[Event], Profile]) -> None:
    profile = probed[1]
    usual = profile.computing_in("fp32")
    assert [device.workers_per_host for device in usual.devices] == [1, 2]
    for device in usual.devices:
        assert tuple(point.local_batch_size for point in device.step_times) == SIZES
        timed = {(cost.name, cost.ratio): cost for cost in device.compressors}
        assert set(timed) == {("topk", 0.1), ("topk", 0.01), *((timed_as(way), 1.0) for way in whole_ways())}
        assert all(cost.compress_s + 8 * cost.decompress_s > 0 for cost in timed.values())
        assert device.matmul_flops_per_s is not None
        assert device.copy_bytes_per_s is not None
    assert {link.collective for link in profile.links} == {"all_reduce", "all_gather", "broadcast"}
    # The gradient's own payload is among them.
    assert {(link.workers, link.scope, link.payload_bytes) for link in profile.links} == {
        (2, "host", (3_496, 4_096, 262_144))
    }
    assert len(profile.pilots) == 3
    assert profile.noise
    assert [point.ratio for point in profile.gain] == [0.01, 0.1, 0.5, 1.0]


def test_what_ways_to_exchange_lose_is_measured_beside_the_pilots(probed: tuple[list[Event], Profile]) -> None:
    """The more that is sent, the more is kept; what is rounded without bias still points where the sum does."""
    profile = probed[1]
    trials = {trial.compression: trial for trial in profile.exchange_trials}
    assert set(trials) == set(SCHEDULE.exchanges)
    gains = [trials[f"powersgd(rank={rank})"].gain or 0.0 for rank in (1, 2, 4)]
    assert gains == sorted(gains)
    assert 0 < gains[0] < gains[-1] <= 1
    assert (trials["int8"].gain or 0) > (trials["int4"].gain or 0) > 0.9
    for name in ("qsgd_maxnorm", "qsgd_two_scale", "qsgd_multi_scale"):
        coarse, fine, finest = (trials[f"{name}(levels={levels})"] for levels in (1, 7, 63))
        assert (coarse.variance or 0) > (fine.variance or 0) > (finest.variance or 0) > 0
        assert coarse.gain is None
        assert finest.signal == pytest.approx(1, abs=0.02)
    assert sum(math.prod(shape) for shape in profile.job.parameter_shapes) == profile.job.parameters


def test_job_facts_are_counted(probed: tuple[list[Event], Profile]) -> None:
    job = probed[1].job
    assert job.task == TASK
    assert job.parameters == 16 * 32 + 32 + 32 * 10 + 10
    assert job.gradient_bytes == 4 * job.parameters
    assert job.dataset_size == 800
    # Two matrix products forward, the gradient of each weight, and that of the hidden layer.
    assert job.flops_per_sample == 2 * (16 * 32 + 32 * 10) * 2 + 2 * 32 * 10
    assert 10 < job.operators_per_step < 200
    assert job.model_kind is None


def test_step_times_hold_their_parts(probed: tuple[list[Event], Profile]) -> None:
    for device in probed[1].devices:
        for point in device.step_times:
            assert len(point.samples_s) >= 3 * device.workers_per_host
            parts = (point.load_s, point.forward_s, point.backward_s, point.optimizer_s)
            assert all(part > 0 for part in parts)
            # Medians of parts do not add up exactly to a median of sums; on a busy machine far from it.
            assert min(parts) < max(point.samples_s)
            assert point.peak_memory_bytes is not None
            assert point.peak_memory_bytes < device.memory_limit_bytes


def test_tensors_are_counted_at_every_batch_size(probed: tuple[list[Event], Profile]) -> None:
    alone, *others = probed[1].computing_in("fp32").devices
    memory = alone.memory
    assert memory is not None
    assert [one.memory for one in others] == [None] * len(others)
    assert [step.samples for step in memory.steps] == [point.local_batch_size for point in alone.step_times]
    # Momentum is as large as what is trained.
    weights = 4 * (16 * 32 + 32 + 32 * 10 + 10)
    assert memory.parameter_bytes == memory.gradient_bytes == memory.optimizer_bytes == weights
    # All 200 samples at once, nothing saved; not counted where one evaluation took long.
    assert memory.evaluating_bytes == 0 or 4 * 200 * (16 + 32) < memory.evaluating_bytes < 4 * 200 * 100
    for step in memory.steps:
        least = 4 * step.samples * (16 + 32 + 10)  # inputs, hidden values and outputs
        assert least < step.computing_bytes < 3 * least + 2 * weights


def test_noise_and_gain_are_possible(probed: tuple[list[Event], Profile]) -> None:
    profile = probed[1]
    assert all(sample.gradient_variance > 0 for sample in profile.noise)
    assert [sample.step for sample in profile.noise] == sorted({sample.step for sample in profile.noise})
    gains = [point.gain for point in profile.gain]
    assert all(low <= high for low, high in itertools.pairwise(gains))
    assert gains[-1] == pytest.approx(1)
    assert all(point.gain >= point.ratio * 0.9 for point in profile.gain)
    assert all(point.gain_low <= point.gain for point in profile.gain)


def test_noise_and_gains_are_measured_from_a_checkpoint_and_one_of_another_model_is_refused(tmp_path: Path) -> None:
    usual = spec_of(SCHEDULE)
    trained = usual.model_copy(update={"workers": usual.workers[:1], "probe": None, "stop": StopRule(max_steps=50)})
    train_here(trained, tmp_path)
    pilot = SCHEDULE.pilots[0].model_copy(update={"time_limit_s": 0.1, "max_epochs": 10**9})
    schedule = ProbeSchedule(seed=3, sweeps=(), pilots=(pilot,), from_checkpoint=str(tmp_path))
    events = EventLog(tmp_path / "probe.jsonl")
    run_probe(
        WorkerContext(
            spec=trained.model_copy(update={"probe": schedule}),
            rank=0,
            world_size=1,
            device=torch.device("cpu"),
            run_dir=tmp_path,
            events=events,
            stop_requested=lambda: False,
        )
    )
    events.close()
    told = read_events(tmp_path / "probe.jsonl")
    assert next((each["step"], each["samples_seen"]) for each in of_kind(told, "noise_sample")) == (50, 50 * 8)
    assert any(of_kind(told, "gain_sample"))
    with pytest.raises(BadInput, match="of another model"):
        begin_from(str(tmp_path), nn.Linear(2, 2), torch.optim.SGD([torch.zeros(2)], 0.1))


def test_pilots_learn_and_reach_the_target(probed: tuple[list[Event], Profile]) -> None:
    small, large, averaged = probed[1].pilots
    assert (small.global_batch_size, large.global_batch_size) == (16, 64)
    assert (small.seed, large.seed) == (3, 4)
    assert large.learning_rate_scale == pytest.approx(2)  # the square root rule
    for pilot in (small, large, averaged):
        assert pilot.steps_to_target is not None
        assert pilot.evaluations[-1].metric >= 0.85
        assert pilot.evaluations[0].metric < 0.85
    assert large.steps_to_target < small.steps_to_target


def test_another_precision_is_measured_beside_and_one_that_is_not_there_is_left_out(
    probed: tuple[list[Event], Profile],
) -> None:
    events, profile = probed
    assert profile.precisions == ("fp32", "bf16")
    (half,) = profile.computing_in("bf16").devices
    assert tuple(point.local_batch_size for point in half.step_times) == SIZES
    usual = profile.devices[0].memory
    assert half.memory is not None
    assert usual is not None
    assert half.memory.kept_bytes == usual.kept_bytes  # parameters, gradients and the optimizer's state stay in fp32
    (trial,) = profile.precision_trials
    assert (trial.precision, trial.global_batch_size, trial.seed) == ("bf16", 16, 3)
    assert trial.usual_steps == profile.pilots[0].steps_to_target
    assert refusals(events) == ("tf32 is left out: there are no units for it here",)


RECORDED = Path(__file__).parent / "recorded"


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
