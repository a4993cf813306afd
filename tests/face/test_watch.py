"""`hetopt status --watch` shows what the log has gained, at next to no cost."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hetopt.cli import render
from hetopt.cli.watch import EVERY_S, Watched, picture
from hetopt.core.events.decisions import write_decision
from hetopt.core.events.log import EVENTS_FILE
from hetopt.optimizer.launch_record import LAUNCH_FILE, Launch
from tests.disturbance import PATIENCE_S

from .test_report import _compressed, launch, plan, rehearsed
from .test_report_page import long_run

__all__ = ["launch", "plan", "rehearsed"]


def written(folder: Path, launch: Launch, lines: list[str]) -> Path:
    folder.mkdir(parents=True)
    launch.save(folder / LAUNCH_FILE)
    (folder / EVENTS_FILE).write_text("\n".join([*lines, ""]), encoding="utf-8")
    return folder


@pytest.fixture
def recorded(rehearsed: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HETOPT_HOME", str(tmp_path))
    lines = [json.dumps(event) for event in _compressed(rehearsed)]
    return written(tmp_path / "runs" / rehearsed.run_id, rehearsed, lines)


def test_a_picture_of_a_run(rehearsed: Launch, tmp_path: Path, golden: Callable[[str, str], None]) -> None:
    events = _compressed(rehearsed)
    folder = written(tmp_path / "run", rehearsed, [json.dumps(event) for event in events[:-4]])
    watched = Watched.of(folder, rehearsed)
    watched.read(time_factor=rehearsed.time_factor)
    out = io.StringIO()
    shown = picture("run", "running", watched, rehearsed, now_s=events[-5]["time_s"])
    Console(file=out, width=110).print(render.drawn(shown))
    golden("watch.txt", "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n")


def test_only_what_is_new_is_read(rehearsed: Launch, tmp_path: Path) -> None:
    lines = [json.dumps(event) for event in _compressed(rehearsed)]
    folder = written(tmp_path / "run", rehearsed, lines[:5])
    watched = Watched.of(folder, None)
    watched.read(time_factor=1.0)
    before = watched.log._offset
    with (folder / EVENTS_FILE).open("a", encoding="utf-8") as stream:
        stream.write("\n".join([*lines[5:], ""]))
    watched.read(time_factor=1.0)
    assert 0 < before < watched.log._offset
    whole = Watched.of(folder, None)
    whole.read(time_factor=1.0)
    assert watched.progress == whole.progress


def test_what_the_supervisor_did_is_seen_once(rehearsed: Launch, tmp_path: Path) -> None:
    folder = written(tmp_path / "run", rehearsed, [json.dumps(event) for event in _compressed(rehearsed)])
    watched = Watched.of(folder, None)
    watched.read(time_factor=1.0)
    before = list(watched.happenings)
    write_decision(folder, "supervisor_acted", {"step": 5, "action": "replace", "host": "h1", "reason": "it is slow"})
    for _ in range(2):
        watched.read(time_factor=1.0)
    assert list(watched.happenings)[len(before) :] == [watched.happenings[-1]]
    assert watched.happenings[-1].sentence == "h1: another machine takes its place: it is slow"


def test_it_takes_less_than_a_hundredth_of_a_core(launch: Launch, tmp_path: Path) -> None:
    """Sixteen workers, with as many events a second as a run writes at most."""
    lines = long_run(120, 16)
    folder = written(tmp_path / "run", launch, lines[:22])
    watched = Watched.of(folder, launch)
    console = Console(file=io.StringIO(), width=120, force_terminal=True)
    costs_s = []
    for start in range(22, 122, 5):
        with (folder / EVENTS_FILE).open("a", encoding="utf-8") as stream:
            stream.write("\n".join([*lines[start : start + 5], ""]))
        begun_s = time.process_time()
        watched.read(time_factor=1.0)
        console.print(render.drawn(picture("run", "running", watched, launch, now_s=2000.0)))
        costs_s.append(time.process_time() - begun_s)
    # The least: this machine may have other things to do.
    assert min(costs_s) < 0.01 * EVERY_S
    assert watched.progress.step == 120


def test_without_a_terminal_it_is_a_line(recorded: Path, hetopt: Callable[..., Any]) -> None:
    answer = hetopt("status", "--watch")
    assert answer.code == 0
    assert answer.out.count("20261120-000000-digits-0001: finished") == 1


def test_in_a_terminal_it_ends_with_the_run(recorded: Path, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "hetopt.cli.main", "status", "--watch"],
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "40"},
    )
    os.close(theirs)
    said = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # what Linux says when the other end is closed
            break
        if not part:
            break
        said += part
    assert process.wait(timeout=PATIENCE_S) == 0
    os.close(ours)
    text = said.decode()
    assert "finished" in text
    assert "h2" in text
    assert "topk 0.01 by all_gather" in text


def test_a_person_watches_one_run(hetopt: Callable[..., Any]) -> None:
    answer = hetopt("status", "--watch", "--json")
    assert (answer.code, "--watch shows one run" in answer.err) == (2, True)
