"""How much something does, counted: processor time is another on another machine, and another in another minute."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

from tests.sources import REPOSITORY

PROGRAM = """
import json, sys
from tests.work import calls_of

def command():
    from hetopt.cli.main import app
    app(standalone_mode=False)

sys.argv[0] = "hetopt"
calls = calls_of(command)
peak = open("/proc/self/status").read().split("VmHWM:")[1].split()[0]
print(json.dumps({"calls": calls, "modules": sorted(sys.modules), "memory_kib": int(peak)}))
"""


def calls_of(work: Callable[[], object]) -> int:
    """Returns of functions while `work` runs, Python's and C's, in this thread alone.

    The same from run to run, up to what is done once a process: let `work` run once before where that matters. What one
    call into C does is not seen, however long it takes; for seconds there are benchmarks.
    """
    count = 0

    def seen(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in {"return", "c_return"}

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


@dataclass(frozen=True, kw_only=True)
class CountedCommand:
    """What `hetopt` with some arguments did in a process of its own, imports included."""

    calls: int
    modules: list[str]
    memory_kib: int
    """At most at a time. The program's own: `ru_maxrss` counts the process that started it, too."""


def counted_command(*arguments: str) -> CountedCommand:
    """Runs ``hetopt ARGUMENTS`` and counts; its output is left unread. A command that fails is an error."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return CountedCommand(**json.loads(done.stdout.splitlines()[-1]))
