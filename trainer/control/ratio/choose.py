"""Ratio policies by name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from hetopt.profiler.errors import BadInput
from hetopt.profiler.inflation import CAUTIOUS_COEFFICIENT
from hetopt.trainer.control.ratio.accordion import Accordion
from hetopt.trainer.control.ratio.auto import AutoRatio
from hetopt.trainer.control.ratio.fixed import FixedRatio
from hetopt.trainer.control.ratio.gravac import Gravac
from hetopt.trainer.control.ratio.policy import RatioPolicy
from hetopt.trainer.control.ratio.scan import ScanRatio
from hetopt.trainer.control.ratio.threshold import ThresholdRatio
from hetopt.trainer.control.ratio.warm_up import WarmUp
from hetopt.trainer.exchange.composition import known
from hetopt.trainer.exchange.planner import Option

CONTROLLERS: Mapping[str, str] = MappingProxyType(
    {
        "auto": "whatever promises the least time to the target, of all compressors, collectives and ratios",
        "fixed": "one ratio",
        "warm_up": "ever less over four epochs, then the ratio (DGC)",
        "accordion": "ten times the ratio while the gradient's norm changes, the ratio while it does not",
        "gravac": "searches from 10x upwards while enough of the gradient is kept (GraVAC)",
        "threshold": "the ratio while little is lost, else everything (ScaDLES)",
        "scan": "weighs exchange time against gain (AR-Topk)",
    }
)


def choose_ratio_policy(
    name: str,
    *,
    ratio: float,
    options: Sequence[Option] = (),
    coefficient: float = CAUTIOUS_COEFFICIENT,
    most_lost: float = math.inf,
    tries_twins: bool = False,
) -> RatioPolicy[Any]:
    """The policy of that name with its published settings. What its state is made of, `RatioPolicy.initial` tells.

    Args:
        name: of the policy.
        ratio: that the run was asked for; the strongest that the policy uses. ``auto`` and ``scan`` go by the options.
        options: what ``auto`` and ``scan`` may choose from; ``auto`` needs a dense one among them.
        coefficient: of the law of slowdown, as ``auto`` has it in mind.
        most_lost: more steps than dense training that ``auto`` may cost.
        tries_twins: whether ``auto`` may ask for trials.

    Raises:
        BadInput: there is no such policy, or the ratio leaves it nothing to decide.
    """
    known(name, CONTROLLERS, "ratio controller")
    if not 0 < ratio <= 1 or (ratio == 1 and name not in ("auto", "fixed", "scan")):
        raise BadInput(
            f"{name} cannot work with a ratio of {ratio:g}.", hint="give a ratio above 0 and below 1, for example 0.01"
        )
    match name:
        case "fixed":
            return FixedRatio(ratio=ratio)
        case "warm_up":
            return WarmUp(ratio=ratio)
        case "accordion":
            return Accordion(gentle=min(1.0, 10 * ratio), strong=ratio)
        case "gravac":
            return Gravac(floor=min(10.0, 1 / ratio), largest=1 / ratio)
        case "threshold":
            return ThresholdRatio(ratio=ratio)
        case "scan":
            return ScanRatio(options=tuple(options))
        case _:
            return AutoRatio(
                options=tuple(options), coefficient=coefficient, most_lost=most_lost, tries_twins=tries_twins
            )
