"""The Python of README and of the page about the library is run, in order, as a reader would."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.disturbance import PATIENCE_S
from tests.forks import Forked

REPOSITORY = Path(__file__).resolve().parents[2]
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def run(code: str, folder: Path) -> str:
    """What a script prints that is run in a folder of its own."""
    (folder / "page.py").write_text(code)
    environment = {"HETOPT_HOME": str(folder / "home"), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    with Forked(["page.py"], {**environment, "COLUMNS": "100"}, folder) as process:
        out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err[-3000:]
    return out


def test_the_page_about_the_library_runs(tmp_path: Path) -> None:
    shutil.copy(REPOSITORY / "tests" / "recorded" / "digits.json", tmp_path / "profile.json")
    blocks = PYTHON.findall((REPOSITORY / "docs" / "library.md").read_text(encoding="utf-8"))
    told = run("\n".join(blocks), tmp_path)
    assert "finished" in told
    assert "run time" in told
    assert "</html>" in (tmp_path / "run.html").read_text()


@pytest.mark.parametrize(
    "profile",
    [  # tests/profiler/test_command.py measures one
        'hetopt.Profile.load("profile.json")',
        pytest.param('hetopt.profile("digits", time_budget_s=5)', marks=pytest.mark.slow),
    ],
)
def test_the_python_of_the_readme_runs(tmp_path: Path, profile: str) -> None:
    shutil.copy(REPOSITORY / "tests" / "recorded" / "digits.json", tmp_path / "profile.json")
    [block] = PYTHON.findall((REPOSITORY / "README.md").read_text(encoding="utf-8"))
    shorter = {'hetopt.profile("digits")': profile, "epochs=20": "epochs=5"}
    for long, short in shorter.items():
        assert long in block
        block = block.replace(long, short)
    assert "run time" in run(block, tmp_path)
