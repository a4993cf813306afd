"""The documentation is true: made pages are as the code makes them now, tables name all there is, commands run."""

from __future__ import annotations

import importlib.util
import itertools
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

import pytest

from hetopt.core.errors import HetoptError
from tests.browser import WIDTHS, browser
from tests.sources import REPOSITORY, modules
from tests.thinned import running

DOCS = REPOSITORY / "docs"


def page_maker(name: str) -> ModuleType:
    """A program of the documentation's folder, which is no package."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def test_made_pages_are_as_the_code_makes_them(recording: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    made = page_maker("generated").pages()
    for page, text in made.items():
        if recording:
            page.write_text(text, encoding="utf-8")
        assert page.read_text(encoding="utf-8") == text, f"{page.name}: write it again with `make docs` or --record"


def test_the_plots_show_what_was_measured() -> None:
    """Made anew by `make docs`; no claim without a result has one."""
    pictures = page_maker("plots").pictures()
    for path, drawn in pictures.items():
        assert path.read_text(encoding="utf-8") == drawn
    assert {*DOCS.glob("images/*.svg")} == {*pictures, DOCS / "images" / "demo.svg", DOCS / "images" / "concepts.svg"}


def test_the_picture_shows_what_was_printed() -> None:
    """On the terminal that it is for; made anew by `python docs/recording.py`."""
    recording = page_maker("recording")
    said = recording.SAID.read_text(encoding="utf-8")
    assert recording.PICTURE.read_text(encoding="utf-8") == recording.draw(said)


def classes(root: type[HetoptError]) -> set[type[HetoptError]]:
    return {root}.union(*(classes(below) for below in root.__subclasses__()))


def test_every_error_is_in_the_table() -> None:
    """With its exit code and a cause."""
    for module in modules():
        importlib.import_module(module)
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| .{10,} \|$", (DOCS / "errors.md").read_text(), re.MULTILINE)
    known = {one for one in classes(HetoptError) if one.__module__.startswith("hetopt.")}
    assert dict(rows) == {one.__name__: str(one.exit_code) for one in known}


def test_every_method_has_a_page() -> None:
    """One, and the page says what is known of it: paper, formula, when, cost, and what was published."""
    made = page_maker("generated")
    told = [method for own in made.method_pages().values() for method in own]
    registered = [(kind, name) for kind, names in made.registries().items() for name in names]
    assert sorted(told) == sorted(registered)
    for name in made.method_pages():
        text = (DOCS / "methods" / name).read_text(encoding="utf-8")
        assert [part for part in ("Paper", "Formula", "When", "Cost") if f"**{part}.** " not in text] == [], name
        assert [line for line in text.splitlines() if line.startswith("    ") and len(line) > 78] == [], "cut on a page"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The documentation, built where its caches do not stay."""
    if importlib.util.find_spec("zensical") is None:
        pytest.skip("no zensical: pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("documentation")
    shutil.copytree(DOCS, folder / "docs", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "mkdocs.yml", folder)
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"


def test_the_site_is_built_without_a_warning_and_fetches_nothing(site: Path) -> None:
    front = (site / "index.html").read_text(encoding="utf-8")
    menu = re.findall(r'href="\./([\w/-]+)\.html" class="md-nav__link', front)
    written = re.findall(r": ([\w/-]+)\.md$", (REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert ["index", *menu] == [page.replace("decisions/README", "decisions/index") for page in written]
    for page in site.rglob("*.html"):
        fetched = re.findall(
            r'<(?:script|link|img)[^>]+(?:src|href)="(https?:[^"]+)"', page.read_text(encoding="utf-8")
        )
        assert [address for address in fetched if "canonical" not in address] == []
    assert not (site / "generated.py").exists()
    assert (site / "schemas" / "plan.schema.json").exists()


CUT = """
[...document.querySelectorAll(".md-content pre > code, .md-content .md-typeset__scrollwrap, .md-content img")]
  .filter(one => one.scrollWidth > one.clientWidth + 1 || (one.tagName === "IMG" && !one.naturalWidth))
  .map(one => one.textContent.slice(0, 60))
"""


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Where the site is served."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=site)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_nothing_on_a_page_is_cut_at_a_desk_and_nothing_fetched(
    site: Path, address: str, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """Tables, code and pictures of every page, decisions aside, are seen whole. On a telephone they are scrolled.

    Of the pages of methods, which are made alike, a few are looked at.
    """
    pages = [page for page in sorted(site.rglob("*.html")) if page.parent.name not in ("decisions", "methods")]
    pages += running(pytestconfig, 6, sorted((site / "methods").glob("*.html")))
    assert len(pages) > 30
    with browser(tmp_path) as page:
        for path in pages:
            page.open(f"{address}/{path.relative_to(site).as_posix()}", width=max(WIDTHS))
            assert page.value(CUT) == [], path.name
            assert page.complaints == [], path.name
        assert [one for one in page.fetched if not one.startswith((address, "data:", "blob:"))] == []


@pytest.mark.parametrize("scheme", ["default", pytest.param("slate", marks=pytest.mark.slow)])
def test_the_site_is_read_in_both_colour_schemes_and_on_a_phone(address: str, tmp_path: Path, scheme: str) -> None:
    """In a browser of its own each: the theme keeps what it was first seen in."""
    with browser(tmp_path) as page:
        for name, width in itertools.product(("index", "quickstart", "models", "methods/gravac"), WIDTHS):
            page.open(f"{address}/{name}.html", width=width, dark=scheme == "slate")
            assert page.value("document.documentElement.scrollWidth") <= width
            assert page.value("document.body.dataset.mdColorScheme") == scheme
            assert page.low_contrast() == {}
            assert page.value(f"[...{COMMANDS}].every(one => one.scrollWidth <= one.clientWidth)"), "no command is cut"


class Quiet(SimpleHTTPRequestHandler):
    """Files, and no line for each on the terminal."""

    def log_message(self, *_: object) -> None:
        """Nothing."""


COMMANDS = "document.querySelectorAll('code:has(.gp)')"


def test_the_front_page_links_to_every_other() -> None:
    """And so does the site's menu. Decisions and methods are listed on pages of their own."""
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    front = {"index.md", *re.findall(r"\]\(([\w/.-]+\.md)\)", (DOCS / "index.md").read_text(encoding="utf-8"))}
    menu = set(re.findall(r": ([\w/.-]+\.md)$", (REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    methods = {page for page in pages if page.startswith("methods/")}
    expected = {page for page in pages if not page.startswith("decisions/") or page == "decisions/README.md"}
    assert menu == expected
    assert front == expected - methods
    index = set(re.findall(r"\]\((methods/[\w-]+\.md)\)", (DOCS / "methods.md").read_text(encoding="utf-8")))
    assert index == methods
    listed = re.findall(r"^- \[\d{4}\]\((\d{4}[\w-]+\.md)\)", (DOCS / "decisions/README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in (DOCS / "decisions").glob("0*.md"))
