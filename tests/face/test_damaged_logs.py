"""Whatever a run's event log holds, every command that reads it answers: with figures, or with one sentence."""

from __future__ import annotations

import contextlib
import copy
import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hetopt.api.run import RunRecord
from hetopt.backends.emulation.conductor import FitWatch
from hetopt.backends.probe_runs import local_probes, read_sample
from hetopt.backends.processes import run_status
from hetopt.backends.supervisor.decide import RunProgress
from hetopt.cli.status import picture
from hetopt.core.errors import BadInput, RunFailed
from hetopt.core.events.fold import RunFold
from hetopt.core.events.log import EVENTS_FILE, read_with_decisions
from hetopt.core.events.records import LogEvent
from hetopt.core.run_status import RunState, RunStatus
from hetopt.optimizer.launch_record import LAUNCH_FILE, Launch
from hetopt.reports import html
from hetopt.reports.learn import learn
from hetopt.reports.live_run import LiveRun
from hetopt.reports.report import Report, make_report
from hetopt.reports.run_document import document
from hetopt.reports.scalars import Exposed, event_file, exposition, scalars
from tests.logs import recorded_run
from tests.work import calls_of

from .test_report import launch, plan

__all__ = ["launch", "plan"]

RUNS = Path(__file__).resolve().parents[1] / "recorded" / "runs"
CASES, QUICK = 300, 60
NUMBER = 10**400
WRONG: tuple[Any, ...] = (
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
            holder[key] = draw.choice(WRONG)
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
    assert picture(folder, going, watched, now_s=events[-1].time_s if events else 0.0)
    exposition([Exposed(name=folder.name, run=record.progress, unread=record.unread.lines)])
    event_file(scalars(events))
    standing = RunProgress.of(events)
    assert all(speed > 0 for speed in standing.speeds)
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
        record = RunRecord.of(folder)
        events = read_with_decisions(folder).events
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
    said = "1 line of the event log could not be read and is left out: line 3 (step): step_time_s is missing."
    for command in (("status", "old"), ("report", "old"), ("metrics", "old")):
        answer = hetopt(*command)
        assert answer.code == 0, answer.err
        assert said in " ".join(answer.err.split())
        assert "\x1b" not in answer.out + answer.err
    assert json.loads(hetopt("status", "old", "--json").out)["unread_lines"] == 1
    assert json.loads(hetopt("report", "old", "--json").out)["unread_lines"] == 1
    assert 'hetopt_unread_lines_total{run="20261126-000001-old-0001"} 1.0' in hetopt("metrics", "old").out


def test_one_run_that_nobody_can_read_hides_no_other(home: Path, hetopt: Callable[..., Any]) -> None:
    (home / "20261126-000001-old-0001" / EVENTS_FILE).unlink()
    (home / "20261126-000001-old-0001" / EVENTS_FILE).mkdir()
    (home / "20261126-000003-broken-0003").mkdir()
    (home / "20261126-000003-broken-0003" / LAUNCH_FILE).write_text("{", encoding="utf-8")
    answer = hetopt("status", "--all")
    assert answer.code == 0
    rows = {line.split()[0]: line.split()[1] for line in answer.out.splitlines()[1:4]}
    assert list(rows.values()) == ["unreadable", "finished", "unreadable"]
    assert "Is a directory" in answer.err
    states = [one["state"] for one in json.loads(hetopt("status", "--all", "--json").out)]
    assert states == ["unreadable", "finished", "unreadable"]
    assert hetopt("status", "old").code == 2


def test_an_empty_run_folder_was_never_started(home: Path, hetopt: Callable[..., Any]) -> None:
    (home / "20261126-000009-empty-0009").mkdir()
    answer = hetopt("status")
    assert answer.code == 0
    assert "it was never started" in answer.out
