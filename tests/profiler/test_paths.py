"""No foreign name leaves the folder that it was meant for. (That all joins go this way: tests/test_house.py.)"""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from hypothesis import example, given, strategies as st
from pydantic import ValidationError

from hetopt.core.errors import BadInput
from hetopt.core.paths import HOST_PATTERN, RUN_PATTERN, host_name, inside, is_name
from hetopt.core.run_folder import host_log_folder
from hetopt.core.run_spec import Node, WorkerSpec
from hetopt.trainer.checkpoints.folder import FileRecord, Manifest

HOSTILE = [
    "",
    "/",
    ".",
    "..",
    "/x",
    "//x",
    "../x",
    "a/../../b",
    "a//b",
    "a/",
    "a/./b",
    "x\0y",
    "x\ny",
    "x\x1b[2Jy",
    "-rf",
    ".ssh/authorized_keys",
    "a" * 5000,
    "a/" * 600 + "b",
    "\ud800",
    "~/x",
    "C:\\x",
    "a\\..\\b",
]

texts = st.one_of(
    st.text(max_size=40),
    st.lists(
        st.sampled_from(["..", ".", "", "a", "b c", "\0", "\ud800", "/", "~", "-", "h0", "x" * 300]), max_size=6
    ).map("/".join),
    st.text(alphabet="./\\a\0~", max_size=12),
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with links that stay inside it and links that leave it."""
    folder = tmp_path_factory.mktemp("root")
    outside = tmp_path_factory.mktemp("outside")
    (folder / "away").symlink_to(outside)
    (folder / "up").symlink_to("..")
    (folder / "within").symlink_to("kept")
    (folder / "kept").mkdir()
    (folder / "loop").symlink_to("loop")
    return folder


@pytest.mark.parametrize("name", HOSTILE, ids=lambda name: ascii(name[:20]))
def test_a_hostile_name_is_one_sentence(root: Path, name: str) -> None:
    with pytest.raises(BadInput, match="cannot be the name of a file") as refused:
        inside(root, name)
    assert len(refused.value.message) < 600
    assert refused.value.message.isprintable(), "nothing of it reaches the terminal as it is"


@given(name=texts, any_text=st.booleans())
@example(name="away/x", any_text=True)
@example(name="up/x", any_text=False)
@example(name="within/x", any_text=False)
@example(name="loop/x", any_text=False)
def test_whatever_the_name_the_path_stays_in_the_folder(root: Path, name: str, any_text: bool) -> None:
    try:
        path = inside(root, name, any_text=any_text)
    except BadInput:
        return
    assert path.resolve().is_relative_to(root.resolve())
    assert path.resolve() != root.resolve()
    assert os.path.normpath(path) == str(path), "it says where it is"


@given(
    name=st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._=+@,-]{0,50}(/[A-Za-z0-9_][A-Za-z0-9._-]{0,50}){0,3}", fullmatch=True)
)
def test_plain_names_are_what_they_say(root: Path, name: str) -> None:
    assert inside(root / "kept", name) == root / "kept" / name


def test_peoples_own_data_has_names_of_their_own(root: Path) -> None:
    for name in ("train images/Bär (1).png", ".hidden", "日本/一.txt", "a" * 255):
        assert inside(root, name, any_text=True) == root / name


@pytest.mark.parametrize("name", ["away/x", "up/x", "up", "away"])
def test_a_link_leads_nowhere_else(root: Path, name: str) -> None:
    with pytest.raises(BadInput, match="leads out of"):
        inside(root, name)
    assert inside(root, "within/x") == root / "within" / "x"


@given(text=st.text(max_size=100))
@example(text=socket.gethostname())
@example(text="-x.y z/../é")
def test_any_machine_has_a_name_in_a_run(text: str) -> None:
    assert is_name(HOST_PATTERN, f"{host_name(text)}-12")


@given(text=st.one_of(texts, st.from_regex(RUN_PATTERN)))
def test_a_run_that_is_named_is_a_folder_of_runs(root: Path, text: str) -> None:
    assert not is_name(RUN_PATTERN, text) or inside(root, text).parent == root


@pytest.mark.parametrize(
    "host", [name for name in HOSTILE if name != "~/x"] + ["h0/../x", "a b"], ids=lambda name: ascii(name[:20])
)
def test_no_host_is_called_so(tmp_path: Path, host: str) -> None:
    """Wherever hosts come from: a plan, a placement, a command line."""
    with pytest.raises(ValidationError):
        WorkerSpec(host=host, type="t", local_batch_size=1)
    with pytest.raises(ValidationError):
        Node(host=host, address="127.0.0.1", meeting="127.0.0.1:29400")
    with pytest.raises(BadInput):
        host_log_folder(tmp_path, host)


@pytest.mark.parametrize(
    ("address", "meeting"),
    [
        ("x", "127.0.0.1:1"),
        ("127.0.0.1", "127.0.0.1"),
        ("127.0.0.1", "127.0.0.1:0"),
        ("127.0.0.1", "127.0.0.1:٣"),
        ("127.0.0.1", "evil.example:29400"),
        ("127.0.0.1", "127.0.0.1:29400,"),
        ("127.0.0.1 --x", "127.0.0.1:29400"),
    ],
)
def test_hosts_meet_at_addresses(address: str, meeting: str) -> None:
    with pytest.raises(ValidationError, match="address"):
        Node(host="h0", address=address, meeting=meeting)


@pytest.mark.parametrize(
    "name",
    ["/etc/passwd", "../state.safetensors", "rank-0.pt/../../x", "model.safetensors", "rank-9999999.safetensors", ""],
)
def test_a_manifest_names_files_of_its_checkpoint_alone(name: str) -> None:
    record = FileRecord.of(b"")
    Manifest(step=1, digest="d", workers=1, files={"state.safetensors": record, "rank-0.safetensors": record})
    with pytest.raises(ValidationError):
        Manifest(step=1, digest="d", workers=1, files={name: record})
