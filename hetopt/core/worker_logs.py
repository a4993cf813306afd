"""Where the output of a run's processes is, and how to read on from where one stopped."""

from __future__ import annotations

import re
from pathlib import Path

from hetopt.core.errors import BadInput
from hetopt.core.events.reader import ITS_OWNER
from hetopt.core.nodes import first_rank
from hetopt.core.paths import inside
from hetopt.core.reading import MissingFile, opened_file
from hetopt.core.run_folder import read_spec

LOG_FOLDER = "log"


def host_log_folder(run_dir: Path, host: str) -> Path:
    """Where the processes of one host write what they print; it need not exist yet.

    Raises:
        BadInput: no host can be called so.
    """
    return inside(run_dir / LOG_FOLDER, host, what="host")


def log_files(run_dir: Path, worker: int | None = None) -> dict[str, Path]:
    """Output files by label ('worker 0', or the file's own name), of one worker when ``worker`` is given.

    Workers are called by their rank in the run, on whichever of its hosts they are.
    """
    files: dict[str, Path] = {}
    folder = run_dir / LOG_FOLDER
    first_ranks: dict[str, int] = {}
    for path in sorted(folder.rglob("*.log")) if folder.is_dir() else ():
        relative = path.relative_to(folder).as_posix()
        # torchrun files output under [<host>/]<id>/attempt_<restart>/<local rank>/<stream>.log
        found = re.search(r"^(?:([^/]+)/)?[^/]+/attempt_(\d+)/(\d+)/(stdout|stderr)\.log$", relative)
        rank: int | None = None
        if found:
            host, restart, local_rank, stream = found.groups()
            if host is not None and host not in first_ranks:
                first_ranks[host] = _first_rank(run_dir, host)
            rank = int(local_rank) + (0 if host is None else first_ranks[host])
        if worker is not None and rank != worker:
            continue
        if found:
            label = f"worker {rank}" + (f" restart {restart}" if restart != "0" else "")
            if label in files:
                label = f"{label} {stream}"
            # Workers of a script may have been started again several times, each time with others.
            label = next(one for one in (label, *_numbered(label, len(files))) if one not in files)
        else:
            label = path.stem if "/" not in relative else f"{path.stem} {path.parent.name}"
        files[label] = path
    return files


def _numbered(label: str, most: int) -> list[str]:
    return [f"{label} {number}" for number in range(2, most + 2)]


def read_from(path: Path, offset: int) -> tuple[str, int]:
    """Whole lines written since byte ``offset``, and the offset to go on from. A missing file has none yet.

    Raises:
        BadInput: the file cannot be read.
    """
    try:
        with opened_file(path, hint=ITS_OWNER) as stream:
            stream.seek(offset)
            data = stream.read()
    except MissingFile:
        return "", offset
    end = data.rfind(b"\n") + 1
    return data[:end].decode("utf-8", errors="replace"), offset + end


def _first_rank(run_dir: Path, host: str) -> int:
    try:
        return first_rank(read_spec(run_dir), host)
    except BadInput:
        return 0  # a folder that the spec no longer explains: its own numbers are all there is
