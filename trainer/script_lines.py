"""Which line of the user's own files is at work, and what an error there means: sentences about a script name it."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType

from hetopt.core.errors import BadInput, HetoptError, RunFailed

_PACKAGES = "site-packages"


class Lines:
    """Finds lines of a script and of the modules beside it."""

    def __init__(self, script: str) -> None:
        self._script = Path(script).resolve()
        self._name = script

    def now(self, *, not_by: str = "-") -> str | None:
        """The innermost line that is being executed: ``train.py, line 12``; None: none of the user's is.

        Args:
            not_by: a package; None as well where it stands between that line and this call.
        """
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            found = self._told(frame, frame.f_lineno)
            if found is not None or _module(frame).startswith(not_by):
                return found
            frame = frame.f_back
        return None

    def of(self, trace: TracebackType | None) -> str:
        """The innermost line of an error's traceback; the script alone where it has none."""
        found = [one for one in self._along(trace) if one is not None]
        return found[-1] if found else self._name

    def _along(self, trace: TracebackType | None) -> Iterator[str | None]:
        while trace is not None:
            yield self._told(trace.tb_frame, trace.tb_lineno)
            trace = trace.tb_next

    def _told(self, frame: FrameType, line: int) -> str | None:
        if _module(frame).partition(".")[0] in ("hetopt", "torch") or _PACKAGES in frame.f_code.co_filename:
            return None
        if frame.f_code.co_filename.startswith("<"):
            return None  # made without a file: Python's frozen modules, what a dataclass generates
        path = Path(frame.f_code.co_filename)
        if not path.is_absolute():
            path = path.resolve()
        if path == self._script:
            return f"{self._name}, line {line}"
        return f"{path.name}, line {line}" if path.is_relative_to(self._script.parent) else None


def exits(script: str) -> str:
    """Where a script leaves a loop or skips the rest of a pass: ``train.py, lines 12 and 20``; empty: nowhere."""
    try:
        tree = ast.parse(Path(script).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ""
    loops = [one for one in ast.walk(tree) if isinstance(one, ast.For | ast.While)]
    inside = [one for loop in loops for body in loop.body for one in ast.walk(body)]
    lines = sorted({one.lineno for one in inside if isinstance(one, ast.Break | ast.Continue | ast.Return)})
    if not lines:
        return ""
    if len(lines) == 1:
        return f"{script}, line {lines[0]}"
    shown = [str(one) for one in lines[:_MOST_SHOWN]]
    listed = f"{', '.join(shown[:-1])} and {shown[-1]}" if len(lines) <= _MOST_SHOWN else f"{', '.join(shown)}, ..."
    return f"{script}, lines {listed}"


_MOST_SHOWN = 4


def _module(frame: FrameType) -> str:
    """Its full name, also of one that was started by ``python -m``; a script has none."""
    spec = frame.f_globals.get("__spec__")
    return str(frame.f_globals.get("__name__") if spec is None else spec.name)


def explained(error: Exception, lines: Lines) -> HetoptError:
    """An error of the script in one sentence, with the line of the user's own file."""
    if isinstance(error, HetoptError):
        return error
    place = lines.of(error.__traceback__)
    said = " ".join(str(error).split())[:200]
    told = f"{type(error).__name__}{': ' + said if said else ''}"
    if isinstance(error, EOFError):
        return BadInput(
            f"{place}: the script asks for input, and nobody is there to type it.",
            hint="give it what it asks for as an argument",
        )
    if type(error).__name__ == "TclError" or any(word in said.lower() for word in ("display", "headless")):
        return BadInput(
            f"{place}: the script needs a display ({told}), and workers have none.",
            hint="write pictures to files instead of showing them, or leave them out with an argument",
        )
    if isinstance(error, KeyError) and error.args and error.args[0] in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        return BadInput(
            f"{place}: the script is written for torchrun, and reads {error.args[0]}.",
            hint="`hetopt convert` takes that out",
        )
    return RunFailed(f"{place}: the script fails: {told}", hint="see that it runs by itself with these arguments")
