"""A fork of a process that has imported what is needed is like the process that Python itself would have started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, strategies as st

from hetopt.backends.processes import LocalLauncher
from hetopt.core.interruption import (
    SPIN,
    SPIN_VARIABLES,
    THREADS_VARIABLE,
    openmp_environment,
    usable_processors,
)
from hetopt.core.run_spec import RunSpec
from hetopt.trainer.host import forks
from hetopt.trainer.host.forks import ForkServer, NoFork
from tests.disturbance import PATIENCE_S
from tests.launched import over
from tests.trainer.scenarios import toy_spec

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes start by themselves elsewhere")

TELLS = """
import atexit, json, os, random, signal, sys, threading
import numpy
atexit.register(print, "at exit", flush=True)
told = dict(
    arguments=sys.argv, name=__name__, folder=os.getcwd(), first=os.path.realpath(sys.path[0]), parent=os.getppid(),
    session=os.getsid(0) == os.getpid(), environment=dict(os.environ), threads=len(os.listdir("/proc/self/task")),
    files=sorted(int(one) for one in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{one}")),
    handlers=[str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)],
    main=sys.modules["__main__"].__dict__ is globals(), read=sys.stdin.read(),
)
print(json.dumps([told, [random.random(), numpy.random.rand()]]))
print("an error", file=sys.stderr)
"""

ENDS = {
    "pass": 0,
    "import sys; sys.exit(3)": 3,
    "import sys; sys.stdout.reconfigure(errors='replace'); print('said')": 0,
    "import sys; sys.exit('a sentence')": 1,
    "raise ValueError('wrong')": 1,
    "import os; os._exit(7)": 7,
    "import os; print('said'); os.kill(os.getpid(), 9)": -signal.SIGKILL,
    "import os, signal; os.kill(os.getpid(), signal.SIGTERM)": -signal.SIGTERM,
    "import os, signal; os.kill(os.getpid(), signal.SIGINT)": -signal.SIGINT,
    "import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()": 0,
}

PARENT = """
import os, sys, time
from hetopt.trainer.host.forks import ForkServer
server = ForkServer.importing(("json",), os.environ)
waits = server.start([sys.argv[1]], environment=os.environ, stdout=1, stderr=2)
print(waits.pid, flush=True)
time.sleep(600)
"""
WAITS = """
import os, signal, time
from hetopt.core.interruption import die_with_parent
die_with_parent(os.getppid(), signal.SIGKILL)
print("waiting", flush=True)
time.sleep(600)
"""
FORKS_ITSELF = """
import os, subprocess, sys, threading
from hetopt.trainer.host import forks
from hetopt.trainer.host.forks import ForkServer, NoFork
import json
server = ForkServer.of_this_process()
sys.exit(server.start([sys.argv[1], "x"], environment=os.environ, stdout=1, stderr=2).wait(30))
"""


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    server = ForkServer.importing(("numpy", "hetopt.core.grammar"), os.environ)
    yield server
    server.close()


def written(folder: Path, text: str) -> str:
    path = folder / f"program_{len(list(folder.iterdir()))}.py"
    path.write_text(text)
    return str(path)


def told(output: str) -> tuple[dict[str, Any], list[float]]:
    facts, drawn = json.loads(output.splitlines()[0])
    return facts, drawn


def test_a_fork_sees_what_a_process_of_its_own_would(
    server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = written(tmp_path, TELLS)
    monkeypatch.chdir(tmp_path)
    arguments = [program, "--one", "two words", "drei ß"]
    environment = {**os.environ, "ONLY": "here", "OMP_NUM_THREADS": "1"}
    environment.pop("HETOPT_HOME")
    (tmp_path / "in").write_text("some input")
    outputs = []
    for number in range(2):
        files = [(tmp_path / f"{name}-{number}").open("w+b") for name in ("out", "err")]
        with (tmp_path / "in").open("rb") as given:
            fork = server.start(arguments, environment=environment, stdin=given, stdout=files[0], stderr=files[1])
        assert fork.wait(PATIENCE_S) == 0
        for one in files:
            one.close()
        assert (tmp_path / f"err-{number}").read_text() == "an error\n"
        outputs.append((tmp_path / f"out-{number}").read_text())
        assert outputs[-1].endswith("at exit\n")
    alone = subprocess.run(
        [sys.executable, *arguments], env=environment, input=b"some input", capture_output=True, start_new_session=True
    )
    facts, expected = told(outputs[0])[0], told(alone.stdout.decode())[0]
    assert facts == expected
    assert (facts["parent"], facts["files"]) == (os.getpid(), [0, 1, 2])
    drawn = [told(output)[1] for output in outputs]
    assert all(one != other for one, other in zip(*drawn, strict=True)), "no two draw the same numbers"


def test_a_frozen_server_keeps_nobody_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither who wants a fork, nor a run that is over and lets go of the server; and it never forks afterwards."""
    monkeypatch.setattr(forks, "_ENDING_S", 0.2)
    program = written(tmp_path, f"open({str(tmp_path / 'forked')!r}, 'w').close()")
    for wants_a_fork in (True, False):
        server = ForkServer.importing(("json",), os.environ)
        with (tmp_path / "out").open("wb") as out:
            server.start(["-m", "this"], environment=os.environ, stdout=out).wait(PATIENCE_S)
        monkeypatch.setattr(forks, "_LONGEST_IMPORT_S", 0.2)
        server._process.send_signal(signal.SIGSTOP)
        if wants_a_fork:
            with pytest.raises(NoFork):
                server.start([program], environment=os.environ, stdout=1)
        else:
            server.close()
        assert server._process.wait(PATIENCE_S) == -signal.SIGKILL
        monkeypatch.undo()
        monkeypatch.setattr(forks, "_ENDING_S", 0.2)
    assert not (tmp_path / "forked").exists()


