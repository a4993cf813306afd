"""The newest figures of a run in Prometheus' text format, version 0.0.4."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from hetopt.core.events.records import LogEvent, RunStarted
from hetopt.reports.scalars import HELP, OF_A_WORKER, ScalarMaker

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "hetopt_"


@dataclass(kw_only=True)
class Newest:
    """The newest value of every figure of a run, as its events come in.

    Attributes:
        figures: by name and labels.
    """

    figures: dict[tuple[str, tuple[tuple[str, str], ...]], float] = field(default_factory=dict)
    _maker: ScalarMaker = field(default_factory=ScalarMaker)

    def take(self, events: Iterable[LogEvent]) -> None:
        """Go on with more events. Workers that train no more have no figures of a step."""
        for event in events:
            if isinstance(event, RunStarted):
                self.figures = {key: value for key, value in self.figures.items() if key[0] not in OF_A_WORKER}
            for one in self._maker.take(event):
                self.figures[one.name, one.labels] = one.value


def exposition(newest: Newest, *, run: str, unread: int = 0) -> str:
    """The text of the newest value of every figure, with ``run`` as a label of all.

    Args:
        newest: the figures.
        run: its name.
        unread: lines of the log that could not be read.
    """
    figures = {("lost_steps_total", ()): 0.0, **newest.figures, ("unread_lines_total", ()): float(unread)}
    lines = []
    for name, said in HELP.items():
        values = {labels: value for (of, labels), value in figures.items() if of == name}
        if values:
            lines.append(f"# HELP {PREFIX}{name} {said}")
            lines.append(f"# TYPE {PREFIX}{name} {'counter' if name.endswith('_total') else 'gauge'}")
        for own, value in values.items():
            labels = ",".join(f'{label}="{_escaped(text)}"' for label, text in (("run", run), *own))
            lines.append(f"{PREFIX}{name}{{{labels}}} {value!r}")
    return "\n".join(lines) + "\n"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
