"""Which commit of hetopt runs: read from files alone, so that asking for it starts no process."""

from __future__ import annotations

import json
import re
from importlib.metadata import distribution, version
from pathlib import Path

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHOWN = 9
"""Characters of a commit that a person compares."""


def full_version() -> str:
    """The version, and the commit in parentheses where it is known: of a checkout, of a wheel, or as pip noted it."""
    commit = of_checkout(Path(__file__).resolve().parents[2] / ".git") or _of_install()
    return version("hetopt") + (f" ({commit[:_SHOWN]})" if commit else "")


def _of_install() -> str | None:
    """What the wheel was built of, written by `setup.py`, or what ``pip install git+https://`` was given (PEP 610)."""
    own = distribution("hetopt")
    noted = own.read_text("direct_url.json")
    commit = own.read_text("commit.txt") or (json.loads(noted).get("vcs_info", {}).get("commit_id") if noted else None)
    return commit.strip() if commit and _COMMIT.fullmatch(commit.strip()) else None


def of_checkout(git: Path) -> str | None:
    """The commit that is checked out; absent where this is no checkout. `setup.py` runs it from this file alone."""
    if git.is_file():  # a work tree beside the repository
        own = git.read_text(encoding="utf-8").removeprefix("gitdir:").strip()
        git = git.parent / own
    if not (git / "HEAD").is_file():
        return None
    head = (git / "HEAD").read_text(encoding="utf-8").strip()
    if _COMMIT.fullmatch(head):
        return head
    name = head.removeprefix("ref:").strip()
    common = git / (git / "commondir").read_text(encoding="utf-8").strip() if (git / "commondir").is_file() else git
    if (common / name).is_file():
        found = (common / name).read_text(encoding="utf-8").strip()
        return found if _COMMIT.fullmatch(found) else None
    packed = common / "packed-refs"
    lines = packed.read_text(encoding="utf-8").splitlines() if packed.is_file() else []
    return next((line[:40] for line in lines if line.endswith(f" {name}") and _COMMIT.match(line)), None)
