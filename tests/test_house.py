"""House rules that no other tool checks: modules say what they know, errors are never swallowed, names are joined to
folders in one place, and no trace of a developer's machine is left in the tree."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetopt.api.options import RECORDS, Changes, Ec2, Local, Rehearsal, Slurm, Ssh
from hetopt.core.option import options_of
from tests.sources import REPOSITORY, modules

HERE = Path(__file__).resolve()
MODULES = sorted(modules().values())
EMPTY_NAMES = {"utils", "util", "helpers", "manager", "misc", "common"}

FORBIDDEN = {
    "a to-do belongs in the issue tracker": re.compile(r"\b(?:TODO|FIXME|XXX|HACK)\b"),
    "a path of one developer's machine": re.compile(r"(?<![\w./$}])/(?:home|root|Users|work)/\w"),
    "a merge that was not finished": re.compile(r"^(?:<<<<<<<|>>>>>>>) "),
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


def test_a_module_opens_with_what_it_knows() -> None:
    for path in MODULES:
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        assert docstring, f"{name(path)} has no docstring"
        opens = docstring.split("\n\n")[0].rstrip().endswith((".", "`", ":"))
        assert opens, f"the docstring of {name(path)} does not open with a sentence"
        assert path.stem not in EMPTY_NAMES, f"the name of {name(path)} does not say what it knows"


NO_VERBS = re.compile(
    r"(?:An?|All|As|Both|By|Each|Every|For|From|How|In|Its|No|None|Of|One|Same|Several|Some|Th(?:at|e|is|ose)|"
    r"Wh(?:at|en|ere|ether|ich|o|y)|With)\b"
)
"""What a function's docstring does not begin with: it says what the function does."""


def test_the_docstring_of_a_function_begins_with_a_verb() -> None:
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or not (text := ast.get_docstring(node)):
                continue
            if not any("property" in ast.unparse(decorator) for decorator in node.decorator_list):
                assert not NO_VERBS.match(text), f"{name(path)}: {node.name}: {text.splitlines()[0]}"


def test_an_unknown_error_is_never_swallowed() -> None:
    """A handler for everything may clean up, but it must raise again or hand the error on."""
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ExceptHandler):
                continue
            caught = {part.id for part in ast.walk(node.type) if isinstance(part, ast.Name)} if node.type else {"all"}
            if caught & {"all", "Exception", "BaseException"}:
                last = node.body[-1]
                handed_on = isinstance(last, ast.Return) and node.name in {
                    part.id for part in ast.walk(last) if isinstance(part, ast.Name)
                }
                swallowed = not handed_on and not isinstance(last, ast.Raise)
                assert not swallowed, f"{name(path)}:{node.lineno} swallows every error"


def test_the_four_folders_are_reached_through_links() -> None:
    """What is imported is what lies in the folders, in a checkout, an editable install and a wheel alike."""
    for folder in ("catalogs", "optimizer", "profiler", "trainer"):
        link = REPOSITORY / "hetopt" / folder
        if not (REPOSITORY / ".git").exists() and not link.is_symlink():
            pytest.skip("a source distribution holds the folders themselves")
        assert os.readlink(link) == f"../{folder}"


def test_every_folder_with_modules_is_a_package() -> None:
    assert {path.parent for path in MODULES} == {path.parent for path in MODULES if path.name == "__init__.py"}


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


def test_every_decision_that_is_cited_is_there_and_short() -> None:
    records = {path.name[:4]: path for path in (REPOSITORY / "docs" / "decisions").glob("0*.md")}
    missing = {
        f"{name(path)} cites {number}"
        for path in tracked_texts()
        for number in re.findall(r"decisions/(\d{4})", path.read_text(encoding="utf-8"))
        if number not in records
    }
    assert missing == set()
    for number, path in records.items():
        assert len(path.read_text(encoding="utf-8").split()) <= 120, f"record {number} is longer than 120 words"


