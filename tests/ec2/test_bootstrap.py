"""What a machine boots with: its text is known, its end comes first, and nothing in it is read as more than a word.

The code that a person brings travels with what it imports, or is refused before anything is rented.
Wheels are installed by their hashes alone, and nothing that no lock names.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from hetopt.backends.ec2 import facts
from hetopt.backends.ec2.bootstrap import NodeConfig, set_timer, user_data
from hetopt.backends.ec2.facts import OWN_DISKS
from hetopt.backends.host.bundle import MOST_BYTES, Bundle, carried, make_bundle, user_code
from hetopt.core.artifact import read_record
from hetopt.core.errors import BadInput
from tests.disturbance import PATIENCE_S
from tests.sources import modules
from tests.test_reachable import reached

CONFIG = NodeConfig(
    run_id="20261120-120000-digits-ab12",
    region="us-east-1",
    bucket="hetopt-123456789012-us-east-1",
    account_id="123456789012",
    bundle_sha256="0" * 64,
    spec_sha256="1" * 64,
    end_s=1_800_000_000.9,
    latest_end_s=1_900_000_000.0,
    has_gpu=False,
    version="0.1.0",
    group_secret="5ec4e7" + 58 * "0",
)


def with_(**change: object) -> NodeConfig:
    return CONFIG.model_copy(update=change)


@pytest.mark.parametrize("gpu", [False, True])
def test_the_text(gpu: bool, golden: Callable[[str, str], None]) -> None:
    text = user_data(with_(has_gpu=gpu))
    golden(f"user-data-{'gpu' if gpu else 'cpu'}.sh", text)
    assert len(text.encode()) < facts.USER_DATA_BYTES / 2


@pytest.mark.parametrize(
    "change",
    [
        {"run_id": "x; rm -rf /"},
        {"run_id": "$(id)"},
        {"run_id": "a\nb"},
        {"bucket": "b`id`"},
        {"region": "us-east-1 "},
        {"account_id": "1"},
        {"bundle_sha256": "z" * 64},
        {"group_secret": ""},
        {"group_secret": "$(id)"},
        {"version": "1'"},
        {"end_s": 0.0},
        {"end_s": float("inf")},
        {"latest_end_s": float("inf")},
        {"spec_sha256": "1"},
    ],
)
def test_nothing_but_words_gets_in(change: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=next(iter(change))):
        NodeConfig.model_validate(CONFIG.model_dump() | change)


SHIMS = {
    "systemctl": 'echo "systemctl $*" >> "$CALLS"; exit "${SYSTEMCTL_CODE:-0}"',
    "shutdown": 'echo "shutdown $*" >> "$CALLS"',
    "dnf": 'echo "dnf $*" >> "$CALLS"',
    "mkfs.xfs": 'echo "mkfs.xfs $*" >> "$CALLS"',
    "mount": 'echo "mount $*" >> "$CALLS"',
    "mountpoint": 'exit "${MOUNTED:-1}"',
    # What a machine before has left is `$LEFT`, where it is there.
    "aws": 'echo "aws $*" >> "$CALLS"; case "$2" in get-object | cp) ;; *) exit 0;; esac; '
    'case "$*" in *"/wheels/"*) cp "$LEFT" "${!#}";; *) cp "$BUNDLE" "${!#}";; esac',
    # A virtual environment whose python notes what it was asked.
    "python3.12": 'mkdir -p "$3/bin"; cp "$(dirname "$0")/noting" "$3/bin/python"',
    # Wheels that somebody has left are refused where `$REFUSED`.
    "noting": 'echo "python $*" >> "$CALLS"; wheels="$(dirname "$0")/../../wheels"; case "$*" in '
    '*--dest*) mkdir -p "$wheels"; touch "$wheels/index.whl";; '
    '*--no-index*) [ -f "$wheels/index.whl" ] || exit "${REFUSED:-0}"; exit;; esac; exit "${AGENT_CODE:-0}"',
}


def boot(folder: Path, config: NodeConfig, bundle: bytes, **environment: str) -> tuple[list[str], str]:
    """Run the text as a machine would, with the programs of the machine standing in; what was called, and the log."""
    shims = folder / "bin"
    shims.mkdir(parents=True)
    for name, body in SHIMS.items():
        (shims / name).write_text(f"#!/bin/bash\n{body}\n")
        (shims / name).chmod(0o755)
    (folder / "bundle").write_bytes(bundle)
    subprocess.run(
        [shutil.which("bash") or "bash", "-s"],
        input=user_data(config).replace(OWN_DISKS, environment.get("DISKS", OWN_DISKS)),
        text=True,
        check=False,
        timeout=PATIENCE_S,
        env={
            **os.environ,
            "PATH": f"{shims}:{os.environ['PATH']}",
            "HETOPT_ROOT": str(folder / "root"),
            "HETOPT_UNITS": str(folder / "units"),
            "CALLS": str(folder / "calls"),
            "BUNDLE": str(folder / "bundle"),
            "LEFT": str(folder / "left"),
            **environment,
        },
    )
    return (folder / "calls").read_text().splitlines(), (folder / "root" / "boot.log").read_text()


def test_a_machine_boots_and_ends(tmp_path: Path, bundle: Bundle) -> None:
    config = with_(bundle_sha256=bundle.sha256)
    called, log = boot(tmp_path, config, bundle.data)
    assert called[:3] == [
        "systemctl daemon-reload",
        "systemctl enable hetopt-again.service hetopt-end.timer",
        "systemctl restart hetopt-end.timer",
    ]
    own = [line for line in called if "put-object" not in line]
    assert own[-2:] == [f"python -m hetopt.backends.ec2.node.agent {tmp_path / 'root'}", "shutdown -h now"]
    asked = [line for line in called if "--requirement" in line]
    locks = ["x86_64-cpu.txt", "x86_64-cpu-torch.txt"]
    assert [line.rpartition("/")[2] for line in asked] == [*locks, "uv.txt", *locks]
    assert [" download " in line for line in asked] == [True] * 2 + [False] * 3
    assert ["-m uv" in line for line in asked] == [False] * 3 + [True] * 2, "pip installs nothing but uv"
    assert re.findall("^[a-z]+", (tmp_path / "root" / "uv.txt").read_text(), re.MULTILINE) == ["uv"]
    assert all("--require-hashes" in line for line in asked)
    for line in asked:
        assert Path(line.rpartition(" ")[2]).is_file()
    assert read_record(NodeConfig, tmp_path / "root" / "node.json", hint="") == config
    assert (tmp_path / "root" / "code" / "hetopt" / "trainer" / "host" / "agent.py").is_file()
    assert "the agent ended with 0" in log


def has_left(folder: Path) -> list[str]:
    """The objects that a machine has left for others, once it has: that goes on beside its work."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        calls = (folder / "calls").read_text().splitlines()
        found = [line.partition("--key ")[2] for line in calls if "put-object" in line]
        if found or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """Wheels in the bucket."""
    with tarfile.open(tmp_path / "left.tar", "w") as archive:
        archive.addfile(tarfile.TarInfo("x.whl"))
    return tmp_path / "left.tar"


