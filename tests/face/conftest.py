"""Runs the `hetopt` command as a person would: in this process where it is quick, as a process where it matters."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from hetopt.backends.emulation.plan import parse_hosts, rehearse
from hetopt.backends.prediction import predict_on_local
from hetopt.cli.main import main
from hetopt.core.interruption import SIGNALS
from hetopt.core.profile import Profile
from hetopt.optimizer.launch_record import Launch
from hetopt.optimizer.market.catalog import load_catalog
from hetopt.optimizer.plan import Goal, Plan
from hetopt.optimizer.recommendation.recommend import Options, PlanRequest, recommend
from hetopt.trainer.host.forks import ForkedProcess
from tests.disturbance import PATIENCE_S
from tests.few_types import few_types
from tests.forks import Forked, server
from tests.logs import recorded_run
from tests.once import once

from .logged import compressed_log

RECORDED = Path(__file__).resolve().parents[1] / "recorded"


@dataclass(frozen=True, kw_only=True)
class Answer:
    code: int
    out: str
    err: str


@pytest.fixture(scope="module")
def small_catalogue() -> Iterator[None]:
    """For a file whose laws hold whatever can be rented."""
    with few_types():
        yield


@pytest.fixture
def hetopt(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    """``hetopt("recommend", "p.json")`` in this process, through the same entry point as the installed command."""

    def run(*arguments: object) -> Answer:
        monkeypatch.setattr(sys, "argv", ["hetopt", *map(str, arguments)])
        capfd.readouterr()
        code = 0
        heard = {number: signal.getsignal(number) for number in SIGNALS}
        try:
            main()
        except SystemExit as exit_:
            code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
        finally:  # the process goes on here
            for number, handler in heard.items():
                signal.signal(number, handler)
        out, err = capfd.readouterr()
        return Answer(code=code, out=out, err=err)

    return run


def start(*arguments: object) -> subprocess.Popen[str]:
    """The command as a process of its own, with its streams in pipes."""
    return subprocess.Popen(
        [sys.executable, "-m", "hetopt.cli.main", *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def on_a_terminal(
    *arguments: object,
    environment: Mapping[str, str],
    folder: Path | None = None,
    columns: int = 80,
    code: int = 0,
    forks: bool = False,
) -> str:
    """What the command writes to a terminal of 24 lines, until it has ended with this exit code.

    A fork has torch, and so have those that it starts; it writes in the encoding of the tests, not of `environment`.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    command = ["-m", "hetopt.cli.main", *map(str, arguments)]
    process: ForkedProcess | subprocess.Popen[bytes]
    if forks:
        process = server().start(
            command, environment=environment, stdin=theirs, stdout=theirs, stderr=theirs, folder=folder
        )
    else:
        process = subprocess.Popen(
            [sys.executable, *command],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=folder,
            env=environment,
            start_new_session=True,
        )
    os.close(theirs)
    said = b""
    with suppress(OSError):  # what Linux says when the other end is closed
        while part := os.read(ours, 65536):
            said += part
    assert process.wait(timeout=PATIENCE_S) == code, said
    os.close(ours)
    return said.decode()


def forked(*arguments: object) -> Forked:
    """The command as `start` has it, with torch imported, and so have the hosts that it starts."""
    return Forked(["-m", "hetopt.cli.main", *map(str, arguments)], os.environ)


@pytest.fixture(scope="session")
def plan(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Plan:
    """Made once, for all processes of tests."""
    return Plan.load(once("plan", _make_plan, tmp_path_factory, worker_id) / "plan.json")


def _make_plan(folder: Path) -> None:
    profile = Profile.load(RECORDED / "digits.json")
    goal = Goal(budget_usd=2.0, ends="epochs", amount=100.0)
    request = PlanRequest(profile, load_catalog(), goal, Options(batch_size=256, market="spot", objective="fastest"))
    recommend(request, seed=0, now=datetime(2026, 11, 20, tzinfo=UTC)).save(folder / "plan.json")


@pytest.fixture(scope="session")
def launch(plan: Plan) -> Launch:
    here = predict_on_local(plan, (1.0, 2.0))
    return Launch(
        created="2026-11-20T00:00:00+00:00",
        started_s=1000.0,
        run_id="20261120-000000-digits-0000",
        on="local",
        plan=plan,
        spec=here.run,
        prediction=here.prediction,
        notes=here.notes,
    )


@pytest.fixture(scope="session")
def rehearsed(plan: Plan) -> Launch:
    hosts = parse_hosts("speed=1,rate=100mbit x2; speed=0.25,rate=25mbit,workers=2")
    rehearsal = rehearse(plan, 2, hosts)
    return Launch(
        created="2026-11-20T00:00:00+00:00",
        started_s=1000.0,
        run_id="20261120-000000-digits-0001",
        on="rehearsal",
        plan=plan,
        spec=rehearsal.run,
        prediction=rehearsal.prediction,
        notes=rehearsal.notes,
    )


@pytest.fixture
def recorded(rehearsed: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with one run that is over; its folder."""
    monkeypatch.setenv("HETOPT_HOME", str(tmp_path))
    return recorded_run(tmp_path / "runs" / rehearsed.run_id, rehearsed, compressed_log(rehearsed))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home for this module's runs, none of which outlives the module."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("home")
        patch.setenv("HETOPT_HOME", str(folder))
        yield folder
        assert processes_of(folder) == []


def processes_of(folder: Path) -> list[str]:
    """Command lines of processes that name a folder."""
    lines = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    return [line for line in lines if str(folder) in line]


T = TypeVar("T")


def until(reached: Callable[[], T], goes_on: Callable[[], object] = lambda: True) -> T:
    """What ``reached`` gives as soon as it is true; what it waits for has to go on meanwhile."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not (found := reached()):
        assert goes_on() or reached(), "it is over"  # it may have ended since it was looked at
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.05)
    return found


@pytest.fixture
def digits_profile() -> Path:
    """The recorded profile of the bundled digits task."""
    return RECORDED / "digits.json"
