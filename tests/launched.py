"""Runs that a launcher has started in processes of their own: what lives of one, and how it is waited for."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from hetopt.backends.backend import RunHandle
from hetopt.backends.processes import ProcessLauncher
from hetopt.core.run_spec import RunSpec
from hetopt.core.run_status import RunStatus
from tests.face.conftest import until

START = """
import importlib, sys, time
from pathlib import Path
from hetopt.core.run_spec import RunSpec
module, name, run_dir = *sys.argv[1:3], Path(sys.argv[3])
spec = RunSpec.model_validate_json((run_dir / "wish.json").read_text())
getattr(importlib.import_module(module), name)().start(spec, run_dir, {})
time.sleep(600)
"""


def start_elsewhere(launcher: type[ProcessLauncher], spec: RunSpec, run_dir: Path) -> subprocess.Popen[bytes]:
    """Start a run by a process that then only waits."""
    (run_dir / "wish.json").write_text(spec.model_dump_json())
    return subprocess.Popen(
        [sys.executable, "-c", START, launcher.__module__, launcher.__qualname__, str(run_dir)],
    )


def processes_of(run_dir: Path) -> list[psutil.Process]:
    """Every living process with the run's folder on its command line, children of tests by `-c` aside."""
    named = (process for process in psutil.process_iter(["cmdline"]) if str(run_dir) in (process.info["cmdline"] or []))
    found = []
    for process in named:
        with suppress(psutil.NoSuchProcess):
            process.info |= process.as_dict(["status", "ppid"])
            if "-c" not in process.info["cmdline"] and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def worker_processes(run_dir: Path, rank: int) -> list[psutil.Process]:
    """The worker, and before it the warden that replaces it, where there is one."""
    workers = [process for process in processes_of(run_dir) if "hetopt.trainer.worker" in process.cmdline()]
    own = [process for process in workers if process.environ()["RANK"] == str(rank)]
    return sorted(own, key=lambda process: process.create_time())


def wait_for(what: Callable[[], object], run_dir: Path) -> None:
    """Wait until something is true, or fail with all that the run has written."""
    try:
        until(what)
    except AssertionError as error:
        logs = "\n".join(f"{path}:\n{path.read_text()}" for path in (*run_dir.rglob("*.log"), *run_dir.glob("*.jsonl")))
        raise AssertionError(f"{processes_of(run_dir)}\n{logs}") from error


def over(launcher: ProcessLauncher, run_dir: Path) -> RunStatus:
    """Wait for the end of a run and return how it ended."""
    handle = RunHandle(run_dir=run_dir)
    wait_for(lambda: launcher.poll(handle).state.is_over, run_dir)
    return launcher.poll(handle)