WRITES_COMMAND_LINES = {
    "hetopt/catalogs/build.py": "its own command line",
    "hetopt/api/exactness.py": "the command line of torchrun",
    "hetopt/backends/ssh/gpus.py": "the command line of nvidia-smi",
    "hetopt/backends/slurm/jobs.py": "the command lines of Slurm",
    "hetopt/integrations/sky.py": "the command lines of uv, and of a machine's own job",
    "hetopt/backends/host/entry.py": "the command lines of nvidia-smi and pip",
    "hetopt/backends/ec2/bootstrap.py": "the script that a rented machine boots with",
    "hetopt/reports/exports.py": "files for torchrun, SkyPilot, dstack and Kubernetes",
    "hetopt/reports/html.py": "variables of a style sheet",
    "hetopt/reports/plan_plots.py": "variables of a style sheet",
    "hetopt/reports/plan_document.py": "the command that starts a plan",
    "hetopt/trainer/host/agent.py": "the command line of torchrun, and its own",
    "hetopt/trainer/torchrun.py": "messages about its own command line, which is torchrun's",
}
"""Modules with options of other programs in them, and whose they are."""

FLAG = re.compile(r"(?<![\w-])--[a-z{]")
COMMAND = re.compile(r"``?(?:hetopt|aws) [^`]*``?|\A(?:hetopt|aws) .*")
"""What a person can type as it stands: a whole text, or a part of one in backticks."""


def written_texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every literal text of a module with its line, docstrings included; ``{}`` stands for what is filled in."""
    parts: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts |= {id(value) for value in node.values}
            filled = (value.value if isinstance(value, ast.Constant) else "{}" for value in node.values)
            yield node.lineno, "".join(map(str, filled))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield node.lineno, node.value


def test_only_the_command_line_speaks_of_options() -> None:
    """The library names its parameters as Python has them; `hetopt.cli.flags` makes options of them."""
    found = {
        f"{name(path)}:{line}: {text.strip()}"
        for path in MODULES
        if name(path) not in WRITES_COMMAND_LINES and not name(path).startswith("hetopt/cli/")
        for line, text in written_texts(ast.parse(path.read_text(encoding="utf-8")))
        if FLAG.search(COMMAND.sub("", text))
    }
    assert not found, "name the parameter in backticks instead:\n" + "\n".join(sorted(found))


def test_what_writes_command_lines_has_options() -> None:
    """An entry that has none any more goes."""
    for path in WRITES_COMMAND_LINES:
        assert FLAG.search((REPOSITORY / path).read_text(encoding="utf-8")), f"{path} holds no option"


LONGEST_BODY = 60
"""Lines of a function of the command line, behind its signature and docstring."""


def body_lines(function: ast.FunctionDef) -> int:
    """Return the lines of a function behind its docstring."""
    first = function.body[min(ast.get_docstring(function) is not None, len(function.body) - 1)]
    return (function.end_lineno or 0) + 1 - first.lineno


def test_the_command_line_is_thin() -> None:
    """It parses, calls the library and prints: what decides or works is in `hetopt.api` and below."""
    long = {
        f"{name(path)}: {node.name} has {body_lines(node)} lines"
        for path in MODULES
        if name(path).startswith("hetopt/cli/")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and body_lines(node) > LONGEST_BODY
    }
    assert not long, "\n".join(sorted(long))


def bound(statement: ast.stmt) -> list[str]:
    """Return the names that a statement of a module binds."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return [statement.name]
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", statement)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


@pytest.mark.parametrize("path", [*MODULES, *(REPOSITORY / "tests").rglob("*.py")], ids=name)
def test_a_name_of_a_module_means_one_thing(path: Path) -> None:
    """Of two that are bound to it, functions between them see the second."""
    names = [each for statement in ast.parse(path.read_text(encoding="utf-8")).body for each in bound(statement)]
    assert len(names) == len(set(names)), sorted({each for each in names if names.count(each) > 1})


FOLDER_WORDS = ("folder", "dir", "path", "home", "root", "where", "parent", "bundled", "base")

