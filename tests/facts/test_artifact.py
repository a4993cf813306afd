"""Artifacts survive the round trip, refuse what cannot be, and are written whole or not at all."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from hetopt.core.artifact import Artifact, write_atomically
from hetopt.core.errors import BadInput
from hetopt.core.events.records import StartedWorker
from hetopt.core.plain_text import fault_of
from hetopt.core.run_spec import WorkerSpec
from hetopt.reports.report import WorkerReport


class Cake(Artifact):
    KIND: ClassVar[str] = "cake"
    VERSION: ClassVar[int] = 3
    MADE_BY: ClassVar[str] = "bake"

    name: str
    mass_kg: float


PLAIN = st.text().filter(lambda text: fault_of(text) is None)


@given(PLAIN, st.floats(allow_nan=False, allow_infinity=False))
def test_round_trip(name: str, mass_kg: float) -> None:
    cake = Cake(name=name, mass_kg=mass_kg)
    assert Cake.from_json(cake.to_json(), origin="cake.json") == cake


def test_every_truncation_is_one_sentence() -> None:
    text = Cake(name="carrot", mass_kg=1.5).to_json().rstrip()
    for end in range(len(text)):
        with pytest.raises(BadInput, match=r"^cake\.json .*\.$") as caught:
            Cake.from_json(text[:end], origin="cake.json")
        assert "bake" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema_version": 4}, "written with cake schema 4; this hetopt reads up to 3"),
        ({"schema_version": 2}, "has cake schema 2, which this hetopt cannot read"),
        ({"schema_version": "new"}, "has cake schema 'new', which this hetopt cannot read"),
        ({"kind": "plan"}, "holds a plan, not a cake"),
        ({"kind": None}, "holds something else, not a cake"),
        ({"mass_kg": math.nan}, "mass_kg must be a finite number, got nan"),
        ({"mass_kg": "heavy"}, "mass_kg must be a valid number, got 'heavy'"),
        ({"colour": "red"}, "colour is no field of it"),
    ],
)
def test_edited_files_are_refused(change: dict[str, object], said: str) -> None:
    data = json.loads(Cake(name="carrot", mass_kg=1.5).to_json())
    with pytest.raises(BadInput) as caught:
        Cake.from_json(json.dumps(data | change), origin="cake.json")
    assert said in caught.value.message
    assert caught.value.exit_code == 2


def test_a_file_that_is_not_there_says_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"does not exist") as caught:
        Cake.load(tmp_path / "none.json")
    assert caught.value.hint == "make it with `bake`"


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cake.json"
    write_atomically(path, "old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(BadInput, match="No space left on device"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_an_interrupt_while_writing_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "cake.json", "new")
    assert list(tmp_path.iterdir()) == []


def test_files_in_a_private_folder_are_private_too(tmp_path: Path) -> None:
    mask = os.umask(0o022)
    try:
        for mode, expected in ((0o700, 0o600), (0o755, 0o644)):
            tmp_path.chmod(mode)
            write_atomically(tmp_path / "cake.json", "new")
            assert (tmp_path / "cake.json").stat().st_mode & 0o777 == expected
    finally:
        os.umask(mask)


def test_a_missing_folder_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot be written: No such file or directory"):
        write_atomically(tmp_path / "no" / "cake.json", "new")


def test_a_link_is_followed(tmp_path: Path) -> None:
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    target.write_text("old")
    link.symlink_to(target)
    write_atomically(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_atomically(pipe, "new")
        assert os.read(reader, 10) == b"new"
    finally:
        os.close(reader)
    assert pipe.is_fifo()


def test_a_slowdown_is_read_under_the_name_that_files_had_for_it() -> None:
    """Plans, logs and reports of 0.1 say ``pace``; both names at once are one too many."""
    worker = {"host": "a", "type": "local", "local_batch_size": 8}
    assert WorkerSpec.model_validate({**worker, "pace": 2}) == WorkerSpec.model_validate({**worker, "slowdown": 2})
    assert WorkerSpec.model_validate({**worker, "slowdown": 2}).model_dump()["slowdown"] == 2
    with pytest.raises(ValidationError):
        WorkerSpec.model_validate({**worker, "slowdown": 2, "pace": 2})
    started = TypeAdapter(StartedWorker)
    assert started.validate_json('{"host": "a", "pace": 3}') == StartedWorker(host="a", slowdown=3.0)
    told = {"host": "a", "type": "t", "pace": 2, "local_batch_size": 8, "compute_s": 1, "wait_s": 0}
    assert WorkerReport.model_validate(told).slowdown == 2
