"""Which commit of hetopt is installed: read from files alone, so that asking for it starts no process."""

from __future__ import annotations

import json
from importlib.metadata import distribution, version
from pathlib import Path

_SHOWN = 9
"""Characters of a commit that a person compares."""


def full_version() -> str:
    """Return the version, and the commit in parentheses where an installation knows it: a checkout's may have changed.

    It is what the wheel was built of, written by `setup.py`, or what ``pip install git+https://`` was given (PEP 610).
    """
    own = distribution("hetopt")
    noted = json.loads(own.read_text("direct_url.json") or "{}").get("vcs_info", {}).get("commit_id")
    is_checkout = (Path(__file__).resolve().parents[2] / ".git").exists()
    commit = "" if is_checkout else (own.read_text("commit.txt") or noted or "").strip()
    return version("hetopt") + (f" ({commit[:_SHOWN]})" if commit else "")
