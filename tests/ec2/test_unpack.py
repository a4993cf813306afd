"""Wheels are installed by their hashes alone: what pip installs of them, and nothing that no lock names."""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetopt.backends.ec2.node.unpack import requirements, unpack
from hetopt.core.errors import BadInput

ROOT = Path(__file__).resolve().parents[2]
FILES = {
    "one/__init__.py": b"WORD = 'one'\n",
    "one/deep/er/data.bin": bytes(range(256)) * 5000,
    "one/tool": b"#!/bin/sh\n",
    "one-1.data/scripts/one-tool": b"#!/bin/sh\necho one\n",
    "one-1.data/purelib/beside.py": b"PLACE = 'site'\n",
    "one-1.data/data/share/one.txt": b"shared\n",
    "one-1.dist-info/METADATA": b"Metadata-Version: 2.1\nName: one\nVersion: 1\n",
    "one-1.dist-info/WHEEL": b"Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
}


def wheel(folder: Path, files: dict[str, bytes] = FILES, name: str = "one") -> tuple[Path, str]:
    """A wheel, and the line of a lock that asks for it."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-1-py3-none-any.whl"
    record = "".join(f"{one.replace('one-1', f'{name}-1')},,\n" for one in files)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for place, data in {**files, "one-1.dist-info/RECORD": record.encode()}.items():
            entry = zipfile.ZipInfo(place.replace("one-1", f"{name}-1"))
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (stat.S_IFREG | (0o755 if "tool" in place else 0o644)) << 16
            archive.writestr(entry, data)
    return path, f"{name}==1 \\\n    --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n"


def tree(folder: Path) -> dict[str, tuple[bytes, bool]]:
    """Files by place, and whether each can be run; not what tells of the installer."""
    told = ("RECORD", "INSTALLER", "REQUESTED")
    found = (path for path in folder.rglob("*") if path.is_file() and path.name not in told and path.suffix != ".pyc")
    return {
        path.relative_to(folder).as_posix(): (path.read_bytes(), os.access(path, os.X_OK))
        for path in found
        if not path.relative_to(folder).as_posix().startswith(("bin/python", "pyvenv"))
    }


def test_it_installs_what_pip_does(tmp_path: Path) -> None:
    """Run as a machine runs it, in an environment that has no pip, by an interpreter that has nothing else."""
    path, line = wheel(tmp_path / "wheels")
    lock = tmp_path / "lock.txt"
    lock.write_text(f"# a lock\n\n{line}")
    homes = [tmp_path / "plain", tmp_path / "pip"]
    for home in homes:
        venv.EnvBuilder(with_pip=False).create(home)
    before = tree(homes[0])
    command = ["-m", "hetopt.backends.ec2.node.unpack", str(path.parent), str(lock), os.devnull]
    done = subprocess.run(
        [homes[0] / "bin" / "python", "-s", *command],
        env={"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    pip = [sys.executable, "-m", "pip", "--python", str(homes[1] / "bin" / "python"), "install", "--no-compile"]
    subprocess.run([*pip, "--quiet", "--no-index", "--find-links", str(path.parent), "one"], check=True)
    ours, pips = ({k: v for k, v in tree(home).items() if k not in before} for home in homes)
    assert ours == pips
    assert len(ours) == len(FILES)


def test_a_wheel_that_no_lock_names_or_that_is_missing_installs_nothing(tmp_path: Path) -> None:
    path, line = wheel(tmp_path / "wheels")
    _, other = wheel(tmp_path / "elsewhere", name="other")
    site = tmp_path / "site"
    for wheels, locks in (([path], [other]), ([path], [line, other]), ([], [line]), ([path], [""])):
        with pytest.raises(ValueError, match=r"missing"):
            unpack(wheels, locks, site, tmp_path / "prefix")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"1 of 1 wheels are missing"):
        unpack([path], [line], site, tmp_path / "prefix")
    assert not site.exists()


@pytest.mark.parametrize("name", ["../out.py", "/out.py", "a/../../out.py", "one-1.data/scripts/../../out.py"])
def test_no_file_of_a_wheel_lands_elsewhere(tmp_path: Path, name: str) -> None:
    path, line = wheel(tmp_path / "wheels", {**FILES, name: b"x"})
    with pytest.raises((BadInput, ValueError, OSError)):
        unpack([path], [line], tmp_path / "a" / "b" / "site", tmp_path / "a" / "b" / "prefix")
    assert not list(tmp_path.rglob("out.py"))


@given(
    names=st.lists(st.from_regex(r"[A-Za-z][A-Za-z0-9._-]{0,9}", fullmatch=True), max_size=4),
    hashes=st.lists(st.binary(min_size=32, max_size=32), min_size=1, max_size=3),
)
def test_a_lock_is_read_whole(names: list[str], hashes: list[bytes]) -> None:
    told = [one.hex() for one in hashes]
    text = "".join(
        f"{name}==1.0+cpu \\\n" + " \\\n".join(f"    --hash=sha256:{one}" for one in told) + "\n" for name in names
    )
    assert list(requirements(f"# made by\n\n{text}")) == [frozenset(told)] * len(names)


@pytest.mark.parametrize("line", ["one", "one==1", "one>=1 --hash=sha256:" + 64 * "0", "-r other.txt", "one==1; x"])
def test_what_is_no_requirement_by_hash_is_left_to_pip(line: str) -> None:
    with pytest.raises(ValueError, match="no requirement by version and hash"):
        list(requirements(line))


def test_the_locks_of_machines_are_known() -> None:
    for path in (ROOT / "hetopt" / "backends" / "ec2" / "node" / "locks").glob("*.txt"):
        found = list(requirements(path.read_text(encoding="utf-8")))
        assert len(found) == path.read_text(encoding="utf-8").count("=="), path.name
