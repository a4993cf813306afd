"""The figures of a run that other tools draw: one list of names for TensorBoard, which has them all, and Prometheus,
which asks for the newest in its text format, version 0.0.4.

Scalars in the files that TensorBoard reads.

A file is a sequence of records: the length (uint64), its checksum, the data, their checksum; little-endian, checksums
CRC-32C rotated and shifted (TensorFlow's ``record_writer.h``). The data is a protocol buffer ``Event`` with
``wall_time`` (1, double), ``step`` (2, varint), and either ``file_version`` (3, string) or ``summary`` (5), which holds
``value`` (1) with ``tag`` (1, string) and ``simple_value`` (2, float). That is little enough to write by hand, and
spares a run the packages that writing it otherwise takes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from hetopt.core.events.fold import RunFold
from hetopt.core.events.records import Evaluated, LogEvent, StepsLogged, TrainingStarted

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "hetopt_"


@dataclass(frozen=True, kw_only=True)
class Scalar:
    """One figure at one moment.

    Attributes:
        name: such as ``step_time_seconds``; units end it, as Prometheus has it.
        value: in SI units.
        labels: what it is of.
        step: steps done.
        time_s: seconds since the epoch.
    """

    name: str
    value: float
    step: int
    time_s: float
    labels: tuple[tuple[str, str], ...] = ()


HELP: Mapping[str, str] = {
    "loss": "Mean training loss of the latest control period.",
    "steps_total": "Optimizer steps done.",
    "lost_steps_total": "Steps that were done again, from a checkpoint.",
    "epochs": "Passes over the training data, with fractions.",
    "step_time_seconds": "Mean time of a step of the latest control period.",
    "local_batch_size": "Samples of a step that a worker computes.",
    "compute_seconds": "Mean time of a step that a worker computes.",
    "wait_seconds": "Mean time of a step that a worker waits for the slowest.",
    "exchange_ratio": "Fraction of the gradient's elements that is sent.",
    "exchange_gain": "Part of the gradient's energy that this retains.",
    "sent_bytes": "Contributed by one worker in a step.",
    "metric": "A metric of the latest evaluation.",
    "unread_lines_total": "Lines of the event log that could not be read.",
}
"""What each name means."""


def scalars(events: Iterable[LogEvent]) -> Iterator[Scalar]:
    """The figures of a run's events, in order."""
    run = RunFold()
    for event in events:
        lost_steps = run.lost_steps
        run.take(event)
        match event:
            case StepsLogged():
                yield from _of_steps(run, event)
            case Evaluated():
                yield from _metrics(run, event.step, event.time_s)
            case TrainingStarted() if run.lost_steps > lost_steps:
                yield Scalar(name="lost_steps_total", value=run.lost_steps, step=event.step, time_s=event.time_s)


@dataclass(frozen=True, kw_only=True)
class Exposed:
    """A run whose figures are asked for.

    Attributes:
        name: of the run.
        run: so far.
        unread: lines of the log that could not be read.
    """

    name: str
    run: RunFold
    unread: int = 0


def exposition(runs: Iterable[Exposed]) -> str:
    """Prometheus' text of the newest value of every figure, with the run as a label of all.

    Workers that train no more have no figures of a step.
    """
    figures = [(one.name, figure) for one in runs for figure in _newest(one.run, one.unread)]
    lines = []
    for of, said in HELP.items():
        own = [(name, figure) for name, figure in figures if figure.name == of]
        if own:
            lines.append(f"# HELP {PREFIX}{of} {said}")
            lines.append(f"# TYPE {PREFIX}{of} {'counter' if of.endswith('_total') else 'gauge'}")
        for name, figure in own:
            labels = ",".join(f'{label}="{_escaped(text)}"' for label, text in (("run", name), *figure.labels))
            lines.append(f"{PREFIX}{of}{{{labels}}} {figure.value!r}")
    return "".join(f"{line}\n" for line in lines)


