"""docs/dependencies.md is true: every declared package has a row, and is imported in the places that it names."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections import defaultdict

from packaging.requirements import Requirement

from tests.sources import REPOSITORY, modules

PACKAGES = {"sklearn": "scikit-learn", "botocore": "boto3", "pydantic_core": "pydantic"}
"""Packages by what is imported of them, where that is called otherwise."""

ROW = re.compile(r"^\| ([\w-]+)(?:[, ][^|]*)? \|[^|]*\| ([^|]*) \|[^|]*\|$", re.MULTILINE)
PATH = re.compile(r"`((?:hetopt|optimizer|profiler|trainer|catalogs)/[\w/]*(?:\.py)?)`")


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
            for top in {name.partition(".")[0] for name in names} - {"hetopt"} - sys.stdlib_module_names:
                found[PACKAGES.get(top, top)].add(where)
    return found


def told() -> dict[str, list[str]]:
    """The places that the page names for each package: files, and folders that end in a slash."""
    text = (REPOSITORY / "docs" / "dependencies.md").read_text(encoding="utf-8")
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
    needed = [*project["dependencies"], *(one for extra in ("train", "aws", "streams") for one in extras[extra])]
    declared = {Requirement(one).name for one in needed}
    assert set(imported()) == declared
    assert declared <= set(told())
