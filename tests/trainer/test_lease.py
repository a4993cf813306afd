"""A run is alive exactly as long as its lease is locked: whatever clocks and files say, and whoever asks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hetopt.backends.backend import RunHandle
from hetopt.backends.processes import LEASE_FILE, PROCESS_FILE, LocalLauncher, is_alive, lease, run_status
from hetopt.core.errors import BadInput
from hetopt.core.run_status import RunState
from tests.disturbance import PATIENCE_S

from .scenarios import toy_spec

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
    LocalLauncher(sleep=lambda _: holder.kill()).stop(RunHandle(run_dir=tmp_path))
    assert not is_alive(tmp_path)


OTHER = """
import os, sys
from pathlib import Path
from tests.trainer.test_lease import stop
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
