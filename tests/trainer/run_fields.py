"""Every field of `RunSpec`, and what a run with another value of it does: on tasks, on scripts, and on each backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Seen = Literal["parameters", "shares", "ways", "evaluations", "saves", "network", "periods", "averages"]
"""What tells two runs apart by their logs."""


@dataclass(frozen=True, kw_only=True)
class Refused:
    """Attributes: sentence: what the run says of it."""

    sentence: str


@dataclass(frozen=True, kw_only=True)
class Told:
    """Left to the script, which a launch says in one sentence. Attributes: sentence: a part of that."""

    sentence: str


@dataclass(frozen=True, kw_only=True)
class Hosted:
    """Applied before a worker trains. Attributes: test: the file and the function that show it."""

    test: str


@dataclass(frozen=True, kw_only=True)
class Field:
    """A field of `RunSpec`.

    Attributes:
        value: another than the usual one, as JSON has it; of workers their shares, and one figure a worker.
        beside: other fields that it needs.
        task: what a run of a task does.
        script: what a run of a script does.
    """

    value: Any
    beside: Mapping[str, Any] = field(default_factory=dict)
    task: Seen | Hosted | Refused
    script: Seen | Hosted | Refused | Told


TOPK = {"compression": {"name": "topk", "ratio": 0.05}}
RATE = "a script's optimizer keeps its own learning rate"
DATA = "a script reads its own data"
READS = "a script's own DataLoader reads"
HERE = "tests/trainer/test_run_fields.py::"
STARTED = Hosted(test=f"{HERE}test_what_starts_workers_follows_the_run")
FEED = Hosted(test=f"{HERE}test_a_task_reads_its_samples_as_planned")
WAITS = Hosted(test=f"{HERE}test_workers_wait_for_each_other_as_long_as_planned")
BEGINS_AGAIN = Hosted(test="tests/ec2/test_reconcile.py::test_nobody_joins_a_run_that_would_begin_again_for_it")
REHEARSED = Hosted(
    test="tests/rehearsal/test_runs.py::test_a_cluster_trains_changes_as_told_and_fails_when_a_host_dies"
)

FIELDS: Mapping[str, Field] = {
    "task": Field(value="digits", task=STARTED, script=STARTED),
    "script": Field(value=["train.py"], task=STARTED, script=STARTED),
    "batches_per_step": Field(
        value=2,
        beside={"script": ["train.py"]},
        task=Hosted(test="tests/trainer/streams/test_rate_policy.py::test_runs_that_cannot_be_are_refused"),
        script=Hosted(test="tests/trainer/test_unchanged_ddp.py::test_audited_steps_are_those_of_one_process"),
    ),
    "resumes": Field(value=False, task=BEGINS_AGAIN, script=BEGINS_AGAIN),
    "data_dir": Field(value="/data", task=STARTED, script=STARTED),
    "seed": Field(
        value=7, beside={"compression": {"name": "randomk", "ratio": 0.1}}, task="parameters", script="parameters"
    ),
    "workers": Field(value=(8, 20, 36), task="shares", script="shares"),
    "compression": Field(value=TOPK["compression"], task="parameters", script="parameters"),
    "ratio_policy": Field(value="accordion", beside=TOPK, task="ways", script="ways"),
    "ratio_settings": Field(
        value={"gentle": 0.9}, beside={**TOPK, "ratio_policy": "accordion"}, task="ways", script="ways"
    ),
    "collective_policy": Field(value="cheapest", beside=TOPK, task="network", script="network"),
    "slowdown_coefficient": Field(value=0.75, beside={**TOPK, "ratio_policy": "auto"}, task="ways", script="ways"),
    "sync": Field(value={"name": "local-sgd", "every_steps": 2}, task="averages", script="averages"),
    "partition": Field(value={"name": "shards"}, task="parameters", script=Refused(sentence=DATA)),
    "injection": Field(
        value={"workers": 1.0, "samples": 0.5},
        beside={"partition": {"name": "shards"}},
        task="parameters",
        script=Refused(sentence=DATA),
    ),
    "stream": Field(value={"rates": (4000, 2000, 1000)}, task="parameters", script=Refused(sentence=DATA)),
    "exchange_timeout_s": Field(value=17.0, task=WAITS, script=WAITS),
    "batch_policy": Field(value="uniform", task="shares", script="shares"),
    "batch_settings": Field(value={"micro": 8}, beside={"batch_policy": "allocation"}, task="shares", script="shares"),
    "micro_batch_size": Field(value=2, task=FEED, script=Refused(sentence="computes its part of a batch at once")),
    "learning_rate_scale": Field(value=2.0, task="parameters", script=Refused(sentence=RATE)),
    "shard": Field(
        value="full",
        task=Hosted(test="tests/trainer/test_sharded_tasks.py::test_a_run_decides_what_devices_share"),
        script=Hosted(test="tests/integrations/test_sharded_scripts.py::test_a_session_shards_as_it_says"),
    ),
    "precision": Field(value="bf16", task="parameters", script=Refused(sentence="says itself what it computes in")),
    "prefetch": Field(value="on", task=FEED, script=Refused(sentence=READS)),
    "stop": Field(value={"max_steps": 7}, task="parameters", script=Told(sentence="the plan reckons with 7 steps")),
    "evaluate_every_epochs": Field(value=0.2, task="evaluations", script=Refused(sentence="evaluates in its own loop")),
    "control_period_steps": Field(value=1, task="periods", script="periods"),
    "checkpoint_every_s": Field(value=0.001, task="saves", script=Told(sentence="a checkpoint every 1 ms")),
    "probe": Field(value={"seed": 0, "sweeps": []}, task=STARTED, script=Refused(sentence="measured by running it")),
    "max_restarts": Field(value=3, task=STARTED, script=STARTED),
    "miniature": Field(value={"hosts": [{"name": "here", "workers": 2}]}, task=REHEARSED, script=REHEARSED),
}
