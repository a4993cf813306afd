"""The dashboard over real HTTP and in a real browser: what it shows, what it reads, and whom it answers."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import struct
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from select import select

import pytest

import hetopt
from hetopt.api.dashboard import MOST_CLIENTS, Dashboard, serve
from hetopt.core.errors import BadInput
from hetopt.core.events.fold import RunFold
from hetopt.core.events.log import EVENTS_FILE
from hetopt.optimizer.launch_record import LAUNCH_FILE, Launch
from hetopt.reports.prometheus import HELP, exposition
from tests.browser import WIDTHS, browser
from tests.disturbance import PATIENCE_S
from tests.logs import events_of, recorded_run

from .conftest import start, until
from .logged import compressed_log
from .test_plan_page import outlined

EVIL = "</td><script>alert(1)</script><img src=x onerror=alert(2)>"


def logged(home: Path, launch: Launch, number: int, *, keep: int | None = None, evil: bool = False) -> Path:
    """A run of a home; ``keep`` of its events, so that it has no end."""
    name = f"20261120-000000-digits-{number:04d}"
    events = compressed_log(launch)[:keep]
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
        logged(home, rehearsed, number)
    logged(home, rehearsed, 2, keep=-4)
    return home


def test_all_runs_and_their_pages_are_served(home: Path) -> None:
    with served(home) as server:
        status, text, headers = get(server, "/")
        assert status == 200
        outlined(text)
        for number in range(3):
            assert f"20261120-000000-digits-{number:04d}" in text
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert "Python" not in headers["Server"]

        status, text, _ = get(server, "/run/20261120-000000-digits-0001")
        assert status == 200
        assert 'data-figure="run_time_measured"' in text

        status, text, headers = get(server, "/metrics")
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
        logged(tmp_path, rehearsed, number, evil=True)
    name = next(folder.name for folder in tmp_path.iterdir() if folder.is_dir())
    with served(tmp_path) as server:
        for path in ("/", f"/run/{name}", "/run/%3Cscript%3E"):
            text = get(server, path)[1]
            assert "<script>alert" not in text
            assert "<img" not in text


def test_a_run_that_cannot_be_read_hides_no_other(rehearsed: Launch, tmp_path: Path) -> None:
    logged(tmp_path, rehearsed, 0)
    damaged = logged(tmp_path, rehearsed, 1)
    (damaged / LAUNCH_FILE).write_text("{", encoding="utf-8")
    empty = tmp_path / "20261120-000000-digits-0002"
    empty.mkdir()
    with served(tmp_path) as server:
        text = get(server, "/")[1]
        assert "unreadable" in text
        assert text.count("finished") == 1
        assert get(server, f"/run/{empty.name}")[0] == 200


def bytes_read() -> int:
    """By this process, from files and sockets."""
    return int(next(line for line in Path("/proc/self/io").read_text().splitlines() if "rchar" in line).split()[1])


@pytest.mark.parametrize(("runs", "steps"), [(40, 1_000), pytest.param(200, 100_000, marks=pytest.mark.slow)])
def test_many_long_runs_open_at_once_and_scrapes_read_no_log_again(
    runs: int, steps: int, rehearsed: Launch, tmp_path: Path
) -> None:
    """Steps are logged twenty at a time; the runs share one log, which each of them reads for itself."""
    first = logged(tmp_path, rehearsed, 0)
    step = next(event for event in compressed_log(rehearsed) if event["event"] == "step")
    with (first / EVENTS_FILE).open("w", encoding="utf-8") as stream:
        for event in compressed_log(rehearsed)[:2]:
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
        assert get(server, "/")[0] == 200
        get(server, "/metrics")  # the newest is read for the figures that its summary does not have
        before = bytes_read()
        for _ in range(5):
            assert get(server, "/metrics")[0] == get(server, "/")[0] == 200
        assert bytes_read() - before < runs * log_bytes / 10


def test_a_browser_shows_it_at_both_widths_by_keyboard_and_without_a_complaint(
    rehearsed: Launch, tmp_path: Path
) -> None:
    home = tmp_path / "runs"
    for number in range(2):
        logged(home, rehearsed, number)
    late = logged(home, rehearsed, 2, keep=-4)
    first = "20261120-000000-digits-0000"
    with served(home) as server, browser(tmp_path / "profile") as tab:
        for width in WIDTHS:
            for path in ("/", f"/run/{first}", f"/run/{late.name}", "/run/nobody"):
                tab.open(server.url + path, width=width)
                assert tab.value("document.documentElement.scrollWidth") <= width, path
                assert tab.value("[...document.querySelectorAll('td')].every(d => !d.innerHTML || d.offsetWidth > 0)")
                assert all(address.startswith(server.url) for address in tab.fetched)
                assert tab.low_contrast() == {}, path
                assert path == "/run/nobody" or tab.complaints == []
        # Everything is reached by the Tab key, and is live.
        tab.open(server.url)
        reached = []
        for _ in range(12):
            tab.press("Tab")
            reached.append(tab.value("document.activeElement.textContent"))
        assert {first, late.name, "all runs"} <= set(reached)
        assert "0.123" not in tab.value("document.body.textContent")
        with (late / EVENTS_FILE).open("a", encoding="utf-8") as stream:
            event = {"event": "evaluated", "time_s": 9000.0, "step": 190, "metrics": {"accuracy": 0.1234}}
            stream.write(json.dumps(event) + "\n")
        until(lambda: "0.1234" in tab.value("document.body.textContent"))
        assert tab.complaints == []
        # The policy holds: what got in as markup could neither run nor load anything.
        tab.value("document.querySelector('main').insertAdjacentHTML('beforeend', '<img src=http://127.0.0.1:9/x>')")
        tab.value("document.body.append(Object.assign(document.createElement('script'), {text: 'window.bad = 1'}))")
        assert tab.value("window.bad === undefined")
        assert any("Content Security Policy" in one for one in tab.complaints)


def test_the_command_serves_until_it_is_interrupted(
    rehearsed: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HETOPT_HOME", str(tmp_path))
    logged(tmp_path / "runs", rehearsed, 0)
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


# A run's figures as Prometheus reads them.


def test_prometheus_gets_the_newest_of_each(rehearsed: Launch) -> None:
    run = RunFold.of(events_of(compressed_log(rehearsed)))
    text = exposition([('odd "name"', run, 0), ("other", run, 0)])
    lines = text.splitlines()
    assert 'hetopt_steps_total{run="odd \\"name\\""} 200.0' in lines
    assert any(line.startswith("hetopt_local_batch_size{") and 'worker="1"' in line for line in lines)
    assert 'hetopt_metric{run="odd \\"name\\"",name="accuracy"} 0.9' in lines
    assert sum(line.startswith("# TYPE") for line in lines) == len(HELP)
    names = [line.rpartition(" ")[0] for line in lines if not line.startswith("#")]
    assert len(names) == len(set(names))


def test_the_endpoint_answers_with_what_is_logged_by_then(recorded: Path) -> None:
    with served(recorded.parent) as server:
        before = get(server, "/metrics")[1]
        with (recorded / EVENTS_FILE).open("a", encoding="utf-8") as stream:
            event = {"event": "evaluated", "time_s": 2000.0, "step": 201, "metrics": {"accuracy": 0.99}}
            stream.write(json.dumps(event) + "\n")
        _, after, headers = get(server, "/metrics")
    assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert ("0.99" in before, "0.99" in after) == (False, True)


def test_a_client_that_goes_away_is_no_news_and_few_are_answered_at_once(
    recorded: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with served(recorded.parent) as server:
        address = server.server_address[:2]
        silent = [socket.create_connection(address) for _ in range(MOST_CLIENTS + 5)]
        until(lambda: sum(select([one], [], [], 0)[0] != [] for one in silent) == 5)
        turned_away = [one for one in silent if select([one], [], [], 0)[0]]
        assert all(one.recv(1) == b"" for one in turned_away)
        for one in silent:
            # A reset instead of a goodbye, before the answer is read.
            with contextlib.suppress(OSError):
                one.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            one.close()

        def answers() -> bool:
            """Whether there is room again, as clients have gone."""
            with contextlib.suppress(OSError, http.client.HTTPException):
                return "hetopt_loss" in get(server, "/metrics")[1]
            return False

        until(answers)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("listen", ["nowhere", "127.0.0.1:99999999", "127.0.0.1:port"])
def test_a_bad_address_is_refused(listen: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="`listen`"):
        serve(listen, pages=False, home=tmp_path)
