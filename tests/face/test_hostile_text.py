"""Whatever others wrote into files and logs: the terminal gets printable lines, and a person one sentence."""

from __future__ import annotations

import inspect
import io
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetopt.cli import render, terminal
from hetopt.core.errors import BadInput
from hetopt.core.paths import MOST_BYTES
from hetopt.optimizer.plan import Plan
from hetopt.reports import html
from hetopt.reports.document import (
    Block,
    Column,
    Document,
    Drawing,
    Facts,
    Heading,
    Line,
    Remarks,
    Table,
    Tile,
    Tiles,
)
from tests.disturbance import PATIENCE_S

from .conftest import Answer, start
from .test_report import plan

__all__ = ["plan"]

HOSTILE = "a\x1b[2J\x1b]0;title\x07b\x00c\x7fd\x9b31me\r\x08f"
WRONG = [None, True, -1, 0, 1e400, 10**400, "", "x", "\ud800", "a\nb", "\x1b[31m", "../../x", [], {}, [[]], {"a": {}}]


def is_clean(text: str) -> bool:
    """Nothing in it does anything but begin a line."""
    return all(one == "\n" or (ord(one) >= 0x20 and not 0x7F <= ord(one) < 0xA0) for one in text)


def blocks(text: str) -> list[Block]:
    """Every kind of block, made of a text wherever one may stand."""
    table = Table(name=text, columns=[Column(text)], rows=[[text]], notes=[text], caption=text)
    narrow = Table(name=text, columns=[Column(text * 99, "word"), Column(text)], rows=[[text, text]])
    copied = Line(text, is_copied=True)
    lists = [Remarks([text], text), Facts({text: text}), Drawing(lines=lambda _: [text])]
    return [
        Heading(text),
        Line(text),
        copied,
        *lists,
        table,
        narrow,
        Tiles([Tile(name=text, value=text, below=[text])]),
    ]


SHOW: dict[str, Callable[[str], object]] = {
    "show": lambda text: render.show(blocks(text)),
    "line": render.line,
    "bullet": render.bullet,
    "note": render.note,
    "error": lambda text: render.error(text, text),
    "print_json": lambda text: render.print_json({text: text}),
    "write": terminal.write,
}


def _shown(show: Callable[[str], object], text: str) -> str:
    out = io.StringIO()
    with redirect_stdout(out), redirect_stderr(out):
        show(text)
    return out.getvalue()


@pytest.mark.parametrize("show", SHOW.values(), ids=SHOW)
@given(text=st.text() | st.just(HOSTILE))
def test_no_text_commands_the_terminal(show: Callable[[str], object], text: str) -> None:
    assert is_clean(_shown(show, text))


def test_progress_and_live_views_command_nothing() -> None:
    def live(text: str) -> None:
        with render.progress(text) as told:
            told(text, 0.5)
            told.note(text)

    assert is_clean(_shown(live, HOSTILE))
    assert is_clean(render.drawn([HOSTILE, HOSTILE]).plain)


@given(text=st.text() | st.just(HOSTILE) | st.just("<script>alert(1)</script>\"'&"))
def test_no_text_is_markup_of_a_page(text: str) -> None:
    """All that a text adds to a page is itself, escaped."""
    page = html.page(Document(kind="k", title=text, about=blocks(text), blocks=blocks(text), below=text))
    tags = HTMLParser(convert_charrefs=True)
    seen: list[str] = []
    tags.handle_starttag = lambda tag, attrs: seen.append(tag)  # type: ignore[method-assign]
    tags.feed(page)
    assert not {"script", "img", "iframe"} & set(seen)
    assert seen.count("table") == 6


def test_every_way_to_show_text_is_looked_at() -> None:
    ways = {name for name, one in vars(render).items() if inspect.isfunction(one) and one.__module__ == render.__name__}
    others = {"console", "drawn", "live_view", "progress", "_cell", "_shown", "plain", "height", "progress_lines"}
    assert ways - others == set(SHOW) - {"write"}


