"""What the events of a log are made of: their numbers, names and sentences, and the parts that several lines hold.

All is as strict as a log is trusted little: numbers are finite and bounded, so that sums of them are too; names hold no
control characters, and sentences are freed of them.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, AliasChoices, ConfigDict, Field, StringConstraints
from pydantic.dataclasses import dataclass

_MOST_LETTERS = 2000
_MOST_NAMED = 256
"""Metrics of one evaluation, and anything else that is named."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]+")


def _sentence(text: str) -> str:
    """In one line, and no longer than a person reads."""
    return _CONTROL.sub(" ", text).strip()[:_MOST_LETTERS]


EpochSeconds = Annotated[float, Field(ge=0, le=1e11)]
Seconds = Annotated[float, Field(ge=0, le=1e9)]
Count = Annotated[int, Field(ge=0, le=10**15)]
Bytes = Annotated[float, Field(ge=0, le=1e18)]
Passes = Annotated[float, Field(ge=0, le=1e9)]
Factor = Annotated[float, Field(ge=0, le=1e9)]
Figure = Annotated[float, Field(ge=-1e100, le=1e100)]
"""A loss or a metric: so large that a diverging run still shows, and its square is still a number."""
Name = Annotated[str, StringConstraints(max_length=512, pattern=r"^[^\p{Cc}]*$")]
Word = Annotated[str, StringConstraints(max_length=512)]
"""A name that every step tells: looking at its letters would cost as much as reading numbers; terminals are guarded."""
Sentence = Annotated[str, AfterValidator(_sentence)]
Metrics = Annotated[dict[Name, Figure], Field(max_length=_MOST_NAMED)]


STRICT = ConfigDict(extra="ignore", allow_inf_nan=False, strict=True)
ProbeKind = Literal[
    "probe_started",
    "probe_finished",
    "host_facts",
    "job_facts",
    "device_facts",
    "sweep_point",
    "memory_counted",
    "sweep_ended",
    "compressor_point",
    "link_point",
    "evaluation_cost",
    "pilot_started",
    "noise_sample",
    "gain_sample",
    "exchange_tried",
    "pilot_evaluation",
    "pilot_finished",
    "precision_refused",
]
"""What a probe writes, as `hetopt.core.events.probe_records` describes it."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Happened:
    """What all events have: when, in seconds since the epoch, by the clock of the machine that wrote it."""

    time_s: EpochSeconds


@dataclass(frozen=True, kw_only=True, config=STRICT)
class StartedWorker:
    """One worker as the event `RunStarted` lists it."""

    host: Name
    type: Name = ""
    slowdown: Annotated[float, Field(gt=0, le=1e9, validation_alias=AliasChoices("slowdown", "pace"))] = 1.0
    local_batch_size: Count = 0
    device: Name = ""
    threads: Count = 0


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ExchangeTold:
    """The exchanges of gradients in `StepsLogged`: means of one exchange."""

    way: Word = ""
    compressor: Word = "identity"
    ratio: Annotated[float, Field(gt=0, le=1)] = 1.0
    collective: Word = ""
    gain: Annotated[float, Field(ge=0, le=1e9)] = 1.0
    sent_bytes: Bytes
    dense_bytes: Annotated[float, Field(gt=0, le=1e18)]
    compress_s: Seconds = 0.0
    sync_s: Seconds = 0.0
    exchanges: Count = 0
    slowdown_coefficient: Figure | None = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SyncTold:
    """What brought the models together of workers that train for themselves, in `StepsLogged`."""

    policy: Name = ""
    synchronised: Count
    local: Count
    sent_bytes: Bytes = 0.0
    divergence: Annotated[float, Field(ge=0, le=1e100)] | None = None
    delta: Figure | None = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class InjectionTold:
    """Samples that workers handed to each other."""

    samples: Count
    sent_bytes: Bytes = 0.0
    time_s: Seconds = 0.0


@dataclass(frozen=True, kw_only=True, config=STRICT)
class StreamTold:
    """What the workers' streams were like, in rank order; a rate that is not known yet is -1."""

    rate_per_s: tuple[Annotated[float, Field(ge=-1, le=1e15)], ...]
    buffered: tuple[Count, ...] = ()
    wait_s: tuple[Seconds, ...] = ()
    dropped: tuple[Count, ...] = ()
    repeated: tuple[Count, ...] = ()


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TimedCollective:
    """One timed collective as the event `NetworkMeasured` lists it."""

    collective: Name
    payload_bytes: Count
    time_s: Seconds
