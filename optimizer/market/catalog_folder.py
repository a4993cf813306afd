"""Writes a catalogue folder whole or not at all: into a folder beside it, which then takes its name."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from hetopt.core.errors import BadInput
from hetopt.optimizer.market.catalog import load_catalog


def write_catalog(folder: Path, files: Mapping[str, str], region: str) -> Path:
    """Write the files, read the region back, and put the folder in place of any that has its name.

    Raises:
        BadInput: the folder cannot be written, or the files are no catalogue.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise BadInput(
            f"{folder.parent} cannot be written: {error.strerror}.", hint="set HETOPT_HOME to a folder that can"
        ) from None
    try:
        for name, text in files.items():
            path = made / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("w", encoding="utf-8", newline="") as stream:
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())
        load_catalog(region, made)
        made.chmod(0o755)
        if folder.exists():
            shutil.rmtree(folder)
        made.rename(folder)
    except OSError as error:
        raise BadInput(f"{made} cannot be written: {error.strerror}.", hint="make room on the disk") from None
    finally:
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(made)
    return folder