@given(st.dictionaries(st.text(), st.text() | st.just(HOSTILE)))
def test_json_stays_json(value: dict[str, str]) -> None:
    printed = _shown(lambda _: terminal.write(json.dumps(value, ensure_ascii=False)), "")
    assert json.loads(printed) == value


def test_a_long_message_is_cut(hetopt: Callable[..., Answer], tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({"kind": "k" * 1_000_000, HOSTILE * 1000: 1}))
    answer = hetopt("launch", tmp_path / "plan.json")
    assert answer.code == 2
    assert len(answer.err) < 1000


@pytest.mark.parametrize("argument", ["a\nb", "\x1b[2J", "a\x7f"])
def test_arguments_command_nothing(argument: str, hetopt: Callable[..., Answer]) -> None:
    for arguments in (["recommend", argument], ["profile", f"{argument}.py:task"], ["status", argument], [argument]):
        answer = hetopt(*arguments)
        assert (answer.code, answer.out) == (2, "")
        assert is_clean(answer.err)
        assert "must be one line of printable characters" in answer.err


def _leaves(value: Any, at: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    if isinstance(value, dict):
        return [leaf for key, one in value.items() for leaf in _leaves(one, (*at, key))]
    if isinstance(value, list):
        return [leaf for number, one in enumerate(value[:2]) for leaf in _leaves(one, (*at, number))]
    return [at]


def _with(value: Any, at: tuple[str | int, ...], other: object) -> Any:
    changed = json.loads(json.dumps(value))
    inner = changed
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = other
    return changed


def test_every_text_of_a_plan_and_of_a_profile_is_checked(plan: Plan) -> None:
    """Each text in turn is replaced by one that commands: then the file is not read, or the text comes in cleaned."""
    for kind, record in ((Plan, plan), (type(plan.profile), plan.profile)):
        whole = json.loads(record.to_json())
        for at in _leaves(whole):
            inner = whole
            for key in at:
                inner = inner[key]
            if isinstance(inner, str):
                try:
                    read = kind.from_json(json.dumps(_with(whole, at, HOSTILE)), origin=str(at)).to_json()
                except BadInput:
                    continue
                assert is_clean(read), at
                assert "host" in at, "only what the machine told of itself is cleaned"


@pytest.mark.parametrize("seed", range(6))
def test_damaged_files_are_one_clean_sentence(
    seed: int, plan: Plan, hetopt: Callable[..., Answer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HETOPT_HOME", str(tmp_path / "home"))
    rng = random.Random(seed)
    for name, record, command in (
        ("profile.json", plan.profile, ["predict"]),
        ("plan.json", plan, ["export", "--torchrun", tmp_path / "d"]),
    ):
        whole = json.loads(record.to_json())
        text = json.dumps(_with(whole, rng.choice(_leaves(whole)), rng.choice(WRONG)))
        whole_file = rng.random()
        if whole_file < 0.3:
            text = text[: rng.randrange(len(text))]
        elif whole_file < 0.5:
            text += rng.choice(["\x00", "[" * 100_000, "{", "]" * 9])
        (tmp_path / name).write_bytes(text.encode("utf-8", "surrogatepass"))
        (tmp_path / "queries.jsonl").write_text("{}\n")
        rest = [tmp_path / "queries.jsonl"] if command == ["predict"] else [*command[1:], "--force"]
        answer = hetopt(command[0], tmp_path / name, *rest)
        assert answer.code in (0, 2)
        assert is_clean(answer.out + answer.err)
        assert "Traceback" not in answer.err


@pytest.mark.parametrize("verb", ["recommend", "launch", "predict", "export"])
@pytest.mark.parametrize("what", ["/dev/zero", "fifo", "folder", "deep", "digits", "surrogate", "large"])
def test_what_is_no_file_of_ours_is_one_sentence(
    verb: str, what: str, hetopt: Callable[..., Answer], tmp_path: Path
) -> None:
    path = Path(what) if what.startswith("/") else tmp_path / what
    if what == "fifo":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    elif what == "large":
        with path.open("wb") as stream:
            stream.truncate(MOST_BYTES + 1)
    elif not what.startswith("/"):
        texts = {"deep": "[" * 100_000, "digits": "9" * 5000, "surrogate": '{"kind": "\\ud800"}'}
        path.write_text(texts[what])
    answer = hetopt(verb, path, *(["--torchrun", tmp_path / "d"] if verb == "export" else []))
    assert answer.code == 2
    assert answer.err.count("error: ") == 1
    assert is_clean(answer.err)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_any_encoding_will_do(encoding: str, digits_profile: Path) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    asked = ["recommend", str(digits_profile), "--budget", "2", "--epochs", "10", "--types", "c7i.large"]
    for arguments in (["--help"], asked, [*asked, "--json"]):
        done = subprocess.run(
            [sys.executable, "-m", "hetopt.cli.main", *arguments],
            env=environment,
            capture_output=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert b"Traceback" not in done.stderr
        if arguments != ["--help"]:  # typer prints its own in UTF-8 where it is told ASCII
            told = done.stdout.decode(encoding)
            assert "--json" not in arguments or json.loads(told)["kind"] == "plan"


@pytest.mark.parametrize("arguments", [["catalog", "list"], ["--help"], ["catalog", "list", "--json"]])
def test_a_full_disk_is_one_sentence_and_a_reader_that_leaves_is_none(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "hetopt.cli.main", *arguments]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 2
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    with start(*arguments) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(timeout=PATIENCE_S) in (0, 1 if "--help" in arguments else 141, 141)


def test_a_home_that_cannot_be_is_one_sentence(
    hetopt: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    for home in ("x" * 300, str(tmp_path / "file")):
        monkeypatch.setenv("HETOPT_HOME", home)
        for verb in ("status", "report", "stop", "logs", "metrics"):
            answer = hetopt(verb)
            assert answer.code == 2
            assert "Traceback" not in answer.err
            assert len(answer.err) < 1500


def test_a_task_that_is_not_there_is_found_out_before_anything_starts(
    plan: Plan, hetopt: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HETOPT_HOME", str(tmp_path / "home"))
    for task, said in (
        ("away/task.py:task", "the task's file away/task.py is not there"),
        ("away_x:task", "no module"),
    ):
        run = plan.run.model_copy(update={"task": task})
        plan.model_copy(update={"run": run}).save(tmp_path / "plan.json")
        answer = hetopt("launch", tmp_path / "plan.json", "--on", "local", "--slowdown", "1", "--yes")
        assert answer.code == 2
        assert said in answer.err
    assert not (tmp_path / "home" / "runs").exists()


def test_quotas_of_any_size_are_limits(hetopt: Callable[..., Answer], digits_profile: Path) -> None:
    asked = ["recommend", digits_profile, "--budget", 2, "--epochs", 10, "--types", "c7i.large", "--json"]
    for quota in ("99999999999999999999", "9" * 5000):
        answer = hetopt(*asked, "--quota", f"standard={quota}")
        assert answer.code == 0, answer.err


@pytest.mark.parametrize(
    ("options", "said", "advice"),
    [
        ("--types c5.metal", "bare metal", "name other --types"),
        ("--types inf2.xlarge", "an accelerator that torch does not drive", "name other --types"),
        ("--types t4g.nano", "burstable", "name other --types"),
        ("--types g5.24xlarge --max-workers 2", "--max-workers 2 leaves no machine", "raise it to --max-workers 4"),
        ("--batch-size 50000", "--batch-size must be at most 1,438", "one step"),
        ("--types g5.24xlarge --batch-size 2", "batch size of 2 is too small", "at least 4"),
    ],
)
def test_advice_names_what_can_help(
    options: str, said: str, advice: str, hetopt: Callable[..., Answer], digits_profile: Path
) -> None:
    answer = hetopt("recommend", digits_profile, "--budget", 20, "--epochs", 1, *options.split())
    told = " ".join(answer.err.split())
    assert answer.code in (2, 3)
    assert said in told
    assert advice in told
    assert "profile again" not in told