def test_a_module_runs_as_the_main_one(server: ForkServer, tmp_path: Path) -> None:
    """Also one that the server has imported: no warning says so."""
    with (tmp_path / "out").open("wb") as out:
        fork = server.start(["-m", "hetopt.core.grammar"], environment=os.environ, stdout=out)
        assert fork.wait(PATIENCE_S) == 0
        fork = server.start(["-m", "timeit", "-n1", "-r1", "pass"], environment=os.environ, stdout=out)
        assert fork.wait(PATIENCE_S) == 0
    said = (tmp_path / "out").read_text()
    assert "1 loop" in said
    assert "Warning" not in said


def test_it_ends_as_a_process_of_its_own_would(server: ForkServer, tmp_path: Path) -> None:
    for program, code in ENDS.items():
        path = written(tmp_path, program)
        with (tmp_path / "out").open("w+b") as out:
            assert server.start([path], environment=os.environ, stdout=out).wait(PATIENCE_S) == code, program
        alone = subprocess.run([sys.executable, "-u", path], capture_output=True)  # as torchrun starts workers
        assert alone.returncode == code, program
        said, expected = (tmp_path / "out").read_text(), (alone.stdout + alone.stderr).decode()
        assert said.splitlines()[-1:] == expected.splitlines()[-1:], program


