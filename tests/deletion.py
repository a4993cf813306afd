"""The deletion test: removes product files one at a time and runs the tests of their room.

    python -m tests.deletion --sample 100 --seed 0

A file that no test misses is dead or untested. Tests run in a copy of the last commit, up to the first failure.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]

_BACKENDS = ("tests/api", "tests/face")

TESTS = {
    "trainer": (
        "tests/trainer_pieces",
        "tests/tasks",
        "tests/trainer",
        "tests/scripts",
        "tests/integrations",
        "tests/face",
    ),
    "trainer/session": ("tests/scripts", "tests/trainer"),
    "optimizer": ("tests/step_model", "tests/optimizer", "tests/catalog", "tests/face"),
    "profiler": ("tests/profiler", "tests/face"),
    "hetopt/backends": ("tests/ec2", "tests/ssh", "tests/rehearsal", *_BACKENDS),
    "hetopt/backends/emulation": ("tests/rehearsal", *_BACKENDS),
    "hetopt/backends/slurm": ("tests/slurm", *_BACKENDS),
    "hetopt/backends/ssh": ("tests/ssh", *_BACKENDS),
    "hetopt/core": ("tests/facts", "tests/trainer_pieces", "tests/optimizer", "tests/face"),
    "hetopt": ("tests/face", "tests/api", "tests/docs"),
}
"""Tests of a room, the quickest first; the longest prefix of a file's path counts."""

SLOWEST_S = 900
"""A run that takes longer has missed nothing so far, and is counted so."""


def tests_of(path: str) -> tuple[str, ...]:
    """Return the folders with tests of a product file."""
    return TESTS[max((room for room in TESTS if path.startswith(f"{room}/")), key=len)]


def what_fails(copy: Path, path: str) -> str | None:
    """Return the first test that fails without a file; None: none does."""
    kept = (copy / path).read_bytes()
    (copy / path).unlink()
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests_of(path)]
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        ran = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=SLOWEST_S, check=False
        )
    except subprocess.TimeoutExpired:
        return None
    finally:
        (copy / path).write_bytes(kept)
    lines = [line for line in ran.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return None if ran.returncode == 0 else [*lines, *ran.stderr.splitlines()[-1:], "at its start"][0]


def main() -> int:
    """Print each file of the sample with the test that misses it; return the number that nothing misses."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sample", type=int, default=100, help="product files to remove, one at a time")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    options = parser.parse_args()
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    rooms = tuple(f"{room}/" for room in TESTS)
    files = [path for path in listed.stdout.splitlines() if path.startswith(rooms) and not path.endswith("__init__.py")]
    missed_by_none = 0
    with tempfile.TemporaryDirectory(prefix="hetopt-deletion-") as folder:
        copy = Path(folder)
        archive = subprocess.run(["git", "archive", "HEAD"], cwd=REPOSITORY, capture_output=True, check=True).stdout
        subprocess.run(["tar", "-x", "-C", str(copy)], input=archive, check=True)
        for path in sorted(random.Random(options.seed).sample(files, min(options.sample, len(files)))):
            failure = what_fails(copy, path)
            missed_by_none += failure is None
            print(f"{path}: {failure or 'NOTHING MISSES IT'}", flush=True)
    print(f"{missed_by_none} files are missed by nothing")
    return min(missed_by_none, 1)


if __name__ == "__main__":
    sys.exit(main())
