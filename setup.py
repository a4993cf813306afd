"""What pyproject.toml cannot say: a wheel knows its commit, and is the same whoever builds it of that commit."""

import os
import re
import subprocess
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.egg_info import egg_info

HERE = Path(__file__).parent
# Of a checkout, dates and the group's rights are those of who made it. The date is the one that hatchling has.
os.environ.setdefault("SOURCE_DATE_EPOCH", "1580601600")
os.umask(0o022)


class EggInfo(egg_info):
    """What a wheel says of itself. Its source distribution, which has no checkout, keeps what it was given."""

    def run(self) -> None:
        """Write the commit beside it."""
        git = ["git", "-C", str(HERE), "rev-parse", "HEAD"]
        head = HERE / ".git" / "HEAD"
        if (HERE / ".git").exists():
            commit = head.read_text(encoding="utf-8") if head.is_file() else ""
            if not re.fullmatch("[0-9a-f]{40}", commit.strip()):  # of a branch
                commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout
            self.mkpath(self.egg_info)
            (Path(self.egg_info) / "commit.txt").write_text(commit, encoding="utf-8")
        super().run()


class BuildPy(build_py):
    """The files of the package."""

    def run(self) -> None:
        """With one mode for all of a kind."""
        super().run()
        for name in self.get_outputs():
            if os.path.exists(name):
                os.chmod(name, 0o755 if os.access(name, os.X_OK) else 0o644)


setup(cmdclass={"egg_info": EggInfo, "build_py": BuildPy})
