"""The dashboard over real HTTP and in a real browser: what it shows, what it reads, and whom it answers."""

from __future__ import annotations

import http.client
import json
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import hetopt
from hetopt.api.dashboard import Dashboard, KnownRuns
from hetopt.core.errors import BadInput
from hetopt.core.events.log import EVENTS_FILE
from hetopt.optimizer.launch_record import LAUNCH_FILE, Launch
from hetopt.reports.dashboard import NOT_READ
from hetopt.reports.live_run import MOST_POINTS, LiveRun
from tests.browser import WIDTHS, browser
from tests.disturbance import PATIENCE_S
from tests.logs import recorded_run

from .conftest import start
from .test_plan_page import outlined
from .test_report import _compressed, launch, plan, rehearsed

__all__ = ["launch", "plan", "rehearsed"]

EVIL = "</td><script>alert(1)</script><img src=x onerror=alert(2)>"


def recorded(home: Path, launch: Launch, number: int, *, keep: int | None = None, evil: bool = False) -> Path:
    """A run of a home; ``keep`` of its events, so that it has no end."""
    name = f"20261120-000000-digits-{number:04d}"
    events = _compressed(launch)[:keep]
    if evil:
        for event in events:
            if event["event"] == "run_started":
                event["workers"][0]["host"] = EVIL
                event["task"] = EVIL
            if event["event"] in ("evaluated", "training_finished"):
                event["metrics"] = {EVIL: 1.0}
            if event["event"] == "training_finished":
                event["reason"] = EVIL
    return recorded_run(home / name, launch.model_copy(update={"run_id": name}), events)


@contextmanager
def served(home: Path) -> Iterator[Dashboard]:
    with hetopt.serve("127.0.0.1:0", home=home) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def get(server: Dashboard, path: str, **headers: str) -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=PATIENCE_S)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    told = answer.status, answer.read().decode(), dict(answer.getheaders())
    connection.close()
    return told


