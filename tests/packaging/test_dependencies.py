"""The dependencies in CONTRIBUTING.md: every package has a row, and is imported in the places that it names."""

from __future__ import annotations

import ast
import io
import re
import sys
import tarfile
import tomllib
from collections import defaultdict
from functools import cache

from packaging.requirements import Requirement

from hetopt.backends.ec2.renter.bundle import NEEDED, make_bundle
from tests.sources import REPOSITORY, modules

PACKAGES = {"sklearn": "scikit-learn", "botocore": "boto3", "pydantic_core": "pydantic"}
"""Packages by what is imported of them, where that is called otherwise."""

NO_PACKAGES = {"hetopt", "_typeshed"}
"""What is imported and not installed: ourselves, and what only type checkers know."""

ROW = re.compile(r"^\| ([\w-]+)(?:[, ][^|]*)? \|[^|]*\| ([^|]*) \|$", re.MULTILINE)
PATH = re.compile(r"`((?:hetopt|optimizer|profiler|trainer|catalogs)/[\w/]*(?:\.py)?)`")


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


def told() -> dict[str, list[str]]:
    """The places that the page names for each package: files, and folders that end in a slash."""
    text = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")
    tables = text.split("\n| package |")[1:]  # those of programs are no packages
    rows = (row for table in tables for row in ROW.findall(table.partition("\n\n")[0]))
    return {package: PATH.findall(places) for package, places in rows}


def is_in(file: str, place: str) -> bool:
    return file.startswith(place) if place.endswith("/") else file == place


def test_every_import_is_where_the_page_says() -> None:
    places = told()
    strays = {
        f"{package} in {file}"
        for package, files in imported().items()
        for file in files
        if not any(is_in(file, place) for place in places.get(package, ()))
    }
    assert strays == set()


def test_every_place_imports_the_package() -> None:
    files = imported()
    idle = {
        f"{package} in {place}"
        for package, places in told().items()
        for place in places
        if not any(is_in(file, place) for file in files.get(package, ()))
    }
    assert idle == set()


def test_what_is_imported_is_declared_and_has_a_row() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    needed = [
        *project["dependencies"],
        *(one for extra in ("train", "aws", "streams") for one in extras[extra]),
    ]
    declared = {Requirement(one).name for one in needed}
    assert set(imported()) == declared
    assert declared <= set(told())


def test_rented_machines_install_what_their_code_imports() -> None:
    """Streams are not for rented machines; they are opened by a URL, and redis is imported where one is."""
    with tarfile.open(fileobj=io.BytesIO(make_bundle("digits").data)) as archive:
        inside = {name for name in archive.getnames() if name.endswith(".py")}
    needed = {
        package
        for package, files in imported().items()
        if any(file in inside or f"hetopt/{file}" in inside for file in files)
    }
    assert needed - {"redis"} == set(NEEDED)
    for lock in sorted((REPOSITORY / "hetopt" / "backends" / "ec2" / "node" / "locks").glob("*-[cg]pu.txt")):
        pinned = set(re.findall(r"^([\w-]+)==", lock.read_text(encoding="utf-8"), re.MULTILINE))
        assert set(NEEDED) - {"torch"} <= pinned, lock.name
