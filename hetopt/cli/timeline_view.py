"""A run over time as a person reads it in a terminal: a row a worker, a column a moment, what happened below."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from hetopt.core import formatting
from hetopt.reports.timeline import Exchanged, Happening, Kind, Moment, Timeline

COLUMNS = 60
FEWEST_COLUMNS = 16
BLOCKS = "▁▂▃▄▅▆▇█"
SHOWN_WORKERS = 16
SHOWN_HAPPENINGS = 9
"""As many as have a digit of their own."""
SEVERAL_MARK = "*"
EXCHANGE_TITLE = "communication (in a step; ratio and sent on a log scale)"


@dataclass(frozen=True, kw_only=True)
class _Letter:
    """What is routine has one letter for all its marks."""

    mark: str
    what: str


LETTERS: Mapping[Kind, _Letter] = MappingProxyType(
    {
        "shares_changed": _Letter(mark="s", what="local batch sizes"),
        "exchange_changed": _Letter(mark="x", what="compression"),
    }
)


@dataclass(frozen=True, kw_only=True)
class _Quantity:
    title: str
    of: Callable[[Moment], Sequence[float | None]]
    say: formatting.Say


_QUANTITIES = (
    _Quantity(title="local batch size (samples)", of=lambda moment: moment.local_batch_sizes, say=formatting.count),
    _Quantity(title="computing (in a step)", of=lambda moment: moment.compute_s, say=formatting.duration),
    _Quantity(title="straggler wait (in a step)", of=lambda moment: moment.wait_s, say=formatting.duration),
)


@dataclass(frozen=True, kw_only=True)
class _ExchangeRow:
    label: str
    of: Callable[[Exchanged], float]
    say: formatting.Say
    in_decades: bool = False
    dull: float | None = None


_EXCHANGE_ROWS = (
    _ExchangeRow(label="ratio", of=lambda one: one.ratio, say=formatting.share, in_decades=True, dull=1.0),
    _ExchangeRow(label="gain", of=lambda one: one.gain, say=formatting.share, dull=1.0),
    _ExchangeRow(label="sent", of=lambda one: one.sent_share, say=formatting.share, in_decades=True),
    _ExchangeRow(label="time", of=lambda one: one.time_s, say=formatting.duration),
)
"""Rows that stay at their dull value tell nothing, and are left out."""


@dataclass(frozen=True, kw_only=True)
class _Row:
    """One line of bars. A value a moment; None where there was none."""

    label: str
    values: Sequence[float | None]
    say: formatting.Say
    level: Callable[[float], int]

    @property
    def range(self) -> str:
        """Smallest and largest in words."""
        known = [value for value in self.values if value is not None]
        if not known:
            return ""
        low, high = self.say(min(known)), self.say(max(known))
        return low if low == high else f"{low} – {high}"


def draw(told: Timeline, hosts: Sequence[str], width: int) -> list[str]:
    """The lines of the chart, none longer than ``width``; none at all for a run that has not been through a step.

    Bars start at zero, and those of one quantity share their scale, so that workers can be compared. A gap is time in
    which the run did something else than stepping, or in which a worker was not there. The exchange is drawn where
    something was compressed.

    Args:
        told: the run.
        hosts: of all workers that ever trained, in the order of the moments' lists.
        width: of the terminal, characters.
    """
    if not told.moments:
        return []
    shown = min(len(hosts), SHOWN_WORKERS)
    sections = _sections(told.moments, _labels(hosts)[:shown])
    rows = [row for _, section in sections for row in section]
    name_width = max(len(row.label) for row in rows)
    number_width = max(len(row.range) for row in rows)
    columns = max(FEWEST_COLUMNS, min(COLUMNS, width - 2 - name_width - 1 - 2 - number_width))
    end_s = max(told.moments[-1].end_s, 1e-9)
    lines: list[str] = []
    for title, section in sections:
        lines.append(title)
        for row in section:
            bars = _bars(row, told.moments, columns, end_s)
            lines.append(f"  {row.label:<{name_width}} {bars}  {row.range:>{number_width}}")
    margin = " " * (2 + name_width + 1)
    if told.happenings:
        lines.append(f"{margin}{_marks(told.happenings, columns, end_s)}".rstrip())
    start, end = "0 s", f"{formatting.duration(end_s)}, step {formatting.count(told.moments[-1].step)}"
    lines.append(f"{margin}{start}{end:>{max(columns - len(start), len(end) + 1)}}")
    if len(hosts) > shown:
        lines.append(f"{formatting.counted(len(hosts) - shown, 'more worker')} in the report's JSON form (--json)")
    return lines


def explain(told: Timeline) -> list[tuple[str, str]]:
    """A sentence for each mark of the chart, behind its mark, in order of time; what is routine comes last, as one."""
    numbered = _numbered(told.happenings)
    found = [(mark, f"{_when(one)}: {one.sentence}") for one, mark in zip(numbered, _digits(), strict=False)]
    if len(numbered) > SHOWN_HAPPENINGS:
        more = len(numbered) - SHOWN_HAPPENINGS
        found.append((SEVERAL_MARK, f"and {more} more, in the report's JSON form (--json)"))
    for kind, letter in LETTERS.items():
        changes = [one for one in told.happenings if one.kind == kind]
        if changes:
            times = "" if len(changes) == 1 else f" {len(changes)} times, last"
            last = changes[-1].text.removeprefix(f"{letter.what} ")
            found.append((letter.mark, f"{letter.what} changed{times} {_when(changes[-1])}: {last}"))
    return found


def _sections(moments: Sequence[Moment], labels: Sequence[str]) -> list[tuple[str, list[_Row]]]:
    """All rows of the chart under their titles."""
    sections = []
    for quantity in _QUANTITIES:
        # Workers beyond those that are shown count too, or a bar would say another thing than it seems to.
        known = [value for moment in moments for value in quantity.of(moment) if value is not None]
        level = _of_largest(max(known, default=0.0))
        rows = [
            _Row(label=label, values=[quantity.of(moment)[place] for moment in moments], say=quantity.say, level=level)
            for place, label in enumerate(labels)
        ]
        sections.append((quantity.title, rows))
    exchanges = [moment.exchange for moment in moments]
    told = [one for one in exchanges if one is not None]
    if any(one.sent_bytes != one.dense_bytes or _differ(one.gain, 1.0) for one in told):
        rows = []
        for wanted in _EXCHANGE_ROWS:
            values = [wanted.of(one) for one in told]
            if wanted.dull is None or any(_differ(value, wanted.dull) for value in values):
                level = _in_decades if wanted.in_decades else _of_largest(wanted.dull or max(values))
                each = [None if one is None else wanted.of(one) for one in exchanges]
                rows.append(_Row(label=wanted.label, values=each, say=wanted.say, level=level))
        sections.append((EXCHANGE_TITLE, rows))
    return sections


def _differ(value: float, dull: float) -> bool:
    """Whether a person would see that these are two values."""
    return abs(value - dull) > 1e-3


def _of_largest(largest: float) -> Callable[[float], int]:
    """Bars from zero to the largest value."""
    return lambda value: int(value / largest * len(BLOCKS)) if largest > 0 else 0


def _in_decades(value: float) -> int:
    """Two levels for a power of ten, down from all of it."""
    return len(BLOCKS) - 1 + math.floor(2 * math.log10(value) + 1e-9) if value > 0 else 0


def _labels(hosts: Sequence[str]) -> list[str]:
    """The host of each worker, and which of its workers it is where it has several."""
    return [host if hosts.count(host) == 1 else f"{host}/{hosts[:rank].count(host)}" for rank, host in enumerate(hosts)]


def _bars(row: _Row, moments: Sequence[Moment], columns: int, end_s: float) -> str:
    """One character a column: the mean over the steps in it, weighed by the time that they take up of it."""
    present = [(moment, value) for moment, value in zip(moments, row.values, strict=True) if value is not None]
    text = ""
    for column in range(columns):
        begin, end = column * end_s / columns, (column + 1) * end_s / columns
        weights = [max(0.0, min(moment.end_s, end) - max(moment.begin_s, begin)) for moment, _ in present]
        total = sum(weights)
        if total <= 0:
            text += " "
            continue
        mean = sum(weight * value for weight, (_, value) in zip(weights, present, strict=True)) / total
        text += BLOCKS[min(max(row.level(mean), 0), len(BLOCKS) - 1)]
    return text


def _marks(happenings: Sequence[Happening], columns: int, end_s: float) -> str:
    marks = [" "] * columns
    letters = {letter.mark for letter in LETTERS.values()}

    def put(happening: Happening, mark: str) -> None:
        column = min(columns - 1, max(0, int(happening.time_s / end_s * columns)))
        taken = marks[column] != " " and marks[column] not in letters
        marks[column] = SEVERAL_MARK if taken else mark

    for kind, letter in LETTERS.items():
        for happening in happenings:
            if happening.kind == kind:
                put(happening, letter.mark)
    for happening, mark in zip(_numbered(happenings), _digits(endless=True), strict=False):
        put(happening, mark)
    return "".join(marks)


def _numbered(happenings: Sequence[Happening]) -> list[Happening]:
    return [happening for happening in happenings if not happening.is_routine]


def _digits(*, endless: bool = False) -> Iterator[str]:
    yield from (str(number) for number in range(1, SHOWN_HAPPENINGS + 1))
    while endless:
        yield SEVERAL_MARK


def _when(happening: Happening) -> str:
    return f"at {formatting.duration(max(0.0, happening.time_s))} (step {formatting.count(happening.step or 0)})"
