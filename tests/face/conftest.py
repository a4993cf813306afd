"""Runs the `hetopt` command as a person would: in this process where it is quick, as a process where it matters."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from hetopt.cli.main import main
from hetopt.core.interruption import SIGNALS
from tests.disturbance import PATIENCE_S
from tests.few_types import few_types
from tests.forks import Forked

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


def on_a_terminal(*arguments: object, environment: Mapping[str, str]) -> bytes:
    """What the command writes to a terminal, until it has ended well."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "hetopt.cli.main", *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        env=environment,
    )
    os.close(theirs)
    said = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # what Linux says when the other end is closed
            break
        if not part:
            break
        said += part
    assert process.wait(timeout=PATIENCE_S) == 0
    os.close(ours)
    return said


def forked(*arguments: object) -> Forked:
    """The command as `start` has it, with torch imported, and so have the hosts that it starts."""
    return Forked(["-m", "hetopt.cli.main", *map(str, arguments)], os.environ)


@pytest.fixture
def digits_profile() -> Path:
    """The recorded profile of the bundled digits task."""
    return RECORDED / "digits.json"
