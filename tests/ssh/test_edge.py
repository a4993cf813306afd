"""The ssh command line as a pure function, and what ssh complains of in one sentence.

What a host sees of the run's objects is what is there, and no frame leads out of the folder.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import socket
import subprocess
import sys
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

from benchmarks._ssh_servers import SSHD, Servers
from hetopt.backends.backend import MOST_IDLE, back_off_s, is_given_up
from hetopt.backends.host.protocol import OUTCOME_OBJECT, Outcome, Placements
from hetopt.backends.ssh import conductor
from hetopt.backends.ssh.checking import INVENTORY_FILE, Inventory, check_hosts
from hetopt.backends.ssh.gpus import environment, places
from hetopt.backends.ssh.link import python_command, ssh_argv, why_unreached
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
from hetopt.core.artifact import parse_from_peer
from hetopt.core.budget_law import PLACEMENT_OBJECT
from hetopt.core.errors import BadInput, RunFailed
from hetopt.core.events.log import EVENTS_FILE, EventLog
from hetopt.core.hosts import Host, parse_hosts
from hetopt.core.interruption import StopSignal
from hetopt.core.run_folder import BUNDLE_FILE, write_spec
from hetopt.core.run_spec import RunSpec
from tests.face.conftest import until
from tests.ssh.test_checking import said
from tests.trainer.scenarios import toy_spec

OPTIONS = (
    "-o BatchMode=yes -o StrictHostKeyChecking=yes -o ConnectTimeout=6 -o ServerAliveInterval=5 "
    "-o ServerAliveCountMax=4 -o ClearAllForwardings=yes -o ForwardAgent=no -o ForwardX11=no -o RequestTTY=no "
    "-o RemoteCommand=none -o LogLevel=ERROR -o ControlMaster=no"
)


@pytest.mark.parametrize(
    ("host", "words"),
    [
        (Host(name="box1", address="box1.lan"), "-- box1.lan true"),
        (
            Host(name="b", address="10.0.0.5", user="bob", port=2222, key="/k"),
            "-p 2222 -l bob -i /k -- 10.0.0.5 true",
        ),
        (Host(name="six", address="[fd00::5]"), "-- fd00::5 true"),
    ],
)
def test_a_host_and_a_command_become_these_words(host: Host, words: str) -> None:
    assert shlex.join(ssh_argv(host, "true", {})) == f"ssh {OPTIONS} {words}"


def test_another_ssh_is_named_by_the_environment() -> None:
    (host,) = parse_hosts("box1")
    assert ssh_argv(host, "true", {"HETOPT_SSH": "ssh -F 'my config'"})[:3] == ["ssh", "-F", "my config"]


@pytest.mark.parametrize("python", ["python3", "~/it's mine/bin/python", "/a b/python", "$(reboot)", "x; reboot"])
def test_an_interpreter_is_one_word_of_the_shell(python: str) -> None:
    outer = shlex.split(python_command(python, b"pass"))
    assert outer[:3] == ["exec", "sh", "-c"]
    script = shlex.split(outer[3])
    path = f"$HOME/{python[2:]}" if python.startswith("~/") else python
    assert script[script.index("exec") + 1] == path


@pytest.mark.parametrize(
    ("complaint", "says"),
    [
        ("No ED25519 host key is known for b.\nHost key verification failed.", "No ED25519 host key is known for b."),
        (
            "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.",
            ": WARNING: REMOTE HOST",
        ),
        ("a@b: Permission denied (password,keyboard-interactive).", ": a@b: Permission denied (password,"),
        (
            "ssh: connect to host b port 22: Connection refused",
            "reached: connect to host b port 22: Connection refused.",
        ),
        ("/etc/ssh/c: line 3: Bad configuration option: x\n/etc/ssh/c: terminating", "/etc/ssh/c: line 3: Bad "),
        ("Welcome\nconnect to host b port 22: Connection timed out\nbye", "port 22: Connection timed out."),
        ("a@gate: Permission denied (publickey).\nkex_exchange_identification: Connection closed", "jump host: a@gate"),
        ("@@@@\n@  REMOTE HOST HAS CHANGED!  @\nkex_exchange_identification: x", "jump host: REMOTE HOST HAS CHANGED!"),
        ("channel 0: open failed: administratively prohibited\nstdio forwarding failed", "jump host: channel 0"),
        ("kex_exchange_identification: read: Connection reset by peer", "Connection reset by peer"),
        ("", "without saying why"),
    ],
)
def test_each_complaint_of_ssh_is_one_sentence_and_what_to_do(complaint: str, says: str) -> None:
    why = why_unreached(Host(name="box1", address="b", user="a"), complaint)
    assert says in why.message
    assert why.message.startswith("box1 ")
    assert why.hint


# Hosts behind others: ssh's way there as a pure function, and over real servers.

TOKENS = {"%%": "%", "%h": "next.lan", "%p": "22"}
HOPS = st.lists(
    st.tuples(st.sampled_from(["", "carol@"]), st.sampled_from(["gate", "10.0.0.5", "fe80::1%eth0"])),
    min_size=1,
    max_size=3,
    unique=True,
)


def as_run(command: str) -> list[str]:
    """The words of a ProxyCommand, as ssh expands it and a shell splits it."""
    return shlex.split(re.sub("%.", lambda token: TOKENS[token[0]], command))


@given(hops=HOPS, ssh=st.sampled_from(["ssh", "ssh -F 'my 100%h config'", 'ssh -F "it\'s"']))
def test_each_hop_is_reached_with_the_same_options(hops: list[tuple[str, str]], ssh: str) -> None:
    host = Host(name="box", address="box.lan", jump=",".join("".join(hop) for hop in hops))
    words = ssh_argv(host, "true", {"HETOPT_SSH": ssh})
    strict = ssh_argv(Host(name="box", address="box.lan"), "true", {"HETOPT_SSH": ssh})[:-3]
    for user, address in reversed(hops):
        assert words[: len(strict)] == strict
        (proxy,) = (word for word in words if word.startswith("ProxyCommand="))
        words = as_run(proxy.removeprefix("ProxyCommand="))
        assert words[-4:] == ["-W", "[next.lan]:22", "--", address]
        assert ("-l" in words) == bool(user)
    assert words[: len(strict)] == strict
    assert not any(word.startswith("ProxyCommand=") for word in words)


FIELDS = ("name", "address", "user", "key", "jump", "private", "python", "folder", "devices", "hours")
HOSTILE = st.one_of(
    st.text(max_size=30),
    st.sampled_from(
        ["a$(id)", "a`id`", "-oProxyCommand=id", "a\nb", "a;id", "a,$(id)", "a %h", "a\x1b[2J", "\u202ea", "~"]
    ),
)


@given(given=st.fixed_dictionaries({}, optional=dict.fromkeys(FIELDS, HOSTILE)))
def test_no_text_of_a_host_is_an_option_or_read_by_a_shell(given: dict[str, str]) -> None:
    try:
        host = Host.model_validate({"name": "box", "address": "box", **given})
    except ValidationError:
        return
    words = ssh_argv(host, "true", {})
    assert words[-3] == "--"
    assert not words[-2].startswith("-")
    assert not (host.user or "").startswith("-")
    assert re.fullmatch(r"[\w.@:%,\[\]-]*", host.jump or "", re.ASCII)
    assert all(text.isprintable() for text in host.model_dump().values() if isinstance(text, str))


def listens(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def behind(servers: Servers) -> Iterator[tuple[Servers, int]]:
    """Servers of which one listens on a port of this machine, where a gateway reaches it."""
    servers.host("box")
    servers.host("gate")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with (servers.folder / "client").open("a") as file:
        file.write(
            f"Host 127.0.0.1\n  IdentityFile {servers.folder / 'user_key'}\n  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {servers.folder / 'known_hosts'}\n  GlobalKnownHostsFile /dev/null\n"
            "Host *\n  StrictHostKeyChecking accept-new\n"
        )
    command = [str(SSHD), "-D", "-e", "-f", str(servers.folder / "box.sshd"), "-p", str(port)]
    with subprocess.Popen([*command, "-o", "ListenAddress=127.0.0.1"], stderr=subprocess.DEVNULL) as server:
        until(lambda: listens(port))
        yield servers, port
        server.terminate()


def test_a_host_behind_others_is_reached_and_no_hop_accepts_an_unknown_key(
    behind: tuple[Servers, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the user's own configuration would: the second of two hops is not known at first."""
    servers, port = behind
    (tmp_path / "it's 100%h").symlink_to(servers.folder)
    monkeypatch.setenv("HETOPT_SSH", shlex.join(["ssh", "-F", str(tmp_path / "it's 100%h" / "client")]))
    hop = f"127.0.0.1:{port}"
    host = Host(name="box", address="127.0.0.1", port=port, jump=f"gate,{hop}", python=sys.executable)
    (found,) = check_hosts([host])
    assert "is not reached through its jump host" in said(found)
    assert "strict checking" in said(found)
    known = servers.folder / "known_hosts"
    assert hop not in known.read_text().replace("[127.0.0.1]:", "127.0.0.1:")
    kind, key, *_ = (servers.folder / "host_key.pub").read_text().split()
    with known.open("a") as file:
        file.write(f"[127.0.0.1]:{port} {kind} {key}\n")
    (found,) = check_hosts([host])
    assert found.seen is not None, said(found)


