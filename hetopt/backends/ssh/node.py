"""The agent of a host in a run: that of a rented machine, with the connection in the place of a bucket.

``python -m hetopt.backends.ssh.node ROOT``, which `hetopt.backends.host.entry` becomes. It ends when the connection
does, and takes with it its workers and its folder: nothing of the run is left on the host.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from contextlib import suppress
from pathlib import Path

from hetopt.backends.host.agent import Agent
from hetopt.backends.host.entry import CONFIG
from hetopt.backends.host.protocol import Terms
from hetopt.backends.processes import LONGEST_STOP_S
from hetopt.backends.ssh import gpus
from hetopt.backends.ssh.objects import MODELS, OBJECTS, Connection, RemoteObjects
from hetopt.core.errors import HetoptError
from hetopt.core.hosts import CPU

TURN_S = 0.1
READ_EVERY_S = 0.3
HEARTBEAT_S = 0.5
END_S = 1e11
"""Moment in the year 5138: an own machine has no budget, and its part ends with the connection."""


def main(arguments: list[str]) -> int:
    """Run this host's agent in the folder ``arguments[0]`` until the run or the connection ends; return the exit code.

    The folder is removed then, and so are its parents that this run made.
    """
    root = Path(arguments[0])
    # What is printed here must not be taken for a frame.
    outgoing = os.dup(1)
    os.dup2(2, 1)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    made_folder = False
    try:
        given = json.loads((root / CONFIG).read_text(encoding="utf-8"))
        (root / CONFIG).unlink()  # the secret stays in memory
        made_folder = bool(given.pop("made"))
        connection = Connection(incoming=0, outgoing=outgoing)
        os.environ |= gpus.environment(given.pop("devices", [CPU]))
        return Agent(
            id=str(given.pop("id")),
            terms=Terms(end_s=END_S, latest_end_s=END_S, **given),
            root=root,
            objects=RemoteObjects(connection=connection, place=OBJECTS),
            models=RemoteObjects(connection=connection, place=MODELS),
            is_taken=lambda: False,
            end_at=lambda end_s: None,  # it does not end itself
            turn_s=TURN_S,
            read_every_s=READ_EVERY_S,
            heartbeat_s=HEARTBEAT_S,
            last_uploads_s=LONGEST_STOP_S,  # nobody takes it back meanwhile, and links are as slow as they are
        ).live()
    except HetoptError as error:
        print(error.message, file=sys.stderr)
        return error.exit_code
    finally:
        shutil.rmtree(root, ignore_errors=True)
        with suppress(OSError):  # others may have something there
            for folder in root.parents[: 3 if made_folder else 2]:
                folder.rmdir()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
