"""Where the output of a run's processes is, and how to read on from where one stopped."""

from __future__ import annotations

import re
from pathlib import Path

LOG_FOLDER = "log"


def log_files(run_dir: Path, worker: int | None = None) -> dict[str, Path]:
    """Output files by label ('worker 0', or the file's own name), of one worker when ``worker`` is given."""
    files: dict[str, Path] = {}
    folder = run_dir / LOG_FOLDER
    for path in sorted(folder.rglob("*.log")) if folder.is_dir() else ():
        relative = path.relative_to(folder).as_posix()
        # torchrun files output under <id>/attempt_<restart>/<local rank>/<stream>.log
        found = re.search(r"attempt_(\d+)/(\d+)/(stdout|stderr)\.log$", relative)
        rank = int(found[2]) if found else None
        if worker is not None and rank != worker:
            continue
        if found:
            label = f"worker {rank}" + (f" restart {found[1]}" if found[1] != "0" else "")
            if label in files:
                label = f"{label} {found[3]}"
        else:
            label = path.stem
        files[label] = path
    return files


def read_from(path: Path, offset: int) -> tuple[str, int]:
    """Whole lines written since byte ``offset``, and the offset to go on from. A missing file has none yet."""
    try:
        with path.open("rb") as stream:
            stream.seek(offset)
            data = stream.read()
    except FileNotFoundError:
        return "", offset
    end = data.rfind(b"\n") + 1
    return data[:end].decode("utf-8", errors="replace"), offset + end
