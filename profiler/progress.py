"""How far a probe has come, told from its event log so far: a line for people and the share that is done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from hetopt.core.run_spec import ProbeSchedule
from hetopt.profiler import records as m
from hetopt.profiler.schedule import LATER_PASSES, PILOT_SHARE, SWEEP_SHARE

Event = Mapping[str, object]

FACTS_SHARE = 0.05

SHOWN: Mapping[object, tuple[str, float]] = MappingProxyType(
    {
        m.STARTED: ("looking at the model and the host", 0.0),
        m.JOB_FACTS: ("", FACTS_SHARE),
        m.SweepPoint.EVENT: ("step time at batch {local_batch_size}", FACTS_SHARE),
        m.CompressorPoint.EVENT: ("compressing with {name}", FACTS_SHARE),
        m.EvaluationCost.EVENT: ("evaluation", FACTS_SHARE),
        m.LinkPoint.EVENT: ("{collective} of {payload_bytes:,} bytes", SWEEP_SHARE),
        m.PilotStarted.EVENT: ("pilot at batch {global_batch_size}", 1 - PILOT_SHARE),
        m.PilotEvaluation.EVENT: ("pilot: {metric:.4g} after {epoch:.3g} epochs", 1 - PILOT_SHARE),
        m.FINISHED: ("done", 1.0),
    }
)
"""By event: what is shown of its fields ("" leaves what is shown), and the share of a probe that is over by then."""


def progress(events: Sequence[Event], schedule: ProbeSchedule) -> tuple[str, float]:
    """Return what a probe is doing, and the share that is done, which never falls; unknown events are passed over."""
    text, done = "starting workers", 0.0
    # Points and pilots may be left out, so that these shares are the most that each brings.
    sizes = (1 + LATER_PASSES) * sum(len(sweep.local_batch_sizes) for sweep in schedule.sweeps)
    brings = {
        m.SweepPoint.EVENT: (SWEEP_SHARE - FACTS_SHARE) / max(1, sizes),
        m.PilotFinished.EVENT: PILOT_SHARE / max(1, len(schedule.pilots)),
    }
    for event in events:
        shown, least = SHOWN.get(event.get("event"), ("", 0.0))
        text = shown.format_map(event) or text
        done = max(done, least) + brings.get(str(event.get("event")), 0.0)
    return text, min(done, 1.0)
