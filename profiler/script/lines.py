"""Which line of the user's own files is at work: sentences about a script name it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType

_PACKAGES = "site-packages"


class Lines:
    """Finds lines of a script and of the modules beside it.

    Args:
        script: the file that runs.
    """

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
        path = Path(frame.f_code.co_filename)
        if not path.is_absolute():
            path = path.resolve()
        if path == self._script:
            return f"{self._name}, line {line}"
        return f"{path.name}, line {line}" if path.is_relative_to(self._script.parent) else None


def _module(frame: FrameType) -> str:
    """Its full name, also of one that was started by ``python -m``; a script has none."""
    spec = frame.f_globals.get("__spec__")
    return str(frame.f_globals.get("__name__") if spec is None else spec.name)
