"""What a machine boots with: its text is known, its end comes first, and nothing in it is read as more than a word."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hetopt.optimizer.ec2.bundle import Bundle, make_bundle
from hetopt.profiler.errors import BadInput
from hetopt.trainer.launch.ec2.bootstrap import USER_DATA_LIMIT_BYTES, NodeConfig, user_data

CONFIG = NodeConfig(
    run_id="20261120-120000-digits-ab12",
    region="us-east-1",
    bucket="hetopt-123456789012-us-east-1",
    account_id="123456789012",
    bundle_sha256="0" * 64,
    end_s=1_800_000_000.9,
    has_gpu=False,
    version="0.1.0",
    group_secret="5ec4e7" + 58 * "0",
)


@pytest.mark.parametrize("gpu", [False, True])
def test_the_text(gpu: bool, golden: Callable[[str, str], None]) -> None:
    text = user_data(replace(CONFIG, has_gpu=gpu))
    golden(f"user-data-{'gpu' if gpu else 'cpu'}.sh", text)
    assert len(text.encode()) < USER_DATA_LIMIT_BYTES / 2


def test_the_end_comes_before_anything_that_can_fail() -> None:
    commands = [line for line in user_data(CONFIG).splitlines() if line.strip() and not line.startswith("#")]
    assert commands[0] == "left=$((1800000000 - $(date +%s)))", "a machine that comes late ends when the others do"
    assert commands[2].startswith('systemd-run --unit=hetopt-lifetime --on-active="$left" shutdown -h now')


def test_a_shell_can_read_it(tmp_path: Path) -> None:
    script = tmp_path / "user-data"
    script.write_text(user_data(CONFIG))
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0


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
    ],
)
def test_nothing_but_words_gets_in(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="cannot be"):
        replace(CONFIG, **change)  # type: ignore[arg-type]


def test_the_configuration_is_read_back() -> None:
    assert NodeConfig.from_json(CONFIG.to_json()) == CONFIG
    for nonsense in ("[]", "{}", '{"run_id": 3}', "no"):
        with pytest.raises(ValueError, match=r".*"):
            NodeConfig.from_json(nonsense)


SHIMS = {
    "systemd-run": 'echo "systemd-run $*" >> "$CALLS"',
    "shutdown": 'echo "shutdown $*" >> "$CALLS"',
    "dnf": 'echo "dnf $*" >> "$CALLS"',
    "aws": 'echo "aws $*" >> "$CALLS"; if [ "$2" = get-object ]; then cp "$BUNDLE" "${!#}"; fi',
    # A virtual environment whose python notes what it was asked.
    "python3.12": 'mkdir -p "$3/bin"; echo "#!/bin/bash" > "$3/bin/python"; '
    'echo \'echo "python $*" >> "$CALLS"; exit "${AGENT_CODE:-0}"\' >> "$3/bin/python"; '
    'chmod +x "$3/bin/python"',
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
        input=user_data(config),
        text=True,
        check=False,
        timeout=60,
        env={
            **os.environ,
            "PATH": f"{shims}:{os.environ['PATH']}",
            "HETOPT_ROOT": str(folder / "root"),
            "CALLS": str(folder / "calls"),
            "BUNDLE": str(folder / "bundle"),
            **environment,
        },
    )
    return (folder / "calls").read_text().splitlines(), (folder / "root" / "boot.log").read_text()


def test_a_machine_boots_and_ends(tmp_path: Path, bundle: Bundle) -> None:
    config = replace(CONFIG, bundle_sha256=bundle.sha256)
    called, log = boot(tmp_path, config, bundle.data)
    assert called[0].startswith("systemd-run --unit=hetopt-lifetime")
    assert called[-1] == "shutdown -h now"
    assert called[-2] == f"python -m hetopt.trainer.launch.ec2.agent {tmp_path / 'root'}"
    assert any("pip install" in line and "requirements.txt" in line for line in called)
    assert NodeConfig.from_json((tmp_path / "root" / "node.json").read_text()) == config
    assert (tmp_path / "root" / "code" / "hetopt" / "trainer" / "launch" / "host.py").is_file()
    assert "the agent ended with 0" in log


def test_a_bundle_that_is_not_the_right_one_is_not_run(tmp_path: Path, bundle: Bundle) -> None:
    called, log = boot(tmp_path, CONFIG, bundle.data)
    assert called[-1] == "shutdown -h now"
    assert not any("python" in line for line in called)
    assert "put-object" in called[-2], "it leaves its log"
    assert "boot failed in line" in log


def test_an_agent_that_fails_ends_the_machine(tmp_path: Path, bundle: Bundle) -> None:
    config = replace(CONFIG, bundle_sha256=bundle.sha256)
    called, log = boot(tmp_path / "install", config, bundle.data, AGENT_CODE="3")
    assert called[-1] == "shutdown -h now", "an installation that fails ends it too"
    assert "boot failed" in log


def test_the_bundle_is_the_same_for_the_same_sources(bundle: Bundle, tmp_path: Path) -> None:
    assert make_bundle("digits").data == bundle.data
    assert bundle.sha256 == hashlib.sha256(bundle.data).hexdigest()
    assert len(bundle.data) < 2_000_000
    (tmp_path / "b.tar.gz").write_bytes(bundle.data)
    with tarfile.open(tmp_path / "b.tar.gz") as archive:
        names = archive.getnames()
    assert "hetopt/profiler/errors.py" in names
    assert not any(name.startswith("/") or ".." in name for name in names)
    assert not any(name.startswith("hetopt/optimizer") for name in names), "machines plan nothing"


def test_the_users_own_task_travels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("task = 1\n")
    monkeypatch.chdir(tmp_path)
    packed = make_bundle("mine.py:task")
    assert packed.task == "task/mine.py:task"
    with pytest.raises(BadInput, match="cannot be read"):
        make_bundle("other.py:task")
    with pytest.raises(BadInput, match="in a module"):
        make_bundle("package.module:task")


def test_the_bundle_runs_by_itself(tmp_path: Path, bundle: Bundle) -> None:
    """On a machine there is nothing of hetopt but the bundle."""
    import sys

    (tmp_path / "b.tar.gz").write_bytes(bundle.data)
    with tarfile.open(tmp_path / "b.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    program = (
        "import json, sys; sys.meta_path = [f for f in sys.meta_path if 'editable' not in repr(f).lower()];"
        "sys.path.insert(0, '.'); import hetopt.trainer.launch.ec2.agent as a; import hetopt.trainer.tasks as t;"
        "print(json.dumps([a.__file__, t.__file__]))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(Path(found).is_relative_to(tmp_path) for found in json.loads(done.stdout))
