"""Two launches of one run: the second is refused, until the first is gone by whatever way."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hetopt.backends.processes import lease
from hetopt.core.errors import BadInput

HOLD = "import sys; sys.stdin.read()"


def test_a_second_launch_is_refused_with_a_sentence(tmp_path: Path) -> None:
    with lease(tmp_path), pytest.raises(BadInput, match="a run is alive in"), lease(tmp_path):
        pass
    with lease(tmp_path):
        pass


def test_a_process_holds_the_lease_as_long_as_it_lives(tmp_path: Path) -> None:
    with lease(tmp_path) as held:
        host = subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, pass_fds=(held,))
    with host:
        with pytest.raises(BadInput), lease(tmp_path):
            pass
        host.kill()
        host.communicate()
    with lease(tmp_path):
        pass


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot be written"), lease(tmp_path / "nowhere"):
        pass
