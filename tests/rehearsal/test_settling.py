"""Runs under sync ``auto`` over slow links: what they settle for, where they end, how they go on when interrupted."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hetopt.backends.emulation.backend import RehearsalLauncher
from hetopt.backends.emulation.description import parse_hosts
from hetopt.core.events.log import Event, read_events
from hetopt.core.run_spec import RunSpec, StopRule, WorkerSpec
from hetopt.core.run_status import RunState
from hetopt.core.scaled_emulation import DeclaredTime, ScaledEmulation
from hetopt.core.synchronization import Injection, Synchronization
from tests.face.conftest import until

TOY = Path(__file__).resolve().parent.parent / "trainer" / "toy_task.py"
STEPS, BEFORE_THE_END = 80, 60


def settling(hosts: str, *, steps: int = STEPS, declared: DeclaredTime | None = None) -> RunSpec:
    """Workers of a model of 1.3 MB. Samples are handed on, so no twins say that thin gradients do no harm."""
    described = parse_hosts(hosts)
    return RunSpec(
        task=f"{TOY}:wide",
        workers=tuple(
            WorkerSpec(host=host.name, type="toy", local_batch_size=4, declared=declared) for host in described
        ),
        injection=Injection(),
        batch_policy="static",
        ratio_policy="auto",
        collective_policy="cheapest",
        sync=Synchronization(name="auto"),
        learning_rate_scale=0.2,
        stop=StopRule(max_steps=steps),
        control_period_steps=5,
        evaluate_every_epochs=100,
        miniature=ScaledEmulation(hosts=tuple(described)),
    )


def trained(spec: RunSpec, run_dir: Path) -> list[Event]:
    launcher = RehearsalLauncher()
    handle = launcher.start(spec, run_dir, {})
    until(lambda: launcher.poll(handle).state.is_over)
    assert launcher.poll(handle).state == RunState.FINISHED
    return read_events(run_dir / "events.jsonl")


def only(events: list[Event], name: str) -> list[Event]:
    return [event for event in events if event["event"] == name]


@pytest.mark.slow
def test_over_slow_links_parameters_are_averaged_and_the_run_takes_longer(box: None, tmp_path: Path) -> None:
    events = trained(settling("rate=40mbit x3"), tmp_path)
    (settled,) = only(events, "sync_settled")
    begun, last = settled["step"], events[-1]
    assert last["event"] == "training_finished"
    expected = begun + (STEPS - begun) * settled["stretch"]
    assert last["step"] == pytest.approx(expected, abs=1)
    assert settled["stop"] == {"max_steps": last["step"], "target": False}
    steps = only(events, "step")
    assert all(("sync" in event) == (event["step"] > begun) for event in steps)
    averaged = sum(event["sync"]["synchronised"] for event in steps if "sync" in event)
    assert settled["fragments"] == settled["every_steps"]
    # The fragment that leaves last is on its way when the run ends.
    assert averaged == (last["step"] - begun - 1) // settled["every_steps"]
    assert begun < 20
    assert only(events, "exchange_changed")[-1]["after"].startswith(settled["compressor"]), (
        "all that was held back goes first"
    )


@pytest.mark.slow
def test_over_quick_links_every_gradient_is_summed_to_the_end(box: None, tmp_path: Path) -> None:
    declared = DeclaredTime(fixed_s=0.2, per_sample_s=0.001)
    events = trained(settling("rate=4gbit x3", steps=40, declared=declared), tmp_path)
    assert not only(events, "sync_settled")
    assert events[-1]["step"] == 40
    assert all("sync" not in event for event in only(events, "step"))


@pytest.mark.parametrize("workers", [pytest.param(3, marks=pytest.mark.slow), 1])
@pytest.mark.slow
def test_a_run_that_has_settled_goes_on_with_averages_when_it_is_resumed(
    box: None, settled_before: Path, tmp_path: Path, workers: int
) -> None:
    """To the step at which it would have ended uninterrupted; a worker that goes on alone averages with nobody."""
    run_dir = tmp_path / "run"
    shutil.copytree(settled_before, run_dir)
    events = trained(settling(f"rate=40mbit x{workers}"), run_dir)
    (settled,) = only(events, "sync_settled")
    assert events[-1]["step"] == pytest.approx(settled["step"] + (STEPS - settled["step"]) * settled["stretch"], abs=1)
    again = events[max(place for place, event in enumerate(events) if event["event"] == "run_started") :]
    assert {"sync" in event for event in only(again, "step")} == {workers > 1}


@pytest.fixture(scope="module")
def settled_before(_possible: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that has settled, and ended early."""
    folder = tmp_path_factory.mktemp("settled")
    assert only(trained(settling("rate=40mbit x3", steps=BEFORE_THE_END), folder), "sync_settled")
    return folder