OURS = {
    "hetopt/api/run.py: self.folder / name": "a constant",
    "hetopt/core/artifact.py: path.with_name(f'.{path.name}.{secrets.token_hex(8)}.partial')": "as given",
    "hetopt/core/plain_text.py: script.with_name(f'{script.stem}_hetopt.py')": "as typed",
    "hetopt/cli/report.py: path.parent / name": "the wheel of this hetopt",
    "hetopt/cli/runs.py: out.with_name(f'.{out.name}.partial')": "as typed",
    "hetopt/backends/host/bundle.py: folder / first": "a module that the person's own code imports",
    "hetopt/backends/host/bundle.py: folder / f'{first}.py'": "likewise",
    "hetopt/backends/ec2/renter/backend.py: run_dir / name": "a constant",
    "hetopt/backends/ec2/facts.py: Path(__file__).parent / name": "a constant",
    "hetopt/backends/on_this_machine.py: folder / name": "one of two constants",
    "hetopt/backends/ec2/renter/doctor.py: Path(__file__).with_name('policies.json')": "a constant",
    "hetopt/core/run_folder.py: run_dir / name": "a constant",
    "hetopt/backends/ec2/renter/launcher.py: run_dir / name": "one of two constants",
    "hetopt/backends/ec2/renter/order.py: run_dir / f'.observed.{order.life}'": "a number",
    "hetopt/backends/ec2/renter/launcher.py: self.run_dir / folder": "one of two constants",
    "hetopt/optimizer/market/catalog_refresh.py: bundled / name": "a constant",
    "hetopt/trainer/checkpoints/folder.py: self._folder / f'step-{step}'": "a number",
    "hetopt/trainer/checkpoints/folder.py: self._folder / f'step-{step}{_PARTIAL}'": "a number",
    "hetopt/trainer/checkpoints/folder.py: folder / name": "a CheckpointFile",
    "hetopt/trainer/checkpoints/folder.py: self.path(step) / name": "state or rank-N, and a suffix",
    "hetopt/trainer/checkpoints/folder.py: path.with_name(f'.{path.name}.partial')": "the file's own name",
    "hetopt/backends/host/agent.py: self.run_dir / CHECKPOINT_FOLDER / newest": "what checkpoint_name let through",
    "hetopt/backends/emulation/namespaces.py: _FOLDER / name": "made of a process id",
    "hetopt/core/run_folder.py: self.home / name": "made of a time and what is left of a label",
    "hetopt/trainer/tasks/vision.py: folder / name": "a constant",
    "hetopt/trainer/tasks/language.py: folder / inside": "a constant",
    "hetopt/trainer/tasks/language.py: folder / inside / naming.format(first)": "a constant",
    "hetopt/trainer/tasks/language.py: folder / inside / naming.format(second)": "a constant",
    "hetopt/core/search_path.py: script.parent / first": "a module that the person's own script imports",
    "hetopt/api/script_text.py: base.joinpath(*name.split('.'))": "identifiers of Python, in a person's own script",
    "hetopt/core/paths.py: folder.joinpath(*parts)": "the one place",
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
    assert found - set(OURS) == set(), "use hetopt.core.paths.inside, or say why the name is ours"
    assert set(OURS) - found == set(), "these are gone"


TIMED = {
    "tests/catalog/test_public_refresh.py": "the long form alone bounds it, at a minute",
    "tests/trainer/test_allocator.py": "it counts faults of pages, not seconds",
}
"""Tests that ask for processor time, and why."""


def test_no_test_is_judged_by_how_quick_its_machine_is() -> None:
    """Processor time is another in another minute, and includes what other tests left to collect: see `tests.work`."""
    found = {
        path.relative_to(REPOSITORY).as_posix()
        for path in (REPOSITORY / "tests").rglob("*.py")
        if path != HERE and re.search(r"process_time|getrusage\(|ru_utime", path.read_text(encoding="utf-8"))
    }
    assert found == set(TIMED)


def test_percent_is_written_with_its_space() -> None:
    """'31 %' everywhere: no ``:.0%``, whose sign sticks to the number. A progress bar's share is part of a drawing."""
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FormattedValue) and name(path) != "hetopt/cli/render.py":
                form = ast.unparse(node.format_spec) if node.format_spec is not None else ""
                assert re.search(r"\.\d%", form) is None, f"{name(path)}:{node.lineno}"


