"""Step times from elsewhere: read (JSON Lines), checked, and written as an artifact."""

from __future__ import annotations

import datetime
from importlib.metadata import version
from pathlib import Path

from hetopt.api.catalogs import in_use
from hetopt.api.planning import remarks
from hetopt.cli import lines, parse, render, terminal
from hetopt.core import formatting
from hetopt.core.step_samples import StepSample, StepSamples, read_samples
from hetopt.reports.document import Facts


def read_file(source: Path) -> tuple[StepSample, ...]:
    """The step samples of a file (JSON Lines, ``-`` for standard input), checked."""
    with lines.opened(source, "--from-samples") as (rows, _):
        return read_samples(rows, origin="standard input" if str(source) == "-" else str(source))


def import_samples(source: Path, output: Path | None, *, force: bool, json_: bool) -> None:
    """Read step samples (JSON Lines, ``-`` for standard input), check them, and write them as an artifact."""
    parse.ready_to_write(output, force=force)
    samples = read_file(source)
    imported = StepSamples(
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        hetopt_version=version("hetopt"),
        source=source.name,
        samples=samples,
    )
    if output is not None:
        imported.save(output)
        render.note(f"wrote {output}")
    for remark in remarks(samples, in_use().catalog.instance_types):
        render.note(remark)
    if json_:
        terminal.write(imported.to_json())
        return
    layouts = {sample.layout for sample in samples}
    types = sorted({node.type for sample in samples for node in sample.nodes})
    sizes = [size for sample in samples for size in sample.batch_sizes]
    measured = f"{formatting.counted(len(samples), 'step time')} of {formatting.counted(len(layouts), 'layout')}"
    render.line(measured, style="strong")
    told = {
        "machine types": ", ".join(types),
        "nodes": f"up to {max(len(sample.nodes) for sample in samples)}",
        "workers": f"up to {max(sample.workers for sample in samples)}",
        "local batch": f"{min(sizes)} to {max(sizes)}",
    }
    render.show([Facts(told)])
