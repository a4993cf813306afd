"""Whether a committed result may be quoted: its commit is in this history, and what it runs was not rewritten since.

What a benchmark runs is found by following its imports, and the imports of those, to the end. Whoever starts runs
(`hetopt.backends`, `hetopt.api`) runs the workers too, which nobody imports.
"""

from __future__ import annotations

import ast
import functools
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
REWRITTEN = 0.5
"""Lines added or removed of what a benchmark runs, over those that it has, beyond which its figures are of other
code."""

STARTS_RUNS = ("hetopt.backends", "hetopt.api", "hetopt.cli")
WORKERS = ("hetopt.trainer.worker", "hetopt.trainer.host.agent")


def has_history() -> bool:
    """Return whether this is a repository with all of its commits."""
    return _git("rev-parse", "--is-shallow-repository") == "false"


def why_stale(result: Mapping[str, Any]) -> str | None:
    """Return why the figures of a result may not be quoted; None if they may.

    Args:
        result: as its file has it.
    """
    commit = str(result["commit"])
    if commit.endswith("-dirty"):
        return f"it was measured with changes on top of commit {commit.removesuffix('-dirty')}"
    if not commit or _git("merge-base", "--is-ancestor", commit, "HEAD") is None:
        return f"commit {commit or 'none'} is not in this history"
    files = runs(result["benchmark"])
    changed = _git("diff", "--numstat", commit, "HEAD", "--", *sorted(map(str, files))) or ""
    lines = sum(int(part) for row in changed.splitlines() for part in row.split("\t")[:2] if part.isdigit())
    of_lines = sum(len((REPOSITORY / file).read_text(encoding="utf-8").splitlines()) for file in files)
    if lines > REWRITTEN * of_lines:
        return f"{lines:,} lines were changed since commit {commit}, of the {of_lines:,} that it runs"
    return None


def runs(benchmark: str) -> frozenset[Path]:
    """Return the files that a benchmark runs, itself included, as paths in the repository."""
    seen: set[str] = set()
    due = [f"benchmarks.{benchmark}"]
    while due:
        module = due.pop()
        if module in seen or _file(module) is None:
            continue
        seen.add(module)
        due += imported(module)
        if module.startswith(STARTS_RUNS):
            due += WORKERS
    return frozenset(file for module in seen if (file := _file(module)) is not None)


@functools.cache
def imported(module: str) -> tuple[str, ...]:
    """Return the absolute names that a module of this repository imports: modules and members, perhaps modules."""
    file = _file(module)
    assert file is not None
    return tuple(_named(ast.parse((REPOSITORY / file).read_text(encoding="utf-8"))))


def _named(tree: ast.AST) -> Iterator[str]:
    """Yield the absolute names imported anywhere in a syntax tree: modules, and members, which may be modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@functools.cache
def _file(module: str) -> Path | None:
    """Return the file of a module, links resolved, as a path in the repository; None: it has no file here."""
    if module.partition(".")[0] not in ("hetopt", "benchmarks"):
        return None
    path = REPOSITORY.joinpath(*module.split("."))
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            return file.resolve().relative_to(REPOSITORY)
    return None


def _git(*arguments: str) -> str | None:
    """Return the output of a git command; None where git refuses."""
    done = subprocess.run(["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None
