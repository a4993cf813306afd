"""The pure and the small parts of a worker: its place, device, pace, batches, statistics, failures."""

from __future__ import annotations

import dataclasses
import json
import math
import signal
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st

from hetopt.core.errors import BadInput, RunFailed
from hetopt.core.events.log import read_events
from hetopt.core.run_folder import write_spec
from hetopt.core.run_spec import RunSpec
from hetopt.trainer import worker
from hetopt.trainer.agreement import choose_backend
from hetopt.trainer.data.cursor import SampleCursor
from hetopt.trainer.data.fetch import TensorPairs
from hetopt.trainer.engine import ControlRow, Period
from hetopt.trainer.failure import FailureReport
from hetopt.trainer.steps.local_batch import BatchReader
from hetopt.trainer.task import evaluate
from hetopt.trainer.worker import Place, StopWish, choose_device

from . import toy_task
from .scenarios import toy_spec

CPU = torch.device("cpu")


def spec_of(*devices: str, **changes: object) -> RunSpec:
    spec = toy_spec(shares=(4,) * len(devices), **changes)
    for entry, device in zip(spec["workers"], devices, strict=True):
        entry["device"] = device
    return RunSpec.model_validate_json(json.dumps(spec))


def test_without_torchrun_a_worker_is_alone() -> None:
    assert Place.of({}) == Place(rank=0, local_rank=0, world_size=1)


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
    assert event["loss"] == 3 / 8


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
