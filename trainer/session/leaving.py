"""Sessions that are open when a script is over: frameworks have no call that every script ends with."""

from __future__ import annotations

import atexit
import sys
from functools import cache
from types import TracebackType

from hetopt.trainer.session.registry import REGISTRY
from hetopt.trainer.session.run import Session


@cache
def leave_at_exit() -> None:
    """End open sessions when Python ends, and tell the other workers if it was an error that ended the script."""
    failed: list[BaseException] = []
    before = sys.excepthook

    def note(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        failed.append(error)
        before(kind, error, trace)

    def leave() -> None:
        error = failed[0] if failed else None
        for one in REGISTRY.open:
            if isinstance(one, Session):
                one.__exit__(None if error is None else type(error), error, None)

    sys.excepthook = note
    atexit.register(leave)
