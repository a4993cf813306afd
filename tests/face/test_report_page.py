"""The page of a run: honest in few points, the report's numbers, nothing from elsewhere, readable on a telephone."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetopt.core.events.fold import RunHistory
from hetopt.core.events.log import Event, read_log
from hetopt.optimizer.launch_record import Launch
from hetopt.reports import html
from hetopt.reports.report import make_report
from hetopt.reports.run_document import document
from hetopt.reports.series import envelope, over_time, stretches
from tests.browser import WIDTHS, browser
from tests.logs import history_of, recorded_run
from tests.work import calls_of

from .test_plan_page import outlined, outside
from .test_report import _compressed, _events, launch, plan, rehearsed

__all__ = ["launch", "plan", "rehearsed"]

FIGURE = re.compile(r'data-figure="(\w+)" data-value="([^"]+)"')


def made(launch: Launch, events: list[Event]) -> str:
    return page_of(launch, history_of(events, launch.starts))


def page_of(launch: Launch, history: RunHistory) -> str:
    return html.page(document(make_report(launch, history, state="finished"), launch))


@pytest.fixture(scope="module")
def text(rehearsed: Launch) -> str:
    return made(rehearsed, _compressed(rehearsed))


@given(
    st.lists(st.floats(0.001, 1e3), min_size=1, max_size=400),
    st.lists(st.floats(-1e6, 1e6), min_size=400, max_size=400),
    st.integers(1, 60),
)
def test_the_band_holds_every_value_and_the_extremes_stay(gaps: list[float], drawn: list[float], most: int) -> None:
    end_s, values = np.cumsum(gaps), np.array(drawn[: len(gaps)])
    over = stretches(end_s, most=most)
    around = envelope(values, over)
    assert len(over) <= most + 1
    assert over.end_s[-1] == end_s[-1]
    assert (np.diff(over.first) > 0).all()
    assert around.low.min() == values.min()
    assert around.high.max() == values.max()
    stretch = np.searchsorted(over.first, np.arange(len(values)), side="right") - 1
    assert (around.low[stretch] <= values).all()
    assert (values <= around.high[stretch]).all()
    assert ((around.low <= around.middle) & (around.middle <= around.high)).all()


def test_a_short_series_is_drawn_as_it_is() -> None:
    values = np.array([1.0, math.nan, 3.0])
    assert envelope(values, stretches(np.array([1.0, 2.0, 3.0]))).middle is values


def test_workers_that_come_late_are_not_known_before(rehearsed: Launch) -> None:
    events = _compressed(rehearsed)
    first = next(event for event in events if event["event"] == "step")
    for name in ("local_batch_sizes", "compute_s", "wait_s", "sync_s"):
        first[name] = first[name][:2]
    told = over_time(history_of(events))
    assert [math.isnan(told.values(f"compute{worker}")[0]) for worker in range(4)] == [False, False, True, True]
    assert not re.search(r"[ >:,]nan\b|NaN", made(rehearsed, events))


def test_workers_that_train_for_themselves_are_seen_to_come_together(launch: Launch) -> None:
    events = _events(launch)
    step = next(event for event in events if event["event"] == "step")
    assert "Steps averaged" not in made(launch, events)
    told = {"policy": "local-sgd", "synchronised": 3, "local": 9, "sent_bytes": 120, "divergence": 0.02}
    first = {**step, "step": 12, "steps": 12, "time_s": step["time_s"] - 1, "sync": told}
    last = {**step, "sync": {**told, "synchronised": 0, "local": 10, "sent_bytes": 0}}
    text = made(launch, [one for event in events for one in ((first, last) if event is step else (event,))])
    data = json.loads(re.findall(r'id="data">(.*?)</script>', text, re.S)[0])
    assert data["series"]["averaged"] == ["share", [0.25, 0.0]]
    assert data["series"]["averages"][1][0] == 120
    assert "Workers apart" in text


def test_the_page_needs_nothing_else(text: str) -> None:
    assert outside(text) == []
    assert not re.search(r"https?:|@import|fetch\(|XMLHttpRequest|import\(", text)


def test_what_a_person_wrote_is_no_markup(rehearsed: Launch) -> None:
    events = _compressed(rehearsed)
    evil = "</script><script>alert(1)</script>"
    for event in events:
        if event["event"] == "run_started":
            event["workers"][0]["host"] = evil
        if "exchange" in event:
            event["exchange"]["way"] = evil
        if event["event"] == "evaluated":
            event["metrics"] = {evil: 1.0}
    assert "alert(1)</script>" not in made(rehearsed, events).replace("&lt;/script&gt;", "")


def test_the_page_says_what_the_report_says(rehearsed: Launch, text: str) -> None:
    history = history_of(_compressed(rehearsed), rehearsed.starts)
    report = make_report(rehearsed, history, state="finished")
    found: dict[str, set[float]] = {}
    for name, value in FIGURE.findall(text):
        found.setdefault(name, set()).add(float(value))
    for one in report.compared:
        name = re.sub(r"[^a-z]+", "_", one.name)
        assert found[f"{name}_measured"] == {one.measured}
        assert found[f"{name}_predicted"] == {one.predicted}
    assert all(sentence in text for sentence in report.verdict)
    terms = rehearsed.plan.chosen.prediction.bill
    assert found["term_usd"] == {term.usd for term in terms}


def test_the_cursor_reads_what_was_logged(rehearsed: Launch, text: str) -> None:
    data = json.loads(re.findall(r'id="data">(.*?)</script>', text, re.S)[0])
    steps = [event for event in _compressed(rehearsed) if event["event"] == "step"]
    assert data["step"] == [event["step"] for event in steps]
    assert data["series"]["loss"][1] == pytest.approx([event["loss"] for event in steps], rel=1e-4)
    assert data["series"]["compute2"][1] == pytest.approx([event["compute_s"][2] for event in steps], rel=1e-4)
    assert data["ways"][data["way"][-1] - 1] == "topk 1 % (all-gather)"


def long_run(steps: int, workers: int) -> list[str]:
    """The lines of a log of so many steps, each with an event of its own."""
    draw = random.Random(0)
    hosts = [f"h{rank}" for rank in range(workers)]
    spec = [{"host": host, "type": "g5.xlarge", "slowdown": 1, "local_batch_size": 64} for host in hosts]
    told: dict[str, Any] = {"event": "run_started", "time_s": 1000.0, "task": "digits", "workers": spec}
    lines = [
        json.dumps({**told, "global_batch_size": 64 * workers}),
        '{"event": "training_started", "time_s": 1005.0, "step": 0}',
    ]
    now_s, shares = 1005.0, [64] * workers
    for step in range(1, steps + 1):
        compute = [round(0.1 + 0.01 * draw.random(), 7) for _ in hosts]
        step_time_s = round(max(compute) + 0.03, 7)
        now_s += step_time_s
        name = "topk 0.01 by all_gather" if step > steps / 3 else "identity by all_reduce"
        exchange = {"way": name, "ratio": 0.01, "gain": 0.3, "sent_bytes": 7860, "dense_bytes": 393000}
        event = {
            "event": "step", "time_s": now_s, "step": step, "epoch": step / 100, "samples_seen": step, "steps": 1,
            "local_batch_sizes": shares, "step_time_s": step_time_s, "compute_s": compute, "sync_s": [0.03] * workers,
            "wait_s": [round(max(compute) - one, 7) for one in compute], "loss": 2 * math.exp(-3 * step / steps),
            "exchange": {**exchange, "compress_s": 0.001, "sync_s": 0.008},
        }  # fmt: skip
        lines.append(json.dumps(event))
    return lines


def test_a_hundred_thousand_steps_of_sixteen_workers_fit_into_a_page(launch: Launch, tmp_path: Path) -> None:
    """Every step has an event here; runs log one of up to twenty. Seconds are for `benchmarks.report_page`."""
    texts: list[str] = []

    def drawn(steps: int) -> int:
        """Calls that reading the log and drawing the page take."""
        path = tmp_path / f"{steps}.jsonl"
        path.write_text("\n".join([*long_run(steps, 16), ""]), encoding="utf-8")
        return calls_of(lambda: texts.append(page_of(launch, RunHistory.of(read_log(path).events, launch.starts))))

    fewer, calls = drawn(2_000), drawn(10_000)
    assert calls < 1_000_000
    assert calls - fewer < 40 * 8_000, "of which reading a line is seven"
    text = texts[-1]
    assert len(text.encode()) < 3_000_000
    data = json.loads(re.findall(r'id="data">(.*?)</script>', text, re.S)[0])
    assert data["step"][-1] == 10_000
    assert len(data["step"]) <= 301


@pytest.fixture
def recorded(rehearsed: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with one run."""
    monkeypatch.setenv("HETOPT_HOME", str(tmp_path))
    return recorded_run(tmp_path / "runs" / rehearsed.run_id, rehearsed, _compressed(rehearsed))


