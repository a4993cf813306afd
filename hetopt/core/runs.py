"""Where runs live: a folder each under ``$HETOPT_HOME/runs`` (``~/.hetopt/runs``), named by their start and task."""

from __future__ import annotations

import datetime
import os
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from hetopt.core.errors import BadInput
from hetopt.core.paths import expanded
from hetopt.core.reading import shortened

_SECRET_BYTES = 8


def home() -> Path:
    """The folder of what hetopt keeps for this user: ``$HETOPT_HOME``, else ``~/.hetopt``."""
    base = os.environ.get("HETOPT_HOME")
    return expanded(base or "~/.hetopt")


def runs_home() -> Path:
    """The folder that holds all runs of this user."""
    return home() / "runs"


@dataclass(frozen=True, kw_only=True)
class RunFolders:
    """The runs under one home.

    Attributes:
        home: the folder of their folders.
        made: told the name of each that is made here.
    """

    home: Path
    made: Callable[[str], None] = field(default=lambda name: None)

    def create(self, label: str, now: datetime.datetime, *, secret: bool = False) -> Path:
        """Make a new, empty run folder. Two runs that begin in the same second get different names.

        Args:
            label: what it is about.
            now: when it begins.
            secret: its name cannot be guessed, as a bucket needs it where machines of several runs may write.

        Raises:
            BadInput: the home cannot be written.
        """
        slug = re.sub(r"[^A-Za-z0-9_-]+", "-", label).strip("-")[:40] or "run"
        name = f"{now:%Y%m%d-%H%M%S}-{slug}-{secrets.token_hex(_SECRET_BYTES if secret else 2)}"
        path = self.home / name
        try:
            self.home.mkdir(parents=True, exist_ok=True)
            path.mkdir(mode=0o700)  # tasks, logs and models are their owner's alone
        except OSError as error:
            raise BadInput(
                f"the run folder {shortened(str(path))} cannot be made: {error.strerror}.",
                hint="set HETOPT_HOME to a folder that you can write to",
            ) from None
        self.made(name)
        return path

    def all(self) -> list[Path]:
        """Every run, oldest first (their names sort by time).

        Raises:
            BadInput: their folder cannot be read.
        """
        try:
            return sorted(path for path in self.home.iterdir() if path.is_dir() and not path.name.startswith("."))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise BadInput(
                f"the runs in {shortened(str(self.home))} cannot be listed: {error.strerror}.",
                hint="set HETOPT_HOME to a folder of yours",
            ) from None

    def find(self, name: str | None) -> Path:
        """The run called ``name`` (any unambiguous part of it will do), or the newest one.

        Raises:
            BadInput: there is no such run, or the name fits several.
        """
        runs = self.all()
        if not runs:
            raise BadInput(f"there are no runs in {self.home}.", hint="start one with `hetopt launch PLAN --on local`")
        if name is None:
            return runs[-1]
        exact = [run for run in runs if run.name == name]
        matches = exact or [run for run in runs if name in run.name]
        if not matches:
            raise BadInput(f"no run is called {name!r}.", hint="list them with `hetopt status --all`")
        if len(matches) > 1:
            shown = ", ".join(run.name for run in matches[-3:])
            raise BadInput(f"{name!r} fits {len(matches)} runs ({shown}).", hint="give more of the name")
        return matches[0]
