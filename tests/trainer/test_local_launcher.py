"""Real runs under the local launcher: started, watched, killed, resumed and stopped from outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from hetopt.backends.backend import RunHandle
from hetopt.backends.processes import LocalLauncher, ProcessLauncher, Program, run_status
from hetopt.core.errors import BadInput
from hetopt.core.events.log import EVENTS_FILE, Event, EventLog, read_events
from hetopt.core.run_spec import RunSpec
from hetopt.core.run_status import RunState, RunStatus
from tests.disturbance import PATIENCE_S
from tests.logs import fields

from .scenarios import toy_spec

START = """
import sys, time
from pathlib import Path
from hetopt.backends.processes import LocalLauncher, ProcessLauncher, Program, run_status
from hetopt.core.run_spec import RunSpec
run_dir = Path(sys.argv[1])
LocalLauncher().start(RunSpec.model_validate_json((run_dir / "wish.json").read_text()), run_dir, {})
time.sleep(600)
"""


def spec(**changes: object) -> RunSpec:
    return RunSpec.model_validate_json(json.dumps(toy_spec(shares=(5, 3), **changes)))


def processes_of(run_dir: Path) -> list[psutil.Process]:
    """Every living process with the run's folder on its command line, this one and its own children by `-c` aside."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        line = process.info["cmdline"] or []
        if str(run_dir) in line and "-c" not in line and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def wait_for(what: Callable[[], object], run_dir: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        if time.monotonic() > deadline:
            logs = "\n".join(f"{path}:\n{path.read_text()}" for path in run_dir.rglob("*.log"))
            pytest.fail(f"waited in vain\n{(run_dir / 'events.jsonl').read_text()}\n{logs}")
        time.sleep(0.05)


def has(run_dir: Path, event: str, **fields: object) -> list[Event]:
    events = read_events(run_dir / "events.jsonl")
    return [each for each in events if each["event"] == event and all(each.get(k) == v for k, v in fields.items())]


def over(launcher: LocalLauncher, handle: RunHandle) -> RunStatus:
    wait_for(lambda: launcher.poll(handle).state.is_over, handle.run_dir)
    return launcher.poll(handle)


def worker(run_dir: Path, rank: int) -> psutil.Process:
    return worker_processes(run_dir, rank)[-1]


def worker_processes(run_dir: Path, rank: int) -> list[psutil.Process]:
    """The worker, and before it the warden that replaces it, where there is one."""
    workers = [process for process in processes_of(run_dir) if "hetopt.trainer.worker" in process.cmdline()]
    own = [process for process in workers if process.environ()["RANK"] == str(rank)]
    return sorted(own, key=lambda process: process.create_time())


def kill_worker(run_dir: Path) -> None:
    """With its warden, as when a machine is lost."""
    worker_processes(run_dir, 1)[0].kill()


def test_a_killed_worker_is_restarted_from_the_checkpoint_and_a_second_kill_is_explained(tmp_path: Path) -> None:
    launcher = LocalLauncher()
    wish = spec(stop={"max_steps": 1_000_000}, checkpoint_every_s=0.2, control_period_steps=5, max_restarts=1)
    handle = launcher.start(wish, tmp_path, {"TOY_WAIT_S": "0.001"})
    try:
        assert launcher.poll(handle) == RunStatus(state=RunState.STARTING)
        with pytest.raises(BadInput, match="is alive"):
            launcher.start(wish, tmp_path, {})
        wait_for(lambda: has(tmp_path, "checkpoint_saved"), tmp_path)
        assert launcher.poll(handle) == RunStatus(state=RunState.RUNNING)
        # Any terminal can ask.
        assert LocalLauncher().poll(RunHandle(run_dir=tmp_path)).state == RunState.RUNNING
        kill_worker(tmp_path)
        wait_for(lambda: len(has(tmp_path, "run_started")) == 2, tmp_path)
        first, second = has(tmp_path, "run_started")
        assert first["resumed_step"] == 0
        assert second["resumed_step"] in [event["step"] for event in has(tmp_path, "checkpoint_saved")]
        wait_for(lambda: len(has(tmp_path, "training_started")) == 2, tmp_path)
        kill_worker(tmp_path)
        status = over(launcher, handle)
    finally:
        launcher.stop(handle)
    assert status.state == RunState.FAILED
    assert "worker 1 on here was killed (SIGKILL)" in (status.reason or "")
    assert not processes_of(tmp_path)


@pytest.mark.parametrize(
    ("task", "compression"),
    [("plain", "topk:0.1"), pytest.param("wide", "identity:1", marks=pytest.mark.slow)],
)
def test_a_worker_that_hangs_is_named_when_time_is_up(tmp_path: Path, task: str, compression: str) -> None:
    """Both forms of step, whole gradients and buckets: the others wait no longer than they were told to."""
    name, _, ratio = compression.partition(":")
    wish = toy_spec(
        task,
        shares=(5, 3, 2),
        stop={"max_steps": 1_000_000},
        compression={"name": name, "ratio": float(ratio)},
        exchange_timeout_s=10.0,
        control_period_steps=5,
    )
    launcher = LocalLauncher()
    handle = launcher.start(RunSpec.model_validate_json(json.dumps(wish)), tmp_path, {"TOY_WAIT_S": "0.001"})
    try:
        wait_for(lambda: has(tmp_path, "step"), tmp_path)
        hanging = worker(tmp_path, 1)
        hanging.send_signal(signal.SIGSTOP)
        wait_for(lambda: has(tmp_path, "run_failed"), tmp_path)
        hanging.send_signal(signal.SIGCONT)
        over(launcher, handle)
    finally:
        launcher.stop(handle)
    failed = has(tmp_path, "run_failed")
    assert failed[0]["reason"] == "worker 1 did not come to an exchange in time."


def test_a_launcher_that_is_killed_takes_its_run_along(tmp_path: Path) -> None:
    (tmp_path / "wish.json").write_text(spec(stop={"max_steps": 1_000_000}).model_dump_json())
    launching = subprocess.Popen([sys.executable, "-c", START, str(tmp_path)])
    try:
        wait_for(lambda: has(tmp_path, "training_started"), tmp_path)
        assert len(processes_of(tmp_path)) == 4, "the host, what it forks from, and two workers"
        os.kill(launching.pid, signal.SIGKILL)
        launching.wait()
        wait_for(lambda: not processes_of(tmp_path), tmp_path)
    finally:
        launching.kill()
        LocalLauncher().stop(RunHandle(run_dir=tmp_path))
    assert LocalLauncher().poll(RunHandle(run_dir=tmp_path)).state.is_over


def test_stopping_a_run_that_is_still_starting_leaves_nothing(tmp_path: Path) -> None:
    launcher = LocalLauncher()
    handle = launcher.start(spec(), tmp_path, {})
    launcher.stop(handle)
    assert not processes_of(tmp_path)
    assert launcher.poll(handle) == RunStatus(state=RunState.STOPPED)


def test_the_launcher_does_not_import_torch() -> None:
    code = "import sys, hetopt.backends.processes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.gpu
@pytest.mark.parametrize("devices", [("cuda",), ("cuda", "cpu"), ("cuda", "cuda")], ids="+".join)
@pytest.mark.parametrize("compression", [{"name": "identity"}, {"name": "topk", "ratio": 0.1}], ids=["dense", "topk"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_gpu_workers_train_alone_and_beside_others(
    tmp_path: Path, devices: tuple[str, ...], compression: dict[str, object], precision: str
) -> None:
    wish = toy_spec(shares=(9, 5)[: len(devices)], compression=compression, precision=precision)
    for worker, device in zip(wish["workers"], devices, strict=True):
        worker["device"] = device
    launcher = LocalLauncher()
    handle = launcher.start(RunSpec.model_validate_json(json.dumps(wish)), tmp_path, {})
    status = over(launcher, handle)
    assert status.state == RunState.FINISHED, status
    metrics = [event["metrics"]["mse"] for event in has(tmp_path, "evaluated")]
    assert metrics[-1] < metrics[0]


class Waits(ProcessLauncher):
    """Its runs wait for a file in their folder before they end, and then say that they did so by themselves."""

    def program(self, spec: RunSpec, run_dir: Path) -> Program:
        script = 'until [ -e "$0/go" ]; do sleep 0.05; done; touch "$0/by-itself"'
        return Program(module="none", log_name="host.log", defaults={}, prefix=("sh", "-c", script, str(run_dir)))


def stopped(folder: Path, grows: bool, apart_s: float, ends_after_s: float) -> bool:
    """Stop a run whose steps take so long, and which ends so long after that; whether it was left to end by itself.

    Args:
        folder: of the run.
        grows: whether its checkpoint does meanwhile.
        apart_s: between two steps.
        ends_after_s: since it was told.
    """
    now_s = [0.0]

    def sleep(seconds: float) -> None:
        """Some time is over, in which a part of the checkpoint has come; the run itself ends when its time is."""
        now_s[0] += seconds
        if grows:
            with (part.parent / f"{part.name}.partial").open("a") as stream:
                stream.write("part")
        if now_s[0] >= ends_after_s and not (folder / "go").exists():
            (folder / "go").touch()
            wait_for(lambda: run_status(folder).state.is_over, folder)

    part = folder / "objects" / "ckpt" / "step-2" / "state.safetensors"
    part.parent.mkdir(parents=True)
    launcher = Waits(grace_s=20.0, clock=lambda: now_s[0], sleep=sleep)
    events = [
        fields("training_started", time_s=1000.0),
        *(fields("step", time_s=1000.0 + t) for t in (apart_s, 2 * apart_s)),
    ]
    handle = launcher.start(spec(), folder, {})
    (folder / EVENTS_FILE).write_text("".join(f"{json.dumps(event)}\n" for event in events))
    assert launcher.poll(handle).state is RunState.RUNNING
    launcher.stop(handle)
    # Seconds of this clock are none: what was killed may not be gone yet.
    wait_for(lambda: launcher.poll(handle).state.is_over, folder)
    launcher.poll(handle)  # collects its exit code
    return (folder / "by-itself").exists()


@pytest.mark.parametrize(
    ("grows", "apart_s", "ends_after_s", "by_itself"),
    [
        (False, 1.0, 15.0, True),
        (False, 1.0, 60.0, False),  # it hangs
        (True, 1.0, 60.0, True),  # its checkpoint comes over a slow link
        (True, 1.0, 5000.0, False),  # it does not hear
        (False, 50.0, 60.0, True),  # its steps are as long
    ],
)
def test_a_run_that_is_stopped_finishes_its_step_and_its_checkpoint(
    tmp_path: Path, grows: bool, apart_s: float, ends_after_s: float, by_itself: bool
) -> None:
    assert stopped(tmp_path, grows, apart_s, ends_after_s) is by_itself


def test_a_run_that_goes_on_is_starting_until_its_own_workers_have_begun(tmp_path: Path) -> None:
    """Whatever the session before has left in its log."""
    (tmp_path / EVENTS_FILE).write_text('{"event": "training_started", "time_s": 1000.0}\n')
    launcher = Waits()
    handle = launcher.start(spec(), tmp_path, {})
    try:
        assert launcher.poll(handle).state is RunState.STARTING
        with closing(EventLog(tmp_path / EVENTS_FILE)) as log:
            log.write("condition_changed", host="a", returns=True)
            assert launcher.poll(handle).state is RunState.STARTING
            log.write("training_started", step=5)
        assert launcher.poll(handle).state is RunState.RUNNING
    finally:
        (tmp_path / "go").touch()
        launcher.stop(handle)
