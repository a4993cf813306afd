"""Ratio policies by name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hetopt.core.comm.planner import Option
from hetopt.core.comm.ratio_controllers import check_ratio_controller
from hetopt.core.compression_slowdown import CAUTIOUS_COEFFICIENT
from hetopt.core.policy_settings import (
    AccordionSettings,
    GravacSettings,
    ScanSettings,
    Settings,
    ThresholdSettings,
)
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
        settings: that are not the published ones (`hetopt.core.policy_settings`).

    Raises:
        BadInput: there is no such policy, or the ratio leaves it nothing to decide.
    """
    check_ratio_controller(name, ratio)
    said = settings or {}
    match name:
        case "fixed":
            return FixedRatio(ratio=ratio)
        case "warm_up":
            return WarmUp(ratio=ratio)
        case "accordion":
            critical = AccordionSettings.model_validate(said)
            return Accordion(
                gentle=max(ratio, critical.gentle or min(1.0, 10 * ratio)),
                strong=ratio,
                threshold=critical.threshold,
                smoothing=critical.smoothing,
                every_epochs=critical.epochs,
                critical_after_decay=critical.decay,
            )
        case "gravac":
            search = GravacSettings.model_validate(said)
            return Gravac(
                floor=min(search.floor, 1 / ratio),
                largest=1 / ratio,
                window_steps=search.window,
                least_gain=search.eps,
                tolerance=search.omega,
                policy=search.raises,
                smoothing=search.smoothing,
            )
        case "threshold":
            vote = ThresholdSettings.model_validate(said)
            return ThresholdRatio(ratio=ratio, delta=vote.delta, combine=vote.combine)
        case "scan":
            weights = ScanSettings.model_validate(said)
            return ScanRatio(
                options=tuple(options),
                time_weight=weights.time,
                gain_weight=weights.gain,
                sensitivity=weights.sensitivity,
                least_gain=weights.least_gain,
            )
        case _:
            return AutoRatio(
                options=tuple(options), coefficient=coefficient, most_lost=most_lost, tries_twins=tries_twins
            )
