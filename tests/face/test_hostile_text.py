"""Whatever others wrote into files and logs: the terminal gets printable lines, and a person one sentence."""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from hetopt.api.probes import local_probes, read_sample
from hetopt.api.run import Run, RunRecord
from hetopt.backends.emulation.conductor import FitWatch
from hetopt.backends.processes import run_status
from hetopt.backends.supervisor import Supervision
from hetopt.cli import render, terminal
from hetopt.core.errors import BadInput, RunFailed
from hetopt.core.events.fold import RunFold
from hetopt.core.events.log import EVENTS_FILE, read_with_decisions
from hetopt.core.events.records import LogEvent
from hetopt.core.run_status import RunState, RunStatus
from hetopt.optimizer.launch_record import LAUNCH_FILE, Launch
from hetopt.optimizer.plan import Plan
from hetopt.reports import html, status_document
from hetopt.reports.document import (
    Block,
    Column,
    Document,
    Facts,
    Heading,
    Html,
    Line,
    Remarks,
    Table,
    Tile,
    Tiles,
)
from hetopt.reports.learn import learn
from hetopt.reports.live_run import LiveRun
from hetopt.reports.report import Report, make_report
from hetopt.reports.run_document import document
from hetopt.reports.text import lines
from tests.disturbance import PATIENCE_S
from tests.logs import recorded_run
from tests.work import calls_of

