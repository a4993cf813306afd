"""What hosts say that say what they like: a record or one sentence, and nothing of the others is lost by it."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import platform
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from typer.testing import CliRunner

import hetopt
from hetopt.api.backends import backend
from hetopt.backends.host import entry
from hetopt.backends.host.protocol import Latest, State
from hetopt.backends.on_this_machine import OnHosts
from hetopt.backends.options import Ssh
from hetopt.backends.ssh.checking import INVENTORY_FILE, Seen, Ways, check_hosts, own_troubles
from hetopt.backends.ssh.conductor import in_our_time
from hetopt.backends.ssh.link import Begun
from hetopt.backends.ssh.objects import Answer, Request
from hetopt.cli import follow
from hetopt.cli.main import app
from hetopt.core.artifact import Record, parse_from_peer
from hetopt.core.errors import BadInput, RunFailed
from hetopt.core.hosts import Host, parse_hosts
from hetopt.core.run_folder import LATEST_OBJECT, OBJECTS_FOLDER, RunFolders, write_spec
from hetopt.optimizer.launch_record import LAUNCH_FILE
from tests.api.test_backends import RECORDED
from tests.ssh.test_checking import HEALTHY, PACKAGES, said, seen

SAYS = """
import re, subprocess, sys
out, (address, command) = sys.stdout.buffer, sys.argv[-2:]
code = sys.stdin.buffer.read(int(re.search(r"read\\((\\d+)\\)", command)[1]))
words = {
    "deep": ["[" * 200_000],
    "nan": [FACTS.replace("3217", "NaN")], "huge": [FACTS.replace("3217", "1" + "0" * 400)],
    "later": [FACTS.replace("3217", "1e300")], "surrogate": ['{"python": "\\\\ud800"}'],
    "crowd": [FACTS, '{"reached": {"nobody": "x"}, "rates": {"good": [NaN, 1]}}'],
    "none": ["null"],
    "long": [FACTS.replace('"13.0"', '"9' + "9" * 9000 + '.\\u00b2"'), '{"reached": {}, "rates": {}}'],
}
for line in words.get(address, []):
    out.write(b"\\nHETOPT-SAYS " + line.encode() + b"\\n")
    out.flush()
if address == "endless":
    for _ in range(3000):
        out.write(b"x" * 1_000_000 + b"\\n")
if address == "good":
    with subprocess.Popen(["sh", "-c", command], stdin=subprocess.PIPE) as there:
        there.stdin.write(code)
        for line in sys.stdin.buffer:
            there.stdin.write(line)
            there.stdin.flush()
