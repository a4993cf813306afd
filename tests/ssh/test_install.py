"""An environment of a run's own: made from hashed packages by the program that begins a host's part, for real."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import platform
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from benchmarks._ssh_servers import Servers
from hetopt.backends.ssh import receive
from hetopt.backends.ssh.checking import alone
from hetopt.core.hosts import Host
from tests.ssh.test_checking import PACKAGES, said, seen


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


def begun(tmp_path: Path, locks: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What `receive` says that is given these locks, and a node that says where its package is from."""
    node = "import json, sys, one\nprint('NODE', json.dumps([sys.executable, one.SAYS]))\n"
    files = {
        "hetopt/__init__.py": "",
        "hetopt/backends/__init__.py": "",
        "hetopt/backends/ssh/__init__.py": "",
        "hetopt/backends/ssh/node.py": node,
        **{f"locks/{platform.machine()}-{name}.txt": text for name, text in locks.items()},
    }
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, text in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    code = packed.getvalue()
    asked = {
        "folder": str(tmp_path / "there"),
        "run": "run",
        "host": "box",
        "bytes": len(code),
        "sha256": hashlib.sha256(code).hexdigest(),
        "config": {},
        "install": True,
        "gpu": True,
    }
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    done = subprocess.run(
        [sys.executable, receive.__file__],
        input=json.dumps(asked).encode() + b"\n" + code,
        capture_output=True,
        check=True,
    )
    lines = done.stdout.decode().splitlines()
    told = next(json.loads(line.removeprefix(receive.MARK)) for line in lines if line.startswith(receive.MARK))
    for line in lines:
        if line.startswith("NODE "):
            told["python"], told["says"] = json.loads(line.removeprefix("NODE "))
    return dict(told)


def test_what_the_lock_names_is_installed_and_nothing_else_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = begun(tmp_path, {"gpu": f"one==1.0 --hash=sha256:{wheel(tmp_path, 'one')}\n"}, monkeypatch)
    root = tmp_path / "there" / "runs" / "run" / "box"
    assert told == {"ready": str(root), "python": str(root / "venv" / "bin" / "python"), "says": "installed"}
    assert not (root / "tmp").exists()


def test_a_folder_that_was_made_for_a_run_goes_with_it_though_its_host_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node of these tests cleans nothing up, as one that lost power."""
    lock = {"gpu": f"one==1.0 --hash=sha256:{wheel(tmp_path, 'one')}\n"}
    config = tmp_path / "there" / "runs" / "run" / "box" / receive.CONFIG
    for _ in range(2):
        begun(tmp_path, lock, monkeypatch)
        assert json.loads(config.read_text())["made"] is True
    shutil.rmtree(tmp_path / "there" / "runs")
    begun(tmp_path, lock, monkeypatch)
    assert json.loads(config.read_text())["made"] is False, "it was there before"


def test_another_package_under_that_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel(tmp_path, "one")
    told = begun(tmp_path, {"gpu": f"one==1.0 --hash=sha256:{'0' * 64}\n"}, monkeypatch)
    assert told["refused"].startswith("its packages cannot be installed")
    assert not (tmp_path / "there" / "runs" / "run" / "box").exists()


def test_a_host_that_installs_needs_no_torch_and_more_room() -> None:
    host = Host(name="box", address="box", install=True)
    nothing = dict.fromkeys(PACKAGES)
    assert alone(host, seen(packages=nothing, gpus=[]), asked_s=1e4) == []
    (other,) = alone(host, seen(packages=nothing, gpus=[], python=(3, 13)), asked_s=1e4)
    assert "it has Python 3.13, and the locked torch for CPUs is for 3.12" in other.said
    (full,) = alone(host, seen(packages=nothing, gpus=[], free_bytes=3 * 10**9), asked_s=1e4)
    assert "a run needs 3.5 GB" in full.said
    (offline,) = alone(host, seen(packages=nothing, gpus=[], installs="it does not reach pypi.org"), asked_s=1e4)
    assert offline.verdict == "bad"
    assert "nothing can be installed there: it does not reach pypi.org" in offline.said


def test_a_host_is_asked_whether_it_could(servers: Servers) -> None:
    """A Python without the modules for it, over ssh."""
    from hetopt.backends.ssh.checking import check_hosts

    lacking = servers.folder / "lacking"
    lacking.mkdir()
    (lacking / "ensurepip.py").write_text("raise ImportError(name='ensurepip')\n")
    host = servers.host(
        "box", private="127.0.0.2", python=sys.executable, install=True, shell_prints=f"export PYTHONPATH={lacking}"
    )
    (found,) = check_hosts([host])
    assert "its Python has no ensurepip" in said(found)
