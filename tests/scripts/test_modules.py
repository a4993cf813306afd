"""A script in a package runs, is read and travels as `python -m` has it; any other as a file does."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from contextlib import chdir
from pathlib import Path

import pytest

from hetopt.api.script_text import read_script
from hetopt.backends.ec2.renter.bundle import make_bundle, user_code
from hetopt.core.errors import BadInput
from hetopt.core.plain_text import typed_script
from hetopt.core.search_path import INSTALLED_ONLY, code_folder

BESIDE, WHOLE, RELATIVE = "import helper", "from app.helper import VALUE", "from .helper import VALUE"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """``app/sub/train.py`` and the modules that it may import, in packages with and without a file of their own."""
    for name in ("app/__init__.py", "app/helper.py", "app/sub/helper.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("" if path.stem == "__init__" else "import os\n\nVALUE = 3\n")
    return tmp_path


def script(folder: Path, text: str, name: str = "app/sub/train.py") -> Path:
    path = folder / name
    path.write_text(f"{text}\nprint(__name__, __package__ or '-')\n")
    return path


@pytest.mark.parametrize(
    ("text", "root", "said"),
    [
        (BESIDE, "app/sub", "__main__ -"),
        (WHOLE, "", "__main__ app.sub"),
        (RELATIVE, "", "__main__ app.sub"),
        (f"{BESIDE}\n{WHOLE}", "", "__main__ app.sub"),
        ("from ..helper import VALUE", "", "__main__ app.sub"),
        ("import json", "app/sub", "__main__ -"),
    ],
)
def test_it_runs_where_its_imports_are_found(package: Path, text: str, root: str, said: str) -> None:
    path = script(package, text)
    (package / "app/sub/__init__.py").touch()
    assert code_folder(path) == package / root
    run = f"from hetopt.core.search_path import run_script; run_script({str(path)!r})"
    done = subprocess.run(
        [sys.executable, "-c", run], env=INSTALLED_ONLY, cwd="/", capture_output=True, text=True, check=False
    )
    assert done.stdout.split("\n")[0] == said, done.stderr


def test_a_checkout_that_is_called_as_what_is_installed_is_no_package(tmp_path: Path) -> None:
    (tmp_path / "hetopt/examples").mkdir(parents=True)
    path = script(tmp_path, "from hetopt import session", "hetopt/examples/train.py")
    assert code_folder(path) == path.parent


def test_all_of_its_package_is_read_and_travels(package: Path) -> None:
    path = script(package, f"{WHOLE}\nfrom . import helper as other", "app/train.py")
    (package / "app/helper.py").write_text("from app.sub import helper\nVALUE = 3\n")
    assert [one.name for one in read_script(path)] == ["train.py", "app/helper.py", "app/sub/helper.py"]
    files = [name for name, _ in user_code(path, provided=frozenset()).files]
    assert files == ["app/__init__.py", "app/helper.py", "app/sub/helper.py", "app/train.py"]
    assert make_bundle("app", (str(path), "--lr", "0.1")).script == ("task/app/train.py", "--lr", "0.1")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (["-m", "app.sub.train", "--lr", "1"], ("app/sub/train.py", "--lr", "1")),
        (["python", "-m", "app.sub.train"], ("app/sub/train.py",)),
        (["python3", "train.py", "-m", "x"], ("train.py", "-m", "x")),
        (["-m", "app"], ("app/__main__.py",)),
        ([], ()),
    ],
)
def test_people_start_scripts_in_several_ways(package: Path, typed: Sequence[str], meant: tuple[str, ...]) -> None:
    for name in ("app/sub/train.py", "app/__main__.py"):
        script(package, BESIDE, name)
    with chdir(package):
        assert typed_script(typed) == meant


@pytest.mark.parametrize("typed", [["-m", "app.none"], ["-m"], ["-m", "app..sub"]])
def test_a_module_that_is_not_there_is_named(package: Path, typed: Sequence[str]) -> None:
    with chdir(package), pytest.raises(BadInput, match="there is no module"):
        typed_script(typed)
