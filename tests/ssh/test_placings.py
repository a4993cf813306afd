"""A host that ends whenever it is placed is given up after some placements, each later than the one before."""

from __future__ import annotations

import itertools
import json
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetopt.backends.backend import MOST_IDLE, back_off_s, is_given_up
from hetopt.backends.ec2.protocol import OUTCOME_OBJECT, Placements, outcome_json
from hetopt.backends.ssh import conductor
from hetopt.backends.ssh.checking import INVENTORY_FILE, Inventory
from hetopt.core.budget_law import PLACEMENT_OBJECT
from hetopt.core.errors import RunFailed
from hetopt.core.events.log import EVENTS_FILE, EventLog, read_log
from hetopt.core.events.records import ConditionChanged
from hetopt.core.hosts import Host
from hetopt.core.interruption import StopSignal
from hetopt.core.run_folder import write_spec
from hetopt.core.run_spec import RunSpec
from tests.trainer.scenarios import toy_spec

STEP = {
    "step": 1, "steps": 1, "step_time_s": 0.1, "local_batch_sizes": [5], "compute_s": [0.1], "sync_s": [0.0],
    "wait_s": [0.0], "epoch": 0.1, "samples_seen": 8, "loss": 1.0,
}  # fmt: skip


@dataclass(kw_only=True)
class Crashing:
    """Stands in for a `Link`; of each placement its host makes the next of "crashes", "steps" (and crashes), "ends"."""

    lives: ClassVar[dict[str, list[str]]] = {}
    placed_s: ClassVar[dict[str, list[float]]] = {}

    host: Host
    objects: Any
    errors: Path
    models: Any = None
    lock: threading.Lock
    wrote: Any = None
    heard_s: float = field(default_factory=time.monotonic)
    speaks: bool = True
    is_over: bool = False
    _seen: bytes | None = None

    def begin(self, part: object) -> None:
        threading.Thread(target=self._live, daemon=True).start()

    def _live(self) -> None:
        while not self.is_over:
            self.heard_s = time.monotonic()
            with self.lock:
                found = self.objects.get(PLACEMENT_OBJECT)
            placed = None if found is None else Placements.of_json(found)
            if placed is not None and self.host.name in {place.host for place in placed.hosts.values()}:
                if placed.pauses:
                    told = {"does": "ended with 0", "generation": placed.generation, "time_s": time.time()}
                    with self.lock:
                        self.wrote("state/any.json", json.dumps(told).encode())
                elif self.lives[self.host.name]:
                    self._take_part(self.lives[self.host.name].pop(0), placed.generation)
                    return
            time.sleep(0.01)

    def _take_part(self, life: str, generation: int) -> None:
        self.placed_s.setdefault(self.host.name, []).append(time.monotonic())
        self.errors.parent.mkdir(parents=True, exist_ok=True)
        self.errors.write_text("RuntimeError: the disk is on fire\n")
        if life == "steps":
            with self.lock:
                log = EventLog(self.objects.folder.parent / EVENTS_FILE)
                log.write("step", **STEP)
                log.close()
        if life == "ends":
            with self.lock:
                self.objects.put(OUTCOME_OBJECT, outcome_json(generation))
        self.is_over = True

    def end(self) -> None:
        self.is_over = True

    cut = end


def conduct(run_dir: Path, monkeypatch: pytest.MonkeyPatch, lives: dict[str, list[str]]) -> int:
    monkeypatch.setattr(conductor, "Link", Crashing)
    monkeypatch.setattr(conductor, "AGAIN_S", 0.2)
    monkeypatch.setattr(Crashing, "lives", lives)
    monkeypatch.setattr(Crashing, "placed_s", {})
    told = toy_spec(shares=(5, 3)[: len(lives)])
    for worker, name in zip(told["workers"], lives, strict=True):
        worker["host"] = name
    spec = RunSpec.model_validate_json(json.dumps(told))
    hosts = tuple(Host(name=name, address=name, private="127.0.0.1") for name in lives)
    write_spec(run_dir, spec)
    Inventory(hosts=hosts, bundle_sha256="0" * 64).save(run_dir / INVENTORY_FILE)
    (run_dir / conductor.BUNDLE_FILE).write_bytes(b"")
    return conductor.train(run_dir, StopSignal())


def test_a_host_that_crashes_whenever_it_is_placed_ends_the_run_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RunFailed, match=rf"placed {MOST_IDLE} times .* the disk is on fire"):
        conduct(tmp_path, monkeypatch, {"a": ["crashes"] * 99})
    placed_s = Crashing.placed_s["a"]
    assert len(placed_s) == MOST_IDLE
    waits = [after - before for before, after in itertools.pairwise(placed_s)]
    assert all(wait > back_off_s(conductor.AGAIN_S, idle) for idle, wait in enumerate(waits, start=1))


def test_a_step_between_crashes_is_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    between = ["crashes"] * (MOST_IDLE - 1)
    conduct(tmp_path, monkeypatch, {"a": [*between, "steps", *between, "ends"]})
    assert Crashing.lives["a"] == []


def test_the_others_go_on_without_a_host_that_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = threading.Thread(target=conduct, args=(tmp_path, monkeypatch, {"a": [], "b": ["crashes"] * 99}))
    run.start()
    deadline_s = time.monotonic() + 60
    said: list[str] = []
    while not said and time.monotonic() < deadline_s:
        events = read_log(tmp_path / EVENTS_FILE).events
        said = [event.reason for event in events if isinstance(event, ConditionChanged) and event.reason]
        time.sleep(0.05)
    assert "the run goes on without it" in said[0]
    time.sleep(0.5)
    Crashing.lives["a"].append("ends")
    run.join(60)
    assert not run.is_alive()
    assert len(Crashing.placed_s["b"]) == MOST_IDLE


@given(idle=st.integers(0, 100), first_s=st.floats(0.1, 60.0))
def test_who_is_not_given_up_waits_longer_each_time(idle: int, first_s: float) -> None:
    assert is_given_up(idle + 1) >= is_given_up(idle)
    assert is_given_up(idle) or back_off_s(first_s, idle + 1) == 2 * back_off_s(first_s, idle)
