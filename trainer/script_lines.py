"""Which line of the user's own files is at work, and what an error there means: sentences about a script name it."""

from __future__ import annotations

import re
import sys
from itertools import dropwhile
from pathlib import Path
from textwrap import shorten
from traceback import walk_tb
from types import FrameType

_PACKAGES = "site-packages"
_QUOTED = re.compile(r'^ +File "(.+)", line (\d+)', re.MULTILINE)
"""A frame of a traceback in text, as Python prints it and torch's loader passes it on."""
MOST_SAID = 240
"""Characters of an error's words: three lines of a terminal."""


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
            found = self._place(_module(frame), frame.f_code.co_filename, frame.f_lineno)
            if found is not None or _module(frame).startswith(not_by):
                return found
            frame = frame.f_back
        return None

    def of(self, error: BaseException) -> str:
        """Return the user's innermost line that an error went through; the script alone where it went through none.

        An error of a reader process quotes its traceback as text; what is quoted lies further in than what caught it.
        """
        frames = ((_module(frame), frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__))
        quoted = (("", file, int(line)) for file, line in _QUOTED.findall(str(error)))
        places = [place for frame in (*frames, *quoted) if (place := self._place(*frame)) is not None]
        return places[-1] if places else self._name

    def _place(self, module: str, file: str, line: int) -> str | None:
        if module.partition(".")[0] in ("hetopt", "torch") or _PACKAGES in file:
            return None
        if file.startswith("<"):
            return None  # made without a file: Python's frozen modules, what a dataclass generates
        path = Path(file)
        if not path.is_absolute():
            path = path.resolve()
        if path == self._script:
            return f"{self._name}, line {line}"
        return f"{path.name}, line {line}" if path.is_relative_to(self._script.parent) else None


def reason_of(error: BaseException) -> str:
    """Return an error's type and words on one line, with the module of a system call that names no file.

    Of an error that quotes the traceback of another process: what that process ended with.
    """
    text = str(error)
    quoted = dropwhile(lambda line: line.startswith(" "), text.rpartition('\n  File "')[2].splitlines()[1:])
    said = " ".join(quoted) if _QUOTED.search(text) else f"{type(error).__name__}: {text}" if text else ""
    said = shorten(said or type(error).__name__, MOST_SAID, placeholder=" ...")
    caller = [_module(frame) for frame, _ in walk_tb(error.__traceback__)][-1:]
    if isinstance(error, OSError) and error.filename is None and caller not in ([], ["__main__"]):
        said += f" (in {caller[0]})"
    return said


_MOST_SHOWN = 4


def _module(frame: FrameType) -> str:
    """Its full name, also of one that was started by ``python -m``; a script has none."""
    spec = frame.f_globals.get("__spec__")
    return str(frame.f_globals.get("__name__") if spec is None else spec.name)
