"""What a host sees of the run's objects is what is there, and no frame leads out of the folder."""

from __future__ import annotations

import itertools
import json
import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given, strategies as st
from pydantic import ValidationError

from hetopt.backends.backend import MOST_IDLE, back_off_s, is_given_up
from hetopt.backends.host.protocol import OUTCOME_OBJECT, Placements, outcome_json
from hetopt.backends.ssh import conductor
from hetopt.backends.ssh.checking import INVENTORY_FILE, Inventory
from hetopt.backends.ssh.objects import (
    MODELS,
    OBJECTS,
    Connection,
    Cut,
    FolderObjects,
    Place,
    RemoteObjects,
    Request,
    What,
    answer,
    check_allowed,
    frame,
    read_frame,
)
from hetopt.core.artifact import read_words
from hetopt.core.budget_law import PLACEMENT_OBJECT
from hetopt.core.errors import BadInput, RunFailed
from hetopt.core.events.log import EVENTS_FILE, EventLog
from hetopt.core.hosts import Host
from hetopt.core.interruption import StopSignal
from hetopt.core.run_folder import write_spec
from hetopt.core.run_spec import RunSpec
from tests.face.conftest import until
from tests.trainer.scenarios import toy_spec


@contextmanager
def seen_from_afar(folder: Path) -> Iterator[RemoteObjects]:
    """A folder's objects through a pair of sockets, as a host has them."""
    ours, theirs = socket.socketpair()
    objects = FolderObjects(folder=folder)

    def serve() -> None:
        with ours, ours.makefile("rb") as stream:
            while (asked := read_frame(stream.read)) is not None:
                ours.sendall(frame(*answer(objects, read_words(Request, asked[0], "host"), asked[1])))

    thread = threading.Thread(target=serve)
    thread.start()
    with theirs:
        yield RemoteObjects(connection=Connection(incoming=theirs.fileno(), outgoing=theirs.fileno()), place=OBJECTS)
    thread.join()


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["put", "delete", "put_over"]), st.sampled_from(["a", "b/c", "b/d"]), st.binary(max_size=99)
        ),
        max_size=12,
    )
)
def test_both_ends_see_the_same(changes: list[tuple[str, str, bytes]]) -> None:
    with tempfile.TemporaryDirectory() as there, tempfile.TemporaryDirectory() as here:
        model = FolderObjects(folder=Path(here))
        with seen_from_afar(Path(there)) as remote:
            for what, name, data in changes:
                for objects in (model, remote):
                    if what == "put":
                        assert objects.put(name, data)
                    elif what == "delete":
                        objects.delete(name)
                    else:
                        found = objects.versioned(name)
                        assert objects.put_over(name, data, None if found is None else found.version)
                        assert not objects.put_over(name, data, "another version")
                assert remote.get(name) == model.get(name)
            assert list(remote.names("")) == list(model.names(""))
            assert list(remote.names("b/")) == list(model.names("b/"))


@pytest.mark.parametrize("size", [0, 1, 5_000_000])
def test_a_file_arrives_whole(tmp_path: Path, size: int) -> None:
    source, back = tmp_path / "source", tmp_path / "back"
    source.write_bytes(os.urandom(size))
    (tmp_path / "objects").mkdir()
    with seen_from_afar(tmp_path / "objects") as remote:
        assert remote.send("ckpt/step-1/rank-0.safetensors", source)
        assert remote.fetch("ckpt/step-1/rank-0.safetensors", back)
        assert not remote.fetch("ckpt/step-2/rank-0.safetensors", tmp_path / "none")
    assert back.read_bytes() == source.read_bytes()
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/../../b", "", "a\0b"])
def test_no_name_leads_out(tmp_path: Path, name: str) -> None:
    for what in ("delete", "put_part", "part"):
        with pytest.raises((BadInput, ValidationError)):
            answer(FolderObjects(folder=tmp_path), Request(what=what, name=name, last=True), b"x")


@pytest.mark.parametrize(
    ("what", "place", "name", "fine"),
    [
        ("part", OBJECTS, "placement.json", True),
        ("put_part", OBJECTS, "placement.json", False),
        ("put_part", OBJECTS, "lease.json", False),
        ("put_part", OBJECTS, "state/i-0.json", True),
        ("put_over", OBJECTS, "ckpt/LATEST", True),
        ("put_part", OBJECTS, "outcome.json", True),
        ("put_part", MODELS, "model.safetensors", True),
        ("put_part", MODELS, "outputs/plots/loss.png", True),
        ("put_part", MODELS, "launch.json", False),
        ("put_part", MODELS, "spec.json", False),
        ("part", MODELS, "inventory.json", False),
        ("names", MODELS, "", False),
    ],
)
def test_a_host_steers_nothing_and_reads_only_the_run(what: What, place: Place, name: str, fine: bool) -> None:
    request = Request(what=what, place=place, name=name)
    if fine:
        check_allowed(request)
    else:
        with pytest.raises(BadInput, match="a host must not"):
            check_allowed(request)


def test_whoever_is_not_answered_has_nothing_left_to_do() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        silent = Connection(incoming=theirs.fileno(), outgoing=theirs.fileno(), silence_s=0.05)
        with pytest.raises(Cut):
            silent.ask(Request(what="part", name="a"))
        ours.close()
        with pytest.raises(Cut):
            Connection(incoming=theirs.fileno(), outgoing=theirs.fileno()).ask(Request(what="part", name="a"))


# A host that ends whenever it is placed is given up after some placements, each later than the one before.

STEP = {
    "step": 1, "steps": 1, "step_time_s": 0.1, "local_batch_sizes": [5], "compute_s": [0.1], "sync_s": [0.0],
    "wait_s": [0.0], "epoch": 0.1, "samples_seen": 8, "loss": 1.0,
}  # fmt: skip


@dataclass(kw_only=True)
class Crashing:
    """Stands in for a `Part`; of each placement its host makes the next of "crashes", "steps" (and crashes), "ends"."""

    lives: ClassVar[dict[str, list[str]]] = {}
    placed_s: ClassVar[dict[str, list[float]]] = {}

    host: Host
    link: Any
    objects: Any
    errors: Path
    models: Any = None
    lock: threading.Lock
    wrote: Any = None
    heard_s: float = field(default_factory=time.monotonic)
    is_over: bool = False
    _seen: bytes | None = None

    def take_part(self, *part: object) -> None:
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

    def complaint(self) -> str:
        return ""

    def end(self) -> None:
        self.is_over = True

    cut = end


def conduct(run_dir: Path, monkeypatch: pytest.MonkeyPatch, lives: dict[str, list[str]]) -> int:
    monkeypatch.setattr(conductor, "Part", Crashing)
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
    log = tmp_path / EVENTS_FILE
    until(lambda: log.exists() and "the run goes on without it" in log.read_text(), run.is_alive)
    time.sleep(0.5)
    Crashing.lives["a"].append("ends")
    run.join(60)
    assert not run.is_alive()
    assert len(Crashing.placed_s["b"]) == MOST_IDLE


@given(idle=st.integers(0, 100), first_s=st.floats(0.1, 60.0))
def test_who_is_not_given_up_waits_longer_each_time(idle: int, first_s: float) -> None:
    assert is_given_up(idle + 1) >= is_given_up(idle)
    assert is_given_up(idle) or back_off_s(first_s, idle + 1) == 2 * back_off_s(first_s, idle)
