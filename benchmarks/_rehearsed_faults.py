"""Seeded faults of whole hosts and their links: runs of three hosts in namespaces, one fault after the other.

A host dies with the store that it holds and comes back, is cut off and heals, becomes ten times slower for a while, or
is taken after a notice. Faults do not overlap: with one host dead and another cut off, nobody may go on, and a moment
that is given by a step would not come.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

from hetopt.backends.emulation.backend import RehearsalLauncher
from hetopt.backends.emulation.description import parse_changes
from hetopt.core.events.log import EVENTS_FILE, Event, read_events
from hetopt.core.run_spec import RunSpec
from hetopt.core.run_status import RunState

HOSTS, STEPS, BATCH = ("h0", "h1", "h2"), 120, 96
_KINDS = {
    "dies": ("step {0} {2} dies", "step {1} {2} returns"),
    "cut": ("step {0} {2} cut", "step {1} {2} heals"),
    "slow": ("step {0} {2} speed=0.1", "step {1} {2} speed=1"),
    "notice": ("step {0} {2} notice", "step {1} {2} dies", "step {3} {2} returns"),
}
_WINDOWS = ((10, 40), (60, 90))
_PATIENCE_S = 240.0


def schedule(seed: int) -> tuple[str, ...]:
    """The lines of a seed's schedule; without one nothing happens."""
    draw = random.Random(seed)
    lines: list[str] = []
    for first, last in _WINDOWS[: draw.randint(1, 2)]:
        begins = draw.randint(first, first + 10)
        ends = draw.randint(begins + 5, last - 5)
        texts, host = _KINDS[draw.choice(sorted(_KINDS))], draw.choice(HOSTS)
        lines += [text.format(begins, ends, host, ends + 5) for text in texts]
    return tuple(lines)


def run(folder: Path, wish: dict[str, Any], lines: tuple[str, ...]) -> tuple[RunState, list[Event]]:
    """How a run ended with these changes, and its log.

    Args:
        folder: of the run; it exists.
        wish: a spec for one host, of which there will be three.
        lines: of the schedule.
    """
    worker, *_ = wish["workers"]
    hosts = [{**worker, "host": name, "local_batch_size": BATCH // len(HOSTS)} for name in HOSTS]
    changes = [change.model_dump(mode="json") for change in parse_changes("\n".join(lines), HOSTS)]
    miniature = {"hosts": [{"name": name} for name in HOSTS], "changes": changes}
    spec = {**wish, "workers": hosts, "stop": {"max_steps": STEPS}, "miniature": miniature, "exchange_timeout_s": 10.0}
    launcher = RehearsalLauncher(grace_s=5.0)
    handle = launcher.start(RunSpec.model_validate(spec), folder, {})
    try:
        deadline_s = time.monotonic() + _PATIENCE_S
        while not (status := launcher.poll(handle)).state.is_over and time.monotonic() < deadline_s:
            time.sleep(0.1)
    finally:
        launcher.stop(handle)
    return status.state, read_events(folder / EVENTS_FILE)


def wrong(state: RunState, events: list[Event], calm_accuracy: float, spread: float) -> str | None:
    """What a run did not keep of what is promised; None: it kept all."""
    if state is not RunState.FINISHED:
        return f"ended {state.value}"
    steps = [event for event in events if event["event"] == "step"]
    told = [event["step"] for event in steps]
    if told != sorted(set(told)) or told[-1] != STEPS:
        return f"told of the steps {told}"
    if any(sum(event["local_batch_sizes"]) != BATCH for event in steps):
        return "trained other samples than the batch's"
    difference = abs(accuracy(events) - calm_accuracy)
    return f"ended with an accuracy that differs by {difference:.3f}" if difference > spread else None


def accuracy(events: list[Event]) -> float:
    """At the end of a run that has finished."""
    last = [event for event in events if event["event"] == "training_finished"][-1]
    return float(last["metrics"]["accuracy"])
