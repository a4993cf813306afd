"""Runs the `hetopt` command as a person would: in this process where it is quick, as a process where it matters."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from hetopt.cli.main import main

RECORDED = Path(__file__).resolve().parents[1] / "recorded"


@dataclass(frozen=True, kw_only=True)
class Answer:
    code: int
    out: str
    err: str


@pytest.fixture
def hetopt(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    """``hetopt("recommend", "p.json")`` in this process, through the same entry point as the installed command."""

    def run(*arguments: object) -> Answer:
        monkeypatch.setattr(sys, "argv", ["hetopt", *map(str, arguments)])
        capfd.readouterr()
        code = 0
        try:
            main()
        except SystemExit as exit_:
            code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
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


@pytest.fixture
def digits_profile() -> Path:
    """The recorded profile of the bundled digits task."""
    return RECORDED / "digits.json"
