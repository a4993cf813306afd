"""`hetopt hosts check` on real ssh servers, and the judgements that need machines which are not here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks._ssh_servers import Servers
from hetopt.backends.emulation.namespaces import EmulatedNetwork
from hetopt.backends.host import entry
from hetopt.backends.ssh.checking import (
    HostFound,
    Seen,
    Ways,
    check_hosts,
    own_troubles,
    troubles_between,
)
from hetopt.cli.account import show
from hetopt.core.hosts import Host
from tests.docs.shown import assert_shown

PACKAGES = dict.fromkeys(entry.PACKAGES, "1.0") | {"torch": "2.13.0+cu130"}
HEALTHY: dict[str, Any] = {
    "python": (3, 12), "executable": "/usr/bin/python3",
    "cpus": 16, "memory_bytes": 64 * 2**30,
    "writable": True, "there": "/srv/alice", "free_bytes": 10**12,
    "packages": PACKAGES, "gpus": [["RTX 3090", "24576", "570.1", "8.6"]],
    "address": "10.0.0.1", "port": 4000, "listen_trouble": None,
}  # fmt: skip
EXPIRED = "Password change required but no TTY available."
"""What PAM says to whoever has no terminal (sshd, `session.c`)."""
GPU = Host(name="box1", address="box1", devices=("RTX 3090",))


def seen(**more: object) -> Seen:
    return Seen.model_validate(HEALTHY | more)


def said(found: HostFound) -> str:
    return "; ".join(one.said for one in found.troubles)


def test_every_bad_host_is_found_and_told(servers: Servers) -> None:
    """One round over real servers: who cannot be used is told why, and the others are not held up."""
    here = {"python": sys.executable}
    hosts = [
        servers.host("box1", private="127.0.0.2", shell_prints="echo Welcome to box1", **here),
        servers.host("box2", private="127.0.0.3", **here),
        servers.host("elsewhere", private="10.255.255.1", **here),
        servers.host("nowhere-to-write", folder="/proc/hetopt", private="127.0.0.4", **here),
        servers.host("stranger", known=False, **here),
        servers.host("changed", host_key="other_host_key", **here),
        servers.host("wrong-key", key="strangers_key", **here),
        servers.host("wrong-user", user="nobody-is-called-so", **here),
        servers.host("passwords", passwords_only=True, **here),
        servers.host("no-python", python="python9"),
        servers.host("half-a-line", shell_prints="printf Hello", private="127.0.0.5", **here),
        servers.host("reads", shell_prints="read line", **here),
        servers.host("no-shell", shell_prints="exit 1", **here),
        servers.host("expired", shell_prints=f"echo '{EXPIRED}' >&2; exit 1", **here),
        servers.host("old-python", python=str(old_python(servers.folder))),
    ]
    found = {one.name: one for one in check_hosts(hosts)}
    told = {
        "elsewhere": "cannot listen on 10.255.255.1",
        "nowhere-to-write": "/proc has 0 B free",
        "stranger": "host key is known for",
        "changed": "REMOTE HOST IDENTIFICATION HAS CHANGED",
        "wrong-key": "Permission denied (publickey",
        "wrong-user": "Permission denied (publickey",
        "passwords": "Permission denied (password",
        "no-python": "python9: not found",
        "reads": "what its shell runs first reads the standard input",
        "no-shell": "cannot run a program (it ends with 1 and says nothing)",
        "expired": f"is not reached: {EXPIRED.rstrip('.')}",
        "old-python": "it is Python 2.7, and training needs 3.11",
    }
    assert {name: words in said(found[name]) for name, words in told.items()} == dict.fromkeys(
        found.keys() - {"box1", "box2", "half-a-line"}, True
    )
    assert found["box1"].verdict == found["box2"].verdict == "good"
    assert found["box1"].rates["box2"][0] > 1e6
    assert (servers.folder / "known_hosts").read_text().count("stranger") == 0
    assert not (Path("~/.cache/hetopt").expanduser() / "box1").exists()
    assert all(trouble.hint for one in found.values() for trouble in one.troubles)


def old_python(folder: Path) -> Path:
    """An interpreter that calls itself 2.7."""
    path = folder / "python2"
    program = "import sys; sys.version_info = (2, 7); exec(sys.argv[1])"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{program}" "$3"\n')
    path.chmod(0o755)
    return path


def test_two_machines_and_their_links(
    servers: Servers, two_machines: EmulatedNetwork, capsys: pytest.CaptureFixture[str]
) -> None:
    network, names = two_machines, [two_machines.namespace(place) for place in range(2)]
    hosts = [
        servers.host(f"box{place}", network=name, private=network.address(place), python=sys.executable)
        for place, name in enumerate(names)
    ]
    found = check_hosts(hosts)
    assert [one.verdict for one in found] == ["good", "good"], [one.troubles for one in found]
    to, back = found[0].rates["box1"]
    show(found, for_plans=True)
    assert_shown("own-machines.md", "hetopt hosts check hosts.toml", "".join(capsys.readouterr()))
    # 25 Mbit/s, but for what a bucket lets pass at once, and for processors that others have meanwhile.
    assert 2e6 < to < 60e6
    assert 2e6 < back < 60e6
    closed = ["iptables", "-A", "INPUT", "-p", "tcp", "--syn", "-j", "DROP"]
    if subprocess.run(["ip", "netns", "exec", names[1], *closed], capture_output=True, check=False).returncode != 0:
        network.take_down(1)  # no packet filter here: nothing passes at all
    walled = check_hosts(hosts)
    assert "cannot reach box1" in said(walled[0])
    assert walled[0].verdict == "bad"


def test_what_is_wrong_with_a_real_host_is_found(servers: Servers, tmp_path: Path) -> None:
    """A full disk, a driver that torch cannot use, a GPU that is another, and no rights."""
    driver = tmp_path / "nvidia-smi"
    driver.write_text('#!/bin/sh\necho "NVIDIA GeForce GTX 1080 Ti, 11264, 470.1, 6.1"\n')
    driver.chmod(0o755)
    (tmp_path / "small").mkdir()
    (tmp_path / "lacking").mkdir()
    (tmp_path / "lacking" / "sitecustomize.py").write_text("import sys\nsys.modules['ensurepip'] = None\n")
    here = {"python": sys.executable}
    hosts = [
        servers.host(
            "full",
            own_processes=True,
            shell_prints=f"mount -t tmpfs -o size=1m tmpfs {tmp_path}/small",
            folder=f"{tmp_path}/small/hetopt",
            private="127.0.0.2",
            **here,
        ),
        servers.host(
            "old", shell_prints=f"PATH={tmp_path}:$PATH", private="127.0.0.4", devices=("GTX 1080 Ti",), **here
        ),
        servers.host("other", shell_prints=f"PATH={tmp_path}:$PATH", private="127.0.0.5", devices=("L4",), **here),
        servers.host(
            "no-rights",
            shell_prints='exec setpriv --reuid=65534 --clear-groups sh -c "$SSH_ORIGINAL_COMMAND"',
            private="127.0.0.6",
            folder="/var/hetopt",
            python="/usr/bin/python3",
        ),
        servers.host("closed", shell_prints="echo This account is not available.; exit 1", **here),
        servers.host("lacking", shell_prints=f"export PYTHONPATH={tmp_path}/lacking", install=True, **here),
        Host(name="behind", address="behind.invalid", jump="gate.invalid"),
        Host(name="shut", address="behind.invalid", jump="127.0.0.1:1"),
    ]
    found = {one.name: one for one in check_hosts(hosts)}
    told = {
        "full": "free, and a run needs 2 GB",
        "old": "its torch cannot use its GPUs",
        "other": "its GPUs are NVIDIA GeForce GTX 1080 Ti, and not L4",
        "no-rights": "nothing can be written to /var",
        "closed": "cannot run a program (This account is not available)",
        "behind": "through its jump host: Could not resolve hostname gate.invalid",
        "shut": "through its jump host: connect to host 127.0.0.1 port 1: Connection refused",
        "lacking": "its Python has no ensurepip",
    }
    assert {name: words in said(found[name]) for name, words in told.items()} == dict.fromkeys(found, True)
    assert all(trouble.hint for one in found.values() for trouble in one.troubles)


def test_packages_that_a_host_lacks_are_named_with_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    lacks = PACKAGES | dict.fromkeys(("torch", "psutil", "safetensors", "scikit-learn"))
    facts = seen(packages=lacks, gpus=[])
    troubles = list(own_troubles(Host(name="box1", address="box1"), facts))
    boxes = [HostFound(name=name, seen=facts, troubles=tuple(troubles), rates={}) for name in ("box1", "box2")]
    show(boxes, for_plans=False)
    shown = capsys.readouterr().out
    assert_shown("own-machines.md", "hetopt hosts check --hosts", shown)


def test_files_of_a_run_that_is_over_are_found(tmp_path: Path) -> None:
    for name, pid in (("over", 2**22 + 1), ("another", os.getpid())):
        folder = tmp_path / "runs" / name / "box1"
        folder.mkdir(parents=True)
        (folder / "pid").write_text(str(pid))
    assert entry._left(str(tmp_path)) == [str(tmp_path / "runs" / name / "box1") for name in ("another", "over")]
    assert entry._left(str(tmp_path / "none")) == []


def test_hosts_are_judged_together() -> None:
    hosts = [Host(name=name, address=name) for name in ("a", "b", "c")]
    three = {"a": seen(), "b": seen(packages=PACKAGES | {"torch": "2.7.0"}), "c": seen()}
    reached = {name: dict.fromkeys({"a", "b", "c"} - {name}, "yes") for name in three}
    ways = {name: Ways.model_validate({"reached": one, "rates": {}}) for name, one in reached.items()}
    found = troubles_between(hosts, three, ways)
    assert [one.said for one in found["b"]] == ["it has torch 2.7.0, and a 2.13.0+cu130"]
    ways["b"] = Ways.model_validate({"reached": {"a": "timed out", "c": "timed out"}, "rates": {}})
    assert "it cannot reach a and c (timed out)" in {one.said for one in troubles_between(hosts, three, ways)["b"]}


def test_the_command_says_a_line_for_each(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from hetopt.cli.account import app

    servers.host("box1")
    servers.host("stranger", known=False)
    inventory = servers.folder / "hosts.toml"
    inventory.write_text(f'python = "{sys.executable}"\n[box1]\nprivate = "127.0.0.2"\n[stranger]\n')
    told = CliRunner().invoke(app, ["check", str(inventory), "--json"])
    assert told.exit_code == 6
    facts = json.loads(told.stdout)
    assert [one["verdict"] for one in facts] == ["good", "bad"]
    _, _, to_add = CliRunner().invoke(app, ["check", str(inventory)]).output.partition("for plans, add to [box1]:\n")
    inventory.write_text(f'python = "{sys.executable}"\n[box1]\nprivate = "127.0.0.2"\n{to_add}\n')
    told = CliRunner().invoke(app, ["check", str(inventory), "--json"])
    assert json.loads(told.stdout)[0]["for_plans"] == []