@pytest.fixture(scope="module")
def home(rehearsed: Launch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs: two that are over, and one without an end, whose processes are gone."""
    home = tmp_path_factory.mktemp("home") / "runs"
    for number in range(2):
        recorded(home, rehearsed, number)
    recorded(home, rehearsed, 2, keep=-4)
    return home


def test_all_runs_and_their_pages_are_served(home: Path) -> None:
    with served(home) as server:
        assert {one.state for one in server.runs.summaries(within_s=60)} == {"finished", "failed"}
        status, text, headers = get(server, "/")
        assert status == 200
        tags = outlined(text)
        assert {"nav", "form", "table", "button"} <= set(tags)
        for number in range(3):
            assert f"20261120-000000-digits-{number:04d}" in text
        assert "finished, all its epochs done" in text
        assert ">failed<" in text
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cache-Control"] == "no-store"
        assert "Python" not in headers["Server"]

        status, text, _ = get(server, "/run/20261120-000000-digits-0001")
        assert status == 200
        assert 'data-figure="run_time_measured"' in text

        runs = "run=20261120-000000-digits-0000&run=20261120-000000-digits-0001"
        status, text, _ = get(server, f"/compare?{runs}")
        outlined(text)
        assert "2 runs compared" in text
        assert "time predicted" in text
        assert "Choose two" in get(server, "/compare?run=20261120-000000-digits-0000&run=nobody")[1]

        status, text, headers = get(server, "/metrics")
        assert (status, headers["Content-Type"].split(";")[0]) == (200, "text/plain")
        assert 'hetopt_loss{run="20261120-000000-digits-0002"}' in text


def test_a_name_that_leads_here_reads_nothing(home: Path) -> None:
    foreign = ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost@evil.example", "[::1", ""]
    with served(home) as server:
        for host in foreign:
            for path in ("/", "/metrics", "/run/20261120-000000-digits-0001"):
                status, text, _ = get(server, path, Host=host)
                assert (status, "digits" in text) == (421, False), host
        for own in ("localhost", "localhost:9", "[::1]:9400", "127.0.0.1"):
            assert get(server, "/", Host=own)[0] == 200


def test_no_path_of_a_request_is_a_path_here(home: Path) -> None:
    run = "20261120-000000-digits-0001"
    paths = ["../runs", "%2e%2e/%2e%2e/etc/passwd", "/etc/passwd", "", "digits", ".", f"{run}/", f"{run}%00"]
    with served(home) as server:
        for path in [
            *(f"/run/{path}" for path in paths),
            f"/run/{run}/{EVENTS_FILE}",
            "/etc/passwd",
            "//x/run",
            "//[x",
            "/%",
        ]:
            status, text, _ = get(server, path)
            assert (status, "root:" in text) == (404, False), path


def test_nothing_can_be_changed(home: Path) -> None:
    with served(home) as server:
        for method in ("POST", "PUT", "DELETE"):
            asked = urllib.request.Request(f"{server.url}/", method=method)
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(asked)
            assert refused.value.code == 501
            refused.value.close()


def test_other_machines_cannot_reach_it(tmp_path: Path) -> None:
    for listen in ("0.0.0.0:0", "192.0.2.1:0", ":::0"):
        with pytest.raises(BadInput, match="this machine alone"):
            hetopt.serve(listen, home=tmp_path)


def test_text_of_a_log_is_no_markup(rehearsed: Launch, tmp_path: Path) -> None:
    for number in range(2):
        recorded(tmp_path, rehearsed, number, evil=True)
    names = [folder.name for folder in tmp_path.iterdir() if folder.is_dir()]
    with served(tmp_path) as server:
        server.runs.summaries(within_s=60)
        for path in ("/", f"/compare?run={names[0]}&run={names[1]}", f"/run/{names[0]}", "/run/%3Cscript%3E"):
            text = get(server, path)[1]
            assert "<script>alert" not in text
            assert "<img" not in text


def test_what_is_over_is_read_once_and_what_goes_on_is_read_on(rehearsed: Launch, tmp_path: Path) -> None:
    over = recorded(tmp_path, rehearsed, 0)
    going = recorded(tmp_path, rehearsed, 1, keep=-4)
    (going / "host.pid").write_text("", encoding="utf-8")
    runs = KnownRuns(home=tmp_path)
    newest, oldest = runs.summaries(within_s=60)
    assert (newest.run, oldest.run) == (going.name, over.name)
    assert oldest.step == 200
    assert runs._live.keys() <= {going.name}
    read, runs._read = runs._read, _never  # type: ignore[method-assign]
    assert runs.summaries() == [newest, oldest]
    runs._read = read  # type: ignore[method-assign]
    # One that went on is another thing.
    with (going / EVENTS_FILE).open("a", encoding="utf-8") as stream:
        for event in _compressed(rehearsed)[-4:]:
            stream.write(json.dumps(event) + "\n")
    changed = runs.summaries(within_s=60)
    assert changed[0].state == "finished"
    assert changed[1] == oldest


def _never(*_: object) -> Any:
    raise AssertionError("a log was read again")


def test_a_run_that_cannot_be_read_hides_no_other(rehearsed: Launch, tmp_path: Path) -> None:
    recorded(tmp_path, rehearsed, 0)
    damaged = recorded(tmp_path, rehearsed, 1)
    (damaged / LAUNCH_FILE).write_text("{", encoding="utf-8")
    empty = tmp_path / "20261120-000000-digits-0002"
    empty.mkdir()
    with served(tmp_path) as server:
        server.runs.summaries(within_s=60)
        text = get(server, "/")[1]
        assert "unreadable" in text
        assert "finished, all its epochs done" in text
        assert get(server, f"/run/{empty.name}")[0] == 200
        assert get(server, f"/run/{damaged.name}")[0] in (200, 500)


def test_long_logs_do_not_keep_a_person_waiting(rehearsed: Launch, tmp_path: Path) -> None:
    for number in range(3):
        recorded(tmp_path, rehearsed, number)
    runs = KnownRuns(home=tmp_path)
    first = runs.summaries(within_s=-1.0)
    assert [one.state for one in first] == [NOT_READ] * 3
    deadline = time.monotonic() + PATIENCE_S
    while any(one.state == NOT_READ for one in runs.summaries(within_s=-1.0)):
        assert time.monotonic() < deadline, "they are read meanwhile"
        time.sleep(0.05)


def bytes_read() -> int:
    """By this process, from files and sockets."""
    return int(next(line for line in Path("/proc/self/io").read_text().splitlines() if "rchar" in line).split()[1])


@pytest.mark.parametrize(("runs", "steps"), [(40, 1_000), pytest.param(200, 100_000, marks=pytest.mark.slow)])
def test_many_long_runs_open_at_once_and_scrapes_read_no_log_again(
    runs: int, steps: int, rehearsed: Launch, tmp_path: Path
) -> None:
    """Steps are logged twenty at a time; the runs share one log, which each of them reads for itself."""
    first = recorded(tmp_path, rehearsed, 0)
    step = next(event for event in _compressed(rehearsed) if event["event"] == "step")
    with (first / EVENTS_FILE).open("w", encoding="utf-8") as stream:
        for event in _compressed(rehearsed)[:2]:
            stream.write(json.dumps(event) + "\n")
        for number in range(20, steps + 1, 20):
            stream.write(json.dumps({**step, "step": number, "steps": 20, "time_s": step["time_s"] + number}) + "\n")
    for number in range(1, runs):
        folder = tmp_path / f"20261120-000000-digits-{number:04d}"
        folder.mkdir()
        for name in (LAUNCH_FILE, EVENTS_FILE):
            (folder / name).hardlink_to(first / name)
    log_bytes = (first / EVENTS_FILE).stat().st_size
    with served(tmp_path) as server:
        begun_s = time.process_time()
        status, text, _ = get(server, "/")
        opened_s = time.process_time() - begun_s
        assert status == 200
        assert text.count("20261120-000000-digits-") >= runs
        deadline = time.monotonic() + 100 * PATIENCE_S
        while any(one.state == NOT_READ for one in server.runs.summaries()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        get(server, "/metrics")  # the newest is read for the figures that its summary does not have
        before, begun_s = bytes_read(), time.process_time()
        for _ in range(5):
            assert get(server, "/metrics")[0] == get(server, "/")[0] == 200
        each_s = (time.process_time() - begun_s) / 10
        assert bytes_read() - before < runs * log_bytes / 10
    # Seconds are for a person to read (`--slow -s`).
    print(f"{runs} runs of {steps} steps: opened in {opened_s:.2f} s of CPU, then {each_s:.3f} s a page or scrape")


def test_a_curve_stays_small_and_keeps_its_shape(rehearsed: Launch, tmp_path: Path) -> None:
    folder = recorded(tmp_path, rehearsed, 0, keep=2)
    step = next(event for event in _compressed(rehearsed) if event["event"] == "step")
    with (folder / EVENTS_FILE).open("a", encoding="utf-8") as stream:
        for number in range(1, 1001):
            event = {**step, "step": number, "steps": 1, "time_s": step["time_s"] + number, "loss": 1000.0 - number}
            stream.write(json.dumps(event) + "\n")
    live = LiveRun.of(folder, rehearsed)
    live.read()
    assert MOST_POINTS / 3 <= len(live.curve) <= MOST_POINTS
    losses = [loss for _, loss in live.curve]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] > 950
    assert losses[-1] < 50


def test_a_browser_shows_it_at_both_widths_by_keyboard_and_without_a_complaint(
    rehearsed: Launch, tmp_path: Path
) -> None:
    home = tmp_path / "runs"
    for number in range(2):
        recorded(home, rehearsed, number)
    late = recorded(home, rehearsed, 2, keep=-4)
    first, second = "20261120-000000-digits-0000", "20261120-000000-digits-0001"
    with served(home) as server, browser(tmp_path / "profile") as tab:
        server.runs.summaries(within_s=60)
        for width in WIDTHS:
            for path in ("/", f"/compare?run={first}&run={second}", f"/run/{first}", "/run/nobody"):
                tab.open(server.url + path, width=width)
                assert tab.value("document.documentElement.scrollWidth") <= width, path
                assert tab.value("[...document.querySelectorAll('td')].every(d => !d.innerHTML || d.offsetWidth > 0)")
                assert all(address.startswith(server.url) for address in tab.fetched)
                assert tab.low_contrast() == {}, path
                assert path == "/run/nobody" or tab.complaints == []
        # Everything is reached by the Tab key: choose two, compare.
        tab.open(server.url)
        reached = []
        for _ in range(24):
            tab.press("Tab")
            reached.append(tab.value("document.activeElement.id || document.activeElement.textContent"))
        assert {f"choose-{first}", f"open-{first}", "compare the chosen ones", "all runs"} <= set(reached)
        for name in (first, second):
            tab.value(f"document.getElementById('choose-{name}').click()")
        # It is live, and keeps what was chosen.
        assert "0.123" not in tab.value("document.body.textContent")
        with (late / EVENTS_FILE).open("a", encoding="utf-8") as stream:
            event = {"event": "evaluated", "time_s": 9000.0, "step": 190, "metrics": {"accuracy": 0.1234}}
            stream.write(json.dumps(event) + "\n")
        deadline = time.monotonic() + PATIENCE_S
        while "0.1234" not in tab.value("document.body.textContent"):
            assert time.monotonic() < deadline, "what the log gained is shown"
            time.sleep(0.2)
        assert tab.value("document.querySelectorAll('input[name=run]:checked').length") == 2
        assert tab.complaints == []
        # The policy holds: what got in as markup could neither run nor load anything.
        tab.value("document.querySelector('main').insertAdjacentHTML('beforeend', '<img src=http://127.0.0.1:9/x>')")
        tab.value("document.body.append(Object.assign(document.createElement('script'), {text: 'window.bad = 1'}))")
        assert tab.value("window.bad === undefined")
        assert any("Content Security Policy" in one for one in tab.complaints)


def test_the_command_serves_until_it_is_interrupted(
    rehearsed: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hetopt: Callable[..., Any]
) -> None:
    monkeypatch.setenv("HETOPT_HOME", str(tmp_path))
    recorded(tmp_path / "runs", rehearsed, 0)
    answer = hetopt("serve", "--listen", "0.0.0.0:9400")
    assert (answer.code, "--listen must be an address of this machine alone" in answer.err) == (2, True)
    process = start("serve", "--listen", "127.0.0.1:0")
    assert process.stdout is not None
    assert process.stderr is not None
    said = process.stdout.readline()
    with urllib.request.urlopen(said.split()[4].rstrip(",")) as answered:
        assert b"20261120-000000-digits-0000" in answered.read()
    process.send_signal(2)
    assert process.wait(timeout=PATIENCE_S) == 130
    assert process.stderr.read() == ""
    process.stdout.close()
    process.stderr.close()
    assert os.listdir(tmp_path / "runs")