SET_BY_ANYBODY = re.compile(
    r"\b(?:time\.(?:time|time_ns|localtime|gmtime|ctime|asctime)|date(?:time)?\.(?:now|utcnow|today)|(?:create|boot)_time)$"
)
"""Clocks that a person, a server of time or a machine that wakes up sets, forward and back."""

SHOWN, DATES, OTHERS = "a time that people are shown", "the date of a fact", "times of other machines"
WALL_CLOCKS = {
    "hetopt/api/account.py": OTHERS,
    "hetopt/api/catalog_refreshing.py": DATES,
    "hetopt/api/planning.py": DATES,
    "hetopt/api/exploring.py": "when a run was launched, by the clock of its log",
    "hetopt/api/profiling.py": "when a measurement was launched, by the clock of its log",
    "hetopt/api/profiling_script.py": "likewise",
    "hetopt/api/run.py": SHOWN,
    "hetopt/backends/backend.py": DATES,
    "hetopt/backends/ec2/bootstrap.py": OTHERS,
    "hetopt/backends/host/agent.py": OTHERS,
    "hetopt/backends/ec2/renter/backend.py": OTHERS,
    "hetopt/backends/ec2/renter/request.py": OTHERS,
    "hetopt/backends/ec2/renter/launcher.py": "times of other machines, and their end by the clock of AWS's scheduler",
    "hetopt/backends/ssh/conductor.py": "the hours of a host's owner, and times of other machines",
    "hetopt/cli/profile.py": DATES,
    "hetopt/core/events/log.py": "the date of an event, and by how much the clock was set",
    "hetopt/reports/timeline.py": SHOWN,
}
"""Modules that look at such a clock, and for what."""


def test_decisions_rest_on_a_clock_that_nobody_sets() -> None:
    """What is waited for, given up, due or alive is told by `time.monotonic`."""
    found: set[str] = set()
    for path in MODULES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        read = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                read |= {f"{node.module}.{imported.name}" for imported in node.names}
        if any(map(SET_BY_ANYBODY.search, read)):
            found.add(name(path))
    assert found == set(WALL_CLOCKS)


MOST_FORMS = 2
"""Of a field of a launch's options: the record that declares it, and what a backend makes of it."""
A_FORM = 3
"""Fields of one record that another record or a signature shares with it, from which on it is a form of the same."""


def forms(record: type) -> dict[str, list[str]]:
    """Return for each field the records and signatures between a person and a machine that are forms of its record.

    Records of other verbs are none: a search and a launch each have a zone.
    """
    fields = set(options_of(record))
    found: dict[str, list[str]] = {field: [] for field in fields}
    for path in MODULES:
        if not name(path).startswith(("hetopt/api/", "hetopt/cli/", "hetopt/backends/")):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and not name(path).startswith("hetopt/backends/"):
                names = {one.arg for one in (*node.args.args, *node.args.kwonlyargs)}
            elif isinstance(node, ast.ClassDef) and "Artifact" not in map(ast.unparse, node.bases):
                if name(path) == "hetopt/api/options.py" and node.name != record.__name__:
                    continue
                names = {ast.unparse(one.target) for one in node.body if isinstance(one, ast.AnnAssign)}
            else:
                continue
            if len(names & fields) >= A_FORM:
                for field in names & fields:
                    found[field].append(f"{name(path)}: {node.name}")
    return found


@pytest.mark.parametrize("record", [Changes, Local, Rehearsal, Ssh, Slurm, Ec2], ids=lambda record: record.__name__)
def test_an_option_is_written_once(record: type) -> None:
    """Command line, signature, docstring and file of options are derived from the field."""
    for field, written in forms(record).items():
        assert len(written) <= MOST_FORMS, f"{field} stands in {', '.join(written)}"
        assert options_of(record)[field].help.endswith("."), field


def test_options_that_several_verbs_have_are_typed_alike() -> None:
    """So that a message of the library names one flag, whichever command it is for."""
    typed: dict[str, set[str]] = {}
    for record in RECORDS:
        for field, option in options_of(record).items():
            typed.setdefault(field, set()).add(option.called(field))
    assert {field: flags for field, flags in typed.items() if len(flags) > 1} == {}
