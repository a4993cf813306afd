"""The peak of a worker's tensors is predicted within a tenth, at batch sizes that were counted and at others.

The most memory that a worker's process uses on a CPU is what its profile says of it, within a tenth.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, strategies as st

import hetopt
from hetopt.backends.processes import LocalLauncher
from hetopt.core.run_spec import RunSpec, StopRule, WorkerSpec
from hetopt.core.run_status import RunState
from hetopt.optimizer.fit import fit
from hetopt.profiler.probe.facts import resident_peak_bytes
from hetopt.profiler.script.order import ORDER_FILE, ScriptOrder
from tests.disturbance import PATIENCE_S
from tests.forks import all_end_well

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = "tests.profiler.worker_memory_program"

SCRIPTS = {f"{ROOT}/examples/script/train.py": f"{ROOT}/examples/script/train_hetopt.py"}
EXAMPLES = {name: f"{ROOT}/examples/{name}.py:task" for name in ("diabetes", "transformer", "vision", "characters")}
COUNTED, TRAINED = [4, 16, 64], [4, 12, 48, 128]
DENSE: dict[str, Any] = {"name": "identity"}
OTHERS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"name": "topk", "ratio": 0.01}, {}),
    ({"name": "int8"}, {}),
    (DENSE, {"name": "local-sgd", "every_steps": 2}),
    ({"name": "topk", "ratio": 0.1}, {}),
    ({"name": "powersgd", "rank": 2}, {}),
]


def cases(tasks: list[str], others: int, scripted: int, trained: list[int]) -> list[dict[str, Any]]:
    """Tasks that sum gradients as they are; scripts; one whose gradient weighs much, by other exchanges."""
    dense = [{"task": task, "compression": DENSE, "sync": {}, "counted": COUNTED, "trained": trained} for task in tasks]
    scripts = [
        {"script": script, "session": session, "compression": one, "sync": {}, "trained": trained}
        for script, session in SCRIPTS.items()
        for one in (DENSE, OTHERS[0][0])
    ]
    return (
        dense
        + scripts[:scripted]
        + [
            {"task": EXAMPLES["transformer"], "compression": one, "sync": sync, "counted": COUNTED, "trained": [12]}
            for one, sync in OTHERS[:others]
        ]
    )


def off(folder: Path, planned: list[dict[str, Any]]) -> dict[str, float]:
    """By job, exchange and batch size: predicted peak over measured peak, less one."""
    for number, script in enumerate(dict.fromkeys(case["script"] for case in planned if "script" in case)):
        place = folder / f"profile-{number}"
        place.mkdir()
        order = ScriptOrder(script=script, warmup_steps=1, timed_steps=2, time_limit_s=60.0)
        (place / ORDER_FILE).write_text(order.model_dump_json())
        all_end_well(["-m", "hetopt.profiler.script.child", str(place), "0"], environment={"LOCAL_RANK": "0"})
        planned = [case | ({"profile": str(place)} if case.get("script") == script else {}) for case in planned]
    (folder / "cases.json").write_text(json.dumps(planned))
    all_end_well(*(["-m", PROGRAM, str(rank), str(folder)] for rank in range(2)))
    told = json.loads((folder / "told.json").read_text())
    assert len(told) == sum(len(case["trained"]) for case in planned)
    named = [
        " ".join(map(str, (Path(job).name, *one["compression"].values(), *one["sync"].values(), one["samples"])))
        + f" {one.get('shard')} {one.get('recomputed')}"
        for one in told
        for job in [one.get("task") or one["session"]]
    ]
    return {name: one["predicted"] / one["measured"] - 1 for name, one in zip(named, told, strict=True)}


def test_peaks_are_predicted_within_a_tenth(tmp_path: Path) -> None:
    found = off(tmp_path, cases([EXAMPLES["transformer"]], others=1, scripted=1, trained=[4, 48]))
    assert {name: value for name, value in found.items() if abs(value) > 0.1} == {}


@pytest.mark.slow
def test_peaks_of_all_examples_and_more_exchanges_are_too(tmp_path: Path) -> None:
    found = off(tmp_path, cases([*EXAMPLES.values(), "digits"], others=len(OTHERS), scripted=2, trained=TRAINED))
    assert {name: value for name, value in found.items() if abs(value) > 0.1} == {}


SHARED = f"{ROOT}/tests/trainer/sharded_tasks.py:wide"
SHARINGS: list[dict[str, Any]] = [
    {"shard": "full", "trained": [4, 48]},
    {"shard": "grads", "trained": [4, 48]},
    {"shard": "full", "trained": [48], "recomputed": f"{SHARED}_recomputed"},
    {"shard": "grads", "trained": [4], "recomputed": f"{SHARED}_recomputed"},
]
"""Weights freed or kept between forward and backward, activations kept or recomputed, of few samples and of many."""


def test_peaks_of_devices_that_share_a_model_are_too(tmp_path: Path) -> None:
    usual = {"task": SHARED, "compression": DENSE, "sync": {}, "counted": [4, 64]}
    found = off(tmp_path, [usual | sharing for sharing in SHARINGS])
    assert {name: value for name, value in found.items() if not -0.03 < value < 0.1} == {}


WORKERS = ("hetopt.trainer.worker",)
MEASURED = [8, 32, 96, 192]
STEPS = 25


def spec_of_job(job: str, samples: int) -> RunSpec:
    """Two workers with equal shares."""
    one = WorkerSpec(host="here", type="local", local_batch_size=samples, threads=1)
    script = (SCRIPTS[job], "--batch-size", str(2 * samples), "--epochs", "60") if job in SCRIPTS else ()
    stop = StopRule(max_epochs=60) if script else StopRule(max_steps=STEPS)
    return RunSpec(task=job, script=script, workers=(one, one), batch_policy="static", stop=stop, max_restarts=0)


def peaks(run_dir: Path) -> Iterator[int]:
    """The most that each worker's process has had in memory so far beside pages of files, bytes."""
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if str(run_dir) in line and any(name in line for name in WORKERS):
            with suppress(OSError):  # it has ended
                most = resident_peak_bytes(Path(f"/proc/{process.pid}/status").read_text())
                yield most or 0  # none left of one that ends


