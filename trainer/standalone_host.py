"""A host that comes and goes: it starts its workers for itself, and holds a store in which workers can meet.

``python -m hetopt.trainer.standalone_host RUN_DIR PARENT_PID NODE``, the last as JSON.
torchrun's agents agree on who takes part, and start all workers again whenever that changes. Here the workers agree,
and stay. One process imports everything and is the warden of all workers of the host; when it ends, so do they.
"""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from pathlib import Path

from hetopt.core.errors import HetoptError
from hetopt.core.interruption import die_with_parent
from hetopt.core.run_folder import INCARNATION_VARIABLE, host_log_folder, read_spec
from hetopt.core.run_spec import Node, RunSpec, first_rank, workers_on
from hetopt.trainer.host.agent import HOST_PID_VARIABLE, MEETING_VARIABLE, import_everything
from hetopt.trainer.worker import keep, live_supervised, tell_lost


def _live_placed(run_dir: Path, spec: RunSpec, node: Node, warden: int, place: int) -> int:
    """Run the worker of a place in a fork of its warden; return the exit code."""
    local_rank = place - first_rank(spec, node.host)
    attempt = f"attempt_{os.environ.get(INCARNATION_VARIABLE, '0')}"
    log = host_log_folder(run_dir, node.host) / "run" / attempt / str(local_rank) / "stderr.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.environ.update(RANK=str(place), LOCAL_RANK=str(local_rank), WORLD_SIZE=str(len(spec.workers)))
    return live_supervised(run_dir, node.meeting, warden)


def main(arguments: list[str]) -> int:
    """Run this host's workers as forks, and a store to meet in, until all end; return the first failed exit code or 0.

    Raises:
        BadInput: the run folder has no usable ``spec.json``, or the node is none of its hosts.
    """
    run_dir, parent = Path(arguments[0]), int(arguments[1])
    die_with_parent(parent, signal.SIGTERM)
    spec, node = read_spec(run_dir), Node.model_validate_json(arguments[2])
    import_everything()
    endpoint = next(meeting for meeting in node.meeting.split(",") if meeting.rpartition(":")[0] == node.address)
    # In a process of its own: this one has no thread, so that it can be forked.
    store = _start_store(endpoint)
    os.environ[HOST_PID_VARIABLE], os.environ[MEETING_VARIABLE] = str(os.getpid()), node.meeting

    first = first_rank(spec, node.host)
    places = range(first, first + workers_on(spec, node.host))
    try:
        return keep(
            {place: partial(_live_placed, run_dir, spec, node, os.getpid(), place) for place in places},
            replacements=spec.max_restarts,
            tell=lambda *lost: tell_lost(run_dir, spec, *lost),
        )
    finally:
        os.kill(store, signal.SIGKILL)


def _start_store(meeting: str) -> int:
    """Start a process that holds a store at an address until its parent ends; return its id."""
    warden = os.getpid()
    child = os.fork()
    if child == 0:
        die_with_parent(warden, signal.SIGKILL)
        from hetopt.trainer.host.gate import open_store

        address, _, port = meeting.rpartition(":")
        store = open_store(address, int(port))
        while store is not None:  # it lives as long as this process
            signal.pause()
    return child


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except HetoptError as error:
        print(error.message, file=sys.stderr)
        sys.exit(error.exit_code)