# Which GPU of a box each worker takes: by the names of its inventory, whatever the order of its slots.

KINDS = {
    "RTX 3090": "NVIDIA GeForce RTX 3090",
    "RTX 3090 Ti": "NVIDIA GeForce RTX 3090 Ti",
    "GTX 1080 Ti": "NVIDIA GeForce GTX 1080 Ti",
    "A100": "NVIDIA A100-SXM4-80GB",
    "T4": "Tesla T4",
    "L4": "NVIDIA L4",
    "L40S": "NVIDIA L40S",
    "V100": "Tesla V100-SXM2-16GB",
}


@given(st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=8), st.data())
def test_each_worker_has_the_gpu_that_was_named(slots: list[str], data: st.DataObject) -> None:
    wanted = data.draw(st.permutations(slots))[: data.draw(st.integers(1, len(slots)))]
    found = places(wanted, [KINDS[slot] for slot in slots])
    assert found is not None
    assert len(set(found)) == len(wanted), "one each"
    assert [slots[place] for place in found] == wanted


@pytest.mark.parametrize(
    ("wanted", "there"),
    [(["T4", "T4"], ["T4"]), (["A10"], ["A100"]), (["L4"], ["L40S"]), (["RTX 3090 Ti"], ["RTX 3090"]), (["T4"], [])],
)
def test_a_gpu_that_is_not_there_is_not_taken_for_another(wanted: list[str], there: list[str]) -> None:
    assert places(wanted, [KINDS[name] for name in there]) is None