def measured(job: str, samples: int, run_dir: Path) -> int:
    """The most that a worker of a run had in memory."""
    launcher, most, deadline_s = LocalLauncher(), 0, time.monotonic() + PATIENCE_S
    run_dir.mkdir()
    handle = launcher.start(spec_of_job(job, samples), run_dir, {})
    try:
        while not launcher.poll(handle).state.is_over and time.monotonic() < deadline_s:
            most = max([most, *peaks(run_dir)])
            time.sleep(0.05)
        assert launcher.poll(handle).state is RunState.FINISHED, launcher.poll(handle).reason
    finally:
        launcher.stop(handle)
    return most


def measured_off(job: str, sizes: list[int], tmp_path: Path) -> dict[int, float]:
    """By local batch size: predicted peak over measured peak, less one."""
    line = fit(hetopt.profile(job, time_budget_s=10.0, workers=1)).reference.memory
    assert line is not None
    return {size: line.peak_bytes(size) / measured(job, size, tmp_path / str(size)) - 1 for size in sizes}


@given(st.integers(1, 1 << 40), st.integers(0, 1 << 40))
def test_pages_of_files_are_no_workers_own(own_kib: int, of_files_kib: int) -> None:
    told = f"Name:\tpython: a\nVmHWM:\t{own_kib + of_files_kib:8} kB\nRssFile:\t{of_files_kib:8} kB\n"
    assert resident_peak_bytes(told) == 1024 * own_kib
    assert resident_peak_bytes("Name:\tpython\n") is None


@pytest.mark.slow
@pytest.mark.parametrize("job", [*EXAMPLES.values(), *SCRIPTS, "digits"])
def test_a_workers_process_uses_what_its_profile_says(job: str, tmp_path: Path) -> None:
    found = measured_off(job, MEASURED, tmp_path)
    assert {size: value for size, value in found.items() if abs(value) > 0.1} == {}