def test_the_command_writes_the_page(recorded: Path, tmp_path: Path, hetopt: Callable[..., Any]) -> None:
    path = tmp_path / "run.html"
    assert hetopt("report", "--html", path).code == 0
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert hetopt("report", "--html", path).code == 0, "the page that it wrote itself"
    path.write_text("my own page", encoding="utf-8")
    again = hetopt("report", "--html", path)
    assert again.code == 2
    assert "exists already" in again.err
    assert hetopt("report", "--html", path, "--force").code == 0


def test_a_browser_draws_it_and_its_cursor_reads(text: str, tmp_path: Path) -> None:
    path = tmp_path / "run.html"
    path.write_text(text, encoding="utf-8")
    with browser(tmp_path / "profile") as tab:
        for width in WIDTHS:
            tab.open(f"{path.as_uri()}#at=0.5", width=width)
            assert tab.value("document.documentElement.scrollWidth") <= width
            assert tab.value("document.documentElement.dataset.ready") == "yes"
            assert tab.low_contrast() == {}
            assert "after the first step, step" in tab.value("document.getElementById('said').textContent")
            outputs = tab.value("[...document.querySelectorAll('output')].map(o => [o.dataset.series, o.textContent])")
            assert {"loss", "step_time", "compute0", "ratio", "sent"} <= {name for name, said in outputs if said}
            assert tab.value("[...document.querySelectorAll('td')].every(d => !d.innerHTML || d.offsetWidth > 0)")
        tab.value("document.getElementById('moment').focus()")
        tab.press("ArrowRight")
        assert "after the first step, step" in tab.value("document.getElementById('said').textContent")
        assert tab.complaints == []
        assert all(address.startswith("file:") for address in tab.fetched)
        # Nothing is missing where scripts are refused.
        tab.send("Emulation.setScriptExecutionDisabled", value=True)
        tab.open(path.as_uri())
        tab.send("Emulation.setScriptExecutionDisabled", value=False)
        assert "of training" in tab.value("document.getElementById('said').textContent")
        assert tab.value("document.getElementById('moment').offsetWidth") == 0


def test_a_screen_reader_finds_its_way(text: str) -> None:
    tags = outlined(text)
    assert tags.count("table") == 3
