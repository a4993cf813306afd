"""Hosts behind others: ssh's way there as a pure function, and over real servers."""

from __future__ import annotations

import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from benchmarks._ssh_servers import SSHD, Servers
from hetopt.backends.ssh.checking import check_hosts
from hetopt.backends.ssh.edge import ssh_argv
from hetopt.core.hosts import Host
from tests.disturbance import PATIENCE_S
from tests.ssh.test_checking import said

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
        deadline = time.monotonic() + PATIENCE_S
        while not listens(port):
            assert time.monotonic() < deadline
            time.sleep(0.1)
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
