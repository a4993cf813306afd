"""A signal ends a command as Ctrl-C does, once: what it has started is stopped, and what it has made is removed."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from hetopt.backends.emulation.namespaces import find_networks, why_not
from hetopt.core.events.log import EVENTS_FILE, Event, read_events
from hetopt.core.run_folder import MODEL_FILE, UNFINISHED_MODEL_FILE
from hetopt.optimizer.plan import Plan
from tests.disturbance import PATIENCE_S
from tests.forks import Forked, server

from .conftest import processes_of, until

STEPS = 100_000
SLOWLY = ("--on", "local", "--slowdown", "20,20")
"""Of what trains until it is ended: most of the time it waits."""


@pytest.fixture
def plan_file(plan: Plan, tmp_path: Path) -> Path:
    """Two workers that would train for hours."""
    stop = plan.run.stop.model_copy(update={"max_steps": STEPS, "max_epochs": None})
    run = plan.run.model_copy(update={"stop": stop})
    plan.model_copy(update={"run": run}).save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


@pytest.fixture
def launched(plan_file: Path) -> Iterator[Callable[..., Launched]]:
    """Starts them; whatever is left of one when the test ends goes."""
    started: list[Launched] = []

    def start(*options: str, **how: Any) -> Launched:
        started.append(Launched(plan_file, *options, **how))
        return started[-1]

    yield start
    for run in started:
        run.process.kill()
        run.process.wait()


class Launched:
    """`hetopt launch` as a process of its own, with streams of its own where it is to have them: a fork."""

    def __init__(
        self, plan_file: Path, *options: str, program: Sequence[str] = ("-m", "hetopt.cli.main"), **streams: Any
    ) -> None:
        self.home = plan_file.parent / "home"
        self.told_file = plan_file.parent / "told.txt"
        command = [*program, "launch", str(plan_file), "--yes", *options]
        environment = {**os.environ, "HETOPT_HOME": str(self.home), "OMP_NUM_THREADS": "1"}
        with self.told_file.open("wb") as told, open(os.devnull, "wb") as nowhere:
            self.process = server().start(
                command, environment=environment, **({"stdout": nowhere, "stderr": told} | streams)
            )

    @property
    def folder(self) -> Path:
        (folder,) = (self.home / "runs").iterdir()
        return folder

    def events(self, name: str) -> list[Event]:
        if not (self.home / "runs").is_dir():
            return []
        return [event for event in read_events(self.folder / EVENTS_FILE) if event["event"] == name]

    def until(self, reached: Callable[[], object]) -> None:
        until(reached, lambda: self.process.poll() is None)

    @property
    def told(self) -> str:
        return " ".join(self.told_file.read_text().split())

    def ended(self) -> tuple[int, str]:
        return self.process.wait(PATIENCE_S), self.told

    def left(self) -> list[str]:
        return processes_of(self.home)


def assert_stopped_with_what_it_had(run: Launched) -> None:
    assert run.left() == []
    (finished,) = run.events("training_finished")
    assert finished["reason"] == "stopped"
    assert 0 < finished["step"] < STEPS
    assert (run.folder / UNFINISHED_MODEL_FILE).is_file()
    assert not (run.folder / MODEL_FILE).exists()
    assert (run.folder / "checkpoint" / "LATEST").exists()


@pytest.mark.parametrize(
    ("numbers", "code"),
    [
        pytest.param([signal.SIGHUP], 129, marks=pytest.mark.slow),
        pytest.param([signal.SIGINT] * 4, 130, marks=pytest.mark.slow),
        ([signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGTERM], 143),
    ],
    ids=["SIGHUP", "four times Ctrl-C", "one after another"],
)
def test_a_signal_stops_the_run_and_more_of_them_wait(
    launched: Callable[..., Launched], numbers: list[signal.Signals], code: int
) -> None:
    run = launched(*SLOWLY)
    run.until(lambda: run.events("step"))
    host = json.loads((run.folder / "process.json").read_text())["pid"]
    os.kill(host, signal.SIGSTOP)  # the run cannot have ended before all signals have come
    try:
        for number in numbers:
            run.process.send_signal(number)
            run.until(lambda: "stopping run" in run.told)
        if len(numbers) > 1:
            run.until(lambda: "still ending, please wait" in run.told)
    finally:
        os.kill(host, signal.SIGCONT)
    ended, told = run.ended()
    assert ended == code, told
    assert f"stopping run {run.folder.name}" in told
    again = f"go on with `hetopt launch --on local --resume {run.folder.name}`"
    assert re.search(rf"stopped at step [\d,]+; its checkpoint is of step [\d,]+: {again}", told)
    assert ("still ending, please wait" in told) == (len(numbers) > 1)
    assert "Traceback" not in told
    assert_stopped_with_what_it_had(run)


def test_a_terminal_that_goes_away_stops_the_run(launched: Callable[..., Launched]) -> None:
    """Whatever is written to it from then on fails, which must not end the stopping."""
    terminal, end = pty.openpty()
    run = launched(*SLOWLY, stdin=end, stdout=end, stderr=end)
    os.close(end)
    os.set_blocking(terminal, False)
    run.until(lambda: run.events("step"))
    os.close(terminal)
    run.process.send_signal(signal.SIGHUP)  # as the kernel does where the terminal is the session's own
    assert run.ended()[0] == 129
    assert_stopped_with_what_it_had(run)


NOHUP = """
import runpy, signal
signal.signal(signal.SIGHUP, signal.SIG_IGN)
runpy.run_module("hetopt.cli.main", run_name="__main__")
"""


def test_nohup_is_heeded(launched: Callable[..., Launched], plan_file: Path) -> None:
    program = plan_file.parent / "nohup.py"
    program.write_text(NOHUP)
    run = launched(*SLOWLY, program=[str(program)])
    run.until(lambda: run.events("step"))
    run.process.send_signal(signal.SIGHUP)
    before = len(run.events("step"))
    run.until(lambda: len(run.events("step")) > before)
    run.process.send_signal(signal.SIGTERM)
    code, told = run.ended()
    assert code == 143, told
    assert "still ending, please wait" not in told, "one signal is enough"
    assert_stopped_with_what_it_had(run)


@pytest.mark.slow
def test_a_run_that_somebody_else_ends_is_no_success(
    launched: Callable[..., Launched],
) -> None:
    """What Slurm, systemd or a daemon that frees memory does: SIGTERM to the process that hosts the workers."""
    run = launched(*SLOWLY)
    run.until(lambda: run.events("step"))
    host = json.loads((run.folder / "process.json").read_text())["pid"]
    os.kill(host, signal.SIGTERM)
    ended, told = run.ended()
    assert ended == 7, told
    step = run.events("training_finished")[-1]["step"]
    assert f"the run was stopped after {step:,} of {STEPS:,} steps" in told
    assert f"--resume {run.folder.name}" in told
    assert_stopped_with_what_it_had(run)


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, *(pytest.param(one, marks=pytest.mark.slow) for one in (signal.SIGINT, signal.SIGHUP))],
    ids=lambda number: number.name,
)
def test_a_signal_ends_a_profile_and_its_folder_goes(tmp_path: Path, number: signal.Signals) -> None:
    task = f"{Path(__file__).resolve().parents[1] / 'profiler' / 'tiny_task.py'}:task"
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    command = ["-m", "hetopt.cli.main", "profile", task, "-o", str(tmp_path / "p.json"), "--time-budget", "60"]
    process = Forked([*command, "--workers", "2"], {**os.environ, "TMPDIR": str(temporary)})
    until(lambda: list(temporary.glob(f"hetopt-measure-*/{EVENTS_FILE}")), lambda: process.poll() is None)
    process.send_signal(number)
    _, told = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 128 + number, told
    assert "Traceback" not in told
    assert list(temporary.glob("hetopt-*")) == []
    assert not (tmp_path / "p.json").exists()
    assert processes_of(temporary) == []


HARNESS = """
import sys, time
from benchmarks._outcome import run_benchmark
from hetopt.backends.emulation.namespaces import EmulatedNetwork
from hetopt.core.run_spec import EmulatedHost

