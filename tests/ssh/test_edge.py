"""The ssh command line as a pure function, and what ssh complains of in one sentence."""

from __future__ import annotations

import shlex

import pytest

from hetopt.backends.ssh.edge import python_command, ssh_argv, why_unreached
from hetopt.core.hosts import Host, parse_hosts

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
    assert script[:3] == ["command", "-v", path]


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
