"""The documentation is true: made pages are as the code makes them now, tables name all there is, commands run."""

from __future__ import annotations

import importlib.util
import json
import pkgutil
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest

import hetopt.optimizer as optimizer
import hetopt.profiler as profiler
import hetopt.trainer as trainer
from hetopt.optimizer.launch_record import LAUNCH_FILE, Launch
from hetopt.profiler.errors import HetoptError
from hetopt.trainer.control.ratio.choose import CONTROLLERS
from hetopt.trainer.events import EVENTS_FILE
from hetopt.trainer.exchange.composition import COLLECTIVES, METHODS
from hetopt.trainer.spec import BatchPolicy
from hetopt.trainer.synchronisation import SyncName
from tests.face.conftest import RECORDED, hetopt
from tests.face.test_report import _disturbed, launch, plan, rehearsed
from tests.face.test_task_check import SMALLEST

__all__ = ["hetopt", "launch", "plan", "rehearsed"]

REPOSITORY = Path(__file__).resolve().parents[2]
DOCS = REPOSITORY / "docs"
CONSOLE = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)


def generated() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generated", DOCS / "generated.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["commands.md", "measured.md", "your-own-code.md"])
def test_a_made_page_is_as_the_code_makes_it(name: str, recording: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = generated().pages()[DOCS / name]
    if recording:
        (DOCS / name).write_text(text, encoding="utf-8")
    assert (DOCS / name).read_text(encoding="utf-8") == text, "write it again with `make docs` or --record"


def classes(root: type[HetoptError]) -> set[type[HetoptError]]:
    return {root}.union(*(classes(below) for below in root.__subclasses__()))


def test_every_error_is_in_the_table() -> None:
    """With its exit code, a cause, and what to do."""
    for package in (profiler, trainer, optimizer):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(found.name)
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| (.+?) \| (.+?) \|$", (DOCS / "errors.md").read_text(), re.MULTILINE)
    told = {name: (int(code), cause, step) for name, code, cause, step in rows}
    known = {one for one in classes(HetoptError) if one.__module__.startswith("hetopt.")}
    assert set(told) == {one.__name__ for one in known}
    for one in known:
        code, cause, step = told[one.__name__]
        assert code == one.exit_code
        assert len(cause) > 10
        assert len(step) > 10


def test_every_method_is_in_the_tables() -> None:
    text = (DOCS / "methods.md").read_text(encoding="utf-8")
    rows = "\n".join(line.partition("|")[2].partition("|")[0] for line in text.splitlines() if line.startswith("|"))
    groups = (METHODS, CONTROLLERS, COLLECTIVES, get_args(BatchPolicy), get_args(SyncName))
    missing = {name for names in groups for name in names if f"`{name}`" not in rows}
    assert missing == set()


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("no mkdocs: pip install 'hetopt[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    front = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert "quickstart.html" in front
    fetched = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?:[^"]+)"', front)
    assert [address for address in fetched if "canonical" not in address] == []
    assert not (tmp_path / "site" / "generated.py").exists()
    assert (tmp_path / "site" / "schemas" / "plan.schema.json").exists()


def of_page(name: str) -> list[str]:
    blocks = CONSOLE.findall((DOCS / name).read_text(encoding="utf-8"))
    return [line[2:] for block in blocks for line in block.splitlines() if line.startswith("$ ")]


def test_the_commands_of_watching_run(
    rehearsed: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hetopt: Callable[..., Any]
) -> None:
    """One after the other, as a reader would; but for the one that waits for Ctrl-C."""
    monkeypatch.setenv("HETOPT_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "home" / "runs" / rehearsed.run_id
    (folder / "log").mkdir(parents=True)
    (folder / "log" / "host.log").write_text("started\n", encoding="utf-8")
    rehearsed.save(folder / LAUNCH_FILE)
    lines = [json.dumps(event) for event in _disturbed(rehearsed)]
    (folder / EVENTS_FILE).write_text("\n".join([*lines, ""]), encoding="utf-8")
    shutil.copy(RECORDED / "digits.json", tmp_path / "profile.json")
    commands = [command for command in of_page("watching.md") if "--listen" not in command]
    assert len(commands) >= 8
    for command in commands:
        program, *arguments = shlex.split(command)
        assert program == "hetopt"
        answer = hetopt(*arguments)
        assert answer.code == 0, f"{command}: {answer.err}"
    written = {path.name for path in tmp_path.iterdir()}
    assert {"run.html", "report.json", "board", "plan.json"} <= written


def test_the_commands_about_files_and_checks_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hetopt: Callable[..., Any]
) -> None:
    (tmp_path / "mine.py").write_text(SMALLEST, encoding="utf-8")
    (tmp_path / "examples").symlink_to(REPOSITORY / "examples")
    monkeypatch.chdir(tmp_path)
    commands = [*of_page("files.md"), *(line for line in of_page("your-own-code.md") if "--check" in line)]
    assert len(commands) == 4
    for command in commands:
        answer = hetopt(*shlex.split(command)[1:])
        assert answer.code == 0, f"{command}: {answer.err}"
    assert len(list((tmp_path / "schemas").iterdir())) == 7
