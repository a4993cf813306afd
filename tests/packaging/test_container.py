"""The image's definition: it copies what the repository has, runs as nobody special, and its steps install hetopt."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


def instructions() -> list[tuple[str, str]]:
    """Each instruction and what it says, lines joined."""
    text = re.sub(r"^#.*\n", "", (REPOSITORY / "Containerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = text.replace("\\\n", "").splitlines()
    return [(line.partition(" ")[0], line.partition(" ")[2].strip()) for line in lines if line.strip()]


def said(name: str) -> list[str]:
    return [text for instruction, text in instructions() if instruction == name]


def test_what_is_copied_is_there_and_what_is_not_in_the_repository_is_left_out() -> None:
    for copied in said("COPY"):
        sources = copied.split()[:-1]
        if not sources[0].startswith("--from="):
            assert all((REPOSITORY / source).exists() for source in sources)
    ignored = (REPOSITORY / ".dockerignore").read_text(encoding="utf-8")
    for line in (REPOSITORY / ".gitignore").read_text(encoding="utf-8").splitlines():
        if line.startswith("/"):
            assert line.strip("/") in ignored, f"{line} would be sent to the builder"


def test_it_has_a_version_to_begin_with_and_ends_as_a_user() -> None:
    assert all(re.search(r":\d", image) for image in said("FROM"))
    assert said("USER") == ["hetopt"]
    assert json.loads(said("ENTRYPOINT")[0]) == ["hetopt"]
    last = max(place for place, (name, _) in enumerate(instructions()) if name == "RUN")
    assert [name for name, _ in instructions()].index("USER") > last, "what is installed is not the user's to change"


def test_every_step_is_a_command_that_a_shell_reads() -> None:
    for step in said("RUN"):
        subprocess.run(["sh", "-n", "-c", step], check=True)


@pytest.mark.slow
def test_its_steps_install_hetopt(tmp_path: Path) -> None:
    """Those of the first stage, in folders of the test's own, with whatever index is configured here."""
    moved = {"/opt/hetopt": f"{tmp_path}/opt", "/tmp/hetopt": str(REPOSITORY), "/tmp/": f"{tmp_path}/"}
    (tmp_path / "constraints.txt").write_bytes((REPOSITORY / "requirements" / "constraints.txt").read_bytes())
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for step in said("RUN")[:3]:
        for there, here in moved.items():
            step = step.replace(there, here)
        step = re.sub(r"--index-url \S+ --extra-index-url \S+", "", step)
        subprocess.run(["sh", "-c", step], check=True, env=environment)
    told = subprocess.run([f"{tmp_path}/opt/bin/hetopt", "--version"], capture_output=True, text=True, check=True)
    assert told.stdout.startswith("hetopt 0.")


@pytest.mark.slow
@pytest.mark.timeout(3600)  # it installs all of hetopt, and copies the image at each step: 19 minutes on two busy cores
def test_it_is_built_without_a_daemon_and_runs(tmp_path: Path) -> None:
    """By buildah, where there is one and the image that it begins with can be had."""
    buildah = shutil.which("buildah")
    if buildah is None:
        pytest.skip("no buildah")
    isolated = ["--isolation", "chroot"]
    begin = subprocess.run([buildah, "from", "--quiet", said("FROM")[0].split()[0]], capture_output=True, text=True)
    if begin.returncode != 0:
        pytest.skip(f"the image that it begins with cannot be had: {begin.stderr[-200:]}")
    subprocess.run([buildah, "rm", begin.stdout.strip()], check=True, capture_output=True)
    listed = subprocess.run(["git", "archive", "HEAD"], cwd=REPOSITORY, check=True, capture_output=True).stdout
    subprocess.run(["tar", "x", "-C", str(tmp_path)], input=listed, check=True)
    name = "localhost/hetopt-test"
    command = [buildah, "bud", *isolated, "--network", "host", *os.environ.get("HETOPT_BUILDAH", "").split()]
    subprocess.run([*command, "-f", "Containerfile", "-t", name, "."], cwd=tmp_path, check=True)
    box = subprocess.run([buildah, "from", name], check=True, capture_output=True, text=True).stdout.strip()
    try:
        for typed, told in (("hetopt --version", "hetopt 0."), ("id -un", "hetopt"), ("hetopt gpus", "A10G")):
            done = subprocess.run(
                [buildah, "run", *isolated, box, "--", *typed.split()], check=True, capture_output=True, text=True
            )
            assert told in done.stdout
    finally:
        subprocess.run([buildah, "rm", box], check=True, capture_output=True)
        subprocess.run([buildah, "rmi", name], check=True, capture_output=True)