@pytest.mark.parametrize("gpu", [False, True])
def test_the_first_machine_leaves_its_packages_and_the_next_needs_no_index(
    tmp_path: Path, bundle: Bundle, left: Path, gpu: bool
) -> None:
    config = with_(bundle_sha256=bundle.sha256, has_gpu=gpu)
    boot(tmp_path / "first", config, bundle.data)
    (key,) = has_left(tmp_path / "first")
    assert re.fullmatch(r"wheels/[0-9a-f]{64}\.tar --body \S+", key)
    called, log = boot(tmp_path / "second", config, bundle.data, LEFT=str(left))
    assert not [line for line in called if " download " in line]
    assert len([line for line in called if "-m uv" in line]) == (1 if gpu else 2)
    assert "no wheels" not in log
    assert not (tmp_path / "second" / "root" / "wheels").exists()
    (got,) = [line for line in called if line.startswith("aws s3 cp")]
    assert f"s3://{config.bucket}/{key.split()[0]} " in got


def test_packages_that_are_not_those_of_the_lock_come_from_their_index(
    tmp_path: Path, bundle: Bundle, left: Path
) -> None:
    """What pip refuses, and what is no archive at all: whoever may write there keeps nobody from booting."""
    config = with_(bundle_sha256=bundle.sha256)
    noise = tmp_path / "noise.tar"
    noise.write_bytes(b"noise")
    for name, how in (("refused", {"LEFT": str(left), "REFUSED": "1"}), ("noise", {"LEFT": str(noise)})):
        called, log = boot(tmp_path / name, config, bundle.data, **how)
        asked = [line for line in called if " download " in line]
        assert [line.rpartition("/")[2] for line in asked] == ["x86_64-cpu.txt", "x86_64-cpu-torch.txt"]
        assert "the agent ended with 0" in log
        assert has_left(tmp_path / name), "and the next finds the right ones"


