"""The runs that the laws of training are read off, and the processes that make them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetopt.core.events.log import Event, read_events
from hetopt.core.run_spec import RunSpec
from hetopt.trainer.checkpoints.folder import STATE_FILE, unpack
from hetopt.trainer.training import MOST_SAMPLES
from tests.disturbance import CoreTime, note
from tests.forks import all_end_well

TOY = Path(__file__).with_name("toy_task.py")
WORLD_SIZE = 3
SHARES = (9, 5, 2)
STEPS, HALF_STEPS, SHORT_STEPS = 46, 27, 26
"""Of a run, of one that is interrupted, and of one of which little is asked; epochs are of six or seven steps."""

SPLITS = [[9, 5, 2], [1, 1, 14], [30, 11, 3], [4, 4, 4]]


def toy_spec(task: str = "plain", *, shares: tuple[int, ...] = SHARES, **changes: Any) -> dict[str, Any]:
    """A run of a toy task as plain JSON; ``declared`` and ``max_local_batch_size`` are one a worker."""
    limits = changes.pop("max_local_batch_size", (None,) * len(shares))
    declared = changes.pop("declared", (None,) * len(shares))
    workers = [
        {
            "host": "here",
            "type": "local",
            "local_batch_size": share,
            "declared": time,
            "max_local_batch_size": limit,
        }
        for share, time, limit in zip(shares, declared, limits, strict=True)
    ]
    spec = {
        "task": f"{TOY}:{task}",
        "workers": workers,
        "batch_policy": "static",
        "stop": {"max_steps": STEPS},
        **changes,
    }
    RunSpec.model_validate_json(json.dumps(spec))
    return spec


TOPK = {"name": "topk", "ratio": 0.1}
HALF = {"stop": {"max_steps": HALF_STEPS}}
SHORT = {"stop": {"max_steps": SHORT_STEPS}}
LONG_STEPS = 64
LONG = {"stop": {"max_steps": LONG_STEPS}}
"""Where buffers and what was rounded have come to rest."""

SHORT_HALF = {"stop": {"max_steps": 17}}
THIN = {"name": "topk", "ratio": 0.01}
STEERED = {"collective_policy": "cheapest", "control_period_steps": 8, "stop": {"max_steps": 32}}
# Far longer than the real computation, so that a busy machine does not show: 1, 1 and 8 ms a sample.
UNEVEN = {
    "shares": (20, 20, 20),
    "declared": tuple({"per_sample_s": per_sample_s} for per_sample_s in (0.001, 0.001, 0.008)),
    "batch_policy": "model",
    "control_period_steps": 5,
}
# Workers that train for themselves and average parameters now and then, on parts of the data, with samples handed on.
SELSYNC = {"name": "selsync", "delta": 0.15, "window": 5, "max_local_steps": 20}
ROUNDED = {"sync": {"name": "local-sgd", "every_steps": 7}, "compression": {"name": "int4"}}
TURNS = {
    "ratio_policy": "auto",
    "control_period_steps": 1,
    "learning_rate_scale": 0.2,
    "sync": {"name": "local-sgd", "every_steps": 3},
}
OUTER = {"name": "local-sgd", "every_steps": 6, "outer_rate": 0.7, "outer_momentum": 0.5}
SYNC_SCENARIOS: list[dict[str, Any]] = [
    {"name": "selsync-0", "spec": toy_spec(sync={"name": "selsync", "delta": 0})},
    {"name": "local-sgd-1", "spec": toy_spec(sync={"name": "local-sgd", "every_steps": 1})},
    {"name": "selsync-never", "spec": toy_spec(sync={"name": "selsync", "delta": "never"}, **SHORT)},
    {"name": "selsync-auto", "spec": toy_spec(sync={**SELSYNC, "delta": "auto", "synchronised_share": 0.25})},
    {"name": "selsync", "spec": toy_spec(sync=SELSYNC)},
    {"name": "selsync-resumed", "spec": toy_spec(sync=SELSYNC, **HALF)},
    {"name": "selsync-resumed", "spec": toy_spec(sync=SELSYNC)},
    {"name": "local-buffers", "spec": toy_spec("with_buffers", sync={"name": "local-sgd", "every_steps": 7}, **LONG)},
    {
        "name": "local-buffers-resumed",
        "spec": toy_spec("with_buffers", sync={"name": "local-sgd", "every_steps": 7}, **HALF),
    },
    {
        "name": "local-buffers-resumed",
        "spec": toy_spec("with_buffers", sync={"name": "local-sgd", "every_steps": 7}, **LONG),
    },
    {"name": "fedavg", "spec": toy_spec(sync={"name": "fedavg", "participants": 0.5, "every_epochs": 0.5})},
    {"name": "rounded", "spec": toy_spec("with_buffers", **ROUNDED, **LONG)},
    {"name": "outer", "spec": toy_spec("with_buffers", sync=OUTER)},
    {"name": "outer-resumed", "spec": toy_spec("with_buffers", sync=OUTER, **HALF)},
    {"name": "outer-resumed", "spec": toy_spec("with_buffers", sync=OUTER)},
    *(
        {"name": name, "turns": True, "spec": toy_spec("with_buffers", **TURNS, **stop)}
        for name, stop in (("turns", {}), ("turns-resumed", HALF), ("turns-resumed", {}))
    ),
    {"name": "local-uneven", "spec": toy_spec(sync={"name": "local-sgd"}, stop={"max_steps": 48}, **UNEVEN)},
    {"name": "shards", "spec": toy_spec(partition={"name": "shards"}, **SHORT)},
    {"name": "seldp", "spec": toy_spec(partition={"name": "seldp"}, **HALF)},
    {"name": "seldp", "spec": toy_spec(partition={"name": "seldp"})},
    {
        "name": "injection",
        "spec": toy_spec(partition={"name": "shards"}, injection={"workers": 0.5, "samples": 0.5}, **SHORT),
    },
]
CRITICAL = {"batch_policy": "critical", "control_period_steps": 5, "learning_rate_scale": 0.2}
CRITICAL_EPOCHS = (5, 10)
SCENARIOS: list[dict[str, Any]] = [
    {"name": "dense", "spec": toy_spec()},
    {"name": "dense-resumed", "spec": toy_spec(**HALF)},
    {"name": "dense-resumed", "spec": toy_spec()},
    {"name": "topk", "spec": toy_spec(compression=TOPK)},
    {"name": "topk-resumed", "spec": toy_spec(compression=TOPK, **HALF)},
    {"name": "topk-resumed", "spec": toy_spec(compression=TOPK)},
    {"name": "topk-half", "spec": toy_spec(compression=TOPK, **HALF)},
    {"name": "buffers", "spec": toy_spec("with_buffers")},
    {"name": "buffers-resumed", "spec": toy_spec("with_buffers", **HALF)},
    {"name": "buffers-resumed", "spec": toy_spec("with_buffers")},
    {"name": "micro", "spec": toy_spec(max_local_batch_size=(2, None, 1))},
    {"name": "unused", "spec": toy_spec("partly_unused", **SHORT)},
    {"name": "bf16-precision", "spec": toy_spec(precision="bf16", **SHORT)},
    {"name": "fp16-precision", "spec": toy_spec(precision="fp16", compression=TOPK, **SHORT)},
    {"name": "sparse", "spec": toy_spec("sparse", **SHORT)},
    {"name": "rows", "spec": toy_spec("rows", **SHORT)},
    {"name": "drifting_rate", "spec": toy_spec("drifting_rate")},
    {"name": "drifting_model", "spec": toy_spec("drifting_model")},
    {"name": "diverging", "spec": toy_spec(learning_rate_scale=1e30)},
    # The batch follows the noise, in two attempts.
    *(
        {"name": "critical", "spec": toy_spec("wide", stop={"max_epochs": epochs}, **CRITICAL)}
        for epochs in CRITICAL_EPOCHS
    ),
    {"name": "target", "spec": toy_spec("easy", stop={"max_epochs": 50, "target": True})},
    {"name": "paced", "spec": toy_spec(stop={"max_steps": 48}, **UNEVEN)},
    # With more than one bucket, so that gradients are sent under backward.
    {"name": "wide", "spec": toy_spec("wide", **SHORT)},
    {"name": "wide-resumed", "spec": toy_spec("wide", **SHORT_HALF)},
    {"name": "wide-resumed", "spec": toy_spec("wide", **SHORT)},
    {"name": "wide-micro", "spec": toy_spec("wide", max_local_batch_size=(2, None, 1), **SHORT)},
    {"name": "wide-fp16", "spec": toy_spec("wide", precision="fp16", **SHORT)},
    # Samples are read ahead, shares change, and the run is interrupted.
    {"name": "ahead", "spec": toy_spec(prefetch="on", stop={"max_steps": 37}, **UNEVEN)},
    {"name": "ahead", "spec": toy_spec(prefetch="on", stop={"max_steps": 48}, **UNEVEN)},
    {"name": "ahead-fixed", "spec": toy_spec(prefetch="on", **HALF)},
    {"name": "ahead-fixed", "spec": toy_spec(prefetch="on")},
    # Memory for 4 samples on the first worker, which finds out by itself or is told; from the start or later.
    {"name": "memory", "spec": toy_spec(**HALF), "memory": {"rank": 0, "samples": 4}},
    {"name": "memory", "spec": toy_spec(), "memory": {"rank": 0, "samples": 4}},
    {"name": "memory-told", "spec": toy_spec(max_local_batch_size=(4, None, None))},
    {"name": "memory-later", "spec": toy_spec(), "memory": {"rank": 0, "samples": 4, "after": 20}},
    {"name": "buffers-memory", "spec": toy_spec("with_buffers", **SHORT), "memory": {"rank": 0, "samples": 4}},
    {"name": "buffers-memory-told", "spec": toy_spec("with_buffers", max_local_batch_size=(4, None, None), **SHORT)},
    {"name": "wide-memory", "spec": toy_spec("wide", **SHORT), "memory": {"rank": 0, "samples": 4}},
    {"name": "wide-memory-told", "spec": toy_spec("wide", max_local_batch_size=(4, None, None), **SHORT)},
    {"name": "wide-memory-later", "spec": toy_spec("wide", **SHORT), "memory": {"rank": 0, "samples": 4, "after": 20}},
    # What is exchanged changes on the way: by what was measured, or by rules that the same run always follows alike.
    # Thin exchanges at the highest rate that dense training bears would end in NaN, so rates are lower where they are.
    {"name": "auto", "spec": toy_spec("wide", **STEERED, ratio_policy="auto", learning_rate_scale=0.2)},
    {"name": "cheapest", "spec": toy_spec("wide", **STEERED, compression=TOPK, learning_rate_scale=0.2)},
    {"name": "scan", "spec": toy_spec("wide", **STEERED, ratio_policy="scan", learning_rate_scale=0.2)},
    {
        "name": "gravac",
        "spec": toy_spec("wide", compression=THIN, ratio_policy="gravac", learning_rate_scale=0.2, **SHORT),
    },
    *(
        {
            "name": f"{policy}{part}",
            "spec": toy_spec("wide", compression=THIN, ratio_policy=policy, learning_rate_scale=0.2, **stop),
        }
        for policy, part, stop in (
            ("accordion", "", SHORT),
            ("threshold", "", SHORT),
            ("warm_up", "", SHORT),
            ("warm_up", "-resumed", SHORT_HALF),
            ("warm_up", "-resumed", SHORT),
        )
    ),
    # The workers keep the momentum; and compression bucket by bucket, in a thread beside backward.
    {"name": "dgc", "spec": toy_spec(compression={"name": "dgc", "ratio": 0.1})},
    {"name": "bf16", "spec": toy_spec("wide", compression={"name": "bf16"}, **SHORT)},
    *(
        {"name": f"qsgd_maxnorm{part}", "spec": toy_spec("wide", compression={"name": "qsgd_maxnorm"}, **stop)}
        for part, stop in (("", SHORT), ("-resumed", SHORT_HALF), ("-resumed", SHORT))
    ),
]


STEERED_RUNS = ["auto", "cheapest", "scan", "gravac", "accordion", "threshold", "warm_up"]
"""Those that change what they exchange on the way."""


@dataclass(frozen=True)
class Crew:
    """The folders that a crew of processes left behind."""

    folder: Path

    def events(self, name: str, kind: str | None = None) -> list[Event]:
        events = read_events(self.folder / name / "events.jsonl")
        return [event for event in events if kind in (None, event["event"])]

    def finished(self, name: str) -> Event:
        last = self.events(name)[-1]
        assert last["event"] == "training_finished", last
        return last

    def state(self, name: str) -> dict[str, Any]:
        folder = self.folder / name / "checkpoint"
        state = unpack((folder / (folder / "LATEST").read_text().strip() / STATE_FILE).read_bytes())
        assert isinstance(state, dict)
        return state

    def stream(self, name: str) -> list[int]:
        """Every training index that was computed, in the order of the global stream, over all attempts of a run."""
        samples: list[int] = []
        records = self.folder / name / "records"
        attempt = 0
        while (records / f"0-{attempt}").exists():
            ranks = [self._steps(records / f"{rank}-{attempt}") for rank in range(WORLD_SIZE)]
            for step in zip(*ranks, strict=True):
                samples += [index for part in step for index in part]
            attempt += 1
        return samples

    def samples(self, name: str, rank: int) -> list[int]:
        """The training indices that one rank computed, over all attempts of a run."""
        attempts = sorted((self.folder / name / "records").glob(f"{rank}-*"))
        return [index for record in attempts for part in self._steps(record) for index in part]

    @staticmethod
    def _steps(record: Path) -> list[list[int]]:
        """What was computed, step by step, without the first samples of the dataset, which the test of the loss and the
        warm-up take."""
        lines = [[int(index) for index in line.split()] for line in record.read_text().splitlines()]
        return list(itertools.dropwhile(_is_warm_up, lines))


def _is_warm_up(part: list[int]) -> bool:
    ordered = part == list(range(part[0], part[0] + len(part)))
    return ordered and (part[0] == 0 or (len(part) > 1 and part[-1] < MOST_SAMPLES))


def run_crew(
    folder: Path,
    scenarios: Sequence[dict[str, Any]] = SCENARIOS,
    splits: Sequence[list[int]] = SPLITS,
    workers: int = WORLD_SIZE,
) -> Crew:
    """Start the processes of `crew.py` and wait until they have trained everything."""
    plan = {"task": f"{TOY}:wide", "splits": splits, "scenarios": scenarios}
    (folder / "crew.json").write_text(json.dumps(plan))
    script = str(Path(__file__).with_name("crew.py"))
    begun = CoreTime.now()
    all_end_well(*([script, str(rank), str(workers), str(folder)] for rank in range(workers)))
    note(folder, begun)
    return Crew(folder)
