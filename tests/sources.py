"""The modules of the product by their names, as they lie in `hetopt/` and in the four folders that it links to."""

from __future__ import annotations

import os
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent


def modules() -> dict[str, Path]:
    """Every module by its dotted name, with its path below `hetopt/`; a package goes by its own name."""
    found = {}
    for folder, folders, files in os.walk(REPOSITORY / "hetopt", followlinks=True):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for file in sorted(files):
            if file.endswith(".py"):
                path = Path(folder) / file
                parts = path.relative_to(REPOSITORY).with_suffix("").parts
                found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found
