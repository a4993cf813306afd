"""Whoever writes an event has a record for it, and whatever a line holds, reading it ends nothing."""

from __future__ import annotations

import ast
import importlib
import json
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from hetopt.core.errors import BadInput
from hetopt.core.events.log import JUMP_S, MOST_LINE_BYTES, EventLog, EventReader, read_events, read_log
from hetopt.core.events.records import RunFailure
from hetopt.profiler import records
from tests.logs import BY_KIND
from tests.sources import REPOSITORY, modules

RUNS = REPOSITORY / "tests" / "recorded" / "runs"
WRITERS = modules()
LOGS = {"events", "log", "_log", "_events", "decisions"}
"""What event logs are called where they are written."""


def named(node: ast.expr, module: str) -> str | None:
    """The text of an argument that is one, or the name of one."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.Name):
        found = getattr(importlib.import_module(module), node.id, None)
        return found if isinstance(found, str) else None
    return None


def receiver(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def written(module: str, path: Path) -> Iterator[tuple[str, int]]:
    """Kind and line of each event that a module writes."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        function = receiver(node.func)
        of_a_log = isinstance(node.func, ast.Attribute) and receiver(node.func.value) in LOGS
        if function == "write" and of_a_log and (kind := named(node.args[0], module)) is not None:
            yield kind, node.lineno
        elif function == "write_decision" and len(node.args) == 3 and path.name == "supervisor.py":
            kind = named(node.args[1], module)
            if kind is not None:
                yield kind, node.lineno


def test_every_event_that_is_written_has_its_record() -> None:
    found = [(path, *one) for module, path in WRITERS.items() for one in written(module, path)]
    assert {"step", "run_started", "worker_lost", "supervisor_acted"} <= {kind for _, kind, _ in found}
    for path, kind, line in found:
        assert kind in BY_KIND, f"{path.name}:{line} writes {kind!r}, which has no record in log_events"


def test_every_measurement_of_a_probe_is_a_kind() -> None:
    assert {records.STARTED, records.FINISHED, *records.EVENTS.values()} <= set(BY_KIND)


@pytest.mark.parametrize("path", sorted(RUNS.glob("*.jsonl")), ids=lambda path: path.stem)
def test_what_real_runs_wrote_is_read_whole(path: Path) -> None:
    log = EventReader(path=path)
    assert len(log.read()) == len(path.read_text(encoding="utf-8").splitlines())
    assert log.unread.sentence is None


GOOD = b'{"event": "training_started", "time_s": 5.0, "step": 3}\n'
BAD = {
    "not JSON": b"{\n",
    "too deep": b"[" * 100_000 + b"\n",
    "no event is called 'x'": b'{"event": "x", "time_s": 1}\n',
    "not an event": b'{"time_s": 1}\n',
    "step: ": b'{"event": "training_started", "time_s": 1, "step": -1}\n',
    "time_s: ": b'{"event": "training_started", "time_s": NaN, "step": 1}\n',
    "lone surrogate": b'{"event": "run_failed", "time_s": 1, "reason": "\\ud800"}\n',
    "digits": b'{"event": "training_started", "time_s": 1, "step": ' + b"9" * 5000 + b"}\n",
    "infinity": b'{"event": "training_started", "time_s": 1e400}\n',
    "a bool is no number": b'{"event": "training_started", "time_s": 1, "step": true}\n',
    "a control character": b'{"event": "worker_lost", "time_s": 1, "worker": 0, "host": "\\u001b[31m"}\n',
}