from .conftest import Answer, start

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
    lists = [Remarks([text], text), Facts({text: text}), Html("<i></i>")]
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
    "answer": lambda text: render.answer(blocks(text), explain=False),
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
    others = {"progress", "_columns", "_styled", "_put", "_remarked", "_shown"}
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
@pytest.mark.parametrize("what", ["/dev/zero", "fifo", "folder", "deep"])
def test_what_is_no_file_of_ours_is_one_sentence(
    verb: str, what: str, hetopt: Callable[..., Answer], tmp_path: Path
) -> None:
    """What else may lie where a file is expected is in tests/facts/test_artifact.py."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    (tmp_path / "deep").write_text("[" * 100_000)
    answer = hetopt(verb, tmp_path / what, *(["--torchrun", tmp_path / "d"] if verb == "export" else []))
    assert answer.code == 2
    assert answer.err.count("error: ") == 1
    assert is_clean(answer.err)


@pytest.mark.parametrize(("encoding", "option"), [("ascii", "--explain"), ("cp1252", "--json")])
def test_any_encoding_will_do(encoding: str, option: str, digits_profile: Path) -> None:
    asked = ["recommend", str(digits_profile), "--budget", "2", "--epochs", "10", "--types", "c7i.large", option]
    done = subprocess.run(
        [sys.executable, "-m", "hetopt.cli.main", *asked],
        env={**os.environ, "PYTHONIOENCODING": encoding},
        capture_output=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = done.stdout.decode(encoding)
    assert option != "--json" or json.loads(told)["kind"] == "plan"


@pytest.mark.parametrize("arguments", [["--help"], ["catalog", "list", "--json"]])
def test_a_full_disk_is_one_sentence_and_a_reader_that_leaves_is_none(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "hetopt.cli.main", *arguments]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 2
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    with start(*arguments) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(timeout=PATIENCE_S) in (0, 1 if "--help" in arguments else 141, 141)


def test_a_home_that_cannot_be_is_one_sentence(
    hetopt: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    for home in ("x" * 300, str(tmp_path / "file")):
        monkeypatch.setenv("HETOPT_HOME", home)
        for verb in ("status", "report", "stop", "logs"):
            answer = hetopt(verb)
            assert answer.code == 2
            assert "Traceback" not in answer.err


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


# Whatever a run's event log holds, every command that reads it answers: with figures, or with one sentence.

RUNS = Path(__file__).resolve().parents[1] / "recorded" / "runs"
CASES, QUICK = 300, 25
NUMBER = 10**400
WRONG_VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1e308, float("inf"), float("nan"), NUMBER, "", "x", "\ud800", "a\nb", "\x1b[31m", "../../x"),
    *([], {}, [[]], {"a": {}}, "9" * 5000, 1e99, 1e12, 2**63),
)


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if at:
        yield at
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield from places(one, (*at, key))


def damaged(event: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """An event with one thing wrong."""
    event = copy.deepcopy(event)
    *path, key = draw.choice(list(places(event)))
    holder: Any = event
    for step in path:
        holder = holder[step]
    match draw.randrange(5):
        case 0 if isinstance(holder, dict):
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder["of_a_later_version"] = holder.pop(key)
        case 2 if isinstance(holder[key], list):
            holder[key] = holder[key][: len(holder[key]) // 2]
        case 3 if isinstance(holder[key], int | float):
            holder[key] = holder[key] * draw.choice((1e9, 1e-9, 1e3))
        case _:
            holder[key] = draw.choice(WRONG_VALUES)
    return event


def damaged_log(lines: list[str], seed: int) -> bytes:
    """A log that was cut, shuffled, written twice, or has lines that say something else."""
    draw = random.Random(seed)
    kind = draw.random()
    text = "\n".join(lines) + "\n"
    if kind < 0.1:
        return text[: draw.randrange(len(text) + 1)].encode()
    if kind < 0.15:
        return text.encode() + draw.choice(
            [b"\x00\n", b"[" * 100_000 + b"\n", b"{\n", b"\xef\xbb\xbf\n", b"\xff\xfe\n"]
        )
    lines = list(lines)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(lines))
        match draw.randrange(8):
            case 0:
                del lines[at]
            case 1:
                lines.insert(draw.randrange(len(lines)), lines[at])
            case 2:
                lines[at] = lines[at][: draw.randrange(len(lines[at]))]
            case _:
                with_one = (
                    damaged(json.loads(lines[at]), draw)
                    if lines[at].startswith("{") and lines[at].endswith("}")
                    else {}
                )
                lines[at] = json.dumps(with_one)
    if draw.random() < 0.2:
        draw.shuffle(lines)
    return ("\n".join(lines) + "\n").encode("utf-8", "surrogatepass")


def everything(folder: Path, started: Launch, record: RunRecord, events: list[LogEvent]) -> None:
    """All that is ever made of a run's log."""
    watched = LiveRun.of(folder, started)
    watched.read()
    assert watched.progress.step == record.progress.step
    going = RunStatus(state=RunState.RUNNING)
    now_s = events[-1].time_s if events else 0.0
    assert lines(status_document.status(watched.facts(folder, going, now_s=now_s)), 80)
    supervision = Supervision.of(started, folder, record.progress)
    for event in events:
        supervision.take(event)
    assert supervision.step_time_s > 0
    fit = FitWatch()
    for event in events:
        fit.look(event, 0.0)
    assert RunFold.of(events, started.starts) == record.progress
    assert run_status(folder).state.is_over
    for ask in (
        lambda: learn(started.plan.profile, started, record.history),
        lambda: read_sample(local_probes(started.plan.profile, 2)[-1], events),
    ):
        with contextlib.suppress(BadInput, RunFailed):  # a sentence
            ask()

    def report() -> Report:
        unread = record.unread.lines
        return make_report(started, record.history, state="finished", unread_lines=unread)

    if record.progress.step_time_s is None:
        with pytest.raises(BadInput, match="has not logged a step"):
            report()
        return
    made = report()
    assert made.from_json(made.to_json(), origin="the report") == made
    assert str(made)
    text = html.page(document(made, started))
    assert not re.search(r"[ >:,](nan|inf)\b|NaN|Infinity", text)


