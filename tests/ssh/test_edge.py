"""The ssh command line as a pure function, and what ssh complains of in one sentence."""

from __future__ import annotations

import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from pydantic import ValidationError

from benchmarks._ssh_servers import SSHD, Servers
from hetopt.backends.ssh.checking import check_hosts
from hetopt.backends.ssh.gpus import environment, places
from hetopt.backends.ssh.link import python_command, ssh_argv, why_unreached
from hetopt.core.hosts import Host, parse_hosts
from tests.face.conftest import until
from tests.ssh.test_checking import said

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
