"""What a session leaves behind for other commands: an event log, and step times to plan from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from hetopt.core.errors import BadInput
from hetopt.core.events.log import EVENTS_FILE, EventLog
from hetopt.core.run_spec import Compression
from hetopt.trainer.statistics import Period

STEPS_FILE = "steps.jsonl"


def open_log(folder: Path | None) -> EventLog:
    """The log of a session in a folder, which is made; None: one that writes nothing.

    Raises:
        BadInput: the folder cannot be made.
    """
    try:
        if folder is not None:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return EventLog(None if folder is None else folder / EVENTS_FILE)
    except OSError as error:
        raise BadInput(f"{folder} cannot be written: {error.strerror}.", hint="name another folder") from None


def add_sample(folder: Path, period: Period, *, types: Sequence[str], compression: Compression) -> None:
    """Add a period as a line that `hetopt profile --from-samples` reads: one machine a worker.

    Args:
        folder: of the session.
        period: of steps that exchanged gradients: others would teach that exchanges take no time.
        types: of the machines, in rank order.
        compression: that was in use.

    Raises:
        OSError: the disk refuses.
    """
    compute_s = max(row.compute_s for row in period.rows)
    step_time_s = max(period.step_time_s, compute_s)
    sync_s = min(row.exchange_s for row in period.rows)
    sample = {
        "nodes": [{"type": name, "workers": 1} for name in types],
        "local_batch_size": list(period.local_batch_sizes),
        "compression": {"name": compression.name, "ratio": compression.ratio},
        "step_time_s": round(step_time_s, 7),
        "sync_time_s": round(min(sync_s, step_time_s), 7),
    }
    with (folder / STEPS_FILE).open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(sample, allow_nan=False) + "\n")
