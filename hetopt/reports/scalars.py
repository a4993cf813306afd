"""The figures of a run that other tools draw: one list of names for TensorBoard and Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from hetopt.core.events.records import Evaluated, LogEvent, RunStarted, StepsLogged, TrainingStarted, WorkersChanged
from hetopt.reports.sessions import Roster


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


OF_A_WORKER = ("local_batch_size", "compute_seconds", "wait_seconds")
"""Figures that a worker has only while it trains."""


def scalars(events: Iterable[LogEvent]) -> Iterator[Scalar]:
    """The figures of a run's events, in order."""
    making = ScalarMaker()
    for event in events:
        yield from making.take(event)


@dataclass(kw_only=True)
class ScalarMaker:
    """Turns events into figures, one after the other.

    Attributes:
        roster: of the workers so far; a worker keeps its number, whoever else comes and goes.
        step: the last one done.
        lost_steps: that were done again.
    """

    roster: Roster = field(default_factory=Roster)
    step: int = 0
    lost_steps: int = 0

    def take(self, event: LogEvent) -> Iterator[Scalar]:
        """The figures of one more event."""
        match event:
            case RunStarted():
                self.roster.take(event)
            case TrainingStarted() | WorkersChanged():
                lost, self.step = max(0, self.step - event.step), event.step
                if lost:
                    self.lost_steps += lost
                    yield Scalar(name="lost_steps_total", value=self.lost_steps, step=event.step, time_s=event.time_s)
            case StepsLogged():
                self.step = event.step
                yield from self._of_steps(event)
            case Evaluated():
                for name, value in event.metrics.items():
                    yield Scalar(
                        name="metric", value=value, step=event.step, time_s=event.time_s, labels=(("name", name),)
                    )

    def _of_steps(self, event: StepsLogged) -> Iterator[Scalar]:
        def scalar(name: str, value: float, *labels: tuple[str, str]) -> Scalar:
            return Scalar(name=name, value=float(value), step=event.step, time_s=event.time_s, labels=labels)

        yield scalar("loss", event.loss)
        yield scalar("steps_total", event.step)
        yield scalar("epochs", event.epoch)
        yield scalar("step_time_seconds", event.step_time_s)
        places = self.roster.places(len(event.compute_s))
        for name, values in zip(OF_A_WORKER, (event.local_batch_sizes, event.compute_s, event.wait_s), strict=True):
            for place, value in zip(places, values, strict=True):
                host = self.roster.workers[place].host
                yield scalar(name, value, ("worker", str(place)), ("host", host))
        if event.exchange is not None:
            yield scalar("exchange_ratio", event.exchange.ratio)
            yield scalar("exchange_gain", event.exchange.gain)
            yield scalar("sent_bytes", event.exchange.sent_bytes)
