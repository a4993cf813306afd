"""The whole loop on a stream."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks._in_process import train_here
from hetopt.core.run_spec import RunSpec


def trained(run_dir: Path, **fields: Any) -> list[dict[str, Any]]:
    """The events of a run of one worker on digits."""
    spec = RunSpec.model_validate(
        {
            "task": "digits",
            "workers": [{"host": "h0", "type": "local", "local_batch_size": 32, "device": "cpu"}],
            "checkpoint_every_s": 0.2,
            "evaluate_every_epochs": 1000,
            **fields,
        }
    )
    return train_here(spec, run_dir)


def test_batches_learning_rate_and_time_follow_the_stream(tmp_path: Path) -> None:
    stream = {"rates": [400.0], "batch_interval_s": 0.1, "buffer": "truncation"}
    events = trained(tmp_path, stream=stream, batch_policy="rate", stop={"max_steps": 12}, control_period_steps=4)
    steps = [event for event in events if event["event"] == "step"]
    assert sum(event["steps"] for event in steps) == 12
    samples = 0
    for event in steps:
        (share,) = event["local_batch_sizes"]
        samples += share * event["steps"]
        assert event["samples_seen"] == samples
        assert event["learning_rate_scale"] == pytest.approx(share / 32)
        assert 30 <= share <= 50
        assert event["stream"]["buffered"][0] <= 50
    waited_s = sum(event["stream"]["wait_s"][0] for event in steps)
    spent_s = sum(event["step_time_s"] * event["steps"] for event in steps)
    # 400 samples/s do not come any faster.
    assert spent_s >= 0.95 * (samples - 50) / 400
    assert waited_s <= spent_s


def test_a_resumed_replay_goes_on_with_other_samples(tmp_path: Path) -> None:
    stream = {"rates": [4000.0], "batch_interval_s": 0.02}
    first = trained(tmp_path, stream=stream, batch_policy="rate", stop={"max_steps": 5})
    again = trained(tmp_path, stream=stream, batch_policy="rate", stop={"max_steps": 9})
    seen = [event["samples_seen"] for event in again if event["event"] == "step"]
    assert len(again) > len(first)
    assert seen == sorted(seen)
    assert [event["resumed_step"] for event in again if event["event"] == "run_started"] == [0, 5]
