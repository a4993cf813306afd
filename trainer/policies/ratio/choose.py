"""Ratio policies by name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hetopt.core.comm.options import Option
from hetopt.core.run_rules import check_ratio_controller
from hetopt.core.run_spec import AccordionSettings, GravacSettings, Settings
from hetopt.core.training_laws import CAUTIOUS_COEFFICIENT
from hetopt.trainer.policies.ratio.accordion import Accordion
from hetopt.trainer.policies.ratio.auto import AutoRatio
from hetopt.trainer.policies.ratio.gravac import Gravac
from hetopt.trainer.policies.ratio.policy import RatioPolicy
from hetopt.trainer.policies.ratio.scan import ScanRatio
from hetopt.trainer.policies.ratio.scheduled import WARM_UP, ScheduledRatio
from hetopt.trainer.policies.ratio.threshold import ThresholdRatio


def choose_ratio_policy(
    name: str,
    *,
    ratio: float,
    options: Sequence[Option] = (),
    coefficient: float = CAUTIOUS_COEFFICIENT,
    most_lost: float = math.inf,
    tries_twins: bool = False,
    settings: Settings | None = None,
) -> RatioPolicy[Any]:
    """The policy of that name. What its state is made of, `RatioPolicy.initial` tells.

    Args:
        name: of the policy.
        ratio: that the run was asked for; the strongest that the policy uses. ``auto`` and ``scan`` go by the options.
        options: what ``auto`` and ``scan`` may choose from; ``auto`` needs a dense one among them.
        coefficient: of the law of slowdown, as ``auto`` has it in mind.
        most_lost: more steps than dense training that ``auto`` may cost.
        tries_twins: whether ``auto`` may ask for trials.
        settings: that are not the published ones (`hetopt.core.run_spec`).

    Raises:
        BadInput: there is no such policy, or the ratio leaves it nothing to decide.
    """
    check_ratio_controller(name, ratio)
    said = settings or {}
    match name:
        case "fixed":
            return ScheduledRatio(ratio=ratio)
        case "warm_up":
            return ScheduledRatio(ratio=ratio, schedule=WARM_UP)
        case "accordion":
            gentle = AccordionSettings.model_validate(said).gentle or min(1.0, 10 * ratio)
            return Accordion.model_validate({**said, "gentle": max(ratio, gentle), "strong": ratio})
        case "gravac":
            floor = min(GravacSettings.model_validate(said).floor, 1 / ratio)
            return Gravac.model_validate({**said, "floor": floor, "largest": 1 / ratio})
        case "threshold":
            return ThresholdRatio.model_validate({**said, "ratio": ratio})
        case "scan":
            return ScanRatio.model_validate({**said, "options": tuple(options)})
        case _:
            return AutoRatio(
                options=tuple(options), coefficient=coefficient, most_lost=most_lost, tries_twins=tries_twins
            )
