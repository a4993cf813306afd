"""The Python of README and of the page about the library is run, in order, as a reader would."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def run(code: str, folder: Path) -> str:
    """What a script prints that is run in a folder of its own."""
    (folder / "page.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "page.py"],
        cwd=folder,
        env={"HETOPT_HOME": str(folder / "home"), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "COLUMNS": "100"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_page_about_the_library_runs(tmp_path: Path) -> None:
    shutil.copy(REPOSITORY / "tests" / "recorded" / "digits.json", tmp_path / "profile.json")
    blocks = PYTHON.findall((REPOSITORY / "docs" / "library.md").read_text(encoding="utf-8"))
    told = run("\n".join(blocks), tmp_path)
    assert "finished" in told
    assert "run time" in told
    assert "</html>" in (tmp_path / "run.html").read_text()


def test_the_python_of_the_readme_runs(tmp_path: Path) -> None:
    [block] = PYTHON.findall((REPOSITORY / "README.md").read_text(encoding="utf-8"))
    told = run(block.replace('hetopt.profile("digits")', 'hetopt.profile("digits", time_budget_s=8)'), tmp_path)
    assert "run time" in told
