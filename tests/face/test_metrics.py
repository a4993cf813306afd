"""A run's figures as TensorBoard and Prometheus read them."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from select import select
from typing import Any

import pytest

from hetopt.api.dashboard import MOST_CLIENTS, KnownRuns, serve
from hetopt.core.errors import BadInput
from hetopt.core.events.fold import RunFold
from hetopt.core.events.log import EVENTS_FILE
from hetopt.optimizer.launch_record import Launch
from hetopt.reports.scalars import HELP, Exposed, _crc32c, _masked, event_file, exposition, scalars, tag
from tests.disturbance import PATIENCE_S
from tests.logs import events_of, recorded_run

from .test_report import _compressed, launch, plan, rehearsed

__all__ = ["launch", "plan", "rehearsed"]


@pytest.fixture
def recorded(rehearsed: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HETOPT_HOME", str(tmp_path))
    return recorded_run(tmp_path / "runs" / rehearsed.run_id, rehearsed, _compressed(rehearsed))


def test_prometheus_gets_the_newest_of_each(rehearsed: Launch) -> None:
    run = RunFold.of(events_of(_compressed(rehearsed)))
    text = exposition([Exposed(name='odd "name"', run=run), Exposed(name="other", run=run)])
    assert 'hetopt_steps_total{run="other"} 200.0' in text
    lines = text.splitlines()
    assert 'hetopt_steps_total{run="odd \\"name\\""} 200.0' in lines
    assert any(line.startswith("hetopt_local_batch_size{") and 'worker="1"' in line for line in lines)
    assert 'hetopt_metric{run="odd \\"name\\"",name="accuracy"} 0.9' in lines
    assert sum(line.startswith("# TYPE") for line in lines) == len(HELP)
    names = [line.rpartition(" ")[0] for line in lines if not line.startswith("#")]
    assert len(names) == len(set(names))


def records(data: bytes) -> Iterator[bytes]:
    """The records of an event file, their checksums compared."""
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        assert data[8:12] == _masked(data[:8])
        body = data[12 : 12 + length]
        assert data[12 + length : 16 + length] == _masked(body)
        yield body
        data = data[16 + length :]


def test_the_checksum_is_the_published_one() -> None:
    """RFC 3720, B.4."""
    assert _crc32c(bytes(32)) == 0x8A9136AA
    assert _crc32c(b"123456789") == 0xE3069283


def test_tensorboard_gets_every_value(rehearsed: Launch) -> None:
    figures = list(scalars(events_of(_compressed(rehearsed))))
    first, *rest = records(event_file(figures))
    assert b"brain.Event:2" in first
    assert len(rest) == len(figures)
    for one, body in zip(figures, rest, strict=True):
        assert struct.unpack("<d", body[1:9]) == (one.time_s,)
        assert tag(one).encode() in body
        assert struct.pack("<f", one.value) in body


def test_tensorboard_itself_reads_it(recorded: Path, tmp_path: Path, hetopt: Callable[..., Any]) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    assert hetopt("metrics", "--tensorboard", tmp_path / "board").code == 0
    read = accumulator.EventAccumulator(str(tmp_path / "board"))
    read.Reload()
    assert {"loss", "compute_seconds/0 h0", "metric/accuracy"} <= set(read.Tags()["scalars"])
    assert [one.step for one in read.Scalars("loss")] == list(range(10, 201, 10))


def test_the_command_writes_the_folder_and_prints(recorded: Path, tmp_path: Path, hetopt: Callable[..., Any]) -> None:
    assert "hetopt_loss{" in hetopt("metrics").out
    assert hetopt("metrics", "--tensorboard", tmp_path / "a" / "board").code == 0
    (path,) = (tmp_path / "a" / "board").iterdir()
    assert len(list(records(path.read_bytes()))) > 100


def test_the_endpoint_answers_with_what_is_logged_by_then(recorded: Path) -> None:
    with serve("127.0.0.1:0", run=recorded.name, pages=False) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        with urllib.request.urlopen(f"{address}/metrics") as answer:
            before = answer.read().decode()
        with (recorded / EVENTS_FILE).open("a", encoding="utf-8") as stream:
            event = {"event": "evaluated", "time_s": 2000.0, "step": 201, "metrics": {"accuracy": 0.99}}
            stream.write(json.dumps(event) + "\n")
        with urllib.request.urlopen(f"{address}/metrics") as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            after = answer.read().decode()
        server.shutdown()
    assert ("0.99" in before, "0.99" in after) == (False, True)


def test_a_scrape_reads_what_is_new_and_none_reads_twice(recorded: Path) -> None:
    runs = KnownRuns(home=recorded.parent, only=recorded.name)
    runs.metrics()
    live = runs._live[recorded.name]
    read = live.log._offset
    assert read == (recorded / EVENTS_FILE).stat().st_size
    with ThreadPoolExecutor(4) as many:
        texts = set(many.map(lambda _: runs.metrics(), range(8)))
    assert len(texts) == 1
    assert (runs._live[recorded.name] is live, live.log._offset) == (True, read)


def test_a_client_that_goes_away_is_no_news_and_few_are_answered_at_once(
    recorded: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with serve("127.0.0.1:0", run=recorded.name, pages=False) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = server.server_address[:2]
        silent = [socket.create_connection(address) for _ in range(MOST_CLIENTS + 5)]
        deadline = time.monotonic() + PATIENCE_S
        while sum(select([one], [], [], 0)[0] != [] for one in silent) < 5 and time.monotonic() < deadline:
            time.sleep(0.05)
        turned_away = [one for one in silent if select([one], [], [], 0)[0]]
        assert len(turned_away) == 5, "the others are still listened to"
        assert all(one.recv(1) == b"" for one in turned_away)
        for one in silent:
            # A reset instead of a goodbye, before the answer is read.
            with contextlib.suppress(OSError):
                one.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            one.close()
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{address[1]}/metrics") as answer:
                    assert b"hetopt_loss" in answer.read()
                break
            except OSError:
                assert time.monotonic() < deadline, "there is room again once clients have gone"
                time.sleep(0.05)
        server.shutdown()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("listen", ["nowhere", "127.0.0.1:99999999", "127.0.0.1:port"])
def test_a_bad_address_is_refused(listen: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="`listen`"):
        serve(listen, pages=False, home=tmp_path)
