"""A run over time as a person reads it in a terminal: a row a worker, a column a moment, what happened below."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hetopt.optimizer import words
from hetopt.optimizer.timeline import Happening, Moment, Timeline

COLUMNS = 60
FEWEST_COLUMNS = 16
BLOCKS = "▁▂▃▄▅▆▇█"
SHOWN_WORKERS = 16
SHOWN_HAPPENINGS = 9
"""As many as have a digit of their own."""
SHARES_MARK = "s"
SEVERAL_MARK = "*"


@dataclass(frozen=True, kw_only=True)
class _Quantity:
    title: str
    of: Callable[[Moment], Sequence[float]]
    say: words.Say


_QUANTITIES = (
    _Quantity(title="share (samples of a step)", of=lambda moment: moment.local_batch_sizes, say=words.count),
    _Quantity(title="computing (in a step)", of=lambda moment: moment.compute_s, say=words.duration),
    _Quantity(title="waiting for the slowest (in a step)", of=lambda moment: moment.wait_s, say=words.duration),
)


def draw(told: Timeline, hosts: Sequence[str], width: int) -> list[str]:
    """The lines of the chart, none longer than ``width``; none at all for a run that has not been through a step.

    Bars start at zero, and those of one quantity share their scale, so that workers can be compared. A gap is time in
    which the run did something else than stepping.

    Args:
        told: the run.
        hosts: where the workers are, in rank order.
        width: of the terminal, characters.
    """
    if not told.moments:
        return []
    shown = min(len(hosts), SHOWN_WORKERS)
    labels = _labels(hosts)[:shown]
    name_width = max(map(len, labels))
    ranges = [[_range(quantity, told.moments, rank) for rank in range(shown)] for quantity in _QUANTITIES]
    number_width = max(len(text) for row in ranges for text in row)
    columns = max(FEWEST_COLUMNS, min(COLUMNS, width - 2 - name_width - 1 - 2 - number_width))
    end_s = max(told.moments[-1].end_s, 1e-9)
    lines: list[str] = []
    for quantity, numbers in zip(_QUANTITIES, ranges, strict=True):
        lines.append(quantity.title)
        # Workers beyond those that are shown count too, or a bar would say another thing than it seems to.
        largest = max(max(quantity.of(moment)) for moment in told.moments)
        for rank, (label, text) in enumerate(zip(labels, numbers, strict=True)):
            bars = _bars(quantity, told.moments, rank, columns, end_s, largest)
            lines.append(f"  {label:<{name_width}} {bars}  {text:>{number_width}}")
    margin = " " * (2 + name_width + 1)
    if told.happenings:
        lines.append(f"{margin}{_marks(told.happenings, columns, end_s)}".rstrip())
    start, end = "0 s", f"{words.duration(end_s)}, step {words.count(told.moments[-1].step)}"
    lines.append(f"{margin}{start}{end:>{max(columns - len(start), len(end) + 1)}}")
    if len(hosts) > shown:
        lines.append(f"{len(hosts) - shown} more workers are in the report's JSON form (--json)")
    return lines


def explain(told: Timeline) -> list[tuple[str, str]]:
    """A sentence for each mark of the chart, behind its mark, in order of time; share changes come last, as one."""
    numbered = _numbered(told.happenings)
    found = [(mark, f"{_when(one)}: {one.sentence}") for one, mark in zip(numbered, _digits(), strict=False)]
    if len(numbered) > SHOWN_HAPPENINGS:
        more = len(numbered) - SHOWN_HAPPENINGS
        found.append((SEVERAL_MARK, f"and {more} more, in the report's JSON form (--json)"))
    shares = [one for one in told.happenings if one.kind == "shares_changed"]
    if shares:
        times = "" if len(shares) == 1 else f" {len(shares)} times, last"
        found.append((SHARES_MARK, f"shares changed{times} {_when(shares[-1])}: {shares[-1].text}"))
    return found


def _labels(hosts: Sequence[str]) -> list[str]:
    """The host of each worker, and which of its workers it is where it has several."""
    return [host if hosts.count(host) == 1 else f"{host}/{hosts[:rank].count(host)}" for rank, host in enumerate(hosts)]


def _range(quantity: _Quantity, moments: Sequence[Moment], rank: int) -> str:
    values = [quantity.of(moment)[rank] for moment in moments]
    low, high = quantity.say(min(values)), quantity.say(max(values))
    return low if low == high else f"{low} – {high}"


def _bars(quantity: _Quantity, moments: Sequence[Moment], rank: int, columns: int, end_s: float, largest: float) -> str:
    """One character a column: the mean over the steps in it, weighed by the time that they take up of it."""
    text = ""
    for column in range(columns):
        begin, end = column * end_s / columns, (column + 1) * end_s / columns
        weights = [max(0.0, min(moment.end_s, end) - max(moment.begin_s, begin)) for moment in moments]
        total = sum(weights)
        if total <= 0:
            text += " "
            continue
        mean = sum(weight * quantity.of(m)[rank] for weight, m in zip(weights, moments, strict=True)) / total
        level = int(mean / largest * len(BLOCKS)) if largest > 0 else 0
        text += BLOCKS[min(level, len(BLOCKS) - 1)]
    return text


def _marks(happenings: Sequence[Happening], columns: int, end_s: float) -> str:
    marks = [" "] * columns

    def put(happening: Happening, mark: str) -> None:
        column = min(columns - 1, max(0, int(happening.time_s / end_s * columns)))
        taken = marks[column] not in (" ", SHARES_MARK)
        marks[column] = SEVERAL_MARK if taken else mark

    for happening in happenings:
        if happening.kind == "shares_changed":
            put(happening, SHARES_MARK)
    for happening, mark in zip(_numbered(happenings), _digits(endless=True), strict=False):
        put(happening, mark)
    return "".join(marks)


def _numbered(happenings: Sequence[Happening]) -> list[Happening]:
    return [happening for happening in happenings if happening.kind != "shares_changed"]


def _digits(*, endless: bool = False) -> Iterator[str]:
    yield from (str(number) for number in range(1, SHOWN_HAPPENINGS + 1))
    while endless:
        yield SEVERAL_MARK


def _when(happening: Happening) -> str:
    return f"at {words.duration(max(0.0, happening.time_s))} (step {words.count(happening.step or 0)})"
