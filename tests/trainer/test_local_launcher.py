"""Real runs under the local launcher: started, watched, killed, resumed and stopped from outside.

A run is alive exactly as long as its lease is locked: whatever clocks and files say, and whoever asks.

torchrun's agent forks its workers, and starts them as it always does where a fork would not do.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest
import torch
from torch.distributed.elastic.multiprocessing import api

from hetopt.backends.backend import RunHandle
from hetopt.backends.processes import (
    LEASE_FILE,
    PROCESS_FILE,
    LocalLauncher,
    ProcessLauncher,
    Program,
    is_alive,
    lease,
    run_status,
)
from hetopt.core.errors import BadInput
from hetopt.core.events.log import EVENTS_FILE, Event, EventLog, read_events
from hetopt.core.run_spec import RunSpec
from hetopt.core.run_status import RunState, RunStatus
from hetopt.trainer.host.agent import fork_from, forked_workers
from hetopt.trainer.host.forks import ForkedProcess, ForkServer
from tests.disturbance import PATIENCE_S
from tests.launched import over, processes_of, start_elsewhere, wait_for, worker_processes
from tests.logs import fields

from .scenarios import toy_spec


def spec(**changes: object) -> RunSpec:
    return RunSpec.model_validate_json(json.dumps(toy_spec(shares=(5, 3), **changes)))


def has(run_dir: Path, event: str, **fields: object) -> list[Event]:
    events = read_events(run_dir / "events.jsonl")
    return [each for each in events if each["event"] == event and all(each.get(k) == v for k, v in fields.items())]


def worker(run_dir: Path, rank: int) -> psutil.Process:
    return worker_processes(run_dir, rank)[-1]


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
        status = over(launcher, tmp_path)
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
        over(launcher, tmp_path)
    finally:
        launcher.stop(handle)
    failed = has(tmp_path, "run_failed")
    assert failed[0]["reason"] == "worker 1 did not come to an exchange in time."


def test_a_launcher_that_is_killed_takes_its_run_along(tmp_path: Path) -> None:
    launching = start_elsewhere(LocalLauncher, spec(stop={"max_steps": 1_000_000}), tmp_path)
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
    launcher.start(RunSpec.model_validate_json(json.dumps(wish)), tmp_path, {})
    status = over(launcher, tmp_path)
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


HOLD = "import sys; sys.stdin.read()"
COMMANDS = """
import sys, time
from pathlib import Path
command, folder, wish, ahead = sys.argv[1], *map(Path, sys.argv[2:])
set_by_nobody = time.time
time.time = lambda: set_by_nobody() + float(ahead.read_text())

from hetopt.backends.backend import RunHandle
from hetopt.backends.processes import ProcessLauncher, Program
from hetopt.core.errors import BadInput
from hetopt.core.run_spec import RunSpec

class Waits(ProcessLauncher):
    def program(self, spec, run_dir):
        waits = ("sh", "-c", "while sleep 1; do :; done")
        return Program(module="none", log_name="host.log", defaults={}, prefix=waits)

launcher, handle, spec = Waits(), RunHandle(run_dir=folder), RunSpec.model_validate_json(wish.read_text())
try:
    if command in ("launch", "resume"):
        launcher.start(spec, folder, {})
    if command == "stop":
        launcher.stop(handle)
    print(launcher.poll(handle).state.value, flush=True)
    for _ in sys.stdin if command == "launch" else ():
        print(launcher.poll(handle).state.value, flush=True)
except BadInput as refused:
    print(refused.message)
"""
"""What terminals do to a run whose process only waits, by a clock that is ahead by what a file says."""


@pytest.fixture
def asked(tmp_path: Path) -> Callable[..., list[str]]:
    """A command line of `COMMANDS` for the run in a folder, where /proc/stat is a file that a test writes."""
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("only root may show a process another /proc/stat")
    (tmp_path / "wish").write_text(json.dumps(toy_spec()))
    set_clock(tmp_path, 0)
    shows = f'mount --bind "{tmp_path}/stat" /proc/stat && exec "$@"'

    def line(command: str) -> list[str]:
        files = [str(tmp_path / name) for name in ("run", "wish", "ahead")]
        return ["unshare", "-m", "sh", "-c", shows, "sh", sys.executable, "-c", COMMANDS, command, *files]

    return line


def set_clock(folder: Path, ahead_s: int) -> None:
    """Set it as the kernel does: the moment of the machine's start moves along."""
    lines = Path("/proc/stat").read_text().splitlines()
    moved = [f"btime {int(line.split()[1]) + ahead_s}" if line.startswith("btime") else line for line in lines]
    (folder / "stat").write_text("\n".join(moved) + "\n")
    (folder / "ahead").write_text(str(ahead_s))


