"""What the documents tell a person to type exists: commands parse, make knows its targets, links lead somewhere."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import typer.main

import hetopt as hetopt_library
from hetopt.backends.emulation.namespaces import why_not
from hetopt.cli.main import app
from hetopt.core.profile import Profile
from hetopt.optimizer.launch_record import Launch
from hetopt.optimizer.market.catalog import load_catalog
from hetopt.optimizer.market.clouds import BUNDLED_CLOUDS
from hetopt.optimizer.plan import Goal
from hetopt.optimizer.recommendation.recommend import Options, PlanRequest, recommend
from tests.face.conftest import RECORDED, hetopt, plan, rehearsed, small_catalogue
from tests.face.logged import disturbed_log
from tests.face.test_help import examples
from tests.face.test_task_check import SMALLEST
from tests.logs import recorded_run

REPOSITORY = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md"), *REPOSITORY.glob("catalogs/*.md")])
CONSOLE = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
NEXT = re.compile(r"^(?:next|then|or): +(hetopt .*)$", re.MULTILINE)
"""What a screen says that is to be typed next."""

LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#]+)")


def name(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


def commands() -> list[str]:
    """Each command of a console block, once, without its comment."""
    found: dict[str, None] = {}
    for path in DOCUMENTS:
        for block in CONSOLE.findall(path.read_text(encoding="utf-8")):
            for line in block.splitlines():
                if line.startswith("$ "):
                    found[shlex.join(shlex.split(line[2:], comments=True))] = None
    for path in (*DOCUMENTS, *REPOSITORY.glob("tests/face/golden/*.txt")):
        for command in NEXT.findall(path.read_text(encoding="utf-8")):
            found[shlex.join(shlex.split(command, comments=True))] = None
    return list(found)


@pytest.mark.parametrize("command", [one for one in commands() if one.startswith(("hetopt ", "make "))])
def test_a_command_in_the_documents_exists(command: str) -> None:
    program, *arguments = shlex.split(command)
    if program == "hetopt":
        parse(arguments)
    else:
        subprocess.run(["make", "--dry-run", *arguments], cwd=REPOSITORY, check=True, capture_output=True)


def parse(arguments: list[str]) -> None:
    """Parse as the command line would, without doing anything. Unknown commands and options raise."""
    command = typer.main.get_command(app)
    context = command.make_context("hetopt", list(arguments))
    while hasattr(command, "resolve_command"):
        rest = [*context._protected_args, *context.args]
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(name, rest, parent=context)


def test_the_readme_is_read_in_minutes() -> None:
    tokens = (REPOSITORY / "README.md").read_text(encoding="utf-8").split()
    assert sum(any(map(str.isalnum, token)) for token in tokens) < 700  # lines of tables are no words


HABITS = re.compile(r"\b(whoever|those that|these that|that which|what is (?:said|told|not said))\b", re.IGNORECASE)
"""Subjects without a noun, which this house likes and readers do not."""

MOST = dict.fromkeys(("README.md", "docs/index.md", "docs/quickstart.md"), 8.06)
"""Grades of the first pages: of the page of SkyPilot 0.14.1 on PyPI, by the function below, on 2026-11-27."""


@pytest.mark.parametrize("path", ["README.md", *(f"docs/{one.name}" for one in REPOSITORY.glob("docs/*.md"))])
def test_pages_are_read_as_easily_as_those_of_others(path: str) -> None:
    """The first pages as that one, all others by people who have been at school for nine years."""
    text = (REPOSITORY / path).read_text(encoding="utf-8")
    assert (reading_grade(text) < MOST.get(path, 9.0), HABITS.findall(text)) == (True, [])


def reading_grade(markdown: str) -> float:
    """Years of school that its prose asks for: 0.39 words a sentence + 11.8 syllables a word - 15.59 (Kincaid 1975).

    Without code, tables, headings and pictures; a syllable is a run of vowels, but for an e at the end.
    """
    text = re.sub(r"```.*?```|<!--.*?-->|<[^>]+>", "", markdown, flags=re.DOTALL)
    text = "\n".join(line for line in text.splitlines() if not line.startswith(("|", "#", "![", "    ")))
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "it", text))
    text = re.sub(r"\n\s*(?:[-*]|\d+\.)\s+|\n\s*\n", ". ", text)
    sentences = [one for one in re.split(r"[.!?:](?:\s|$)", text) if re.search(r"[A-Za-z]{2}", one)]
    words = re.findall(r"[A-Za-z]+(?:'[a-z]+)?", text)
    silent = sum(word.endswith("e") and not word.endswith(("le", "ee")) and len(word) > 3 for word in words)
    syllables = sum(max(1, len(re.findall(r"[aeiouy]+", word.lower()))) for word in words) - silent
    return 0.39 * len(words) / len(sentences) + 11.8 * syllables / len(words) - 15.59


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in LINK.findall(path.read_text(encoding="utf-8")):
        assert (path.parent / target).exists(), f"{target} is not there"


# Every command of the documents is typed, in a folder as a reader would have it by then.

pytestmark = pytest.mark.usefixtures("small_catalogue")

__all__ = ["hetopt", "plan", "rehearsed", "small_catalogue"]

FILE = re.compile(r"^```(?:text|toml)\n(# (\w+\.(?:txt|toml)).*?)^```", re.MULTILINE | re.DOTALL)
"""A file that a page shows, by the name in its first line."""

SET_UP = ("python3 -m venv .venv", ". .venv/bin/activate", "python3 -m venv .venv '&&' . .venv/bin/activate")

DONE_ELSEWHERE = {
    r"profile .*-- ": "tests/scripts/test_script_job.py::test_what_a_plan_needs_is_measured",
    r"check .*-- ": "tests/scripts/test_checking.py::test_shares_are_held_against_one_machine",
    r"convert": "tests/scripts/test_script_job.py::test_gradients_are_compared",
    r"launch \S+ .*-- ": "tests/scripts/test_script_job.py::test_it_is_launched_stopped",
    r"profile \S+ (--from-samples \S+ )?-o": "tests/docs/test_own_code.py::test_the_example_can_be_profiled",
    r"profile \S+ --explore .*--on ec2": "tests/ec2/test_renting.py::test_a_probe_is_rented",
    r"profile \S+ --explore": "tests/profiler/test_command.py::test_exploring",
    r"launch \S+ --on ec2 --dry-run": "tests/ec2/test_command.py::test_a_dry_run_prints_every_call",
    r"profile \S+ --explore .*--on ssh": "tests/ssh/test_backend.py::test_hosts_are_measured",
    r"launch .*--on ssh": "tests/ssh/test_backend.py::test_a_run_ends_and_nothing",
    r"launch .*--on slurm": "tests/slurm/test_slurm.py::test_a_node_whose_job_is_cancelled",
    r"launch .*--on sky": "tests/ssh/test_sky.py::test_a_machine_that_is_taken",
    r"hosts slurm": "tests/slurm/test_slurm.py::test_the_nodes_of_a_cluster_are_an_inventory",
    r"gc --on slurm": "tests/slurm/test_slurm.py::test_jobs_of_a_run_whose_conductor",
    r"hosts check": "tests/ssh/test_checking.py::test_the_command_says_a_line_for_each",
    r"doctor": "tests/ec2/test_setup.py::test_the_commands",
    r"setup": "tests/ec2/test_setup.py::test_the_commands",
    r"fetch": "tests/ec2/test_bucket.py::test_a_model_that_a_machine_sent_is_fetched",
    r"attach": "tests/ec2/test_command.py::test_a_run_is_looked_after_from_another_machine",
    r"stop": "tests/face/test_configuration.py",
    r"catalog refresh": "tests/catalog/test_public_refresh.py",
    r"gc --on ec2": "tests/ec2/test_command.py",
    r"estimate --config": "tests/api/test_estimate.py::test_a_configuration_is_counted",
    r"predict": "tests/face/test_predict.py",
    r"inject": "tests/face/test_launch.py::test_a_rehearsal_is_disturbed",
}
"""What measures for long, waits for Ctrl-C, or needs a cloud or a run that goes on."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Profile, plan and files of a reader's own."""
    folder = tmp_path_factory.mktemp("reader")
    shutil.copy(RECORDED / "digits.json", folder / "profile.json")
    # Long and large enough for several machines, of a kind that can be rehearsed here.
    goal = Goal(budget_usd=50.0, ends="epochs", amount=2000.0)
    options = Options(batch_size=1024, types=("c7i.large",), max_machines=4, market="spot", objective="fastest")
    profile, moment = Profile.load(folder / "profile.json"), datetime.now(UTC)
    recommend(PlanRequest(profile, load_catalog(), goal, options), seed=0, now=moment).save(folder / "plan.json")
    told = hetopt_library.estimate(
        params="110M", samples="30M", tokens=512, gpus="A10G", quotas=("spot:g=40",), market="spot", objective="fastest"
    )
    told.plan.save(folder / "large.json")
    shutil.copy(BUNDLED_CLOUDS / "verda.csv", folder / "vms.csv")
    (folder / "mine.py").write_text(SMALLEST, encoding="utf-8")
    for page in DOCUMENTS:
        for text, name in FILE.findall(page.read_text(encoding="utf-8")):
            (folder / name).write_text(text, encoding="utf-8")
    (folder / "examples").symlink_to(REPOSITORY / "examples")
    return folder


