"""Ratio policies by name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hetopt.core.comm.planner import Option
from hetopt.core.comm.ratio_controllers import check_ratio_controller
from hetopt.core.compression_slowdown import CAUTIOUS_COEFFICIENT
from hetopt.trainer.policies.ratio.accordion import Accordion
from hetopt.trainer.policies.ratio.auto import AutoRatio
from hetopt.trainer.policies.ratio.fixed import FixedRatio
from hetopt.trainer.policies.ratio.gravac import Gravac
from hetopt.trainer.policies.ratio.policy import RatioPolicy
from hetopt.trainer.policies.ratio.scan import ScanRatio
from hetopt.trainer.policies.ratio.threshold import ThresholdRatio
from hetopt.trainer.policies.ratio.warm_up import WarmUp


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
    check_ratio_controller(name, ratio)
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
