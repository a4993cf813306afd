"""How far each committed result lies behind: commits since it was measured, and lines changed of what it runs.

What a benchmark runs is found by following its imports, and the imports of those, to the end. Whoever starts runs
(`hetopt.backends`, `hetopt.api`) runs the workers too, which nobody imports, and some only call the command line.

``python -m benchmarks._freshness`` (``make bench-stale``) lists the results of which something has changed, those first
of which most has.
"""

from __future__ import annotations

import ast
import functools
import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks._outcome import RESULTS

REPOSITORY = Path(__file__).resolve().parent.parent
STARTS_RUNS = ("hetopt.backends", "hetopt.api", "hetopt.cli")
CALL_COMMANDS = ("command_line", "newcomer")
COMMAND_LINE = "hetopt.cli.main"
WORKERS = ("hetopt.trainer.worker", "hetopt.trainer.script_worker", "hetopt.trainer.host.agent")


@dataclass(frozen=True, kw_only=True)
class Age:
    """Of a result.

    Attributes:
        benchmark: its name.
        commit: that was measured.
        commits: since then.
        lines: added or taken away since then, of what it runs.
        of_lines: that this has now.
        at_least: the commit that was measured is not in this history: counted from the one that brought the result.
    """

    benchmark: str
    commit: str
    commits: int
    lines: int
    of_lines: int
    at_least: bool = False


def ages() -> list[Age]:
    """Of every committed result; none outside a repository."""
    found = []
    for path in sorted(RESULTS.glob("*.json")):
        told = json.loads(path.read_text(encoding="utf-8"))
        commit = told["commit"].removesuffix("-dirty")
        commits = _since(commit)
        known = commits is not None
        if commits is None:
            commit = (_git("log", "-1", "--format=%H", "--", str(path)) or "").strip()
            commits = _since(commit) if commit else None
        if commits is None:
            continue
        files = runs(told["benchmark"])
        changed = _git("diff", "--numstat", commit, "HEAD", "--", *sorted(map(str, files))) or ""
        found.append(
            Age(
                benchmark=told["benchmark"],
                commit=told["commit"],
                commits=commits,
                lines=sum(int(part) for row in changed.splitlines() for part in row.split("\t")[:2] if part.isdigit()),
                of_lines=sum(len((REPOSITORY / file).read_text(encoding="utf-8").splitlines()) for file in files),
                at_least=not known,
            )
        )
    return found


def runs(benchmark: str) -> frozenset[Path]:
    """The files that a benchmark runs, beside itself, as paths in the repository."""
    seen: set[str] = set()
    due = [f"benchmarks.{benchmark}", *([COMMAND_LINE] if benchmark in CALL_COMMANDS else [])]
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
    """What a module imports of this repository, wherever in it; names of modules, and what may be one."""
    file = _file(module)
    assert file is not None
    return tuple(_named(ast.parse((REPOSITORY / file).read_text(encoding="utf-8"))))


def _named(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@functools.cache
def _file(module: str) -> Path | None:
    """Where a module lies, without links; None: it is not of this repository, or no module."""
    if module.partition(".")[0] not in ("hetopt", "benchmarks"):
        return None
    path = REPOSITORY.joinpath(*module.split("."))
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            return file.resolve().relative_to(REPOSITORY)
    return None


def _since(commit: str) -> int | None:
    """Commits that came after this one; None: it is not in this history."""
    counted = _git("rev-list", "--count", f"{commit}..HEAD")
    return None if counted is None else int(counted)


def _git(*arguments: str) -> str | None:
    """What git says; None: it refuses."""
    done = subprocess.run(["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else None


def main() -> None:
    """List what has changed."""
    stale = sorted((age for age in ages() if age.lines), key=lambda age: -age.lines / age.of_lines)
    for age in stale:
        print(
            f"{age.benchmark:18s} measured at {age.commit:14s} {age.commits:4d} commits ago; {age.lines:6,d} lines "
            f"changed of the {age.of_lines:6,d} that it runs"
        )
    print(f"{len(stale)} of {len(list(RESULTS.glob('*.json')))} results are of code that has changed")


if __name__ == "__main__":
    main()