def main():
    with EmulatedNetwork.create([EmulatedHost(name="h0"), EmulatedHost(name="h1")]) as network:
        print(network.id, flush=True)
        time.sleep(600)

run_benchmark(main)
"""


@pytest.mark.skipif(why_not() is not None, reason="needs network namespaces")
def test_a_benchmark_that_is_ended_takes_its_network_along(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HARNESS],
        cwd=Path(__file__).resolve().parents[2],
        stdout=subprocess.PIPE,
        text=True,
    )
    made = process.stdout.readline().strip()
    assert made in set(find_networks())
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 143
    assert made not in set(find_networks())


def test_every_benchmark_is_ended_by_signals() -> None:
    folder = Path(__file__).resolve().parents[2] / "benchmarks"
    commands = [path for path in sorted(folder.glob("[a-z]*.py")) if "__main__" in path.read_text()]
    assert len(commands) > 10
    assert [path.name for path in commands if not path.read_text().endswith("    run_benchmark(main)\n")] == []


ENDS = """
import atexit, os, sys, time

class Last:
    def __del__(self, write=os.write, sleep=time.sleep):  # by then Python has let go of its handlers
        write(1, b"last\\n")
        sleep(0.5)

sys.last = Last()

@atexit.register
def first():
    os.write(1, b"first\\n")
    time.sleep(0.5)

from hetopt.cli.main import main
sys.argv = ["hetopt", *sys.argv[1:]]
main()
"""


@pytest.mark.parametrize(
    ("typed", "code", "number"),
    [
        (["--version"], 0, signal.SIGINT),
        (["stop", "no-such-run"], 2, signal.SIGTERM),
        pytest.param(["stop", "no-such-run"], 2, signal.SIGHUP, marks=pytest.mark.slow),
    ],
)
def test_a_signal_to_a_command_that_has_ended_changes_nothing(
    tmp_path: Path, number: signal.Signals, typed: list[str], code: int
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", ENDS, *typed],
        env={**os.environ, "HETOPT_HOME": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    for line in process.stdout:
        if line in ("first\n", "last\n"):
            process.send_signal(number)
        if line == "last\n":
            break
    else:
        pytest.fail("it never came to its end")
    _, told = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == code, told
    assert "Traceback" not in told


BEGINS = """
import sys, time
from hetopt.cli import terminal
from hetopt.cli.main import main as begin

def slow():
    print("begins", flush=True)
    time.sleep(60)

terminal.prepare = slow
sys.argv = ["hetopt", "--version"]
begin()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)])
def test_a_signal_to_a_command_that_has_hardly_begun_ends_it_without_a_traceback(number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", BEGINS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "begins\n"
    process.send_signal(number)
    _, told = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, told) == (128 + number, "")
