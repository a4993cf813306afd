"""The newest figures of runs in Prometheus' text format, version 0.0.4."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from hetopt.core.events.fold import RunFold

PREFIX = "hetopt_"

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
"""What each name means; units end it."""

Figure = tuple[str, float, tuple[tuple[str, str], ...]]
"""Name, value and labels."""


def exposition(runs: Iterable[tuple[str, RunFold, int]]) -> str:
    """Return Prometheus' text of the newest value of every figure, with the run as a label of all.

    Workers that train no more have no figures of a step.

    Args:
        runs: of each its name, what it has come to, and how many lines of its log could not be read.
    """
    figures = [(name, *figure) for name, run, unread in runs for figure in _newest(run, unread)]
    lines = []
    for of, said in HELP.items():
        named = [(run, value, labels) for run, name, value, labels in figures if name == of]
        if named:
            lines.append(f"# HELP {PREFIX}{of} {said}")
            lines.append(f"# TYPE {PREFIX}{of} {'counter' if of.endswith('_total') else 'gauge'}")
        for run, value, labels in named:
            told = ",".join(f'{label}="{_escaped(text)}"' for label, text in (("run", run), *labels))
            lines.append(f"{PREFIX}{of}{{{told}}} {float(value)!r}")
    return "".join(f"{line}\n" for line in lines)


def _newest(run: RunFold, unread: int) -> Iterator[Figure]:
    """Yield the figures of a run; a worker keeps its number, whoever else comes and goes."""
    event = run.latest
    if event is not None:
        yield "loss", event.loss, ()
        yield "steps_total", event.step, ()
        yield "epochs", event.epoch, ()
        yield "step_time_seconds", event.step_time_s, ()
        workers = [(("worker", str(place)), ("host", run.roster.workers[place].host)) for place in run.latest_places]
        for name, values in (
            ("local_batch_size", event.local_batch_sizes),
            ("compute_seconds", event.compute_s),
            ("wait_seconds", event.wait_s),
        ):
            for labels, value in zip(workers, values, strict=False):  # no workers: others have come since
                yield name, value, labels
        if event.exchange is not None:
            yield "exchange_ratio", event.exchange.ratio, ()
            yield "exchange_gain", event.exchange.gain, ()
            yield "sent_bytes", event.exchange.sent_bytes, ()
    for metric, value in run.metrics.items():
        yield "metric", value, (("name", metric),)
    yield "lost_steps_total", run.lost_steps, ()
    yield "unread_lines_total", unread, ()


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
