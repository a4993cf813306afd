"""`hetopt status --watch` shows what the log has gained, at next to no cost."""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hetopt.cli import render
from hetopt.cli.status import picture
from hetopt.core.events.log import EVENTS_FILE, write_decision
from hetopt.core.interruption import PIECES
from hetopt.core.run_status import RunState, RunStatus
from hetopt.optimizer.launch_record import Launch
from hetopt.reports.live_run import LiveRun
from tests.logs import recorded_run
from tests.work import calls_of

from .conftest import on_a_terminal
from .test_report import _compressed, launch, plan, rehearsed
from .test_report_page import long_run

__all__ = ["launch", "plan", "rehearsed"]


@pytest.fixture
def recorded(rehearsed: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HETOPT_HOME", str(tmp_path))
    return recorded_run(tmp_path / "runs" / rehearsed.run_id, rehearsed, _compressed(rehearsed))


@pytest.mark.parametrize("columns", [80, 40])
def test_a_picture_of_a_run(
    columns: int,
    rehearsed: Launch,
    tmp_path: Path,
    golden: Callable[[str, str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    events = _compressed(rehearsed)
    folder = recorded_run(tmp_path / "run", rehearsed, events[:-4])
    watched = LiveRun.of(folder, rehearsed)
    watched.read()
    out = io.StringIO()
    shown = picture(folder, RunStatus(state=RunState.RUNNING), watched, now_s=events[-5]["time_s"])
    Console(file=out, width=columns).print(render.drawn(shown))
    assert "…" not in out.getvalue(), "nothing is cut"
    golden(f"watch-{columns}.txt", "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n")


@pytest.mark.parametrize("columns", [120, 80, 40])
def test_a_line_of_progress_says_all_at_any_width(columns: int) -> None:
    told = (
        "step 1,234 of 4,741",
        "loss 0.009039",
        "58,101 samples/s",
        "straggler wait 12 %",
        "$0.0021",
        "ends in 1 min 20 s, at 19:12",
        "accuracy 0.9861  loss 0.03723  top5_accuracy 1",
    )
    lines = render.progress_lines("training", PIECES.join(told), 0.26, elapsed_s=3725.6, columns=columns)
    assert max(map(len, lines)) < columns
    assert "26%" in lines[0]
    assert "1:02:05" in lines[0]
    assert "█" in lines[0]
    for piece in told[:6] if columns == 40 else told:  # the last is longer than such a line
        assert any(piece in line for line in lines), piece
    waits = render.progress_lines("searching", "mixes of two types", None, elapsed_s=2.0, columns=columns)
    assert " ".join(" ".join(waits).split()) == "searching 0:00:02 mixes of two types"


def test_only_what_is_new_is_read(rehearsed: Launch, tmp_path: Path) -> None:
    lines = [json.dumps(event) for event in _compressed(rehearsed)]
    folder = recorded_run(tmp_path / "run", rehearsed, lines[:5])
    watched = LiveRun.of(folder, None)
    watched.read()
    before = watched.log._offset
    with (folder / EVENTS_FILE).open("a", encoding="utf-8") as stream:
        stream.write("\n".join([*lines[5:], ""]))
    watched.read()
    assert 0 < before < watched.log._offset
    whole = LiveRun.of(folder, None)
    whole.read()
    assert watched.progress == whole.progress


def test_what_the_supervisor_did_is_seen_once(rehearsed: Launch, tmp_path: Path) -> None:
    folder = recorded_run(tmp_path / "run", rehearsed, _compressed(rehearsed))
    watched = LiveRun.of(folder, None)
    watched.read()
    before = list(watched.happenings)
    write_decision(folder, "supervisor_acted", {"step": 5, "action": "replace", "host": "h1", "reason": "it is slow"})
    for _ in range(2):
        watched.read()
    assert list(watched.happenings)[len(before) :] == [watched.happenings[-1]]
    assert watched.happenings[-1].sentence == "h1: another machine takes its place: it is slow"


def test_a_look_takes_little_work_and_no_more_as_the_run_goes_on(launch: Launch, tmp_path: Path) -> None:
    """Sixteen workers, with as many events a second as a run writes at most."""
    lines = long_run(120, 16)
    folder = recorded_run(tmp_path / "run", launch, lines[:22])
    watched = LiveRun.of(folder, launch)
    console = Console(file=io.StringIO(), width=120, force_terminal=True)

    def look() -> None:
        watched.read()
        console.print(render.drawn(picture(folder, RunStatus(state=RunState.RUNNING), watched, now_s=2000.0)))

    calls = []
    for start in range(22, 122, 5):
        with (folder / EVENTS_FILE).open("a", encoding="utf-8") as stream:
            stream.write("\n".join([*lines[start : start + 5], ""]))
        calls.append(calls_of(look))
    assert max(calls) < 100_000
    assert max(calls[10:]) < 1.5 * max(calls[1:10])
    assert watched.progress.step == 120


def test_without_a_terminal_it_is_a_line(recorded: Path, hetopt: Callable[..., Any]) -> None:
    answer = hetopt("status", "--watch")
    assert answer.code == 0
    assert answer.out.count("20261120-000000-digits-0001: finished") == 1


def test_in_a_terminal_it_ends_with_the_run(recorded: Path, tmp_path: Path) -> None:
    wide = {"TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
    said = on_a_terminal("status", "--watch", environment={**os.environ, **wide})
    text = said.decode()
    assert "finished" in text
    assert "h2" in text
    assert "topk 1 % (all-gather)" in text


def test_a_person_watches_one_run(hetopt: Callable[..., Any]) -> None:
    answer = hetopt("status", "--watch", "--json")
    assert (answer.code, "--watch shows one run" in answer.err) == (2, True)