@pytest.mark.parametrize("line", BAD.values(), ids=BAD)
def test_a_line_that_is_no_event_is_counted(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(GOOD + line + GOOD)
    log = EventReader(path=path)
    assert len(log.read()) == 2
    assert log.unread.lines == 1
    assert log.unread.first.startswith("line 2")
    assert len(log.unread.sentence or "") < 400


def test_lists_of_workers_have_one_length() -> None:
    step = json.loads((RUNS / "resumed.jsonl").read_text(encoding="utf-8").splitlines()[2])
    assert step["event"] == "step"
    for name in ("compute_s", "wait_s", "sync_s", "local_batch_sizes"):
        parser = EventReader(path=Path("events.jsonl"))
        assert parser.parse(json.dumps({**step, name: step[name][:1]}).encode()) is None
        assert parser.unread.lines == 1


def test_sentences_hold_no_control_characters(tmp_path: Path) -> None:
    parser = EventReader(path=Path("events.jsonl"))
    line = json.dumps({"event": "run_failed", "time_s": 1, "reason": "a\x1b[2Jb\nc" + "x" * 9999}).encode()
    event = parser.parse(line)
    assert isinstance(event, RunFailure)
    assert event.reason.startswith("a [2Jb c")
    assert len(event.reason) == 2000


def test_a_line_that_never_ends_is_not_kept_and_takes_no_other_with_it(tmp_path: Path) -> None:
    """Its writer died within it, or found the disk full; who writes next ends it first."""
    path = tmp_path / "events.jsonl"
    with path.open("wb") as stream:
        stream.write(GOOD)
        for _ in range(5):
            stream.write(b"x" * (MOST_LINE_BYTES // 2))
    log = EventReader(path=path)
    assert len(log.read()) == 1
    with closing(EventLog(path)) as later:
        later.write("run_failed", reason="the disk is full")
    assert (len(log.read()), log.unread.lines) == (1, 1)
    assert log.unread.first == "line 2: longer than 8 MiB"


@given(st.lists(st.integers(1, 200), max_size=8), st.integers(0, 3))
def test_reading_on_finds_what_reading_at_once_does(cuts: list[int], bad: int) -> None:
    import tempfile

    data = b"".join(GOOD if number % 4 != bad else b"nothing\n" for number in range(12))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "events.jsonl"
        reader, found, at = EventReader(path=path), 0, 0
        for cut in [*cuts, len(data)]:
            with path.open("ab") as stream:
                stream.write(data[at : at + cut])
            at += cut
            found += len(reader.read())
        at_once = EventReader(path=path)
        assert (found, reader.unread) == (len(at_once.read()), at_once.unread)


def test_a_log_that_is_a_folder_or_another_users_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").mkdir()
    with pytest.raises(BadInput, match=r"events\.jsonl cannot be read: Is a directory"):
        read_log(tmp_path / "events.jsonl")


# --- The log of a run: one event a line, and a word where times on both sides do not belong together


class Clocks:
    """One that is set, and one that is not."""

    def __init__(self) -> None:
        self.passed_s, self.set_by_s = 0.0, 1.8e9

    def wall(self) -> float:
        return self.set_by_s + self.passed_s

    def steady(self) -> float:
        return self.passed_s


@given(st.lists(st.tuples(st.floats(0.0, 1e5), st.sampled_from([0.0, 0.5, -0.5, 20.0, -3600.0])), min_size=1))
def test_a_clock_that_was_set_is_told_before_the_next_event_and_one_that_runs_is_not(
    walk: list[tuple[float, float]],
) -> None:
    import tempfile

    clocks = Clocks()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "events.jsonl"
        with closing(EventLog(path, clocks.wall, clocks.steady)) as log:
            log.write("run_started")
            for passes_s, jumps_s in walk:
                clocks.passed_s += passes_s
                clocks.set_by_s += jumps_s
                log.write("step")
        events = read_events(path)
    told = [event["by_s"] for event in events if event["event"] == "clock_jumped"]
    assert told == [jumps_s for _, jumps_s in walk if abs(jumps_s) > JUMP_S]
    assert sum(event["event"] == "step" for event in events) == len(walk)
    for before, after in pairwise(events):
        if before["event"] == "clock_jumped":
            assert after["time_s"] == before["time_s"]
