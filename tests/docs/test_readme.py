"""What the documents tell a person to type exists: commands parse, make knows its targets, links lead somewhere."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import typer.main

from hetopt.backends.emulation.description import parse_change, parse_changes, parse_hosts
from hetopt.cli.main import app
from hetopt.core.comm.compression_text import parse_compression

REPOSITORY = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md"), *REPOSITORY.glob("catalogs/*.md")])
CONSOLE = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
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
    return list(found)


@pytest.mark.parametrize("command", [one for one in commands() if one.startswith(("hetopt ", "make "))])
def test_a_command_in_the_documents_exists(command: str) -> None:
    """Those of setting up are looked at in `test_commands`, where those of hetopt are typed as well."""
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


def test_the_rehearsal_of_the_guide_can_be_read() -> None:
    """What its options hold is a language of its own, which parsing the command does not look at."""
    text = (REPOSITORY / "docs" / "guide.md").read_text(encoding="utf-8")
    described = [
        argument for command in commands() for argument in shlex.split(command) if argument.startswith("speed=")
    ]
    assert described
    names = [host.host.name for host in parse_hosts(described[0])]
    (schedule,) = re.findall(r"^```text\n# drift.txt(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(parse_changes(schedule.partition("\n")[2], names)) == 3
    disturbed = [shlex.split(command)[3] for command in commands() if command.startswith("hetopt inject")]
    assert all(parse_change(change, names) for change in disturbed)


def test_compressions_in_the_documents_can_be_read() -> None:
    typed = [shlex.split(command) for command in commands() if "--compression" in command]
    told = [words[words.index("--compression") + 1] for words in typed]
    assert any(text == "auto" for text in told)
    assert all(parse_compression(text) for text in told if text != "auto")


def test_the_readme_opens_with_the_two_commands() -> None:
    first_screen = (REPOSITORY / "README.md").read_text(encoding="utf-8").splitlines()[:30]
    assert any(line.startswith("$ make demo") for line in first_screen)
    assert any(line.startswith("$ make test") for line in first_screen)


def test_the_readme_is_read_in_minutes() -> None:
    assert len((REPOSITORY / "README.md").read_text(encoding="utf-8").split()) < 900


SKYPILOT_GRADE = 8.06
"""Of the page of SkyPilot 0.14.1 on PyPI, by the function below, on 2026-11-27."""


@pytest.mark.parametrize("path", ["README.md", "docs/index.md", "docs/quickstart.md"])
def test_the_first_pages_are_read_as_easily_as_those_of_others(path: str) -> None:
    assert reading_grade((REPOSITORY / path).read_text(encoding="utf-8")) < SKYPILOT_GRADE


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
