"""What a lower precision costs in steps: nothing, unless pilots of the job say otherwise.

Networks of many kinds were trained in fp16 with a loss scale, and in bf16, to the accuracy of fp32 in as many steps
(Micikevicius et al. 2018, 1710.03740; Kalamkar et al. 2019, 1905.12322). Trials of a profile, each a pilot beside one
from the same weights over the same batches, can contradict that: with ``m`` the mean of ``ln(steps / usual steps)``
over ``n`` of them, and two runs apart by `SEED_LOG_SD` each whatever they compute in,

    sd = sqrt(2 / n) SEED_LOG_SD          seen to cost more where  m > 1.645 sd
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hetopt.core.memory import Precision
from hetopt.core.profile import Profile
from hetopt.optimizer.convergence.convergence import SEED_LOG_SD
from hetopt.optimizer.convergence.steps_law import Z90

UNSEEN_LOG_SD = 0.05
"""Spread of the log of steps over fp32's where they are not seen to differ: what the papers' tables leave open."""


@dataclass(frozen=True, kw_only=True)
class PrecisionLoss:
    """Steps of a precision over those of the profile's first.

    Attributes:
        stretch: at least 1.
        log_sd: spread of its log.
    """

    stretch: float = 1.0
    log_sd: float = 0.0


def precision_loss(profile: Profile, precision: Precision) -> PrecisionLoss:
    """Return the steps of a precision over the first one's, by the profile's trials; nothing is lost in the first."""
    if precision == profile.precisions[0]:
        return PrecisionLoss()
    trials = (trial for trial in profile.precision_trials if trial.precision == precision)
    log_ratios = [math.log(trial.steps / trial.usual_steps) for trial in trials]
    log_sd = math.sqrt(2 / max(1, len(log_ratios))) * SEED_LOG_SD
    mean = sum(log_ratios) / max(1, len(log_ratios))
    if mean > Z90 * log_sd:
        return PrecisionLoss(stretch=math.exp(mean), log_sd=log_sd)
    return PrecisionLoss(log_sd=UNSEEN_LOG_SD)
