"""The house rules that no other tool checks: modules say what they know and stay small, errors are never swallowed, and
no trace of a developer's machine is left in the tree."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

HERE = Path(__file__).resolve()
REPOSITORY = HERE.parent.parent
PYPROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
FOLDERS: dict[str, str] = PYPROJECT["tool"]["setuptools"]["package-dir"]
MODULES = sorted(path for folder in FOLDERS.values() for path in (REPOSITORY / folder).rglob("*.py"))
LONGEST_MODULE = 400
EMPTY_NAMES = {"utils", "util", "helpers", "manager", "misc", "common"}

FORBIDDEN = {
    "a to-do belongs in the issue tracker": re.compile(r"\b(?:TODO|FIXME|XXX|HACK)\b"),
    "a path of one developer's machine": re.compile(r"(?<![\w./$}])/(?:home|root|Users|work)/\w"),
    "a suppression without its code": re.compile(r"#\s*(?:noqa(?!:)|type:\s*ignore(?!\[))"),
}


def name(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


def tracked_texts() -> list[Path]:
    """The files of the repository that people write: tracked or about to be, data aside."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode != 0:
        return MODULES
    paths = [REPOSITORY / entry for entry in listed.stdout.split("\0") if entry]
    return [path for path in paths if path.suffix in ("", ".py", ".md", ".toml", ".txt", ".yml") and path.is_file()]


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_a_module_opens_with_what_it_knows_and_stays_small(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    docstring = ast.get_docstring(ast.parse(text))
    assert docstring, "it has no docstring"
    assert docstring.split("\n\n")[0].rstrip().endswith((".", "`", ":")), "its docstring does not open with a sentence"
    assert len(text.splitlines()) <= LONGEST_MODULE
    assert path.stem not in EMPTY_NAMES, "its name does not say what it knows"


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_an_unknown_error_is_never_swallowed(path: Path) -> None:
    """A handler for everything may clean up, but it must raise again or hand the error on."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ExceptHandler):
            caught = {part.id for part in ast.walk(node.type) if isinstance(part, ast.Name)} if node.type else {"all"}
            if caught & {"all", "Exception", "BaseException"}:
                last = node.body[-1]
                handed_on = isinstance(last, ast.Return) and node.name in {
                    part.id for part in ast.walk(last) if isinstance(part, ast.Name)
                }
                assert handed_on or isinstance(last, ast.Raise), f"line {node.lineno} swallows every error"


def test_the_packages_are_the_folders() -> None:
    """A sub-package that pyproject.toml forgets can be imported in an editable install and is absent from the wheel."""
    found = {
        ".".join((package, *init.parent.relative_to(REPOSITORY / folder).parts))
        for package, folder in FOLDERS.items()
        for init in (REPOSITORY / folder).rglob("__init__.py")
    }
    assert found == set(PYPROJECT["tool"]["setuptools"]["packages"])


def test_every_folder_with_modules_is_a_package() -> None:
    assert {path.parent for path in MODULES} == {path.parent for path in MODULES if path.name == "__init__.py"}


def test_every_package_is_typed() -> None:
    assert all((REPOSITORY / folder / "py.typed").is_file() for folder in FOLDERS.values())


@pytest.mark.parametrize("rule", FORBIDDEN)
def test_nothing_is_left_that_does_not_belong_in_a_repository(rule: str) -> None:
    found = [
        f"{name(path)}:{number}: {line.strip()}"
        for path in tracked_texts()
        if path.resolve() != HERE
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if FORBIDDEN[rule].search(line)
    ]
    assert not found, f"{rule}:\n" + "\n".join(found)


FOLDER_WORDS = ("folder", "dir", "path", "home", "root", "where", "parent", "bundled", "base")

OURS = {
    "optimizer/cli/catalog_refresh.py: home / day.isoformat()": "a date",
    "optimizer/cli/metrics.py: into / f'.{EVENT_FILE}.partial'": "a constant",
    "optimizer/cli/export.py: skypilot.parent / name": "the wheel of this hetopt",
    "optimizer/cli/fetch.py: out.with_name(f'.{out.name}.partial')": "the file's own name, as it was typed",
    "optimizer/ec2/fetching.py: run_dir / name": "one of two constants",
    "optimizer/ec2/launcher.py: run_dir / name": "one of two constants",
    "optimizer/ec2/observing.py: run_dir / f'.observed.{order.life}'": "a number",
    "optimizer/ec2/watch.py: self.run_dir / folder": "one of two constants",
    "optimizer/market/catalog_refresh.py: bundled / name": "a constant",
    "optimizer/market/answer_store.py: self.folder / f'{part}.jsonl'": "a constant part of what AWS is asked",
    "trainer/checkpoints/folder.py: self._folder / f'step-{step}'": "a number",
    "trainer/checkpoints/folder.py: self._folder / f'step-{step}{_PARTIAL}'": "a number",
    "trainer/checkpoints/folder.py: folder / name": "state.pt or rank-N.pt",
    "trainer/checkpoints/folder.py: self.path(step) / name": "state.pt or rank-N.pt",
    "trainer/checkpoints/folder.py: path.with_name(f'.{path.name}.partial')": "the file's own name",
    "trainer/checkpoints/manifest.py: folder / name": "a CheckpointFile",
    "trainer/launch/cgroups.py: hierarchy.root / name": "made of a process id",
    "trainer/launch/ec2/checkpoints.py: path.parent / newest": "what checkpoint_name let through",
    "trainer/launch/netns.py: _FOLDER / name": "made of a process id",
    "trainer/launch/runs.py: self.home / name": "made of a time and what is left of a label",
    "trainer/lone_host.py: host_log_folder(run_dir, node.host) / 'run' / attempt": "a number",
    "trainer/lone_host.py: host_log_folder(run_dir, node.host) / 'run' / attempt / str(local_rank)": "a number",
    "trainer/tasks/cifar.py: folder / layout.folder": "a constant",
    "trainer/tasks/cifar.py: folder / name": "a constant",
    "trainer/tasks/corpus.py: folder / inside": "a constant",
    "trainer/tasks/corpus.py: folder / inside / naming.format(first)": "a constant",
    "trainer/tasks/corpus.py: folder / inside / naming.format(second)": "a constant",
    "profiler/paths.py: folder.joinpath(*parts)": "the one place",
}  # fmt: skip
"""Joins whose right side is not written out, and why it is nobody else's."""


def joins(path: Path) -> set[str]:
    """What a module joins to a folder beside constants, as it is written there."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            constant = isinstance(node.right, ast.Constant) or (
                isinstance(node.right, ast.Name) and node.right.id.isupper()
            )
            words = [
                part.id if isinstance(part, ast.Name) else part.attr
                for part in ast.walk(node.left)
                if isinstance(part, ast.Name | ast.Attribute)
            ]
            if not constant and (
                isinstance(node.right, ast.JoinedStr)
                or any(word in name.lower() for name in words for word in FOLDER_WORDS)
            ):
                found.add(ast.unparse(node))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("joinpath", "path.join", "with_name")):
            found.add(ast.unparse(node))
    return found


def test_names_are_joined_to_folders_in_one_way() -> None:
    """A name that is not ours goes through `inside`; one that is stands in the list with its reason."""
    found = {f"{path.relative_to(REPOSITORY).as_posix()}: {join}" for path in MODULES for join in joins(path)}
    assert found - set(OURS) == set(), "use hetopt.profiler.paths.inside, or say why the name is ours"
    assert set(OURS) - found == set(), "these are gone"
