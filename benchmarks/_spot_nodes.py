"""Hosts of a rehearsal that go and come as the nodes of a spot cluster did in public recordings.

A recording tells how many nodes ran, not which: those are drawn. Of a cluster with more nodes than the rehearsal has
hosts, each host stands for a group of nodes, and is there when all of the group are.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Fate = Literal["dies", "returns", "notice"]
NOTICE_S = 120.0
"""What EC2 gives before it takes a spot machine."""


@dataclass(frozen=True, kw_only=True)
class NodeTrace:
    """A recording of the number of running nodes of a spot cluster.

    Attributes:
        nodes: number of nodes of the cluster.
        running: number of running nodes at each sample.
        gap_s: seconds between two samples.
    """

    name: str
    nodes: int
    running: NDArray[np.int64]
    gap_s: float

    def grouped(self, hosts: int) -> NodeTrace:
        """Return the trace of a cluster of at most ``hosts`` hosts, each of which stands for a group of nodes."""
        group = -(-self.nodes // hosts)
        running = self.running // group
        return NodeTrace(name=self.name, nodes=self.nodes // group, running=running, gap_s=self.gap_s)

    def busiest(self, samples: int, *, without_any: float = 0.1) -> NodeTrace:
        """Return the part of ``samples`` samples in which most nodes come and go, of those that begin with all nodes.

        Args:
            samples: length of the part.
            without_any: largest fraction of the part without any running node, when nothing is trained or paid.

        Raises:
            ValueError: there is no such part.
        """
        moves = np.abs(np.diff(self.running, prepend=self.running[0]))
        parts = [
            (int(moves[first + 1 : first + samples].sum()), -first)
            for first in range(len(self.running) - samples + 1)
            if self.running[first] == self.nodes and np.mean(self.running[first : first + samples] == 0) <= without_any
        ]
        if not parts:
            raise ValueError(f"{self.name} has no part of {samples} samples that begins with all nodes")
        first = -max(parts)[1]
        running = self.running[first : first + samples]
        return NodeTrace(name=self.name, nodes=self.nodes, running=running, gap_s=self.gap_s)

    def paid_node_s(self) -> float:
        """Return the seconds that nodes were running, summed over all nodes."""
        return float(self.running.sum() * self.gap_s)


@dataclass(frozen=True, kw_only=True)
class Move:
    """A change of a host (death, return or notice) at a moment of the rehearsal."""

    at_s: float
    host: int
    fate: Fate


def read_node_traces(folder: Path, *, least: int = 2) -> list[NodeTrace]:
    """Return the recordings under a folder of at least ``least`` nodes; none where it does not exist."""
    traces = []
    for path in sorted(folder.glob("*/*-node/*/*.json")):
        nodes = int(path.parts[-3].removesuffix("-node"))
        if nodes < least:
            continue
        recorded = json.loads(path.read_text(encoding="utf-8"))
        traces.append(
            NodeTrace(
                name=f"{nodes} x {path.stem}",
                nodes=nodes,
                running=np.array(recorded["data"]),
                gap_s=float(recorded["metadata"]["gap_seconds"]),
            )
        )
    return traces


def moves_of(trace: NodeTrace, *, compression: float, seed: int, notice: bool) -> list[Move]:
    """Return the moves of the hosts over a trace; all hosts are there at the beginning.

    Args:
        trace: recording, with a host for each of its nodes.
        compression: seconds of the recording in one of the rehearsal.
        seed: seed of the draw of which hosts go and come.
        notice: whether each death is announced, as long before as EC2 does it.
    """
    draw, there = random.Random(seed), list(range(trace.nodes))
    away: list[int] = []
    moves: list[Move] = []
    for number, wanted in enumerate(trace.running.tolist()):
        at_s = number * trace.gap_s / compression
        while len(there) > wanted:
            host = there.pop(draw.randrange(len(there)))
            away.append(host)
            if notice:
                moves.append(Move(at_s=max(0.0, at_s - NOTICE_S / compression), host=host, fate="notice"))
            moves.append(Move(at_s=at_s, host=host, fate="dies"))
        while len(there) < wanted:
            host = away.pop(draw.randrange(len(away)))
            there.append(host)
            moves.append(Move(at_s=at_s, host=host, fate="returns"))
    return sorted(moves, key=lambda move: move.at_s)


def best_samples(
    moves: Sequence[Move], hosts: int, lasts_s: float, samples_per_s: Mapping[int, float], *, start_s: float = 0.0
) -> float:
    """Return the samples that hosts would train if they were always at work, and coming and going cost nothing else.

    Args:
        moves: changes of the hosts, all of which are at work at the beginning.
        hosts: number of hosts.
        lasts_s: seconds of training.
        samples_per_s: samples a second by number of hosts at work.
        start_s: seconds between the return of a host and its work.
    """
    changes = [(move.at_s, move.host, False) for move in moves if move.fate == "dies"]
    for move in (move for move in moves if move.fate == "returns"):
        until_s = min((at_s for at_s, host, _ in changes if host == move.host and at_s > move.at_s), default=lasts_s)
        if move.at_s + start_s < until_s:
            changes.append((move.at_s + start_s, move.host, True))
    there, before_s, samples = set(range(hosts)), 0.0, 0.0
    for at_s, host, comes in [*sorted(changes), (lasts_s, -1, False)]:
        samples += (min(at_s, lasts_s) - before_s) * samples_per_s[len(there)] if there else 0.0
        before_s = min(at_s, lasts_s)
        (there.add if comes else there.discard)(host)
    return samples
