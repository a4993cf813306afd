"""The pure and the small parts of a worker: its place, device, pace, batches, statistics, failures.

What happens when a micro-batch does not fit into memory: it is cut, and nothing else is different.

How a run is, told from the end of its log and from its processes.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import load_file

from hetopt.backends.processes import LocalLauncher
from hetopt.core.errors import BadInput, RunFailed
from hetopt.core.events.log import EVENTS_FILE, Event, read_events
from hetopt.core.events.records import LogEvent
from hetopt.core.run_folder import MODEL_FILE, write_spec
from hetopt.core.run_spec import RunSpec
from hetopt.core.run_status import RunState, judge, last_log_line
from hetopt.trainer import worker
from hetopt.trainer.agreement import choose_backend
from hetopt.trainer.data.cursor import SampleCursor
from hetopt.trainer.data.fetch import TensorPairs
from hetopt.trainer.failure import FailureReport, reason_of
from hetopt.trainer.host.agent import died_of
from hetopt.trainer.steps.local_batch import BatchReader
from hetopt.trainer.steps.period import ControlRow, Period
from hetopt.trainer.task import evaluate
from hetopt.trainer.worker import Place, StopWish, choose_device
from tests.forks import all_end_well
from tests.launched import over
from tests.logs import an_event

from . import memory_program, toy_task
from .scenarios import toy_spec

CPU = torch.device("cpu")


def spec_of(*devices: str, **changes: object) -> RunSpec:
    spec = toy_spec(shares=(4,) * len(devices), **changes)
    for entry, device in zip(spec["workers"], devices, strict=True):
        entry["device"] = device
    return RunSpec.model_validate_json(json.dumps(spec))


@pytest.mark.parametrize(
    ("wished", "cuda_devices", "expected"),
    [
        (("auto", "auto", "auto"), 2, ["cuda:0", "cuda:1", "cpu"]),
        (("cpu", "cuda", "cuda"), 1, ["cpu", "cuda:0", "cuda:0"]),
        (("cpu", "auto", "cpu", "cuda"), 2, ["cpu", "cuda:0", "cpu", "cuda:1"]),
        (("auto", "auto"), 0, ["cpu", "cpu"]),
    ],
)
def test_devices_go_round_among_the_workers_that_may_use_them(
    wished: tuple[str, ...], cuda_devices: int, expected: list[str]
) -> None:
    places = [Place(rank=rank, local_rank=rank, world_size=len(wished)) for rank in range(len(wished))]
    assert [choose_device(spec_of(*wished), place, cuda_devices) for place in places] == expected


def test_devices_are_those_of_a_workers_own_machine() -> None:
    # Ranks 2 and 3 are the first two of another machine.
    second = [Place(rank=rank, local_rank=rank - 2, world_size=4) for rank in (2, 3)]
    spec = spec_of("cuda", "cuda", "auto", "auto")
    assert [choose_device(spec, place, 1) for place in second] == ["cuda:0", "cpu"]
    with pytest.raises(BadInput, match="no CUDA device"):
        choose_device(spec_of("cuda"), Place(rank=0, local_rank=0, world_size=1), 0)


@pytest.mark.parametrize(
    ("devices", "has_nccl"),
    [
        (["a/cuda:0", "a/cuda:1", "b/cuda:0"], True),
        (["a/cuda:0", "a/cuda:0"], False),
        (["a/cuda:0", "b/cpu"], False),
        (["a/cpu", "a/cpu"], False),
    ],
)
def test_nccl_needs_a_cuda_device_for_every_worker(devices: list[str], has_nccl: bool) -> None:
    assert ("nccl" in choose_backend(devices)) is has_nccl


def test_a_wish_to_stop_comes_by_file_or_signal(tmp_path: Path, signals: None) -> None:
    wish = StopWish(tmp_path)
    assert not wish()
    (tmp_path / "stop").touch()
    assert wish()
    (tmp_path / "stop").unlink()
    wish.listen()
    signal.raise_signal(signal.SIGTERM)
    assert wish()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, "a second signal ends the process"


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda folder: (folder / "spec.json").write_text("{"), "spec.json"),
        (lambda folder: (folder / "spec.json").unlink(), "does not exist"),
        (lambda folder: write_spec(folder, spec_of("cpu", "cpu")), "2 workers, but 1"),
        (lambda folder: write_spec(folder, spec_of("cpu").model_copy(update={"task": "nothing"})), "nothing"),
        (
            lambda folder: (
                (folder / "checkpoint" / "step-5").mkdir(parents=True),
                write_spec(folder, spec_of("cpu")),
            ),
            "No checkpoint in",
        ),
    ],
    ids=["truncated spec", "no spec", "world size", "task", "checkpoint"],
)
def test_bad_input_is_one_sentence_in_the_log_and_exit_code_2(
    tmp_path: Path, signals: None, capfd: pytest.CaptureFixture[str], spoil: object, words: str
) -> None:
    (tmp_path / "spec.json").write_text("")
    assert callable(spoil)
    spoil(tmp_path)
    assert worker.main([str(tmp_path)]) == 2
    failure = read_events(tmp_path / "events.jsonl")[-1]
    assert failure["event"] == "run_failed"
    assert words in failure["reason"]
    assert "Traceback" not in capfd.readouterr().err


def test_an_unexpected_error_keeps_its_traceback_in_the_log_and_a_lost_peer_is_not_a_cause(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with FailureReport(tmp_path, 3) as report:
        raise ZeroDivisionError("by zero\nand more")
    assert report.exit_code == 6
    assert "Traceback" in capfd.readouterr().err
    assert [event["reason"] for event in read_events(tmp_path / "events.jsonl")] == [
        "worker 3: ZeroDivisionError: by zero and more"
    ]
    with FailureReport(tmp_path, 1) as report:
        raise RuntimeError("[pair.cc:1] Connection closed by peer [127.0.0.1]:1")
    assert report.exit_code == 6
    assert len(read_events(tmp_path / "events.jsonl")) == 1
    with pytest.raises(KeyboardInterrupt), FailureReport(tmp_path, 1):
        raise KeyboardInterrupt


class Augmented(TensorPairs):
    """Samples that depend on the epoch."""

    def set_epoch(self, epoch: int, seed: int, /) -> None: ...


@given(
    shares=st.lists(st.integers(0, 30), min_size=1, max_size=4).filter(any),
    steps=st.integers(0, 12),
    limit=st.none() | st.integers(1, 9),
    augmented=st.booleans(),
)
def test_micro_batches_cover_the_slice_in_order(
    shares: list[int], steps: int, limit: int | None, augmented: bool
) -> None:
    size = 23
    kind = Augmented if augmented else TensorPairs
    dataset = kind(torch.zeros(size, 1), torch.zeros(size))
    reader = BatchReader(dataset=dataset, device=CPU, seed=0, max_samples=limit)
    cursor = SampleCursor(size, 0)
    for _ in range(steps):
        cursor.take(shares)
    batch = cursor.take(shares)
    position = batch.position
    for rank, share in enumerate(shares):
        parts = reader.cut(batch, rank)
        assert [index for part in parts for index in part.indices] == batch.slice(rank).tolist()
        assert all(len(part) <= (limit or share) for part in parts)
        if limit is not None and not augmented:
            assert len(parts) == math.ceil(share / limit)
            assert max(map(len, parts), default=0) - min(map(len, parts), default=0) <= 1
        for part in parts:
            if augmented:
                assert {(position + offset) // size for offset in range(len(part))} == {part.epoch}
            position += len(part)


def row(compute_s: float, exchange_s: float, loss_sum: float = 1.0, stop: float = 0.0, **more: float) -> ControlRow:
    plain = {field.name: 0.0 for field in dataclasses.fields(ControlRow)}
    known = {
        "steps": 2,
        "step_time_s": 0.5,
        "compute_s": compute_s,
        "exchange_s": exchange_s,
        "judged_steps": 5,
        "compute_median_s": compute_s,
        "loss_sum": loss_sum,
        "stop_wished": stop,
    }
    return ControlRow(**{**plain, **known, **more})


def test_the_slowest_worker_waits_for_nobody() -> None:
    period = Period(rows=(row(0.1, 0.4), row(0.3, 0.2), row(0.2, 0.3)), local_batch_sizes=(1, 2, 1))
    event = period.event(step=2, epoch=0.5, samples_seen=8)
    assert event["sync_s"] == [0.2, 0.2, 0.2]
    assert event["wait_s"] == pytest.approx([0.2, 0.0, 0.1])
    assert event["step_time_s"] == 0.5
    assert event["loss"] == 3 / 2, "of two steps, whatever their batches were"


def test_one_workers_bad_loss_or_wish_counts_for_all() -> None:
    assert Period(rows=(row(1, 1), row(1, 1, loss_sum=math.nan)), local_batch_sizes=(1, 1)).diverged
    assert Period(rows=(row(1, 1), row(1, 1, loss_sum=math.inf)), local_batch_sizes=(1, 1)).diverged
    assert not Period(rows=(row(1, 1), row(1, 1)), local_batch_sizes=(1, 1)).diverged
    assert Period(rows=(row(1, 1), row(1, 1, stop=1.0)), local_batch_sizes=(1, 1)).stop_wished


def test_a_worker_without_evaluation_samples_of_its_own_still_gets_the_metrics() -> None:
    task = toy_task.plain()
    model = task.model()
    data = task.data(None).evaluation
    metrics = evaluate(task, model, data, shares=[1], rank=0, device=CPU)
    with torch.no_grad():
        expected = float((model(data.inputs) - data.targets).square().mean())
    assert metrics == {"mse": pytest.approx(expected, rel=1e-5)}
    model[0].weight.data.fill_(math.nan)
    with pytest.raises(RunFailed, match="mse = nan"):
        evaluate(task, model, data, shares=[1], rank=0, device=CPU)


STEPS = 3


def test_a_worker_without_memory_for_one_sample_says_so(
    tmp_path: Path, signals: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOY_MEMORY_SAMPLES", "0")
    write_spec(tmp_path, RunSpec.model_validate_json(json.dumps(toy_spec(shares=(6,)))))
    assert worker.main([str(tmp_path)]) == RunFailed.exit_code
    last = read_events(tmp_path / "events.jsonl")[-1]
    assert (last["event"], last["reason"]) == ("run_failed", "worker 0 has too little memory for a single sample.")


def runs(folder: Path) -> dict[str, list[Event]]:
    """Both forms of step, with memory for everything, for some samples, and told for how many."""
    plan = []
    for form, allowed_bytes in (("fused", 10 << 20), ("bucketed", 20 << 20)):
        for kind, allowed in (("rich", None), ("poor", allowed_bytes)):
            run_dir = folder / f"{form}-{kind}"
            run_dir.mkdir()
            spec = toy_spec(shares=(60, 8), stop={"max_steps": STEPS}, prefetch="off")
            spec["task"] = f"{memory_program.__file__}:{form}"
            write_spec(run_dir, RunSpec.model_validate_json(json.dumps(spec)))
            plan.append({"folder": str(run_dir), "allowed_bytes": allowed})
    (folder / "runs.json").write_text(json.dumps(plan))
    program = "tests.trainer.memory_program"
    all_end_well(*(["-m", program, str(rank), str(folder)] for rank in range(memory_program.WORLD_SIZE)))
    return {Path(run["folder"]).name: read_events(Path(run["folder"]) / "events.jsonl") for run in plan}


def test_a_run_whose_allocations_fail_finds_its_bound_and_ends_where_others_do(tmp_path: Path) -> None:
    logs = runs(tmp_path)
    for form in ("fused", "bucketed"):
        rich, poor = logs[f"{form}-rich"], logs[f"{form}-poor"]
        assert not [event for event in rich if event["event"] == "memory_bound_learned"]
        learned = [event for event in poor if event["event"] == "memory_bound_learned"]
        assert learned, f"{form}: memory was enough"
        assert {event["rank"] for event in learned} == {0}
        assert 1 <= learned[-1]["samples"] <= 30
        losses = [[event["loss"] for event in log if event["event"] == "step"] for log in (rich, poor)]
        assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-5)
        models = [load_file(tmp_path / f"{form}-{kind}" / MODEL_FILE) for kind in ("rich", "poor")]
        for name, value in models[0].items():
            torch.testing.assert_close(models[1][name], value, rtol=1e-4, atol=1e-6)


SPEC = RunSpec.model_validate_json(json.dumps(toy_spec()))


def log(*events: str | LogEvent) -> list[LogEvent]:
    return [an_event(event) if isinstance(event, str) else event for event in events]


FINISHED = an_event("training_finished", reason="steps")
STOPPED = an_event("training_finished", reason="stopped")


def failed(reason: str) -> LogEvent:
    return an_event("run_failed", reason=reason)


@pytest.mark.parametrize(
    ("events", "alive", "stop_wished", "state", "reason"),
    [
        (log(), True, False, RunState.STARTING, None),
        (log("run_started"), True, False, RunState.STARTING, None),
        (log("run_started", "training_started"), True, True, RunState.RUNNING, None),
        (log("run_started", FINISHED), True, False, RunState.RUNNING, None),
        (log("run_started", FINISHED), False, False, RunState.FINISHED, None),
        (log("probe_finished"), False, False, RunState.FINISHED, None),
        (log("run_started", STOPPED), False, True, RunState.STOPPED, None),
        (log("run_started", "step"), False, True, RunState.STOPPED, None),
        (log("run_started", "step"), False, False, RunState.FAILED, "last words"),
        (log(failed("cause"), failed("echo")), False, False, RunState.FAILED, "cause"),
        (log("run_started", failed("first"), "run_started", failed("second")), False, False, RunState.FAILED, "second"),
        (log("run_started", failed("first"), "run_started", FINISHED), False, False, RunState.FINISHED, None),
        (log(FINISHED, failed("resuming failed")), False, False, RunState.FAILED, "resuming failed"),
    ],
)
def test_how_a_run_is(
    events: list[LogEvent], alive: bool, stop_wished: bool, state: RunState, reason: str | None
) -> None:
    status = judge(events, alive=alive, stop_wished=stop_wished, last_line="last words")
    assert (status.state, status.reason) == (state, reason)


@pytest.mark.parametrize(
    ("codes", "cause"),
    [
        ({0: 6, 1: 1}, None),
        ({0: 6, 2: -9}, "worker 2 on here was killed (SIGKILL)"),
        ({1: -11, 0: -15}, "SIGSEGV"),
        ({0: -15}, None),  # the agent ends survivors with SIGTERM
    ],
)
def test_the_worker_that_a_signal_killed_is_the_cause(codes: dict[int, int], cause: str | None) -> None:
    died = died_of(codes, SPEC)
    assert died is None if cause is None else cause in str(died)


def test_the_last_words_are_an_error_if_there_is_one(tmp_path: Path) -> None:
    assert last_log_line(tmp_path) is None
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "host.log").write_text(
        "=====\nsome banner\n=====\nW1127 05:24:52.804000 26091 torch/x.py:1028] Sending signal SIGTERM\n"
    )
    told = "its processes are gone and gave no reason; the last that they printed is `some banner`"
    assert last_log_line(tmp_path) == told, "a banner is no reason"
    (tmp_path / "log" / "worker.log").write_text("Traceback\n  File x\nValueError: no luck\n  note\n")
    assert last_log_line(tmp_path) == "ValueError: no luck"


def test_a_reason_is_one_plain_line() -> None:
    assert reason_of(ValueError("\x1b[1mWeights only\x1b[0m\n  load failed")) == "ValueError: Weights only load failed"


# --- A disk without room for all that a run keeps: its model is written, and whatever checkpoints there is room for


DISK_STEPS = 60
CHECKPOINT_KB, MODEL_KB, REST_KB = 2560, 1280, 300
"""Of the toy task, and of logs and specs."""


@contextmanager
def disk(folder: Path, size_kb: int) -> Iterator[Path]:
    """A folder on a disk of so many kB."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_kb}k", "none", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("only root may make a small disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize(
    ("size_kb", "checkpoints"),
    [
        (2 * CHECKPOINT_KB + REST_KB, 1),  # a third finds no room, nor does the model beside two
        (CHECKPOINT_KB + MODEL_KB // 2 + REST_KB, 0),  # the model finds none beside one
        (MODEL_KB + REST_KB, 0),
    ],
)
def test_a_run_comes_to_its_end_with_its_model_and_what_else_there_is_room_for(
    tmp_path: Path, size_kb: int, checkpoints: int
) -> None:
    often = {"control_period_steps": 5, "checkpoint_every_s": 0.01, "learning_rate_scale": 0.01}
    wish = toy_spec("wide", shares=(5, 3), stop={"max_steps": DISK_STEPS}, **often)
    launcher = LocalLauncher()
    with disk(tmp_path / "disk", size_kb) as run_dir:
        handle = launcher.start(RunSpec.model_validate_json(json.dumps(wish)), run_dir, {"TOY_WAIT_S": "0.01"})
        try:
            status = over(launcher, handle.run_dir)
        finally:
            launcher.stop(handle)
        assert status.state is RunState.FINISHED, status
        assert load_file(run_dir / MODEL_FILE)
        told = [event for event in read_events(run_dir / EVENTS_FILE) if event["event"].startswith("checkpoint_")]
        assert checkpoints or "checkpoint_failed" in [event["event"] for event in told]
        assert len(list(run_dir.glob("checkpoint/step-*/manifest.json"))) == checkpoints
        assert not checkpoints or told[-1] == {**told[-1], "event": "checkpoint_saved", "step": DISK_STEPS}