def test_a_clock_that_is_set_ends_nothing_and_every_command_tells_the_truth(
    tmp_path: Path, asked: Callable[..., list[str]]
) -> None:
    """By seconds, an hour and a day, while the launch goes on and for terminals that were opened since."""
    (tmp_path / "run").mkdir()

    def said(command: str) -> str:
        return subprocess.run(asked(command), capture_output=True, text=True, check=True).stdout.strip()

    with subprocess.Popen(asked("launch"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as launch:
        assert launch.stdout.readline() == "starting\n"
        for ahead_s in (-2, 3600, -86_400):
            set_clock(tmp_path, ahead_s)
            launch.stdin.write("poll\n")
            launch.stdin.flush()
            assert launch.stdout.readline() == "starting\n", f"the launch itself, {ahead_s} s"
            assert said("status") == "starting", f"{ahead_s} s"
        assert said("resume") == f"a run is alive in {tmp_path / 'run'}."
        assert said("stop") == "stopped"
        launch.stdin.write("poll\n")
        launch.stdin.flush()
        assert launch.stdout.readline() == "stopped\n"
        assert not is_alive(tmp_path / "run")


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that holds the lease on the folder."""
    with lease(tmp_path) as held:
        process = subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, pass_fds=(held,))
    with process:
        yield process
        process.kill()


def test_a_process_holds_the_lease_as_long_as_it_lives(tmp_path: Path, holder: subprocess.Popen[bytes]) -> None:
    assert is_alive(tmp_path)
    assert run_status(tmp_path).state is RunState.STARTING
    with pytest.raises(BadInput, match="a run is alive in"), lease(tmp_path):
        pass
    holder.kill()
    holder.communicate()
    assert not is_alive(tmp_path)
    assert run_status(tmp_path).state is RunState.FAILED
    with lease(tmp_path):
        pass


def stop(run_dir: Path) -> None:
    """With a clock of its own: what it would wait for does not come."""
    now_s = iter(range(10**9))
    LocalLauncher(clock=lambda: float(next(now_s)), sleep=lambda _: None).stop(RunHandle(run_dir=run_dir))


def names(run_dir: Path, pid: object) -> None:
    (run_dir / PROCESS_FILE).write_text(json.dumps({"pid": pid, "log_bytes": 0}))


def test_only_the_holder_of_the_lease_is_ever_ended(tmp_path: Path, holder: subprocess.Popen[bytes]) -> None:
    """A file may name any process: one that is no run's, one that only looks at the lease, all of them, or none."""
    looks = "import sys; lease = open(sys.argv[1]); sys.stdin.read()"
    copy = tmp_path / "copy"
    with subprocess.Popen([sys.executable, "-c", looks, tmp_path / LEASE_FILE], stdin=subprocess.PIPE) as stranger:
        for pid in (stranger.pid, os.getpid(), 1, 0, -1, -stranger.pid, 10**30, "self", f"{holder.pid}/../self", None):
            names(tmp_path, pid)
            with pytest.raises(BadInput, match="holds its lease here"):
                stop(tmp_path)
            shutil.copytree(tmp_path, copy, ignore=shutil.ignore_patterns("copy"), dirs_exist_ok=True)
            stop(copy)  # nobody is alive there, whatever is in it
        for text in ("", "[" * 100_000, '{"pid": 1e400}', '{"pid": ' + "9" * 5000 + "}", '"x"'):
            (tmp_path / PROCESS_FILE).write_text(text)
            with pytest.raises(BadInput, match="holds its lease here"):
                stop(tmp_path)
        names(copy, holder.pid)
        stop(copy)
        assert (stranger.poll(), holder.poll()) == (None, None)
        names(tmp_path, holder.pid)
        stop(tmp_path)
        assert stranger.poll() is None
        assert holder.wait(PATIENCE_S) < 0
        stranger.kill()


def test_a_lease_that_is_let_go_a_moment_later_is_waited_for(tmp_path: Path, holder: subprocess.Popen[bytes]) -> None:
    """As that of a process which is ending: it has closed its files before the kernel unlocks them."""

    def end(_: float) -> None:
        holder.kill()
        holder.wait(PATIENCE_S)  # a busy machine takes a while

    LocalLauncher(sleep=end).stop(RunHandle(run_dir=tmp_path))
    assert not is_alive(tmp_path)


OTHER = """
import os, sys
from pathlib import Path
from tests.trainer.test_local_launcher import stop
"".encode("utf-8-sig")  # what is read in this way is found by its owner alone
os.setresuid(65534, 65534, 65534)
stop(Path(sys.argv[1]))
"""


def test_a_run_of_another_user_is_left_alone(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may become somebody else")
    run_dir = Path("/tmp") / f"hetopt-lease-{os.getpid()}-{time.monotonic_ns()}"  # tmp_path is its owner's alone
    run_dir.mkdir(mode=0o755)
    try:
        with lease(run_dir) as held:
            process = subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, pass_fds=(held,))
        with process:
            names(run_dir, process.pid)
            other = subprocess.run([sys.executable, "-c", OTHER, run_dir], capture_output=True, text=True, check=False)
            assert "holds its lease here" in other.stderr.splitlines()[-1]
            assert process.poll() is None
            process.kill()
    finally:
        shutil.rmtree(run_dir)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot be written"), lease(tmp_path / "nowhere"):
        pass
    os.mkfifo(tmp_path / LEASE_FILE)  # nobody waits for what comes out of it
    with pytest.raises(BadInput):
        is_alive(tmp_path)


def test_the_agent_forks_its_workers_and_starts_them_itself_where_it_cannot(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(api, "get_subprocess_handler", api.get_subprocess_handler)  # put back afterwards
    server = ForkServer.importing(("json",), os.environ)
    fork_from(server)
    kinds = []
    for number in range(2):
        worker = api.get_subprocess_handler(
            entrypoint=sys.executable,
            args=("-u", "-m", "timeit", "-n1", "-r1", "import os; print(os.environ['RANK'])"),
            env={"RANK": "7"},
            stdout=str(tmp_path / f"out-{number}"),
            stderr=str(tmp_path / f"err-{number}"),
            local_rank_id=0,
            numa_options=None,
        )
        kinds.append(type(worker.proc))
        assert worker.proc.wait(PATIENCE_S) == 0
        for output in (worker._stdout, worker._stderr):
            output.close()  # as the worker's own `close` does, which also wants somebody to kill
        assert (tmp_path / f"out-{number}").read_text().splitlines()[0] == "7"
        server.close()
    assert kinds == [ForkedProcess, subprocess.Popen]


def test_nobody_forks_a_process_that_uses_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    before = api.get_subprocess_handler
    with forked_workers():
        assert api.get_subprocess_handler is before
    assert "uses a GPU" in capsys.readouterr().err
