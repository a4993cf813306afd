"""Capacity of the unkind account's pools as it was recorded: each takes a part of a recording, its prices stay drawn.

The recordings are public ones of real spot pools (`benchmarks._spot_nodes`). Where they are not at hand, a series
stands in that nobody has recorded, and is named so: ``synthetic_capacity.json``, in the same shape, drawn once.
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from random import Random

import numpy as np

from benchmarks._spot_nodes import NodeTrace, read_node_traces

SYNTHETIC = Path(__file__).with_name("synthetic_capacity.json")
MOST = 4
"""Machines of a pool of which everything was there that was recorded: one more than a story's plan ever asks for."""

Steps = list[list[float]]
"""From when on a pool has how many machines, at what price in USD an hour."""


@cache
def recordings() -> tuple[NodeTrace, ...]:
    """Those at hand; the synthetic one where there are none."""
    shared = Path(os.environ.get("HETOPT_SHARED_DATA") or Path(__file__).resolve().parents[3] / "shared" / "data")
    return tuple(read_node_traces(shared / "spot-traces", least=1)) or (synthetic(),)


def synthetic() -> NodeTrace:
    """The series that stands in."""
    made = json.loads(SYNTHETIC.read_text(encoding="utf-8"))
    running = np.array(made["data"])
    return NodeTrace(
        name="synthetic", nodes=int(running.max()), running=running, gap_s=float(made["metadata"]["gap_seconds"])
    )


def replayed(drawn: Random, steps: Steps, trace: NodeTrace, until_s: float) -> Steps:
    """A pool with its prices as they were, and with the machines of a part of a recording that is drawn.

    Args:
        drawn: says which part.
        steps: of the pool, from its first moment on.
        trace: the recording; where it is shorter than the pool's time it begins again.
        until_s: the pool's last moment.
    """
    begin_s, first = steps[0][0], drawn.randrange(len(trace.running))
    samples = int((until_s - begin_s) // trace.gap_s) + 1
    machines = np.take(trace.running, range(first, first + samples), mode="wrap") * MOST // trace.nodes
    moves = [0, *(np.flatnonzero(np.diff(machines)) + 1).tolist()]
    capacity = {begin_s + place * trace.gap_s: int(machines[place]) for place in moves}
    usd = {at: price for at, _, price in steps}
    merged: Steps = []
    for at in sorted({*capacity, *usd}):
        before = merged[-1] if merged else [at, 0, 0.0]
        merged.append([at, capacity.get(at, before[1]), usd.get(at, before[2])])
    return merged
