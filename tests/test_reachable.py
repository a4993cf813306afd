"""Every module of the product is reached from something that a person can start, by the imports that stand in it."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.sources import REPOSITORY, modules

STARTED = {
    "hetopt.__main__": "the command line, as `python -m hetopt`",
    "hetopt.cli.main": "the command line",
    "hetopt.trainer.worker": "a worker, started by torchrun",
    "hetopt.profiler.worker": "a worker of `hetopt profile`, started by torchrun",
    "hetopt.trainer.host.agent": "a host of a run",
    "hetopt.trainer.torchrun": "what the script of `hetopt export` starts",
    "hetopt.backends.ec2.node.agent": "the agent of a rented machine",
    "hetopt.trainer.session": "what a script of one's own imports",
    "hetopt.trainer.task": "what a task imports",
    "hetopt.catalogs.build": "`python -m hetopt.catalogs.build`, which makes the bundled catalogue",
}
"""What people and programs start or import by name; docs/decisions/0001 says what of it is promised."""

USES = ("benchmarks", "docs", "examples")

FOUND_BY_OTHERS = {"hetopt.__dir__", "hetopt.cli.catalog.import_", "hetopt.cli.main._root"}
"""By Python itself, and by typer."""


def texts(tree: ast.AST) -> Iterator[str]:
    """Literal texts but for docstrings: modules are also started by their name, as `python -m NAME`."""
    docstrings = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


def imported(name: str, path: Path, known: dict[str, Path]) -> Iterator[str]:
    """What a module imports anywhere in it, but for types alone, and modules that it names as a whole text."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    typed = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for part in node.body
        for inner in ast.walk(part)
    }
    for node in ast.walk(tree):
        if id(node) in typed:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
    # Such as "hetopt.trainer.host.agent", or "hetopt.trainer.tasks.digits:digits".
    yield from (name for text in texts(tree) if (name := text.partition(":")[0]) in known)


def reached(known: dict[str, Path], start: set[str]) -> set[str]:
    """What is imported from there, and from that, and so on; a module also runs the packages that it is in."""
    seen: set[str] = set()
    waiting = list(start)
    while waiting:
        name = waiting.pop()
        if name in seen or name not in known:
            continue
        seen.add(name)
        waiting += [name.rpartition(".")[0], *imported(name, known[name], known)]
    return seen


def test_what_is_started_is_there() -> None:
    known = modules()
    assert set(STARTED) <= set(known)


def test_every_module_can_be_reached() -> None:
    known = modules()
    lost = set(known) - reached(known, set(STARTED))
    assert not lost, f"nothing that can be started imports {', '.join(sorted(lost))}"


def test_a_module_that_nothing_imports_is_found() -> None:
    known = modules()
    without = {name: path for name, path in known.items() if name != "hetopt.cli.report"}
    lost = set(without) - reached(without, set(STARTED))
    assert "hetopt.reports.exports" in lost


def test_every_function_and_class_is_used() -> None:
    """Its name stands somewhere else in the product, its benchmarks or its examples: tests alone keep nothing alive."""
    paths = [*modules().values(), *(path for room in USES for path in sorted((REPOSITORY / room).rglob("*.py")))]
    texts_of = {path: path.read_text(encoding="utf-8") for path in paths}
    words = Counter(word for text in texts_of.values() for word in re.findall(r"\w+", text))
    unused = {
        f"{name}.{node.name}"
        for name, path in modules().items()
        for node in ast.parse(texts_of[path]).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and words[node.name] == 1
    }
    assert unused == FOUND_BY_OTHERS
