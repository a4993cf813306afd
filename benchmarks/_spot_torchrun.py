"""The peer in `spot_rehearsal`: torchrun on hosts that come and go, and a script that loads its last snapshot.

torchrun's elastic rendezvous, with as many hosts as there are. What it waits for is set to the miniature's time: its
defaults (a last call of 30 s, three heartbeats of 5 s) would be minutes there. The store of the rendezvous is on a host
that is never lost and that nobody pays for.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks._spot_nodes import Move
from hetopt.backends.emulation.namespaces import LINK, EmulatedNetwork
from hetopt.backends.processes import QUIET_TORCH
from hetopt.core.events.log import EVENTS_FILE, Event, read_events
from hetopt.core.run_folder import write_spec
from hetopt.core.run_spec import MEETING_PORT, EmulatedHost, RunSpec

_LOOK_S = 0.02
_START_S = 120.0
_STORE = """
import signal, sys
from hetopt.trainer.host.gate import open_store
store = open_store(sys.argv[1], int(sys.argv[2]))
signal.pause()
"""


def run_under_torchrun(
    folder: Path, spec: RunSpec, moves: Sequence[Move], *, lasts_s: float, snapshot_every_s: float
) -> list[Event]:
    """Run a script under torchrun on hosts that come and go, end all, and return the event log.

    Args:
        folder: existing folder of the run.
        spec: run spec.
        moves: changes of hosts, by seconds since training began.
        lasts_s: seconds of training, after which all processes are ended.
        snapshot_every_s: seconds between two snapshots.

    Raises:
        RuntimeError: training does not begin in time; no process is left then either.
    """
    assert spec.miniature is not None
    hosts, events = spec.miniature.hosts, folder / EVENTS_FILE
    write_spec(folder, spec)
    with EmulatedNetwork.create([*hosts, EmulatedHost(name="store")]) as network:
        where = [network.address(len(hosts)), str(MEETING_PORT)]
        network.popen(len(hosts), [sys.executable, "-c", _STORE, *where], env=dict(os.environ))
        for place in range(len(hosts)):
            _start(network, folder, place, len(hosts), snapshot_every_s)
        began_s = _when_training_begins(events)
        for move in sorted(moves, key=lambda move: move.at_s):
            if move.at_s >= lasts_s:
                break
            time.sleep(max(0.0, began_s + move.at_s - time.time()))
            if move.fate == "dies":
                network.kill(move.host)
                network.take_down(move.host)
            elif move.fate == "returns":
                network.bring_up(move.host)
                _start(network, folder, move.host, len(hosts), snapshot_every_s)
        time.sleep(max(0.0, began_s + lasts_s - time.time()))
    return read_events(events)


def _when_training_begins(events: Path) -> float:
    """Wait until the event log says that training has begun, and return that moment as seconds since the epoch.

    Raises:
        RuntimeError: training does not begin in time.
    """
    deadline_s = time.monotonic() + _START_S
    while time.monotonic() < deadline_s:
        with contextlib.suppress(StopIteration):
            return float(next(event["time_s"] for event in read_events(events) if event["event"] == "training_started"))
        time.sleep(_LOOK_S)
    raise RuntimeError("the run under torchrun did not begin; its output is in the log files beside its events")


def _start(network: EmulatedNetwork, folder: Path, place: int, hosts: int, snapshot_every_s: float) -> None:
    """Start torchrun on a host, with a log file of its own in the folder; do not wait for it."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run"),
        *(f"--nnodes=1:{hosts}", "--nproc-per-node=1", "--max-restarts=1000", "--rdzv-id=spot"),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint={network.address(hosts)}:{MEETING_PORT}"),
        "--rdzv-conf=is_host=0,last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=2",
        *(f"--local-addr={network.address(place)}", "--monitor-interval=0.1"),
        *("--module", "benchmarks._spot_script", str(folder), str(snapshot_every_s)),
    ]
    environment = {
        **os.environ,
        **QUIET_TORCH,
        "GLOO_SOCKET_IFNAME": LINK,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).resolve().parents[1]),
        # As hetopt does it: the store of the rendezvous would hand dead addresses to workers that start again.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    with (folder / f"torchrun-{place}.log").open("ab") as log:
        network.popen(place, command, env=environment, stdout=log, stderr=subprocess.STDOUT)
