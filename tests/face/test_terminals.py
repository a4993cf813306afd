"""Answers in narrow, colourless, unlettered terminals and in pipes: nothing runs over, and nothing is lost."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from hetopt.cli import render, terminal
from hetopt.core.events.log import write_decision
from hetopt.optimizer.launch_record import Launch
from hetopt.reports.live_run import LiveRun
from hetopt.reports.text import wrapped
from tests.logs import recorded_run

from .conftest import RECORDED, Answer, on_a_terminal
from .logged import compressed_log

JOB = RECORDED / "resnet20-cifar10.json"
COMMANDS = (
    "--help",
    "recommend --help",
    "gpus",
    "catalog list",
    "catalog show g5.xlarge",
    "estimate --params 110M --samples 3M --tokens 128 --budget 200",
    f"recommend {JOB} --epochs 2000 --budget 5 --explain -o PLAN",
    "launch PLAN --on local --dry-run",
    "status --all",
)
COPIED = re.compile(r"(next: |then: | +)?(add -o plan\.json, then )?hetopt ")
"""How a line begins that is for the clipboard: it is never broken."""

pytestmark = pytest.mark.usefixtures("small_catalogue")


def test_nothing_runs_over_forty_columns(
    hetopt: Callable[..., Answer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HETOPT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "40")
    terminal.prepare()
    for command in COMMANDS:
        told = hetopt(*command.replace("PLAN", str(tmp_path / "plan.json")).split())
        assert told.code == 0, (command, told.err)
        lines = [line.rstrip() for line in told.out.splitlines()]
        wide = [line for line in lines if len(line) > 40 and not COPIED.match(line)]
        assert wide == [], command
        assert "\x1b" not in told.out + told.err, "a pipe has no colours"


def test_a_number_stays_with_its_unit_and_what_follows_hangs() -> None:
    assert wrapped("it takes an hour, 10 % more", 20, hang=2) == ["it takes an hour,", "  10 % more"]
    assert wrapped("    this is on 2 × g5.xlarge", 20, hang=4) == ["    this is on", "    2 × g5.xlarge"]
    assert wrapped("give --max-hourly 5\n", 20) == ["give --max-hourly 5", ""]


def test_a_terminal_of_forty_columns_without_colours_and_letters() -> None:
    without = {name: text for name, text in os.environ.items() if name not in ("COLUMNS", "FORCE_COLOR")}
    poor = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "NO_COLOR": "1", "TERM": "xterm", "COLUMNS": "40"}
    text = on_a_terminal("catalog", "show", "g5.xlarge", environment={**without, **poor})
    assert text.isascii()
    assert "Traceback" not in text
    assert re.search(r"\x1b\[[0-9;]*[34]\d", text) is None, "bold and dim may be"
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert max(len(line.rstrip()) for line in plain.splitlines()) <= 40


def test_an_answer_fits_a_terminal_below_what_is_remarked(tmp_path: Path) -> None:
    hosts, asked = tmp_path / "hosts.toml", "estimate --params 110M --samples 3M --tokens 128 --budget 20 --inventory"
    hosts.write_text(
        "[desk]\ndevices = ['RTX 3090']\ncpus = 8\nnetwork_mbit = 940\nusd_per_hour = 0.1\n", encoding="utf-8"
    )
    told = on_a_terminal(*asked.split(), str(hosts), environment={**os.environ, "COLUMNS": "80"})
    assert "days old" in told
    assert len(told.splitlines()) <= 23


@given(minutes=st.integers(1, 3000), looks=st.integers(1, 400))
def test_a_file_gets_a_line_a_tenth_or_a_minute_whichever_is_later(minutes: int, looks: int) -> None:
    written: list[tuple[float, str]] = []
    now_s = [0.0]
    plain = render.PlainProgress(write=lambda line: written.append((now_s[0], line)), clock=lambda: now_s[0])
    plain.tell("starting the workers", 0.0)
    for look in range(looks + 1):
        now_s[0] = 60.0 * minutes * look / looks
        plain.tell(f"step {10 * look:,} of {10 * looks:,} · loss {2.5 / (look + 1):.4g}", look / looks)
    start, *steps = written
    assert start == (0.0, "starting the workers (0%)")
    assert steps[0] == (0.0, f"step 0 of {10 * looks:,} · loss 2.5 (0%)")
    assert len(steps) <= 1 + min(10, minutes)
    assert all(after - before >= 60.0 for (before, _), (after, _) in pairwise(steps))
    if looks >= 20 * min(10, minutes):
        assert len(steps) >= min(10, minutes) // 2, "nobody waits for twice as long as that"


def test_a_file_gets_a_line_of_each_new_thing() -> None:
    written: list[str] = []
    plain = render.PlainProgress(write=written.append, clock=lambda: 0.0)
    for text in ("loading the task", "step time, 1 worker, batch 8", "step time, 1 worker, batch 16", "evaluation"):
        plain.tell(text, None)
    assert written == ["loading the task", "step time, 1 worker, batch 8", "evaluation"]


def test_what_the_supervisor_did_is_seen_once(rehearsed: Launch, tmp_path: Path) -> None:
    folder = recorded_run(tmp_path / "run", rehearsed, compressed_log(rehearsed))
    watched = LiveRun.of(folder, None)
    watched.read()
    before = list(watched.happenings)
    write_decision(folder, "supervisor_acted", {"step": 5, "action": "replace", "host": "h1", "reason": "it is slow"})
    for _ in range(2):
        watched.read()
    assert list(watched.happenings)[len(before) :] == [watched.happenings[-1]]
    assert watched.happenings[-1].sentence == "h1: another machine takes its place: it is slow"
