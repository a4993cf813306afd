"""The commit that runs is the one that git says is checked out, however git keeps it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from hetopt.cli.provenance import full_version, of_checkout

AS_SOMEBODY = ("-c", "user.name=somebody", "-c", "user.email=somebody@localhost", "-c", "init.defaultBranch=main")


def git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *AS_SOMEBODY, *arguments], capture_output=True, check=True)
    return done.stdout.decode().strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "-q")
    git(folder, "commit", "-q", "--allow-empty", "-m", "first")
    git(folder, "branch", "topic")
    git(folder, "commit", "-q", "--allow-empty", "-m", "second")
    return folder


@pytest.mark.parametrize("kept", ["loose", "packed", "detached"])
def test_a_checkout_knows_its_commit(repository: Path, kept: str) -> None:
    if kept == "packed":
        git(repository, "pack-refs", "--all")
    elif kept == "detached":
        git(repository, "checkout", "-q", "HEAD~1")
    assert of_checkout(repository / ".git") == git(repository, "rev-parse", "HEAD")


def test_so_does_a_work_tree_beside_it(repository: Path, tmp_path: Path) -> None:
    git(repository, "worktree", "add", "-q", str(tmp_path / "beside"), "topic")
    assert of_checkout(tmp_path / "beside" / ".git") == git(repository, "rev-parse", "topic")


def test_where_there_is_no_commit_the_version_is_all(tmp_path: Path) -> None:
    assert of_checkout(tmp_path / ".git") is None
    git(tmp_path, "init", "-q")
    assert of_checkout(tmp_path / ".git") is None
    assert full_version().startswith("0.")
