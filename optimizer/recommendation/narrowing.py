"""What would narrow a plan's interval most, and what that costs: a step measured on the device that nobody profiled."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hetopt.core.formatting import usd
from hetopt.optimizer.convergence.steps_law import Z90
from hetopt.optimizer.plan import Candidate
from hetopt.optimizer.search.search_space import MachineOption, SearchSpace
from hetopt.optimizer.step_time.earlier_runs import device_of
from hetopt.optimizer.step_time.probes import PROBE_STEPS
from hetopt.optimizer.step_time.transfer import SAME_ACCELERATOR_LOG_SD, SAME_FAMILY_LOG_SD

WORTH_IT = 0.75
"""Of the log of the interval: a probe that leaves more than that of it is not worth a sentence."""


@dataclass(frozen=True, kw_only=True)
class Narrowing:
    """A probe of one machine.

    Attributes:
        instance_type: to measure steps on.
        usd: for a machine from its request to the last of the probe's steps.
        reach: factor of the step's 90 % interval that is expected then.
    """

    instance_type: str
    usd: float
    reach: float

    @property
    def in_words(self) -> str:
        """'a probe on g5.xlarge for about $0.04 would leave 1.2x'."""
        return f"a probe on {self.instance_type} for about {usd(self.usd)} would leave {self.reach:.1f}x"


def narrowing(space: SearchSpace, chosen: Candidate) -> Narrowing | None:
    """The cheapest machine with the device that is known least of those in the chosen cluster; None: it tells little.

    Another size with the same GPU tells as much as `SAME_ACCELERATOR_LOG_SD` allows, of the same family of processors
    `SAME_FAMILY_LOG_SD`. What the network leaves open stays open.
    """
    guessed = {group.instance_type for group in chosen.groups if group.evidence == "extrapolated"}
    of_cluster = [option for option in space.options if option.name in guessed]
    if not of_cluster:
        return None
    widest = max(of_cluster, key=lambda option: option.worker.log_sd)
    alike = [option for option in space.options if device_of(option.offer.instance_type) == _device(widest)]
    cheapest = min(alike, key=lambda option: option.usd_per_hour)
    told = chosen.prediction
    has_gpu = widest.offer.instance_type.accelerator is not None
    left_sd = SAME_ACCELERATOR_LOG_SD if has_gpu else SAME_FAMILY_LOG_SD
    before = math.log(told.step_time_s.high / told.step_time_s.value) / Z90
    # Of a mixture of unlike machines the slowest decides, so that one that stays a guess keeps the interval open.
    others = [option.worker.log_sd for option in of_cluster if _device(option) != _device(widest)]
    share = min(1.0, told.compute_s / told.step_time_s.value)
    removed = share**2 * max(0.0, widest.worker.log_sd**2 - max([left_sd, *others]) ** 2)
    after = math.sqrt(max(before**2 - removed, (share * left_sd) ** 2))
    if after > WORTH_IT * before:
        return None
    seconds = cheapest.startup_s + PROBE_STEPS * told.step_time_s.value
    return Narrowing(
        instance_type=cheapest.name, usd=cheapest.usd_per_hour * seconds / 3600, reach=math.exp(Z90 * after)
    )


def _device(option: MachineOption) -> str:
    return device_of(option.offer.instance_type)
