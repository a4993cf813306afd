"""What to install where an optional part of hetopt is missing: a command that works wherever hetopt itself came from.

hetopt may be installed from a checkout, a wheel or an index, so the command names what the extra needs and not hetopt.
"""

from __future__ import annotations

import importlib.metadata
import re
import shlex

_NAMED_EXTRA = re.compile(r"""extra\s*==\s*['"]([^'"]+)['"]""")


def install_command(extra: str) -> str:
    """The pip command that installs what an extra of hetopt needs, such as ``train``; as pyproject.toml declares it."""
    needed = []
    for line in importlib.metadata.requires("hetopt") or ():
        requirement, _, condition = line.partition(";")
        named = _NAMED_EXTRA.search(condition)
        if named is not None and named.group(1) == extra:
            needed.append(requirement.strip())
    return f"pip install {shlex.join(needed)}"
