"""Keeps refreshed catalogues: each in a folder that is named by its day, is never changed, and is whole or not there.

A second one of a day is DAY.1, and so on. A reader thus finds the one that was there, or the new one, whenever it looks
and whenever the writer is killed: a new folder takes its name in one step, and one that goes loses it in one step.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from hetopt.core.errors import BadInput
from hetopt.core.paths import inside
from hetopt.optimizer.market.catalog import load_catalog

KEPT = 2
"""Catalogues of a region: the newest, and the one that somebody may be reading while it is replaced."""

_NAME = re.compile(r"(\d{4}-\d{2}-\d{2})(?:\.(\d{1,6}))?")
_UNFINISHED = re.compile(r"\.\d{4}-\d{2}-\d{2}[^/]*")


def refreshed_folders(home: Path, region: str) -> tuple[Path, ...]:
    """Return the folders of a region's refreshed catalogues below ``home``, newest first.

    Raises:
        BadInput: no region can be called so.
    """
    folder = inside(home, region, what="region")
    return _folders(folder) if folder.is_dir() else ()


def write_catalog(home: Path, region: str, day: str, files: Mapping[str, str]) -> Path:
    """Write a catalogue of a day, read the region back, and give it its name; older ones go.

    One writer at a time: what others left unfinished is removed.

    Args:
        home: of the catalogues of all regions.
        region: that the catalogue is of.
        day: ISO 8601.
        files: text by path inside the folder.

    Returns:
        The folder.

    Raises:
        BadInput: the folder cannot be written, or the files are no catalogue.
    """
    folder = inside(home, region, what="region")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{day}-", dir=folder) as unfinished:
            target = inside(Path(unfinished), day)
            for name, text in files.items():
                path = target / name
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("w", encoding="utf-8", newline="") as stream:
                    stream.write(text)
                    stream.flush()
                    os.fsync(stream.fileno())
            load_catalog(region, target)
            taken = [_order(path)[1] for path in _folders(folder) if _order(path)[0] == day]
            named = inside(folder, f"{day}.{max(taken) + 1}" if taken else day, what="day")
            target.rename(named)
    except OSError as error:
        raise BadInput(
            f"{folder} cannot be written: {error.strerror}.",
            hint="make room on the disk, or set HETOPT_HOME to a folder that can",
        ) from None
    unfinished_ones = (path for path in folder.iterdir() if _UNFINISHED.fullmatch(path.name))
    for path in (*_folders(folder)[KEPT:], *unfinished_ones):
        shutil.rmtree(path, ignore_errors=True)
    return named


def _folders(folder: Path) -> tuple[Path, ...]:
    folders = (path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir())
    return tuple(sorted(folders, key=_order, reverse=True))


def _order(path: Path) -> tuple[str, int]:
    match = _NAME.fullmatch(path.name)
    return (match.group(1), int(match.group(2) or 0)) if match else ("", 0)