def test_a_bundle_that_is_not_the_right_one_is_not_run(tmp_path: Path, bundle: Bundle) -> None:
    called, log = boot(tmp_path, CONFIG, bundle.data)
    assert called[-1] == "shutdown -h now"
    assert not any("python" in line for line in called)
    assert "put-object" in called[-2], "it leaves its log"
    assert "boot failed in line" in log


@pytest.mark.parametrize("mounted", [True, False])
def test_a_disk_of_the_machines_own_holds_data_and_the_run(tmp_path: Path, bundle: Bundle, mounted: bool) -> None:
    """And where it cannot be used, the machine boots all the same."""
    config = with_(bundle_sha256=bundle.sha256)
    disk = tmp_path / "by-id" / "nvme-x"
    disk.parent.mkdir()
    disk.touch()
    called, log = boot(
        tmp_path / "m", config, bundle.data, DISKS=str(tmp_path / "by-id" / "nvme-"), MOUNTED=str(int(not mounted))
    )
    root = tmp_path / "m" / "root"
    made = [f"mkfs.xfs -q -K {disk}", f"mount {disk} {root}/disk"]
    bound = [f"mount --bind {root}/disk/hetopt/{name} {root}/{name}" for name in ("data", "run")] if mounted else []
    assert [line for line in called if line.startswith(("mkfs", "mount "))] == [*made, *bound]
    assert ("own disk" in log) is mounted
    assert "the agent ended with 0" in log


def test_the_bundle_is_the_same_for_the_same_sources(bundle: Bundle, tmp_path: Path) -> None:
    assert make_bundle("digits").data == bundle.data
    assert bundle.sha256 == hashlib.sha256(bundle.data).hexdigest()
    assert len(bundle.data) < 2_000_000
    (tmp_path / "b.tar.gz").write_bytes(bundle.data)
    with tarfile.open(tmp_path / "b.tar.gz") as archive:
        names = archive.getnames()
    assert {"hetopt/core/errors.py", "hetopt/backends/ec2/node/agent.py", "hetopt/trainer/worker.py"} <= set(names)
    assert not any(name.startswith("/") or ".." in name for name in names)
    there = {name.removesuffix(".py").replace("/", ".") for name in names}
    assert not any(name.startswith("hetopt.optimizer") for name in there), "machines plan nothing"
    lazily = ("hetopt", "hetopt.reports")  # the library by its names, and what a notebook shows
    inside = {name: path for name, path in modules().items() if not name.startswith(lazily[1]) and name != lazily[0]}
    needed = reached(inside, {"hetopt.backends.ec2.node.agent", "hetopt.trainer.worker", "hetopt.trainer.host.agent"})
    assert needed <= {name.removesuffix(".__init__") for name in there}, "what machines import travels"


def test_the_users_own_task_travels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("task = 1\n")
    monkeypatch.chdir(tmp_path)
    packed = make_bundle("mine.py:task")
    assert packed.task == "task/mine.py:task"
    with pytest.raises(BadInput, match="does not exist"):
        make_bundle("other.py:task")


