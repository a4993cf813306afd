"""What a host sees of the run's objects is what is there, and no frame leads out of the folder."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

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
from hetopt.core.errors import BadInput


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
    for what in ("get", "put", "delete", "put_part", "part"):
        with pytest.raises((BadInput, ValidationError)):
            answer(FolderObjects(folder=tmp_path), Request(what=what, name=name, last=True), b"x")


@pytest.mark.parametrize(
    ("what", "place", "name", "fine"),
    [
        ("get", OBJECTS, "placement.json", True),
        ("put", OBJECTS, "placement.json", False),
        ("put", OBJECTS, "lease.json", False),
        ("put", OBJECTS, "state/i-0.json", True),
        ("put_over", OBJECTS, "ckpt/LATEST", True),
        ("put", OBJECTS, "outcome.json", True),
        ("put_part", MODELS, "model.safetensors", True),
        ("put_part", MODELS, "outputs/plots/loss.png", True),
        ("put_part", MODELS, "launch.json", False),
        ("put_part", MODELS, "spec.json", False),
        ("get", MODELS, "inventory.json", False),
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
            silent.ask(Request(what="get", name="a"))
        ours.close()
        with pytest.raises(Cut):
            Connection(incoming=theirs.fileno(), outgoing=theirs.fileno()).ask(Request(what="get", name="a"))
