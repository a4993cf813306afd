"""What a signal ends and what it waits for, in processes of their own: once one has ended them they ignore others."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.disturbance import PATIENCE_S

IN_ONE_PIECE = """
import os, signal, sys
from hetopt.core.interruption import Terminated, ends_by_signals, in_one_piece
ignored, number = int(sys.argv[1]), int(sys.argv[2])
if ignored:
    signal.signal(ignored, signal.SIG_IGN)
try:
    with ends_by_signals():
        with in_one_piece():
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
from hetopt.core.interruption import Terminated, ends_by_signals, exit_code_of, hears_nothing_more
try:
    with ends_by_signals():
        exec(f"os.kill(os.getpid(), {int(sys.argv[1])})")
except (KeyboardInterrupt, Terminated) as error:
    code = exit_code_of(error)
hears_nothing_more()
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
