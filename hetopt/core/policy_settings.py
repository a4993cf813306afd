"""What the published policies can be told beyond their name, in the one grammar: `gravac(window=50, eps=0.7)`.

Of who decides how much of the gradient is sent (`RATIO_SETTINGS`), and of who shares the global batch
(`BATCH_SETTINGS`). Each default is the published one, or what stands for it where none was printed. A run keeps only
what was said otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, PositiveFloat, PositiveInt, ValidationError

from hetopt.core.artifact import Record
from hetopt.core.faults import faults
from hetopt.core.grammar import call, record, written
from hetopt.core.names import known
from hetopt.core.quantities import FRACTION

Settings: TypeAlias = dict[str, int | float | str | bool]
"""Those of a policy that were said, by key."""

Share = Annotated[float, Field(gt=0, le=1)]
Part = Annotated[float, Field(ge=0, le=1)]


class NoSettings(Record):
    """Of a policy that has none."""


class GravacSettings(Record):
    """GraVAC (arXiv 2305.12201).

    Attributes:
        window: steps between candidates.
        eps: least gain of what is sent.
        omega: relative difference that is none.
        floor: first factor.
        raises: how the candidate grows.
        smoothing: weight of the newest throughput.
    """

    window: PositiveInt = 500
    eps: PositiveFloat = 0.7
    omega: Annotated[float, Field(ge=0, lt=1)] = 0.01
    floor: Annotated[float, Field(ge=1)] = 10.0
    raises: Literal["exponential", "geometric"] = "exponential"
    smoothing: Share = 0.3


class AccordionSettings(Record):
    """Accordion (MLSys 2021) as its released script has it; the paper: threshold 0.5, smoothing 1, 10 epochs, decay.

    Attributes:
        gentle: ratio in critical regimes; absent: ten times the run's.
        threshold: relative change of the gradient's norm that makes a regime critical.
        smoothing: weight of the newest norm.
        epochs: between looks; 0: every control period.
        decay: a learning rate that has fallen is critical too.
    """

    gentle: Share | None = None
    threshold: PositiveFloat = 0.2
    smoothing: Share = 0.5
    epochs: Annotated[float, Field(ge=0)] = 0.0
    decay: bool = False


class ThresholdSettings(Record):
    """ScaDLES' rule (arXiv 2301.08897).

    Attributes:
        delta: part of the energy that a worker votes to lose.
        combine: how votes become a decision.
    """

    delta: Part = 0.3
    combine: Literal["majority", "any", "all", "mean"] = "majority"


class ScanSettings(Record):
    """AR-Topk's choice (arXiv 2312.02493).

    Attributes:
        time, gain: weights of the two objectives.
        sensitivity: relative change of either that calls for another scan.
        least_gain: below which nothing is chosen while there is something above it; the paper has no such floor (0).
    """

    time: Annotated[float, Field(ge=0)] = 0.6
    gain: Annotated[float, Field(ge=0)] = 0.4
    sensitivity: Annotated[float, Field(ge=0)] = 0.1
    least_gain: Part = 0.05


class ProportionalSettings(Record):
    """Shares by the law of proportion (arXiv 2110.08941).

    Attributes:
        every: when they are judged.
    """

    every: Literal["epoch", "period"] = "epoch"


class DynamicSettings(Record):
    """Dynamic batching (arXiv 2305.12213).

    Attributes:
        smoothing: weight of the newest time.
        dead_band: relative change of a share below which all shares stay.
        least, most: bounds of a share, in equal shares; absent: none above.
        every: when they are judged.
    """

    smoothing: Share = 0.5
    dead_band: Annotated[float, Field(ge=0)] = 0.05
    least: Part = 0.0
    most: Annotated[float, Field(ge=1)] | None = None
    every: Literal["epoch", "period"] = "period"


class AllocationSettings(Record):
    """Self-adaptive allocation (arXiv 2111.08272).

    Attributes:
        micro: samples of a micro-batch; absent: the run's, or an eighth of an equal share.
        tolerance: relative difference of compute times that is left alone; absent: what one micro-batch resolves.
        every: when shares are judged.
    """

    micro: PositiveInt | None = None
    tolerance: Annotated[float, Field(ge=0, lt=1)] | None = None
    every: Literal["epoch", "period"] = "epoch"


RATIO_SETTINGS: Mapping[str, type[Record]] = MappingProxyType(
    {
        "gravac": GravacSettings,
        "accordion": AccordionSettings,
        "threshold": ThresholdSettings,
        "scan": ScanSettings,
    }
)
BATCH_SETTINGS: Mapping[str, type[Record]] = MappingProxyType(
    {"proportional": ProportionalSettings, "dynamic": DynamicSettings, "allocation": AllocationSettings}
)
_UNITS = {"gentle": FRACTION}


def parse_policy(
    text: str, names: Iterable[str], settings: Mapping[str, type[Record]], where: str, what: str
) -> tuple[str, Settings]:
    """``name(key=value)``: the name, and the settings that are not the usual ones.

    Raises:
        BadInput: an unknown name or key, or a value that cannot be.
    """
    item = call(text.strip(), where)
    name = known(item.name, names, what)
    kind = settings.get(name, NoSettings)
    keys = {key: key for key in kind.model_fields}
    made = record(kind, item, keys, units={key: unit for key, unit in _UNITS.items() if key in keys})
    return name, made.model_dump(exclude_defaults=True)


def spell_policy(name: str, settings: Settings) -> str:
    """The policy as `parse_policy` reads it."""
    return written(name, pairs=settings)


def check_settings(name: str, settings: Settings, kinds: Mapping[str, type[Record]]) -> None:
    """Whether a policy can have them.

    Raises:
        ValueError: it has no such setting, or not with that value.
    """
    try:
        kinds.get(name, NoSettings).model_validate(settings)
    except ValidationError as error:
        raise ValueError(f"{name}: {faults(error)[0]}") from None
