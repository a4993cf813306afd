"""The documentation is true: made pages are as the code makes them now, tables name all there is, commands run."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import get_args

import pytest

from hetopt.core.comm.composition import COLLECTIVES, METHODS
from hetopt.core.comm.ratio_controllers import CONTROLLERS
from hetopt.core.errors import HetoptError
from hetopt.core.run_spec import BATCH_POLICIES
from hetopt.core.synchronization import PartitionName, SyncName
from tests.face.conftest import hetopt
from tests.face.test_report import launch, plan, rehearsed
from tests.sources import modules

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


@pytest.mark.parametrize("name", ["commands.md", "measured.md", "your-own-code.md", "../README.md"])
def test_a_made_page_is_as_the_code_makes_it(name: str, recording: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    page = (DOCS / name).resolve()
    text = generated().pages()[page]
    if recording:
        page.write_text(text, encoding="utf-8")
    assert page.read_text(encoding="utf-8") == text, "write it again with `make docs` or --record"


def classes(root: type[HetoptError]) -> set[type[HetoptError]]:
    return {root}.union(*(classes(below) for below in root.__subclasses__()))


def test_every_error_is_in_the_table() -> None:
    """With its exit code, a cause, and what to do."""
    for module in modules():
        importlib.import_module(module)
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
    groups = (METHODS, CONTROLLERS, COLLECTIVES, BATCH_POLICIES, *map(get_args, (SyncName, PartitionName)))
    missing = {name for names in groups for name in names if not re.search(rf"`{name}[`(]", rows)}
    assert missing == set()


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("no mkdocs: pip install -e '.[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    front = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert "quickstart.html" in front
    fetched = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?:[^"]+)"', front)
    assert [address for address in fetched if "canonical" not in address] == []
    assert not (tmp_path / "site" / "generated.py").exists()
    assert (tmp_path / "site" / "schemas" / "plan.schema.json").exists()


def test_the_front_page_links_to_every_other() -> None:
    """And so does the site's menu. Decisions are listed on a page of their own."""
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    front = {"index.md", *re.findall(r"\]\(([\w/.-]+\.md)\)", (DOCS / "index.md").read_text(encoding="utf-8"))}
    menu = set(re.findall(r": ([\w/.-]+\.md)$", (REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    expected = {page for page in pages if not page.startswith("decisions/") or page == "decisions/README.md"}
    assert front == menu == expected
    listed = re.findall(r"^\| \[\d{4}\]\((\d{4}[\w-]+\.md)\)", (DOCS / "decisions/README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in (DOCS / "decisions").glob("0*.md"))


def test_every_file_on_the_two_paths_is_there() -> None:
    text = (DOCS / "paths.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\b(?:hetopt|optimizer|profiler|trainer|catalogs)/[\w/]*(?:\.py)?", text))
    assert len(named) > 20
    assert {path for path in named if not (REPOSITORY / path).exists()} == set()


def test_the_glossary_defines_each_word_once() -> None:
    text = (DOCS / "glossary.md").read_text(encoding="utf-8")
    words = re.findall(r"^\| ([^|]+) \| [^|]{10,} \|$", text, re.MULTILINE)
    assert len(words) > 60
    assert len(set(words)) == len(words)
