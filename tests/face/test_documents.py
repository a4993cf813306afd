"""Documents as they are shown: each on a screen of 80 columns, and those that have a page as the text of that page."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from html import unescape
from pathlib import Path

import pytest

from hetopt.api.changes import exchanged
from hetopt.api.options import Changes
from hetopt.backends.backend import Prepared
from hetopt.backends.prediction.local_plan import predict_on_local
from hetopt.cli import launch_document, render
from hetopt.core.profile import Profile
from hetopt.core.run_folder import CHECKPOINT_FOLDER, LATEST_FILE
from hetopt.optimizer.launch_record import Launch
from hetopt.optimizer.plan import Plan
from hetopt.reports import html, plan_document, profile_document, run_document
from hetopt.reports.document import Block, Document

from .test_report import _compressed, _disturbed, _events, _report, launch, plan, rehearsed

__all__ = ["launch", "plan", "rehearsed"]

Golden = Callable[[str, str], None]
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
    answer = plan_document.answer(plan, height=render.height)
    shown("plan", answer)
    assert render.height(answer) <= plan_document.MOST_LINES
    shown("plan-explained", plan_document.details(plan))
    golden("plan-page.txt", page_text(plan_document.page(plan)))


@pytest.mark.parametrize("name", ["report", "report-rehearsal", "report-compressed"])
def test_a_report(name: str, launch: Launch, rehearsed: Launch, shown: Shown, golden: Golden) -> None:
    started, events = {
        "report": (launch, _events(launch, slowdown=1.2)),
        "report-rehearsal": (rehearsed, _disturbed(rehearsed)),
        "report-compressed": (rehearsed, _compressed(rehearsed)),
    }[name]
    report = _report(started, events)
    document = run_document.document(report)
    shown(name, (*document.about, *document.blocks))
    golden(f"{name}-page.txt", page_text(run_document.document(report, started)))
    notebook = report._repr_html_()
    assert all(
        sentence in unescape(notebook) and sentence in " ".join(str(report).split()) for sentence in report.verdict
    )


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
    shown(f"launch-{name}", launch_document._here(Prepared(launch=started)))


def test_a_rehearsal_and_one_that_goes_on(rehearsed: Launch, tmp_path: Path, shown: Shown) -> None:
    shown("launch-rehearsal", launch_document._here(Prepared(launch=rehearsed)))
    (tmp_path / CHECKPOINT_FOLDER).mkdir()
    (tmp_path / CHECKPOINT_FOLDER / LATEST_FILE).write_text("step-281\n", encoding="utf-8")
    shown("launch-resumed", launch_document._here(Prepared(launch=rehearsed, folder=tmp_path)))
