"""What machines and whoever rented them tell each other through the bucket: names of objects, and what is in them.

runs/RUN/placement.json      which machine is which host, where all meet, and the spec    written by the renter
runs/RUN/outcome.json        that the run is over for good                                written by the first host
runs/RUN/lease.json          until when they may train and live                           written by the renter
runs/RUN/state/ID.json       that machine ID lives, and what it does                      written by that machine
runs/RUN/events/OFFSET.jsonl the run's events from that byte on                           written by the first host
runs/RUN/log/HOST/...        the end of what its processes printed                        written by each host
runs/RUN/ckpt/...            checkpoints; LATEST names the newest that is complete,       written by each host
                             and the generation of machines that says so
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from hetopt.profiler.errors import BadInput
from hetopt.profiler.reading import parse_json
from hetopt.trainer.launch.nodes import Node
from hetopt.trainer.spec import RunSpec

PLACEMENT_OBJECT = "placement.json"
LEASE_OBJECT = "lease.json"
OUTCOME_OBJECT = "outcome.json"
LATEST_OBJECT = "ckpt/LATEST"
WANTED_OBJECT = "ckpt/WANTED"

CHECKPOINT_PATTERN = r"step-[0-9]{1,15}"

READ_OFTEN = (LEASE_OBJECT, PLACEMENT_OBJECT)
READ_EVERY_S = 5.0
"""How often a machine looks for news."""

HEARTBEAT_S = 15.0
"""How often a machine writes that it lives."""


@dataclass(frozen=True, kw_only=True)
class Lease:
    """Until when a run may go on, in seconds since the epoch. 0 for ``stop_training_s`` means: end now."""

    end_s: float
    stop_training_s: float

    @property
    def wishes_end(self) -> bool:
        """Whether somebody wants the run to end, whatever its budget."""
        return self.stop_training_s == 0.0

    @classmethod
    def of_json(cls, data: bytes) -> Lease | None:
        """The lease that was written; None where it is something else, so that the one before holds."""
        try:
            found: Any = parse_json(data, origin=LEASE_OBJECT)
            lease = cls(end_s=float(found["end_s"]), stop_training_s=float(found["stop_training_s"]))
        except (BadInput, ValueError, KeyError, TypeError):
            return None
        return lease if math.isfinite(lease.end_s) and math.isfinite(lease.stop_training_s) else None


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The place of one machine in a run.

    Attributes:
        generation: grows when machines are replaced.
        resume_from: the checkpoint that all machines go on from, such as step-120; None: from the start.
        pauses: whether this generation is to save a checkpoint and wait for the next, because machines join.
    """

    generation: int
    node: Node
    spec: RunSpec
    resume_from: str | None = None
    pauses: bool = False

    @property
    def leads(self) -> bool:
        """Whether the worker of rank 0 is here."""
        return self.spec.workers[0].host == self.node.host


def placement_of(data: bytes, instance_id: str) -> Placement | None:
    """The place of a machine; None where it has none, or the text is no placement."""
    try:
        found: Any = parse_json(data, origin=PLACEMENT_OBJECT)
        mine: Mapping[str, str] | None = found["hosts"].get(instance_id)
        if mine is None or not all(isinstance(one, str) for one in (mine["host"], mine["address"], found["meeting"])):
            return None
        return Placement(
            generation=int(found["generation"]),
            node=Node(host=mine["host"], address=mine["address"], meeting=found["meeting"]),
            spec=RunSpec.model_validate(found["spec"]),
            resume_from=checkpoint_name(found.get("resume_from")),
            pauses=found.get("pauses") is True,
        )
    except (BadInput, ValueError, KeyError, TypeError, AttributeError, OverflowError, ValidationError):
        return None


def checkpoint_name(found: object) -> str | None:
    """The name of a checkpoint, where it is one."""
    return found if isinstance(found, str) and re.fullmatch(CHECKPOINT_PATTERN, found) else None


@dataclass(frozen=True, kw_only=True)
class Latest:
    """What a run goes on from: the newest complete checkpoint, and which generation of machines has named it."""

    checkpoint: str
    generation: int = 0

    @property
    def data(self) -> bytes:
        """As it is written."""
        return f"{self.checkpoint} {self.generation}\n".encode()

    @classmethod
    def of(cls, data: bytes) -> Latest | None:
        """What `data` gave; None where it is something else."""
        found = re.fullmatch(rf"({CHECKPOINT_PATTERN})(?: ([0-9]{{1,9}}))?\s*", data.decode("ascii", errors="replace"))
        return None if found is None else cls(checkpoint=found[1], generation=int(found[2] or 0))


def outcome_json(generation: int) -> bytes:
    """That a generation needs no successor."""
    return json.dumps({"generation": generation}).encode()


def is_over(data: bytes | None, generation: int) -> bool:
    """Whether an outcome says that a generation is over for good."""
    if data is None:
        return False
    try:
        return int(parse_json(data, origin="an outcome")["generation"]) >= generation
    except (BadInput, ValueError, KeyError, TypeError, OverflowError):
        return False
