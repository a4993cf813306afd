"""How long a newcomer takes from nothing to a first report, by the commands of `docs/quickstart.md` as they stand.

A fresh copy of the repository in a folder that holds nothing else, an environment of its own, and then the page from
top to bottom in one shell, each command timed as a whole. hetopt's own share is everything but copying, making the
environment and installing packages, which is the network's and pip's. `--quick` leaves those out and uses the packages
that are here. The copy is of the last commit: what is not committed is not measured.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks._outcome import Results, options, publish, run_benchmark

REPOSITORY = Path(__file__).resolve().parent.parent
PAGE = REPOSITORY / "docs" / "quickstart.md"
CONSOLE = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
MOST_S, MOST_OWN_S = 600.0, 120.0
SET_UP = ("git", "python3", ".", "pip")
"""What begins a command that is not hetopt's."""


def commands() -> list[str]:
    """Of the page, in its order."""
    blocks = CONSOLE.findall(PAGE.read_text(encoding="utf-8"))
    return [line[2:] for block in blocks for line in block.splitlines() if line.startswith("$ ")]


def name_of(command: str) -> str:
    """What a command's figure is called."""
    words = command.split()
    kind = {"git": "copy", "python3": "environment", ".": "environment", "pip": "install"}.get(words[0])
    return f"{kind or '_'.join(word.strip('-') for word in words[1:3] if not word.endswith('.json'))}_s"


def timed_s(command: str, folder: Path, environment: dict[str, str]) -> float:
    """Seconds that a command takes; what it exports goes on to the next.

    Raises:
        SystemExit: it failed.
    """
    left = Path(environment["HETOPT_HOME"]).with_name("shell")
    begun_s = time.perf_counter()
    done = subprocess.run(
        ["bash", "-c", f"{command}\nstatus=$?; env -0 > {left}; exit $status"],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    took_s = time.perf_counter() - begun_s
    if done.returncode != 0:
        raise SystemExit(f"`{command}` ended with {done.returncode}:\n{done.stdout[-2000:]}")
    environment.clear()
    for item in filter(None, left.read_text(encoding="utf-8").split("\0")):
        name, _, value = item.partition("=")
        environment[name] = value
    return took_s


def first_environment(home: Path, *, set_up: bool) -> dict[str, str]:
    """Of a shell that knows nothing of this environment; without set-up, of one in which hetopt is installed."""
    inherited: Mapping[str, str] = os.environ
    known = {key: inherited[key] for key in inherited if key not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    own = str(Path(sys.executable).parent)
    others = [part for part in known.get("PATH", "").split(os.pathsep) if part != own]
    known["PATH"] = os.pathsep.join(others if set_up else [own, *others])
    return {**known, "HETOPT_HOME": str(home / ".hetopt")}


def main() -> None:
    """The page, once: what is measured is minutes long, and much of it the network's."""
    asked = options(__doc__)
    results, times = Results(), dict[str, float]()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "hetopt"
        environment = first_environment(Path(made), set_up=not asked.quick)
        todo = commands()
        if asked.quick:
            folder.mkdir()
            todo = [command for command in todo if command.split()[0] not in SET_UP]
        else:
            copy = f"git clone --quiet --no-hardlinks {REPOSITORY} {folder}"
            times[name_of(copy)] = timed_s(copy, Path(made), environment)
        for command in todo:
            print(f"$ {command}", file=sys.stderr)
            name = name_of(command)
            times[name] = times.get(name, 0.0) + timed_s(command, folder, environment)
    set_up = {name_of(f"{word} .") for word in SET_UP}
    own_s = sum(took_s for name, took_s in times.items() if name not in set_up)
    for name, took_s in times.items():
        print(f"{name.removesuffix('_s'):20}{took_s:8.1f} s{'' if name in set_up else '   hetopt'}")
        results.figures[name] = round(took_s, 3)
    total_s = sum(times.values())
    print(f"{'all':20}{total_s:8.1f} s\n{'of which hetopt':20}{own_s:8.1f} s")
    if not asked.quick:
        results.goal("total_s", total_s, at_most=MOST_S)
    results.goal("own_s", own_s, at_most=MOST_OWN_S)
    publish(results.outcome("newcomer", quick=asked.quick), asked.json_file)


if __name__ == "__main__":
    run_benchmark(main)
