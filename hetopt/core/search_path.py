"""Whose modules a process of hetopt's finds: installed ones first, and those beside a script once that is to run.

``python -m MODULE`` looks in the current folder before anywhere else, and there a person may keep a ``torch.py`` or a
``json.py``. What hetopt starts has `INSTALLED_ONLY` in its environment, and so has what that starts. A script finds its
own folder first, as with ``python SCRIPT``; what has been imported by then stays what it is.
(Python documentation, "Command line and environment", -P and PYTHONSAFEPATH, from 3.11 on.)
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

_VARIABLE = "PYTHONSAFEPATH"

INSTALLED_ONLY = {_VARIABLE: "1"}
"""Environment of a Python that is to look in no folder of the caller's."""


def search_first(folder: Path) -> None:
    """Look in a folder first, in the place of the one that this process began with, if any; what it starts begins as
    usual."""
    if not os.environ.pop(_VARIABLE, None):
        del sys.path[0]
    sys.path.insert(0, str(folder))


def begin_in(folder: str) -> None:
    """Look where a Python does that begins with this process's environment: in that folder first, or only at what is
    installed."""
    if not sys.flags.safe_path:
        del sys.path[0]
    if not os.environ.get(_VARIABLE):
        sys.path.insert(0, folder)
