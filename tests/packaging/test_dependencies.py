"""Dependencies: what is imported is declared, pinned and explained; and the image installs it."""

from __future__ import annotations

import ast
import importlib.util
import io
import os
import re
import socket
import subprocess
import sys
import tarfile
import threading
import time
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from hetopt.backends.host.bundle import NEEDED, make_bundle
from tests.docs.shown import assert_shown
from tests.sources import REPOSITORY, modules

PACKAGES = {"sklearn": "scikit-learn", "botocore": "boto3", "pydantic_core": "pydantic", "sky": "skypilot"}
"""Packages by what is imported of them, where that is called otherwise."""

NO_PACKAGES = {"hetopt", "_typeshed"}
"""What is imported and not installed: ourselves, and what only type checkers know."""

ROW = re.compile(r"^\| ([\w-]+)(?:[, ][^|]*)? \|", re.MULTILINE)


@cache
def imported() -> dict[str, set[str]]:
    """The files that import each package, anywhere in them."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in modules().values():
        where = path.resolve().relative_to(REPOSITORY).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
                names = [node.module]
            else:
                continue
            for top in {name.partition(".")[0] for name in names} - NO_PACKAGES - sys.stdlib_module_names:
                found[PACKAGES.get(top, top)].add(where)
    return found


def test_what_is_imported_is_declared_and_has_a_row() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    needed = [
        *project["dependencies"],
        *(one for extra in ("train", "aws", "sky") for one in extras[extra]),
    ]
    declared = {Requirement(one).name for one in needed}
    assert set(imported()) == declared
    table = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8").split("\n| package |")[1]
    assert declared <= set(ROW.findall(table))


def test_rented_machines_install_what_their_code_imports() -> None:
    with tarfile.open(fileobj=io.BytesIO(make_bundle("digits").data)) as archive:
        inside = {name for name in archive.getnames() if name.endswith(".py")}
    needed = {
        package
        for package, files in imported().items()
        if any(file in inside or f"hetopt/{file}" in inside for file in files)
    }
    assert needed | {"uv"} == set(NEEDED), "uv installs them"
    for lock in sorted((REPOSITORY / "hetopt" / "backends" / "ec2" / "node" / "locks").glob("*-[cg]pu.txt")):
        pinned = set(re.findall(r"^([\w-]+)==", lock.read_text(encoding="utf-8"), re.MULTILINE))
        assert set(NEEDED) - {"torch"} <= pinned, lock.name


# The pins are complete, torch is the one version that is supported, and these tests run on what is pinned.

REQUIREMENTS = Path(__file__).resolve().parents[2] / "requirements"


def test_the_tests_run_on_the_pinned_versions() -> None:
    spec = importlib.util.spec_from_file_location("freeze", REQUIREMENTS / "freeze.py")
    freeze = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(freeze)
    installed = freeze.closure(freeze.declared())
    pinned = pins()
    missing = sorted(set(installed) - set(pinned))
    # CUDA builds of torch bring libraries that torch itself pins.
    missing = [name for name in missing if not name.startswith(("nvidia-", "cuda-", "triton"))]
    assert not missing, f"not pinned: {missing}; run `make pins`"
    different = {
        name: (installed[name], pinned[name])
        for name in pinned.keys() & installed.keys()
        if Version(installed[name]).public != pinned[name]
    }
    assert not different, f"(installed, pinned) differ: {different}; run `make setup`"


def pins() -> dict[str, str]:
    pinned: dict[str, str] = {}
    for line in (REQUIREMENTS / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        requirement = Requirement(line)
        (specifier,) = requirement.specifier
        assert specifier.operator == "==", line
        assert requirement.name not in pinned
        pinned[requirement.name] = specifier.version
    return pinned


# Which build of torch is fetched: without CUDA where there is no GPU, and nobody waits long for an index.


@pytest.fixture
def torch_index(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    path = Path(__file__).resolve().parents[2] / "requirements" / "torch_index.py"
    spec = importlib.util.spec_from_file_location("torch_index", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "has_gpu", lambda: False)
    return module


class Index(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/whl/cpu/torch/" else 404)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Nobody reads it."""


@pytest.fixture
def index() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Index) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/whl/cpu"
        server.shutdown()


def test_a_machine_without_a_gpu_fetches_the_smaller_build(
    torch_index: ModuleType, index: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert torch_index.option(index) == f"--extra-index-url {index}"
    said = capsys.readouterr().err.replace(index, torch_index.INDEX)
    assert_shown("quickstart.md", "pip install", said)


def test_an_index_without_torch_or_that_is_not_there_is_left_out(
    torch_index: ModuleType, index: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert torch_index.option(index.replace("cpu", "moon")) == ""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        assert torch_index.option(f"http://127.0.0.1:{closed.getsockname()[1]}/whl/cpu") == ""
    assert "does not answer" in capsys.readouterr().err


def test_an_index_that_never_answers_is_not_waited_for(
    torch_index: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_index, "WITHIN_S", 0.2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        begun = time.monotonic()
        assert torch_index.option(f"http://127.0.0.1:{silent.getsockname()[1]}/whl/cpu") == ""
        assert time.monotonic() - begun < 60


# The image's definition: it copies what the repository has, runs as nobody special, and its steps install hetopt.


def instructions() -> list[tuple[str, str]]:
    """Each instruction and what it says, lines joined."""
    text = re.sub(r"^#.*\n", "", (REPOSITORY / "Containerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = text.replace("\\\n", "").splitlines()
    return [(line.partition(" ")[0], line.partition(" ")[2].strip()) for line in lines if line.strip()]


def said(name: str) -> list[str]:
    return [text for instruction, text in instructions() if instruction == name]


def test_what_is_copied_is_there_and_what_is_not_in_the_repository_is_left_out() -> None:
    for copied in said("COPY"):
        sources = copied.split()[:-1]
        if not sources[0].startswith("--from="):
            assert all((REPOSITORY / source).exists() for source in sources)
    ignored = (REPOSITORY / ".dockerignore").read_text(encoding="utf-8")
    for line in (REPOSITORY / ".gitignore").read_text(encoding="utf-8").splitlines():
        if line.startswith("/"):
            assert line.strip("/") in ignored, f"{line} would be sent to the builder"


@pytest.mark.slow
def test_its_steps_install_hetopt(tmp_path: Path) -> None:
    """Those of the first stage, in folders of the test's own, with whatever index is configured here."""
    moved = {"/opt/hetopt": f"{tmp_path}/opt", "/tmp/hetopt": str(REPOSITORY), "/tmp/": f"{tmp_path}/"}
    (tmp_path / "constraints.txt").write_bytes((REPOSITORY / "requirements" / "constraints.txt").read_bytes())
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for step in said("RUN")[:3]:
        step = re.sub("|".join(moved), lambda found: moved[found[0]], step)
        step = re.sub(r"--index-url \S+ --extra-index-url \S+", "", step)
        subprocess.run(["sh", "-c", step], check=True, env=environment)
    told = subprocess.run([f"{tmp_path}/opt/bin/hetopt", "--version"], capture_output=True, text=True, check=True)
    assert told.stdout.startswith("hetopt 0.")
