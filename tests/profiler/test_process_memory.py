"""The most memory that a worker's process uses on a CPU is what its profile says of it, within a tenth."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from hypothesis import given, strategies as st

import hetopt
from hetopt.backends.processes import LocalLauncher
from hetopt.core.run_spec import RunSpec, StopRule, WorkerSpec
from hetopt.core.run_status import RunState
from hetopt.optimizer.fit import fit
from hetopt.profiler.probe.facts import resident_peak_bytes
from tests.disturbance import PATIENCE_S

from .test_worker_memory import EXAMPLES, SCRIPTS

WORKERS = ("hetopt.trainer.worker",)
TRAINED = [8, 32, 96, 192]
STEPS = 25


def spec(job: str, samples: int) -> RunSpec:
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
    handle = launcher.start(spec(job, samples), run_dir, {})
    try:
        while not launcher.poll(handle).state.is_over and time.monotonic() < deadline_s:
            most = max([most, *peaks(run_dir)])
            time.sleep(0.05)
        assert launcher.poll(handle).state is RunState.FINISHED, launcher.poll(handle).reason
    finally:
        launcher.stop(handle)
    return most


def off(job: str, sizes: list[int], tmp_path: Path) -> dict[int, float]:
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
    found = off(job, TRAINED, tmp_path)
    assert {size: value for size, value in found.items() if abs(value) > 0.1} == {}