def test_signals_and_waiting(server: ForkServer, tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb") as out:
        forks = [server.start([written(tmp_path, WAITS)], environment=os.environ, stdout=out) for _ in range(2)]
        assert [fork.poll() for fork in forks] == [None, None]
        with pytest.raises(subprocess.TimeoutExpired):
            forks[0].wait(0.01)
        forks[0].terminate()
        os.killpg(forks[1].pid, signal.SIGKILL)
        assert [fork.wait(PATIENCE_S) for fork in forks] == [-signal.SIGTERM, -signal.SIGKILL]
        forks[0].kill()  # as of `Popen`: it has ended, and its number may be another's


def test_what_it_is_to_keep_is_open_in_it_and_nothing_else(server: ForkServer, tmp_path: Path) -> None:
    """As a lease is, which the kernel lets go of when its last holder ends."""
    reading, writing = os.pipe()
    with (tmp_path / "out").open("wb") as out:
        fork = server.start([written(tmp_path, WAITS)], environment=os.environ, stdout=out, keep=(writing,))
        other = server.start([written(tmp_path, "pass")], environment=os.environ, stdout=out)
        os.close(writing)
        assert other.wait(PATIENCE_S) == 0
        os.set_blocking(reading, False)
        with pytest.raises(BlockingIOError):
            os.read(reading, 1)
        fork.kill()
        fork.wait(PATIENCE_S)
        os.set_blocking(reading, True)
        assert os.read(reading, 1) == b""
        os.close(reading)


def test_forks_and_their_server_end_with_whoever_asked(tmp_path: Path) -> None:
    command = [sys.executable, written(tmp_path, PARENT), written(tmp_path, WAITS)]
    asker = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert {asker.stdout.readline() for _ in range(2)} > {b"waiting\n"}
    until_s = time.monotonic() + PATIENCE_S
    # Who stood between the server and the fork has ended at once, and may be there until the server has looked.
    while len(family := psutil.Process(asker.pid).children(recursive=True)) > 2 and time.monotonic() < until_s:
        time.sleep(0.01)
    assert len(family) == 2
    asker.kill()
    asker.wait()
    asker.stdout.close()
    assert not psutil.wait_procs(family, timeout=PATIENCE_S)[1]


def test_a_process_can_be_its_own_forks_beginning(tmp_path: Path) -> None:
    program = written(tmp_path, "import sys; print(sys.argv[1], 'json' in sys.modules)")
    done = subprocess.run([sys.executable, written(tmp_path, FORKS_ITSELF), program], capture_output=True, text=True)
    assert (done.stdout, done.stderr, done.returncode) == ("x True\n", "", 0)


LISTENS_AND_FORKS = """
import os, signal, sys
from hetopt.trainer.host.forks import ForkServer
from hetopt.core.interruption import StopSignal
StopSignal().listen()
signal.signal(signal.SIGHUP, lambda *_: None)
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
server = ForkServer.of_this_process()
reading, writing = os.pipe()
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT):
    process = server.start([sys.argv[1]], environment=os.environ, stdout=writing, stderr=2)
    os.read(reading, 100)
    process.send_signal(number)
    if number == signal.SIGUSR1:  # is not listened to: what ends it is the next
        process.send_signal(signal.SIGTERM)
    print(process.wait(300), end=" ")
"""


def test_whoever_listened_to_signals_before_does_not_take_those_of_a_fork(tmp_path: Path) -> None:
    """A host whose conductor has been killed would train on without it."""
    program = written(tmp_path, "import time; print('here', flush=True); time.sleep(600)")
    listening = written(tmp_path, LISTENS_AND_FORKS)
    done = subprocess.run([sys.executable, listening, program], capture_output=True, text=True)
    assert done.stdout.split() == ["-15", "-1", "-15", "-2"], done.stderr


def test_nobody_forks_a_process_with_threads(tmp_path: Path) -> None:
    """It would be without them, and with the locks that they hold."""
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    try:
        with pytest.raises(NoFork, match="threads"):
            ForkServer.of_this_process()
    finally:
        ended.set()
        thread.join()


def test_a_server_that_is_gone_is_told(tmp_path: Path) -> None:
    server = ForkServer.importing(("no_such_module",), os.environ)
    with pytest.raises(NoFork, match="has ended"):
        server.start(["-m", "this"], environment=os.environ, stdout=1)
    server.close()


# What a signal ends and what it waits for, in processes of their own: once one has ended them they ignore others.

IN_ONE_PIECE = """
import os, signal, sys
from hetopt.core.interruption import Terminated, ends_by_signals, delay_signals
ignored, number = int(sys.argv[1]), int(sys.argv[2])
if ignored:
    signal.signal(ignored, signal.SIG_IGN)
try:
    with ends_by_signals():
        with delay_signals():
            os.kill(os.getpid(), number)
            print("all of it")
        print("more")
except (KeyboardInterrupt, Terminated) as error:
    print(type(error).__name__)
"""


@pytest.mark.parametrize(
    ("number", "ignored", "said"),
    [
        (signal.SIGINT, 0, ["all of it", "KeyboardInterrupt"]),
        (signal.SIGTERM, 0, ["all of it", "Terminated"]),
        (signal.SIGHUP, signal.SIGHUP, ["all of it", "more"]),
    ],
)
def test_what_is_done_in_one_piece_is_done_before_a_signal_is_heard(number: int, ignored: int, said: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", IN_ONE_PIECE, str(int(ignored)), str(int(number))],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert (done.stdout.splitlines(), done.stderr) == (said, "")


WHILE_A_TEXT_IS_EXECUTED = """
import os, signal, sys
from hetopt.core.interruption import Terminated, ends_by_signals, exit_code_of, ignore_signals
try:
    with ends_by_signals():
        exec(f"os.kill(os.getpid(), {int(sys.argv[1])})")
except (KeyboardInterrupt, Terminated) as error:
    code = exit_code_of(error)
ignore_signals()
sys.exit(code)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_making_of_a_class_does_not_change_how_a_command_ends(number: int, tmp_path: Path) -> None:
    """Dataclasses and named tuples are texts that are executed; a command imports modules of them while it runs."""
    (tmp_path / "command.py").write_text(WHILE_A_TEXT_IS_EXECUTED)
    done = subprocess.run(
        [sys.executable, "-m", "command", str(int(number))], cwd=tmp_path, capture_output=True, timeout=PATIENCE_S
    )
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, b"", b"")


# How many threads workers have and how they wait, by this machine's limits and a person's wishes.

HERE = len(os.sched_getaffinity(0))
WISHES = st.dictionaries(st.sampled_from([*SPIN_VARIABLES, THREADS_VARIABLE, "OTHER"]), st.text(max_size=3))


@given(workers=st.integers(1, 99), wishes=WISHES)
def test_what_a_person_has_set_is_kept_and_workers_share_the_processors(workers: int, wishes: dict[str, str]) -> None:
    own = openmp_environment(workers, wishes)
    assert not set(own) & set(wishes)
    assert (THREADS_VARIABLE in own) != (THREADS_VARIABLE in wishes)
    assert set(SPIN) <= set(own) or set(SPIN_VARIABLES) & set(wishes)
    each = int(own.get(THREADS_VARIABLE, 1))
    assert each == 1 or each * workers <= usable_processors()


@pytest.mark.parametrize(
    ("files", "processors"),
    [
        ({}, HERE),
        ({"cpu.max": "max 100000"}, HERE),
        ({"cpu.max": "100000 100000"}, 1),
        ({"cpu.max": "25000 100000"}, 1),
        ({"cpu.max": f"{(HERE + 9) * 10**5} 100000"}, HERE),
        ({"cpu/cpu.cfs_quota_us": "30000", "cpu/cpu.cfs_period_us": "20000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "20000"}, HERE),
    ],
)
def test_a_quota_of_a_control_group_counts_as_processors(
    tmp_path: Path, files: dict[str, str], processors: int
) -> None:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert usable_processors(tmp_path) == processors


TELLS_THREADS = """
import json, os
from pathlib import Path
from tests.trainer.toy_task import plain
def task():
    told = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "GOMP_SPINCOUNT")}
    Path(__file__).with_name(f"told-{os.environ['RANK']}.json").write_text(json.dumps(told))
    return plain()
"""


@pytest.mark.parametrize("wish", [{}, {"GOMP_SPINCOUNT": "7"}])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_launched_worker_has_its_part_of_the_processors_and_spins_briefly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int, wish: dict[str, str]
) -> None:
    for name in (THREADS_VARIABLE, *SPIN_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "tells.py").write_text(TELLS_THREADS)
    (tmp_path / "run").mkdir()
    toy = toy_spec(shares=(4,) * workers, stop={"max_steps": 2}) | {"task": f"{tmp_path / 'tells.py'}:task"}
    launcher = LocalLauncher()
    launcher.start(RunSpec.model_validate_json(json.dumps(toy)), tmp_path / "run", wish)
    status = over(launcher, tmp_path / "run")
    assert status.state.value == "finished", status
    for rank in range(workers):
        told = json.loads((tmp_path / f"told-{rank}.json").read_text())
        assert told == {THREADS_VARIABLE: str(max(1, usable_processors() // workers))} | SPIN | wish