sys.stdin.buffer.read()
"""
"""Stands in for ssh: each host of a name that it knows says what that name stands for; one is what it is."""

LIES = ("deep", "nan", "huge", "later", "surrogate", "none", "endless")
ODD = ("crowd", "long")


@pytest.fixture
def they_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = json.dumps(HEALTHY | {"gpus": [], "port": None, "cpus": 3217})
    program = tmp_path / "says.py"
    program.write_text(f"FACTS = {facts!r}\n{SAYS}")
    monkeypatch.setenv("HETOPT_SSH", shlex.join([sys.executable, "-S", str(program)]))


@pytest.mark.usefixtures("they_say")
def test_a_host_that_says_what_cannot_be_is_a_sentence_and_the_others_are_shown() -> None:
    good = Host(name="good", address="good", private="127.0.0.2", python=sys.executable)
    found = {
        host.name: host for host in check_hosts([good, *(Host(name=name, address=name) for name in (*LIES, *ODD))])
    }
    assert found["good"].seen is not None, said(found["good"])
    assert found["good"].verdict != "bad"
    for name in (*LIES, *ODD):
        assert found[name].rates == {}
        assert found[name].verdict == "bad"
        assert all(len(one.said) < 300 and one.said.isprintable() for one in found[name].troubles), name
    assert {name for name, host in found.items() if host.seen is None} == set(LIES)


KINDS: tuple[type[Record], ...] = (Seen, Ways, State, Request, Answer, Begun)
NUMBERS = st.one_of(st.floats(), st.integers(-(10**400), 10**400), st.just(1e308))
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=6,
)
FIELDS = sorted({name for kind in KINDS for name in kind.model_fields})


def read_or_refused(kind: type[Record], data: bytes) -> tuple[Record | None, str]:
    try:
        return parse_from_peer(kind, data, "box"), ""
    except RunFailed as refused:
        return None, refused.message


@given(
    kind=st.sampled_from(KINDS),
    data=st.one_of(
        st.binary(max_size=40),
        st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=8).map(lambda value: json.dumps(value).encode()),
        st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=8).map(
            lambda value: json.dumps({**HEALTHY, **value}).encode()
        ),
        st.integers(1, 10**5).map(lambda depth: b"[" * depth),
    ),
)
def test_words_are_a_record_or_one_sentence(kind: type[Record], data: bytes) -> None:
    record, sentence = read_or_refused(kind, data)
    assert sentence.isprintable()
    assert len(sentence) < 400
    if record is None:
        return
    assert json.loads(record.model_dump_json()) is not None
    assert "Infinity" not in json.dumps(record.model_dump(mode="json"))


@given(time=st.from_regex(rb"-?[0-9.e+-]{1,500}", fullmatch=True), clock_s=st.floats(0, 1e11))
def test_no_clock_makes_an_event_that_cannot_be_read(time: bytes, clock_s: float) -> None:
    ahead_s = parse_from_peer(State, json.dumps({"time_s": clock_s, "does": "training"}), "box").time_s - 1.7e9
    line = b'{"event": "step", "time_s": ' + time + b', "loss": 0.5}\n'
    again = in_our_time(line, ahead_s)
    try:
        json.loads(line)
    except ValueError:
        return
    json.loads(again, parse_constant=lambda name: pytest.fail(f"{name} of {line!r}"))


@pytest.fixture
def ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run on hosts that could go on; nobody was connected to for it."""
    monkeypatch.setenv("HETOPT_HOME", str(tmp_path))
    plan = hetopt.recommend(RECORDED, budget_usd=2, epochs=20, types="c7i.large", max_workers=2, trials=0)
    plan.save(tmp_path / "plan.json")
    prepared = backend("ssh").prepare(plan, plan, Ssh(hosts="alice@box1,box2"))
    assert isinstance(prepared, OnHosts)
    folder, launch = prepared.begun(RunFolders(home=tmp_path / "runs"))
    prepared.inventory.save(folder / INVENTORY_FILE)
    launch.save(folder / LAUNCH_FILE)
    write_spec(folder, launch.spec)
    latest = folder / OBJECTS_FOLDER / LATEST_OBJECT
    latest.parent.mkdir(parents=True)
    latest.write_text(Latest(checkpoint="step-1").model_dump_json())
    return folder


