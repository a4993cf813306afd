"""The whole loop on streams: a replay, and a broker that is killed with its run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks._in_process import train_here
from hetopt.core.run_spec import RunSpec
from tests.disturbance import PATIENCE_S
from tests.trainer.streams.redis_server import MISSING, PROGRAM

HOUSE = Path(__file__).resolve().parents[3]


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


@pytest.mark.slow  # test_redis.py kills a broker, and a run, each by itself
@pytest.mark.skipif(PROGRAM is None, reason=MISSING)
def test_kills_of_workers_and_broker_lose_nothing_and_train_nothing_twice(tmp_path: Path) -> None:
    pytest.importorskip("redis", reason="needs redis-py: pip install -e '.[streams]'")
    done = subprocess.run(
        [sys.executable, "-m", "tests.trainer.streams.killed_run", str(tmp_path), "3"],
        cwd=HOUSE,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["lost"] == result["trained_twice"] == result["not_whole"] == 0
    assert result["trained"] > 0
    assert result["redelivered"] > 0
