"""The newest figures of a run in Prometheus' text format, version 0.0.4."""

from __future__ import annotations

from collections.abc import Iterable

from hetopt.optimizer.reports.scalars import HELP, Scalar

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "hetopt_"


def exposition(figures: Iterable[Scalar], *, run: str) -> str:
    """The text of the newest value of every figure, with ``run`` as a label of all."""
    newest = {(one.name, one.labels): one for one in figures}
    lines = []
    for name, said in HELP.items():
        values = [one for one in newest.values() if one.name == name]
        if values:
            lines.append(f"# HELP {PREFIX}{name} {said}")
            lines.append(f"# TYPE {PREFIX}{name} {'counter' if name.endswith('_total') else 'gauge'}")
        for one in values:
            labels = ",".join(f'{label}="{_escaped(value)}"' for label, value in (("run", run), *one.labels))
            lines.append(f"{PREFIX}{name}{{{labels}}} {one.value!r}")
    return "\n".join(lines) + "\n"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
