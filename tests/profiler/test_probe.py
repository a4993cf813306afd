"""A real probe: two worker processes under the local launcher measure a small task, and a profile comes of it."""

from __future__ import annotations

import itertools
import json
import math
import time
from pathlib import Path

import pytest

from hetopt.backends.processes import LocalLauncher
from hetopt.core.comm.compression_text import spell
from hetopt.core.comm.options import timed_as, tried_ways, whole_ways
from hetopt.core.events.log import EVENTS_FILE, Event, read_events
from hetopt.core.profile import Profile
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
from hetopt.profiler.collect import collect, refusals
from hetopt.profiler.records import FINISHED
from tests.trainer.test_local_launcher import over

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
        over(launcher, handle)
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
