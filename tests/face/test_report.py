"""Reports hold the events of a run against its prediction, and say so honestly."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable, Iterable
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from hetopt.api.changes import exchanged
from hetopt.api.options import Changes
from hetopt.backends.backend import Prepared
from hetopt.backends.prediction import predict_on_local
from hetopt.cli import follow, launch_document, render
from hetopt.core import formatting
from hetopt.core.errors import BadInput
from hetopt.core.events.fold import RunFold, RunHistory
from hetopt.core.events.log import Event, read_log
from hetopt.core.events.records import LogEvent
from hetopt.core.profile import Profile
from hetopt.core.run_folder import CHECKPOINT_FOLDER, LATEST_FILE
from hetopt.core.run_spec import Stream
from hetopt.core.run_status import RunState, RunStatus
from hetopt.optimizer.launch_record import Launch
from hetopt.optimizer.plan import Plan, Range
from hetopt.reports import html, plan_document, profile_document, run_document
from hetopt.reports.document import Block, Document
from hetopt.reports.live_run import resume_command
from hetopt.reports.report import Report, make_report
from hetopt.reports.run_document import document
from hetopt.reports.series import envelope, over_time, stretches
from hetopt.reports.text import COLUMNS, SCREEN, lines, on_one_screen
from hetopt.reports.timeline import pause
from tests.browser import WIDTHS, browser
from tests.logs import an_event, history_of
from tests.work import calls_of

from .logged import compressed_log, disturbed_log, plain_log, report_of
from .test_show import outlined, outside

Golden = Callable[[str, str], None]


def test_a_run_as_predicted_is_within_the_promise(launch: Launch) -> None:
    report = report_of(launch, plain_log(launch))
    errors = {figure.name: figure.error for figure in report.compared}
    assert errors.pop("steps") == pytest.approx(0, abs=0.01)
    assert all(error == pytest.approx(0, abs=1e-9) for error in errors.values())
    assert report.within_tolerance is True


@given(
    slowdown=st.floats(1.3, 3.0) | st.floats(0.3, 0.7),
    contention=st.none() | st.floats(1.3, 30.0),
    waited_s=st.just(0.0) | st.floats(1.0, 60.0),
    changes=st.booleans(),
)
def test_a_verdict_cites_what_the_log_holds_and_nothing_else(
    launch: Launch, slowdown: float, contention: float | None, waited_s: float, changes: bool
) -> None:
    streaming = launch.spec.model_copy(update={"stream": Stream(rates=(40.0, 80.0))})
    events = plain_log(launch, slowdown=slowdown)
    step = events[2]
    if contention is not None:
        step |= {"processor_s": [worker_s / contention for worker_s in step["compute_s"]]}
    if waited_s:
        nothing = [0, 0]
        flow = {"rate_per_s": [1.0, 1.0], "buffered": nothing, "dropped": nothing}
        step |= {"stream": {**flow, "wait_s": [waited_s, 0.0]}}
    if changes:
        events.insert(2, {"event": "condition_changed", "time_s": events[1]["time_s"], "host": "local-0", "speed": 0.5})
    report = report_of(launch.model_copy(update={"spec": streaming}), events)
    cited = {
        "its conditions changed": changes,
        f"steps waited {formatting.duration(waited_s)} for samples to arrive": bool(waited_s),
        f"computing took {contention or 0:.1f} times as long": contention is not None and slowdown > 1,
    }
    assert "in the step time" in report.verdict[1]
    assert {text: text in report.verdict[1] for text in cited} == cited
    assert ("no event of the run says why" in report.verdict[1]) == (not any(cited.values()))
    assert report.contention is not None
    assert report.contention.measured == (None if contention is None else pytest.approx(contention, rel=1e-3))


@pytest.mark.parametrize("change", [{"reason": "stopped"}, {"resumed_step": 50}])
def test_only_the_step_time_of_half_a_run_is_compared(launch: Launch, change: dict[str, object]) -> None:
    report = report_of(launch, plain_log(launch, **change))  # type: ignore[arg-type]  # one keyword of several types
    assert [figure.name for figure in report.compared] == ["step time"]
    assert report.within_tolerance is None
    slow = report_of(launch, plain_log(launch, slowdown=30.0, **change))  # type: ignore[arg-type]  # likewise
    assert slow.verdict[1] == "Steps are slower than predicted: no event of the run says why."


@pytest.mark.parametrize(
    ("state", "said"), [("finished", "has not logged a step yet"), ("failed", "failed before its first step")]
)
def test_a_run_without_a_step_has_no_report(launch: Launch, state: str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        make_report(launch, history_of(plain_log(launch)[:2], launch.starts), state=state)


def test_a_run_costs_what_it_runs_on(launch: Launch) -> None:
    """Here nothing, on one's own hosts what their owner said, whatever the plan's machines would cost."""
    assert launch.plan.chosen.usd_per_hour > 0
    assert launch.running_usd_per_hour == 0
    took = launch.prediction.total_s
    priced = launch.prediction.model_copy(update={"cost_usd": Range(value=took.value, low=took.low, high=took.high)})
    own = launch.model_copy(update={"on": "ssh", "prediction": priced})
    assert own.running_usd_per_hour == pytest.approx(3600)
    costs = [one for one in report_of(own, plain_log(own)).compared if one.unit == "USD"]
    assert [(one.name, one.predicted) for one in costs] == [("cost", pytest.approx(took.value))]
    assert own.model_copy(update={"on": "ec2"}).running_usd_per_hour == launch.plan.chosen.usd_per_hour


@pytest.mark.parametrize(("on", "kept"), [("local", "checkpoint/LATEST"), ("ec2", "objects/ckpt/LATEST")])
def test_a_run_goes_on_wherever_it_was_and_a_rented_one_from_a_checkpoint(
    launch: Launch, tmp_path: Path, on: str, kept: str
) -> None:
    folder = tmp_path / launch.run_id
    (folder / kept).parent.mkdir(parents=True)
    stopped, command = RunStatus(state=RunState.STOPPED), f"hetopt launch --on {on} --resume {launch.run_id}"
    run = launch.model_copy(update={"on": on})
    assert resume_command(folder, stopped, run) == (None if on == "ec2" else command)
    (folder / kept).write_text("step-7\n", encoding="utf-8")
    assert resume_command(folder, stopped, run) == command
    assert resume_command(folder, RunStatus(state=RunState.RUNNING), run) is None


def test_nobody_is_asked_where_nothing_leaves_this_machine(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(follow, "is_attended", lambda: True)
    monkeypatch.setattr(follow.typer, "confirm", lambda text, **_: asked.append(text) or True)
    assert follow.confirmed(Prepared(launch=launch), yes=False).launch is launch
    assert asked == []
    follow.confirmed(Prepared(launch=launch, connects_to=("box1",)), yes=False)
    assert asked == ["Start?"]


@pytest.mark.parametrize(
    ("hosts", "fates", "said"),
    [
        ("ab", ["cut"], "b is not heard for 8 s: unless it is heard again, the others go on without it"),
        ("ab", ["dies"], "b is gone for 8 s: the others go on without it"),
        ("ab", ["returns"], "b is there again: workers meet anew, for 8 s so far"),
        ("ab", ["notice"], "b has to leave: workers meet anew, for 8 s so far"),
        ("b", ["dies"], "b is gone for 8 s: the run waits for it"),
        ("ab", ["dies", "workers"], "workers start on a from step 40, for 8 s so far"),
        ("ab", ["cut", "heals"], None),
        ("ab", ["dies", "workers", "training"], None),
        ("ab", ["returns", "step"], None),
    ],
)
def test_a_run_that_stands_still_says_why_since_when_and_what_follows(
    hosts: str, fates: list[str], said: str | None
) -> None:
    def started(names: str, step: int) -> LogEvent:
        workers = [{"host": name} for name in names]
        return an_event("run_started", time_s=1000.0, workers=workers, resumed_step=step)

    def told(fate: str) -> LogEvent:
        match fate:
            case "workers":
                return started("a", 40)
            case "training":
                return an_event("training_started", time_s=1000.0)
            case "step":
                return an_event("step", time_s=1000.0)
            case _:
                return an_event("condition_changed", time_s=1000.0, host="b", **{fate: True})

    run = RunFold.of([started(hosts, 0), an_event("training_started"), *map(told, fates)])
    assert pause(run, 1008.0) == said


# The page of a run: honest in few points, the report's numbers, nothing from elsewhere, readable on a telephone.

FIGURE = re.compile(r'data-figure="(\w+)" data-value="([^"]+)"')


def made(launch: Launch, events: list[Event]) -> str:
    return page_of(launch, history_of(events, launch.starts))


def page_of(launch: Launch, history: RunHistory) -> str:
    return html.page(document(make_report(launch, history, state="finished"), launch))


@pytest.fixture(scope="module")
def text(rehearsed: Launch) -> str:
    return made(rehearsed, compressed_log(rehearsed))


@given(
    st.lists(st.floats(0.001, 1e3), min_size=1, max_size=400),
    st.lists(st.floats(-1e6, 1e6), min_size=400, max_size=400),
    st.integers(1, 60),
)
def test_the_band_holds_every_value_and_the_extremes_stay(gaps: list[float], drawn: list[float], most: int) -> None:
    end_s, values = np.cumsum(gaps), np.array(drawn[: len(gaps)])
    first = stretches(end_s, most=most)
    low, middle, high = envelope(values, first)
    assert len(first) <= most + 1
    assert (np.diff(first) > 0).all()
    assert low.min() == values.min()
    assert high.max() == values.max()
    stretch = np.searchsorted(first, np.arange(len(values)), side="right") - 1
    assert (low[stretch] <= values).all()
    assert (values <= high[stretch]).all()
    assert ((low <= middle) & (middle <= high)).all()


def test_workers_that_come_late_are_not_known_before(rehearsed: Launch) -> None:
    events = compressed_log(rehearsed)
    first = next(event for event in events if event["event"] == "step")
    for name in ("local_batch_sizes", "compute_s", "wait_s", "sync_s"):
        first[name] = first[name][:2]
    begins = {series.key: series.values[0] for series in over_time(history_of(events)).series}
    assert [begins[f"compute{worker}"] is None for worker in range(4)] == [False, False, True, True]
    assert not re.search(r"[ >:,]nan\b|NaN", made(rehearsed, events))


def test_workers_that_train_for_themselves_are_seen_to_come_together(launch: Launch) -> None:
    events = plain_log(launch)
    step = next(event for event in events if event["event"] == "step")
    told = {"policy": "local-sgd", "synchronised": 3, "local": 9, "sent_bytes": 120, "divergence": 0.02}
    first = {**step, "step": 12, "steps": 12, "time_s": step["time_s"] - 1, "sync": told}
    last = {**step, "sync": {**told, "synchronised": 0, "local": 10, "sent_bytes": 0}}
    text = made(launch, [one for event in events for one in ((first, last) if event is step else (event,))])
    data = json.loads(re.findall(r'id="data">(.*?)</script>', text, re.S)[0])
    assert data["series"]["averaged"] == ["share", [0.25, 0.0]]
    assert data["series"]["averages"][1][0] == 120


def test_the_page_needs_nothing_else(text: str) -> None:
    assert outlined(text).count("table") == 3, "a screen reader finds its way"
    assert outside(text) == []
    assert not re.search(r"https?:|@import|fetch\(|XMLHttpRequest|import\(", text)


def test_what_a_person_wrote_is_no_markup(rehearsed: Launch) -> None:
    events = compressed_log(rehearsed)
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
    history = history_of(compressed_log(rehearsed), rehearsed.starts)
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
    steps = [event for event in compressed_log(rehearsed) if event["event"] == "step"]
    assert data["step"] == [event["step"] for event in steps]
    assert data["series"]["loss"][1] == pytest.approx([event["loss"] for event in steps], rel=1e-4)
    assert data["series"]["compute2"][1] == pytest.approx([event["compute_s"][2] for event in steps], rel=1e-4)
    assert data["ways"][data["way"][-1] - 1] == "topk 0.01 by all-gather"


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
    """Every step has an event here; runs log one of up to twenty."""
    texts: list[str] = []

    def drawn(steps: int) -> int:
        """Calls that reading the log and drawing the page take."""
        path = tmp_path / f"{steps}.jsonl"
        path.write_text("\n".join([*long_run(steps, 16), ""]), encoding="utf-8")
        return calls_of(lambda: texts.append(page_of(launch, RunHistory.of(read_log(path), launch.starts))))

    fewer, calls = drawn(2_000), drawn(10_000)
    assert calls < 1_000_000
    assert calls - fewer < 40 * 8_000, "of which reading a line is seven"
    text = texts[-1]
    assert len(text.encode()) < 3_000_000
    data = json.loads(re.findall(r'id="data">(.*?)</script>', text, re.S)[0])
    assert data["step"][-1] == 10_000
    assert len(data["step"]) <= 301


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


# Documents as they are shown: each on a screen of 80 columns, and those that have a page as the text of that page.

Shown = Callable[[str, Iterable[Block]], None]


@pytest.fixture
def shown(golden: Golden, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shown:
    """Compares a screen with what was recorded; at 40 columns nothing runs over."""

    def compare(name: str, blocks: Iterable[Block]) -> None:
        blocks = list(blocks)
        for columns in (40, 120, 80):
            monkeypatch.setenv("COLUMNS", str(columns))
            capsys.readouterr()
            render.show(blocks)
            text = capsys.readouterr().out
            assert max(len(line) for line in text.splitlines() if "hetopt " not in line) <= columns
        golden(f"{name}.txt", text)

    return compare


def page_text(document: Document) -> str:
    """The words of a page, a line an element that has any."""
    body = re.sub(r"<(style|script)\b.*?</\1>", "", html.page(document), flags=re.S)
    labelled = re.sub(r'<(?:svg|div)[^>]* aria-label="([^"]*)"[^>]*>', r"\n[\1]\n", body)
    text = unescape(re.sub(r"</?(?:span|b|i|output)\b[^>]*>", "", labelled))
    lines = (" ".join(line.split()) for line in re.sub(r"<[^>]*>", "\n", text).splitlines())
    return "\n".join(filter(None, lines)) + "\n"


def test_a_plan(plan: Plan, shown: Shown, golden: Golden) -> None:
    answer = on_one_screen(plan_document.answer(plan), COLUMNS)
    shown("plan", answer)
    assert len(lines(answer, COLUMNS)) <= SCREEN
    shown("plan-explained", plan_document.details(plan))
    golden("plan-page.txt", page_text(plan_document.page(plan)))


@pytest.mark.parametrize("name", ["report", "report-rehearsal", "report-compressed"])
def test_a_report(name: str, launch: Launch, rehearsed: Launch, shown: Shown, golden: Golden) -> None:
    started, events = {
        "report": (launch, plain_log(launch, slowdown=1.2)),
        "report-rehearsal": (rehearsed, disturbed_log(rehearsed)),
        "report-compressed": (rehearsed, compressed_log(rehearsed)),
    }[name]
    report = report_of(started, events)
    assert Report.from_json(report.to_json(), origin="itself") == report
    document = run_document.document(report)
    shown(name, (*document.about, *document.blocks))
    golden(f"{name}-page.txt", page_text(run_document.document(report, started)))


def test_a_profile(digits_profile: Path, shown: Shown) -> None:
    shown("profile", profile_document.document(Profile.load(digits_profile)))


@pytest.mark.parametrize(
    ("name", "typed"),
    [
        ("auto", {"compression": "auto"}),
        ("dgc", {"compression": "dgc:1000x,momentum=0.9", "ratio_policy": "warm_up"}),
        ("cheapest", {"compression": "topk:0.01,coding=packed", "collective": "auto"}),
    ],
)
def test_a_launch_with_compression(plan: Plan, shown: Shown, name: str, typed: dict[str, str]) -> None:
    wanted = plan.model_copy(update={"run": exchanged(Changes(**typed), plan.run)})
    here = predict_on_local(wanted, (1.0, 2.0))
    predicted = {"spec": here.run, "prediction": here.prediction, "notes": here.notes}
    started = Launch(created="", started_s=0.0, run_id="", on="local", plan=plan, **predicted)
    shown(f"launch-{name}", launch_document._run_summary(Prepared(launch=started)))


def test_a_rehearsal_and_one_that_goes_on(rehearsed: Launch, tmp_path: Path, shown: Shown) -> None:
    shown("launch-rehearsal", launch_document._run_summary(Prepared(launch=rehearsed)))
    (tmp_path / CHECKPOINT_FOLDER).mkdir()
    (tmp_path / CHECKPOINT_FOLDER / LATEST_FILE).write_text("step-281\n", encoding="utf-8")
    shown("launch-resumed", launch_document._run_summary(Prepared(launch=rehearsed, folder=tmp_path)))