def _newest(run: RunFold, unread: int) -> Iterator[Scalar]:
    now_s = run.last_event_s or 0.0
    if run.latest is not None:
        yield from _of_steps(run, run.latest)
    yield from _metrics(run, run.step, now_s)
    yield Scalar(name="lost_steps_total", value=float(run.lost_steps), step=run.step, time_s=now_s)
    yield Scalar(name="unread_lines_total", value=float(unread), step=run.step, time_s=now_s)


def _of_steps(run: RunFold, event: StepsLogged) -> Iterator[Scalar]:
    """The figures of the newest logged steps; a worker keeps its number, whoever else comes and goes."""

    def scalar(name: str, value: float, *labels: tuple[str, str]) -> Scalar:
        return Scalar(name=name, value=float(value), step=event.step, time_s=event.time_s, labels=labels)

    yield scalar("loss", event.loss)
    yield scalar("steps_total", event.step)
    yield scalar("epochs", event.epoch)
    yield scalar("step_time_seconds", event.step_time_s)
    workers = [(("worker", str(place)), ("host", run.roster.workers[place].host)) for place in run.latest_places]
    for name, values in (
        ("local_batch_size", event.local_batch_sizes),
        ("compute_seconds", event.compute_s),
        ("wait_seconds", event.wait_s),
    ):
        for labels, value in zip(workers, values, strict=False):  # no workers: others have come since
            yield scalar(name, value, *labels)
    if event.exchange is not None:
        yield scalar("exchange_ratio", event.exchange.ratio)
        yield scalar("exchange_gain", event.exchange.gain)
        yield scalar("sent_bytes", event.exchange.sent_bytes)


def _metrics(run: RunFold, step: int, time_s: float) -> Iterator[Scalar]:
    for name, value in run.metrics.items():
        yield Scalar(name="metric", value=value, step=step, time_s=time_s, labels=(("name", name),))


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


_POLYNOMIAL = 0x82F63B78
_MASK_DELTA = 0xA282EAD8
_DOUBLE, _FLOAT, _BYTES, _VARINT = 1, 5, 2, 0


def event_file(figures: Iterable[Scalar]) -> bytes:
    """The bytes of an event file with these figures."""
    parts = [_record(_field(1, _DOUBLE, struct.pack("<d", 0.0)) + _string(3, "brain.Event:2"))]
    parts += [_record(_event(one)) for one in figures]
    return b"".join(parts)


def tag(one: Scalar) -> str:
    """Such as ``compute_seconds/0 h0``: TensorBoard groups by what comes before the stroke."""
    return f"{one.name}/{' '.join(value for _, value in one.labels)}" if one.labels else one.name


def _event(one: Scalar) -> bytes:
    value = _string(1, tag(one)) + _field(2, _FLOAT, struct.pack("<f", one.value))
    summary = _message(1, value)
    time = _field(1, _DOUBLE, struct.pack("<d", one.time_s))
    return time + _field(2, _VARINT, _varint(one.step)) + _message(5, summary)


def _record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + _masked(length) + data + _masked(data)


def _masked(data: bytes) -> bytes:
    crc = _crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF)


def _crc32c(data: bytes) -> int:
    table, crc = _table(), 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


@cache
def _table() -> tuple[int, ...]:
    rows = []
    for number in range(256):
        for _ in range(8):
            number = number >> 1 ^ _POLYNOMIAL if number & 1 else number >> 1
        rows.append(number)
    return tuple(rows)


def _field(number: int, kind: int, data: bytes) -> bytes:
    return _varint(number << 3 | kind) + data


def _message(number: int, data: bytes) -> bytes:
    return _field(number, _BYTES, _varint(len(data)) + data)


def _string(number: int, text: str) -> bytes:
    return _message(number, text.encode())


def _varint(number: int) -> bytes:
    parts = []
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*parts, number])
