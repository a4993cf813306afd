"""What pages show of the output of their commands is what the commands print.

Plans of recorded profiles are compared to the last digit, everything else by its words. What takes long is compared
by the test that types it anyway.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hetopt.backends.emulation.namespaces import why_not
from hetopt.cli import render
from hetopt.core.profile import Profile
from hetopt.reports import profile_document
from tests.docs.shown import DOCS, all_shown, assert_shown, assert_shown_exactly, masked, shown
from tests.docs.test_readme import FILE
from tests.face.conftest import RECORDED, Answer, hetopt

__all__ = ["hetopt"]

TESTS = Path(__file__).resolve().parents[1]
SCRIPT = Path(__file__).with_name("script.json")
"""Of `examples/script/train.py`, by ``hetopt profile -- train.py``."""

NAMED = re.compile(r'\(\s*"([\w-]+\.md)",\s*"((?:hetopt|pip) [^"]+)"')
"""How a test names what it compares."""

PLANS = (
    ("quickstart.md", "hetopt recommend", RECORDED / "digits.json"),
    ("script-to-spot.md", "hetopt recommend", SCRIPT),
    ("by-friday.md", "hetopt recommend", RECORDED / "resnet20-cifar10.json"),
    ("two-old-gpus.md", "hetopt recommend", RECORDED / "resnet20-cifar10.json"),
    ("own-machines.md", "hetopt recommend", RECORDED / "digits.json"),
)
PROFILES = (
    ("quickstart.md", "hetopt profile", RECORDED / "digits.json"),
    ("script-to-spot.md", "hetopt profile", SCRIPT),
)


@pytest.fixture
def typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hetopt: Callable[..., Answer]
) -> Callable[[str, str, Path], str]:
    """Types a page's command beside a profile and the files that the page shows."""

    def type_(page: str, command: str, profile: Path) -> str:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("HETOPT_HOME", str(tmp_path / "home"))
        monkeypatch.setenv("COLUMNS", "80")
        shutil.copy(profile, tmp_path / "profile.json")
        for text, name in FILE.findall((DOCS / page).read_text(encoding="utf-8")):
            (tmp_path / name).write_text(text, encoding="utf-8")
        answer = hetopt(*shlex.split(command)[1:])
        assert answer.code == 0, answer.err
        return answer.out

    return type_


@pytest.mark.parametrize(("page", "command", "profile"), PLANS)
def test_a_plan_is_shown_as_it_is_printed(
    page: str, command: str, profile: Path, typed: Callable[[str, str, Path], str], recording: bool
) -> None:
    whole = next(one for one in shown(page, command).commands if one.startswith(command))
    assert_shown_exactly(page, command, typed(page, whole, profile), recording=recording)


@pytest.mark.parametrize(("page", "command", "profile"), PROFILES)
def test_a_profile_is_shown_as_it_is_printed(
    page: str,
    command: str,
    profile: Path,
    recording: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    render.show(profile_document.document(Profile.load(profile)))
    assert_shown_exactly(page, command, capsys.readouterr().out, recording=recording)


@pytest.mark.skipif(why_not() is not None, reason="needs network namespaces")
def test_a_dry_run_is_shown_as_it_is_printed(typed: Callable[[str, str, Path], str]) -> None:
    """Below each of its commands: ("slow-links.md", "hetopt launch")."""
    for one in (one for one in all_shown() if one.page == "slow-links.md"):
        said = [typed(one.page, command, RECORDED / "digits.json") for command in one.commands]
        assert_shown(one.page, one.commands[-1], said[-1])


def test_everything_that_is_shown_is_compared() -> None:
    """By a test that names the page and how the command begins."""
    named = [
        (page, command)
        for file in TESTS.rglob("test_*.py")
        for page, command in NAMED.findall(file.read_text(encoding="utf-8"))
    ]
    left = [
        (one.page, one.commands)
        for one in all_shown()
        if not any(page == one.page and any(c.startswith(start) for c in one.commands) for page, start in named)
    ]
    assert left == []


def test_words_that_were_not_printed_are_found() -> None:
    assert masked("local-0  1 × 2 threads  1 min 6.6 s  ±48 %\ntotal $0.") == "local# total #"
    with pytest.raises(AssertionError, match="shows below"):
        assert_shown("quickstart.md", "hetopt report", "step time 3 ms")