@pytest.fixture
def here(written: Path, tmp_path: Path, rehearsed: Launch, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy to type in, with one run that is over."""
    shutil.copytree(written, tmp_path / "here", symlinks=True)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HETOPT_HOME", str(tmp_path / "home"))
    run = recorded_run(tmp_path / "home" / "runs" / rehearsed.run_id, rehearsed, disturbed_log(rehearsed))
    (run / "log").mkdir()
    (run / "log" / "host.log").write_text("started\n", encoding="utf-8")
    return tmp_path / "here"


def typed() -> list[str]:
    """Commands of hetopt that can be typed here."""
    told = [*commands(), *examples()]
    own = [command.removeprefix("hetopt ") for command in dict.fromkeys(told) if command.startswith("hetopt ")]
    return [one for one in own if not any(re.match(pattern, one) for pattern in DONE_ELSEWHERE)]


@pytest.mark.parametrize("command", typed())
def test_a_command_does_what_it_says(
    command: str, here: Path, hetopt: Callable[..., Any], request: pytest.FixtureRequest
) -> None:
    words = shlex.split(command)
    if words[0] == "gc":
        request.getfixturevalue("own_leftovers")  # it sweeps what other tests leave, and look for
    if words[0] == "launch":
        words = [word for word in words if word != "--yes"] + ["--dry-run"] * ("--dry-run" not in words)
        if "rehearsal" in words and (reason := why_not()):
            pytest.skip(reason)
    output = Path(words[words.index("-o") + 1]) if "-o" in words else None
    if output is not None:
        output.unlink(missing_ok=True)
    answer = hetopt(*words)
    assert answer.code == 0, answer.err
    assert answer.out or answer.err
    if output is not None:
        assert json.loads(output.read_text(encoding="utf-8"))["kind"] in ("plan", "report")
    if "--json" in words:
        json.loads(answer.out)
    for option in ("--html", "--report", "--torchrun", "--skypilot", "--dstack", "--jobset", "--schemas"):
        if option in words:
            assert (here / words[words.index(option) + 1]).exists()


@pytest.mark.parametrize("command", [one for one in commands() if not one.startswith(("hetopt ", "make "))])
def test_a_command_of_setting_up_is_known(command: str) -> None:
    if not command.startswith("pip install "):
        assert command in SET_UP
        return
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    *before, package = shlex.split(command)[2:]
    pins = ["-c", "requirements/constraints.txt", "$(python3", "requirements/torch_index.py)"]
    assert before in ([], pins)
    name, _, extras = package.rstrip("]").partition("[")
    assert name in (".", project["name"])
    assert set(extras.split(",")) - {""} <= set(project["optional-dependencies"])


def test_what_is_not_typed_here_is_done_by_the_test_that_is_named() -> None:
    told = [*commands(), *examples()]
    own = [command.removeprefix("hetopt ") for command in dict.fromkeys(told) if command.startswith("hetopt ")]
    for pattern, test in DONE_ELSEWHERE.items():
        assert any(re.match(pattern, one) for one in own), f"nobody is told to type {pattern}"
        file, _, name = test.partition("::")
        text = (REPOSITORY / file).read_text(encoding="utf-8")
        assert f"def {name}" in text