@pytest.mark.parametrize("name", ["resumed", "lost-worker"])
def test_no_damage_ends_a_command(
    name: str, launch: Launch, tmp_path: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    lines = (RUNS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    folder = tmp_path / "run"
    folder.mkdir()
    (tmp_path / "beside").touch()
    begun_s = json.loads(lines[0])["time_s"] - 10.0
    started = launch.model_copy(
        update={"started_s": begun_s, "resumed_s": (begun_s + 46.0,) if name == "resumed" else ()}
    )
    started.save(folder / LAUNCH_FILE)
    draw, counted, most_calls = random.Random(name), 0, 0
    read: list[tuple[RunRecord, list[LogEvent]]] = []

    def all_that_is_read() -> None:
        record = Run.in_folder(folder).record()
        events = read_with_decisions(folder)[0]
        everything(folder, started, record, events)
        read.append((record, events))

    for seed in range(CASES if request.config.getoption("--slow") else QUICK):
        log = damaged_log(lines, draw.randrange(2**32))
        (folder / EVENTS_FILE).write_bytes(log)
        try:
            most_calls = max(most_calls, calls_of(all_that_is_read))
        except Exception as error:
            (tmp_path / "case.jsonl").write_bytes(log)
            raise AssertionError(f"case {seed}, kept as {tmp_path / 'case.jsonl'}") from error
        record, events = read.pop()
        whole = [line for line in log.split(b"\n")[:-1] if line.strip()]
        assert len(events) + record.unread.lines == len(whole), "what is not read is counted"
        counted += bool(record.unread.lines)
        (tmp_path / "case.jsonl").unlink(missing_ok=True)
        assert {path.name for path in tmp_path.iterdir()} == {"run", "beside"}, "nothing is written elsewhere"
        assert {path.name for path in folder.iterdir()} == {LAUNCH_FILE, EVENTS_FILE}
        capsys.readouterr()
    assert counted > QUICK // 4
    assert most_calls < 1_000_000


@pytest.fixture
def home(launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with a good run, and an older one with a damaged log."""
    monkeypatch.setenv("HETOPT_HOME", str(tmp_path))
    lines = (RUNS / "resumed.jsonl").read_text(encoding="utf-8").splitlines()
    without = json.loads(lines[2])
    del without["step_time_s"]
    evil = {"event": "worker_lost", "time_s": without["time_s"], "worker": 0, "host": "h0", "reason": "\x1b[31mred"}
    for name, text in (
        ("20261126-000001-old-0001", [*lines[:2], json.dumps(without), json.dumps(evil), *lines[3:]]),
        ("20261126-000002-good-0002", lines),
    ):
        started_s = json.loads(lines[0])["time_s"] - 10.0
        started = launch.model_copy(update={"run_id": name, "started_s": started_s})
        recorded_run(tmp_path / "runs" / name, started, text)
    return tmp_path / "runs"


def test_what_could_not_be_read_is_told(home: Path, tmp_path: Path, hetopt: Callable[..., Any]) -> None:
    said = "1 line of the event log could not be read and is left out: line 3: step.step_time_s is missing."
    for command in (("status", "old"), ("report", "old")):
        answer = hetopt(*command)
        assert answer.code == 0, answer.err
        assert said in " ".join(answer.err.split())
        assert "\x1b" not in answer.out + answer.err
    assert json.loads(hetopt("status", "old", "--json").out)["unread_lines"] == 1


def test_one_run_that_nobody_can_read_hides_no_other(home: Path, hetopt: Callable[..., Any]) -> None:
    (home / "20261126-000001-old-0001" / EVENTS_FILE).unlink()
    (home / "20261126-000001-old-0001" / EVENTS_FILE).mkdir()
    (home / "20261126-000003-broken-0003").mkdir()
    (home / "20261126-000003-broken-0003" / LAUNCH_FILE).write_text("{", encoding="utf-8")
    answer = hetopt("status", "--all")
    assert answer.code == 0
    rows = {line.split()[0]: line.split()[1] for line in answer.out.splitlines()[1:4]}
    assert list(rows.values()) == ["unreadable", "finished", "unreadable"]
    assert hetopt("status", "old").code == 2