def test_workers_are_told_by_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real process in the place of the driver's."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\nprintf 'Tesla T4\\nNVIDIA L4\\nTesla T4\\n'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    told = environment(["L4", "T4"])
    assert told == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "1,0"}
    assert environment(["cpu"]) == {}
    assert environment(["A100"]) == {}
    smi.write_text("#!/bin/sh\necho no driver\nexit 9\n")
    assert environment(["L4"]) == {}


# What others use of a host: laws of the count, and a real process.


@contextmanager
def seen_from_afar(folder: Path) -> Iterator[RemoteObjects]:
    """A folder's objects through a pair of sockets, as a host has them."""
    ours, theirs = socket.socketpair()
    objects = FolderObjects(folder=folder)

    def serve() -> None:
        with ours, ours.makefile("rb") as stream:
            while (asked := read_frame(stream.read)) is not None:
                ours.sendall(frame(*answer(objects, parse_from_peer(Request, asked[0], "host"), asked[1])))

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
            assert remote.names("") == tuple(model.names(""))
            assert remote.names("b/") == tuple(model.names("b/"))


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
                self.objects.put(OUTCOME_OBJECT, Outcome(generation=generation).model_dump_json().encode())
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
    (run_dir / BUNDLE_FILE).write_bytes(b"")
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