def test_no_host_is_connected_to_before_a_person_said_yes(
    ended: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither for a new run nor for one that goes on, whose folder says which hosts; both are shown first."""
    monkeypatch.setenv("HETOPT_SSH", f"sh -c 'touch {tmp_path}/asked'")
    monkeypatch.setattr(follow, "is_attended", lambda: True)
    resumed, new = ["--resume", ended.name], [str(tmp_path / "plan.json"), "--hosts", "alice@box1,box2"]
    for words in (resumed, new, [*new, "--dry-run"]):
        told = CliRunner().invoke(app, ["launch", "--on", "ssh", *words], input="n\n")
        assert "alice@box1" in told.output, told.output
        assert told.exit_code == 0
        assert not (tmp_path / "asked").exists()
    CliRunner().invoke(app, ["launch", "--on", "ssh", *new], input="y\n")
    assert (tmp_path / "asked").exists()


@pytest.mark.parametrize(
    ("field", "value"),
    [("jump", "a$(id)"), ("address", "-oProxyCommand=id"), ("user", "a\nb"), ("python", "\x1b[2J"), ("port", 70_000)],
)
def test_an_inventory_of_a_run_is_held_to_what_a_typed_one_is(ended: Path, field: str, value: object) -> None:
    path = ended / INVENTORY_FILE
    altered = json.loads(path.read_text())
    altered["hosts"][0][field] = value
    path.write_text(json.dumps(altered))
    with pytest.raises(BadInput, match=rf"hosts\.0\.{field}") as refused:
        hetopt.resume(ended.name)
    assert refused.value.message.isprintable()


def test_words_of_a_whole_round_fit_into_what_is_read() -> None:
    """With as many hosts as an inventory may have."""
    hosts = parse_hosts(",".join(f"box{place}" for place in range(256)))
    ways = {"reached": {host.name: "yes" for host in hosts}, "rates": {"box1": [1e9, 1e9]}}
    assert parse_from_peer(Ways, json.dumps(ways), "box").reached.keys() == {host.name for host in hosts}


# An environment of a run's own: made from hashed packages by the program that begins a host's part, for real.


def wheel(folder: Path, name: str) -> str:
    """A package of one module that says what it is, in a folder; its hash."""
    info = f"{name}-1.0.dist-info"
    files = {
        f"{name}.py": "SAYS = 'installed'\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(text)}\n"
    data = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(data, "w") as archive:
        for path, text in {**files, f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}.items():
            archive.writestr(path, text)
    return hashlib.sha256(data.read_bytes()).hexdigest()


def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lock: str | None = None) -> dict[str, str]:
    """What `entry` says that is given a lock, if any, and a node that says where its package is from."""
    node = "import json, sys, one\nprint('NODE', json.dumps([sys.executable, one.SAYS]))\n"
    files = {
        "hetopt/__init__.py": "",
        "hetopt/backends/__init__.py": "",
        "hetopt/backends/ssh/__init__.py": "",
        "hetopt/backends/ssh/node.py": "" if lock is None else node,
        f"locks/{platform.machine()}-gpu.txt": lock or "",
    }
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, text in files.items():
            packed_file = tarfile.TarInfo(name)
            packed_file.size = len(text)
            archive.addfile(packed_file, io.BytesIO(text.encode()))
    code = packed.getvalue()
    asked = {
        "folder": str(tmp_path / "there"),
        "run": "run",
        "host": "box",
        "bytes": len(code),
        "sha256": hashlib.sha256(code).hexdigest(),
        "config": {},
        "install": lock is not None,
        "gpu": True,
    }
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    done = subprocess.run(
        [sys.executable, entry.__file__],
        input=json.dumps(asked).encode() + b"\n" + code,
        capture_output=True,
        check=True,
    )
    lines = done.stdout.decode().splitlines()
    told = next(json.loads(line.removeprefix(entry.MARK)) for line in lines if line.startswith(entry.MARK))
    for line in lines:
        if line.startswith("NODE "):
            told["python"], told["says"] = json.loads(line.removeprefix("NODE "))
    return dict(told)


def test_what_the_lock_names_is_installed_and_nothing_else_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = begun(tmp_path, monkeypatch, f"one==1.0 --hash=sha256:{wheel(tmp_path, 'one')}\n")
    root = tmp_path / "there" / "runs" / "run" / "box"
    assert told == {"ready": str(root), "python": str(root / "venv" / "bin" / "python"), "says": "installed"}
    assert not (root / "tmp").exists()


def test_a_folder_that_was_made_for_a_run_goes_with_it_though_its_host_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node of these tests cleans nothing up, as one that lost power."""
    config = tmp_path / "there" / "runs" / "run" / "box" / entry.CONFIG
    for _ in range(2):
        begun(tmp_path, monkeypatch)
        assert json.loads(config.read_text())["made"] is True
    shutil.rmtree(tmp_path / "there" / "runs")
    begun(tmp_path, monkeypatch)
    assert json.loads(config.read_text())["made"] is False, "it was there before"


def test_another_package_under_that_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel(tmp_path, "one")
    told = begun(tmp_path, monkeypatch, f"one==1.0 --hash=sha256:{'0' * 64}\n")
    assert told["refused"].startswith("its packages cannot be installed")
    assert not (tmp_path / "there" / "runs" / "run" / "box").exists()


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({}, []),
        ({"python": (3, 13)}, ["it has Python 3.13, and the locked torch for CPUs is for 3.12"]),
        ({"free_bytes": 3 * 10**9}, ["a run needs 3.5 GB"]),
        ({"installs": "its Python has no venv"}, ["nothing can be installed there: its Python has no venv"]),
    ],
)
def test_a_host_that_installs_needs_no_torch_and_more_room(more: dict[str, object], says: list[str]) -> None:
    facts = seen(packages=dict.fromkeys(PACKAGES), gpus=[], **more)
    troubles = list(own_troubles(Host(name="box", address="box", install=True), facts))
    assert [words in trouble.said for words, trouble in zip(says, troubles, strict=True)] == [True] * len(says)
