"""All workers of a new generation take over the newest state that any of them holds.

A survivor's parameters and optimizer state are those of all, so whoever did the last step has what the lost workers
had. What is each worker's own stays with it: the residual of a lost worker is lost, and a worker that comes anew begins
without one.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from hetopt.core.errors import RunFailed
from hetopt.trainer.agreement import gather_numbers
from hetopt.trainer.checkpoints.folder import RankState, SharedState
from hetopt.trainer.comm.compressor import ALIKE, State
from hetopt.trainer.elastic.rendezvous import NO_GENERATION, Generation, Version
from hetopt.trainer.packing import pack, unpack

_HEAVY = ("model", "optimizer")


@dataclass(frozen=True, kw_only=True)
class Held:
    """What a worker takes from one generation into the next; tensors are its own copies, on the CPU.

    Attributes:
        version: how new it is.
        shared: what all workers share.
        own: of this worker; None: it has just started.
        own_after: the same had it done the step that it was at, as some of the others may have.
        alike: what gradient memories have in common.
        evaluation_owed: the workers were about to evaluate.
        share: local batch size of this worker.
    """

    version: Version
    shared: SharedState
    own: RankState | None
    own_after: RankState | None
    alike: State
    evaluation_owed: bool = False
    share: int = 0


def hand_over(held: Held | None, generation: Generation, rank: int) -> Held | None:
    """What every worker goes on from; None: nobody has anything, and the newest checkpoint counts.

    Called by all workers of the generation, in whose group they are.

    Raises:
        RunFailed: what arrived cannot be read.
    """
    workers = len(generation.members)
    version = Version() if held is None else held.version
    rows = gather_numbers([float(number) for number in astuple(version)], workers)
    versions = [Version(agreed=int(row[0]), step=int(row[1]), decisions=int(row[2])) for row in rows]
    newest = max(versions)
    if not newest.is_held:
        return None
    source = versions.index(newest)
    light = _spread(None if rank != source or held is None else _light(held), source, workers)
    heavy = None
    if any(one != newest for one in versions):
        heavy = _spread(None if rank != source or held is None else _heavy(held), source, workers)
    if held is None or version != newest:
        assert heavy is not None
        model, optimizer = heavy["model"], heavy["optimizer"]
    else:
        model, optimizer = held.shared.model, held.shared.optimizer
    own = None if held is None else held.own if version.step == newest.step else held.own_after
    shared = SharedState(**light["shared"], model=model, optimizer=optimizer)
    if generation.members[source].beside != generation.places:
        # Other workers than those that the shares were for: the spec of this generation has theirs.
        shared = replace(shared, shares=(), memory_bounds=())
    return Held(
        version=replace(newest, agreed=generation.number),
        shared=shared,
        own=own,
        own_after=own,
        alike=light["alike"],
        evaluation_owed=light["evaluation_owed"],
    )


def alike_part(memory: State) -> State:
    """The part of a residual state that a worker has in common with those of all other workers."""
    return {key: value for key, value in memory.items() if key.startswith(ALIKE)}


def _light(held: Held) -> dict[str, Any]:
    shared = {key: value for key, value in vars(held.shared).items() if key not in _HEAVY}
    return {"shared": shared, "alike": held.alike, "evaluation_owed": held.evaluation_owed}


def _heavy(held: Held) -> dict[str, Any]:
    return {key: getattr(held.shared, key) for key in _HEAVY}


def _spread(value: dict[str, Any] | None, source: int, workers: int) -> dict[str, Any]:
    """The value that the source has, everywhere."""
    packed = torch.empty(0, dtype=torch.uint8)
    if value is not None:
        packed = torch.frombuffer(bytearray(pack(value)), dtype=torch.uint8)
    size = int(gather_numbers([float(packed.numel())], workers)[source][0])
    if workers > 1:
        if value is None:
            packed = torch.empty(size, dtype=torch.uint8)
        dist.broadcast(packed, src=source)
    try:
        restored: dict[str, Any] = unpack(packed.numpy().tobytes())
    except ValueError:
        raise RunFailed("the state that another worker sent cannot be read.") from None
    return restored


def told(generation: Generation, held: Held | None) -> dict[str, object]:
    """A new generation as an event."""
    source = max(generation.members, key=lambda member: member.version)
    return {
        "generation": generation.number,
        "workers": list(generation.places),
        "lost": [place for place in source.beside if place not in generation.places],
        "new": [member.place for member in generation.members if member.joined == NO_GENERATION],
        "from": "checkpoint" if held is None else "memory",
    }