def test_the_bundle_runs_by_itself(tmp_path: Path, bundle: Bundle) -> None:
    """On a machine there is nothing of hetopt but the bundle."""
    import sys

    (tmp_path / "b.tar.gz").write_bytes(bundle.data)
    with tarfile.open(tmp_path / "b.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    program = (
        "import json, sys; sys.meta_path = [f for f in sys.meta_path if 'editable' not in repr(f).lower()];"
        "sys.path.insert(0, '.'); import hetopt.backends.ec2.node.agent as a; import hetopt.trainer.tasks as t;"
        "print(json.dumps([a.__file__, t.__file__]))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(Path(found).is_relative_to(tmp_path) for found in json.loads(done.stdout))


def carry_out(line: str, folder: Path, calls: Path) -> list[str]:
    """Run what a unit starts as systemd would: whether it shuts the machine down."""
    calls.unlink(missing_ok=True)
    subprocess.run(
        ["bash", "-c", line.partition("=")[2]],
        check=False,
        env={"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "CALLS": str(calls)},
    )
    return calls.read_text().splitlines() if calls.exists() else []


def starts(unit: Path) -> str:
    (line,) = [line for line in unit.read_text().splitlines() if line.startswith("ExecStart=")]
    return line


def test_the_end_survives_a_reboot(tmp_path: Path, bundle: Bundle) -> None:
    """The units that the real script wrote, read by the real systemd's own checker, and a boot imitated."""
    config = with_(bundle_sha256=bundle.sha256)
    called, _ = boot(tmp_path, config, bundle.data)
    units, calls = tmp_path / "units", tmp_path / "rebooted"
    enabled = next(line for line in called if line.startswith("systemctl enable")).split()[2:]
    # Nothing of it is in /run or in a process: it is on disk, and the system starts it at every boot.
    timer, again = units / "hetopt-end.timer", units / "hetopt-again.service"
    assert {path.name for path in units.iterdir()} == {"hetopt-end.timer", "hetopt-end.service", "hetopt-again.service"}
    assert set(enabled) == {timer.name, again.name}
    assert "WantedBy=timers.target" in timer.read_text()
    assert "WantedBy=multi-user.target" in again.read_text()
    assert "OnCalendar=@1800000000\n" in timer.read_text()
    assert "Persistent=true" in timer.read_text(), "a time that passed while it was down counts"
    # The first boot goes on; any other ends at once.
    assert carry_out(starts(again), tmp_path, calls) == []
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert boot_id in again.read_text()
    again.write_text(again.read_text().replace(boot_id, "00000000-0000-0000-0000-000000000000"))
    assert carry_out(starts(again), tmp_path, calls) == ["shutdown -h now"]
    assert carry_out(starts(units / "hetopt-end.service"), tmp_path, calls) == ["shutdown -h now"]
    if shutil.which("systemd-analyze") is not None:
        checked = subprocess.run(
            ["systemd-analyze", "verify", *(str(path) for path in units.iterdir())],
            capture_output=True,
            text=True,
            check=False,
        )
        told = [line for line in checked.stderr.splitlines() if "hetopt-" in line]
        assert told == [], checked.stderr
        moment = subprocess.run(
            ["systemd-analyze", "calendar", "@1800000000"], capture_output=True, text=True, check=True
        )
        assert "2027-01-15 08:00:00 UTC" in moment.stdout


def test_without_its_timer_a_machine_ends_all_the_same(tmp_path: Path, bundle: Bundle) -> None:
    config = with_(bundle_sha256=bundle.sha256, end_s=time.time() + 3600)
    called, _ = boot(tmp_path, config, bundle.data, SYSTEMCTL_CODE="1")
    assert called[3] in ("shutdown -h +59", "shutdown -h +60")


def test_a_machine_that_comes_too_late_ends_in_a_minute(tmp_path: Path, bundle: Bundle) -> None:
    boot(tmp_path, with_(bundle_sha256=bundle.sha256, end_s=1e9), bundle.data)
    (line,) = [one for one in (tmp_path / "units" / "hetopt-end.timer").read_text().splitlines() if "OnCalendar" in one]
    assert abs(int(line.partition("@")[2]) - time.time() - 60) < 50, "a timer whose time has passed never elapses"


@pytest.mark.parametrize(("ends_in_s", "set_in_s"), [(7200.0, 7200.0), (30.0, 30.0), (-50.0, 1.0)])
def test_each_lease_sets_the_end_anew(tmp_path: Path, ends_in_s: float, set_in_s: float) -> None:
    asked: list[list[str]] = []

    def run(command: list[str]) -> bool:
        asked.append(command)
        return True

    set_timer(1_800_000_000.0 + ends_in_s, run=run, units=tmp_path, clock=lambda: 1_800_000_000.0)
    assert f"OnCalendar=@{1_800_000_000 + int(set_in_s)}\n" in (tmp_path / "hetopt-end.timer").read_text()
    assert asked == [["systemctl", "daemon-reload"], ["systemctl", "restart", "hetopt-end.timer"]]


def test_a_timer_that_cannot_be_set_is_made_up_for(tmp_path: Path) -> None:
    asked: list[list[str]] = []

    def run(command: list[str]) -> bool:
        asked.append(command)
        return command[0] != "systemctl"

    set_timer(600.0, run=run, units=tmp_path, clock=lambda: 0.0)
    assert asked[-1] == ["shutdown", "-h", "+10"]


PROVIDED = frozenset({"numpy", "torch", "scikit-learn"})


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / (name.replace("__", "/") + ".py")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return folder / "train.py"


def names(script: Path) -> list[str]:
    return [name for name, _ in user_code(script, provided=PROVIDED)]


def test_modules_and_packages_of_its_folder_travel(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        train="import os, torch, layers, hetopt\nfrom net.blocks import Block\nfrom sklearn import datasets\n",
        layers="import sizes\n",
        sizes="N = 1\n",
        net__blocks="from . import parts\n",
        net__parts="import numpy\n",
        unused="import tensorflow\n",
    )
    assert names(script) == ["layers.py", "net/blocks.py", "net/parts.py", "sizes.py", "train.py"]


def test_what_machines_do_not_install_is_named_with_its_line(tmp_path: Path) -> None:
    script = write(tmp_path, train="import helper\n", helper="import torch\n\nimport made_up_package.sub\n")
    with pytest.raises(BadInput, match=r"helper\.py, line 3, imports made_up_package"):
        names(script)


def test_what_a_script_can_do_without_is_not_asked_for(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        train="from typing import TYPE_CHECKING\ntry:\n    import made_up\nexcept ImportError:\n    made_up = None\n"
        "if TYPE_CHECKING:\n    import other\n",
    )
    assert names(script) == ["train.py"]


def test_requirements_with_hashes_are_installed_and_others_do_not_count(tmp_path: Path) -> None:
    script = write(tmp_path, train="import made_up\n")
    (tmp_path / "requirements.txt").write_text("made-up==1.0 \\\n    --hash=sha256:00\n# a comment\n")
    assert names(script) == ["requirements.txt", "train.py"]
    (tmp_path / "requirements.txt").write_text("made-up==1.0\n")
    with pytest.raises(BadInput, match="imports made_up") as refused:
        names(script)
    assert "by version and hash" in (refused.value.hint or "")


def test_files_among_its_arguments_travel_and_folders_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the script is given must be on the machine too: named before anything is rented, with what to do instead."""
    (tmp_path / "work" / "train").mkdir(parents=True)
    script = write(tmp_path / "work", train="import torch\n")
    (tmp_path / "work" / "small.yaml").write_text("lr: 1\n")
    (tmp_path / "other.yaml").write_text("lr: 2\n")
    monkeypatch.chdir(tmp_path)
    kept = ["--lr", "0.1", "--mode", "train", "--out=new/folder", "s3://bucket/x", "{data}", "~nobody/x", "x" * 5000]
    told, files = carried(script, [*kept, "--config=work/small.yaml", "--base", "other.yaml"])
    assert told == (*kept, "--config=small.yaml", "--base", "given-11/other.yaml")
    assert dict(files) == {"small.yaml": b"lr: 1\n", "given-11/other.yaml": b"lr: 2\n"}
    (tmp_path / "large.bin").write_bytes(bytes(MOST_BYTES + 1))
    for arguments, named in (
        (["--data", "work"], "the folder work"),
        (["work"], "the folder work"),
        (["--mode=./work"], r"the folder \./work"),
        (["--weights=large.bin"], "the file large.bin of 1,000,001 bytes"),
    ):
        with pytest.raises(BadInput, match=f"given {named}, which rented machines do not have") as refused:
            carried(script, arguments)
        assert "aws s3 sync" in (refused.value.hint or "")
        assert "{data}" in (refused.value.hint or "")
    bundle = make_bundle("train.py", [str(script), "--config", "work/small.yaml"])
    assert bundle.script == ("task/train.py", "--config", "small.yaml")
    with tarfile.open(fileobj=io.BytesIO(bundle.data)) as archive:
        assert "task/small.yaml" in archive.getnames()


def wheel(folder: Path) -> str:
    """Put a wheel into a folder; return the lines of a lock that asks for it."""
    path = folder / "one-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("one.py", "WORD = 'one'\n")
        archive.writestr("one-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: one\nVersion: 1\n")
        archive.writestr("one-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("one-1.dist-info/RECORD", "one.py,,\none-1.dist-info/METADATA,,\none-1.dist-info/WHEEL,,\n")
    return f"one==1 \\\n    --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n"


def test_what_a_machine_asks_of_uv_installs_what_the_lock_names_and_nothing_else(
    tmp_path: Path, bundle: Bundle
) -> None:
    """The command that a machine was seen to give, given to uv itself, with a small lock in the place of its own."""
    called, _ = boot(tmp_path / "m", with_(bundle_sha256=bundle.sha256), bundle.data)
    _, *words = next(line for line in called if "-m uv pip install" in line).split()
    (wheels := tmp_path / "wheels").mkdir()
    words[words.index("--find-links") + 1] = str(wheels)
    lock, home = Path(words[-1]), tmp_path / "home"
    venv.EnvBuilder(with_pip=False).create(home)
    for line, code in ((wheel(wheels), 0), (f"one==1 --hash=sha256:{'0' * 64}\n", 1), ("two==1\n", 1)):
        lock.write_text(f"# a lock\n\n{line}")
        shutil.rmtree(tmp_path / "m" / "root" / "tmp", ignore_errors=True)
        shutil.rmtree(home / "lib", ignore_errors=True)
        done = subprocess.run(
            [sys.executable, *words, "--python", str(home / "bin" / "python")], capture_output=True, check=False
        )
        assert bool(done.returncode) is bool(code), done.stderr
        assert bool(list(home.rglob("one.py"))) is not bool(code)
