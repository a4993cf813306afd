"""Choice of the next cluster layout to measure: the probe that removes most variance for its price.

A choice among clusters that is made with an error of variance v in the log of their time costs about v / 2 of the job
(to second order around the best choice), so a probe that takes a share r of that variance is worth r v / 2 of the job.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hetopt.core.errors import BadInput
from hetopt.core.formatting import usd
from hetopt.core.step_samples import Configuration, StepSample
from hetopt.optimizer.market.instance_type import InstanceType
from hetopt.optimizer.plan import Plan
from hetopt.optimizer.step_time.model import StepTimeModel
from hetopt.optimizer.step_time.observed import observe
from hetopt.optimizer.step_time.tiers import kinship

JOB_OVER_PROBES = 20.0
"""A job is taken to be worth this many times what may be spent on probing it: at most 5 % of it, that is."""

FIRST_LAYOUTS = 2
"""Number of layouts measured before anything can be weighed: one without an exchange and one with one."""


@dataclass(frozen=True, kw_only=True)
class Suggested:
    """Probe that is worth its price: the configuration to measure next, its worth in USD, and the reason.

    Attributes:
        configuration: what to measure; one launch serves all batch sizes of its layout.
        worth_usd: what measuring it is expected to be worth; None for the first layouts and types without relatives.
        reason: why this configuration, in words.
    """

    configuration: Configuration
    worth_usd: float | None
    reason: str


def suggest(
    known: Sequence[StepSample],
    spent_usd: float,
    *,
    candidates: Sequence[Configuration],
    price_usd: Callable[[Configuration, float | None], float],
    budget_usd: float,
    catalog: Mapping[str, InstanceType],
) -> Suggested | str:
    """Return the next probe, given the steps measured so far; or a sentence on why no probe is worth it.

    Layouts that were measured are not suggested again. The first two, and types of machines to which nothing measured
    is related, are measured smallest first if the budget pays for them; later ones only if their worth exceeds their
    price.

    Args:
        known: steps that were measured so far.
        spent_usd: cost of measuring those, USD.
        candidates: configurations that are to be predicted, and may be measured.
        price_usd: returns the price of measuring a configuration, USD, given the predicted seconds of its step (None:
            not predictable yet).
        budget_usd: most USD for all probes together; the job is taken to be worth `JOB_OVER_PROBES` times as much.
        catalog: instance types by name, to relate machine types to each other.

    Returns:
        The probe, or a clause without full stop that says why there is none.

    Raises:
        BadInput: the measured steps are of different jobs, or a compression is unknown or impossible.
    """
    layouts = {sample.layout for sample in known}
    rest = [candidate for candidate in candidates if candidate.layout not in layouts]
    if not rest:
        return "every layout was measured"
    left = budget_usd - spent_usd
    # A model of one layout cannot tell computing from exchanging, and none tells of a type that nothing relates to.
    strange = [
        candidate
        for candidate in rest
        if not all(_is_related(candidate.kind(node), known, catalog) for node in candidate.nodes)
    ]
    if len(layouts) < FIRST_LAYOUTS or strange:
        first = min(strange if len(layouts) >= FIRST_LAYOUTS else rest, key=_size)
        if price_usd(first, None) > left:
            return f"what is left of {usd(budget_usd)} pays for no other layout"
        is_begun = len(layouts) >= FIRST_LAYOUTS
        reason = "a type of machine that nothing else tells about" if is_begun else "the smallest layout, to begin with"
        return Suggested(configuration=first, worth_usd=None, reason=reason)
    model = StepTimeModel.fit(observe(known), catalog)
    predictions = model.predict(candidates)
    prices = [
        price_usd(candidate, step.step_time_s) if candidate.layout not in layouts else math.inf
        for candidate, step in zip(candidates, predictions, strict=True)
    ]
    within = [price if price <= left else math.inf for price in prices]
    if not any(math.isfinite(price) for price in within):
        return f"what is left of {usd(budget_usd)} pays for no other layout"
    best = next(iter(model.suggest(candidates, 1, within)), None)
    if best is None or best.usd is None:
        return "nothing is left to learn"
    price = within[best.row]
    worth = JOB_OVER_PROBES * budget_usd * best.removed * best.variance / 2
    if worth < price:
        return f"the next probe would cost {usd(price)} and be worth {usd(worth)}"
    reason = f"expected to remove {100 * best.removed:.0f} % of the uncertainty, mostly about {best.about}"
    return Suggested(configuration=candidates[best.row], worth_usd=worth, reason=reason)


def _is_related(name: str, known: Sequence[StepSample], catalog: Mapping[str, InstanceType]) -> bool:
    """Return whether the catalogue relates a machine type to one of those in the measured steps ``known``."""
    types = sorted({sample.kind(node) for sample in known for node in sample.nodes})
    try:
        kinship(name, types, catalog)
    except BadInput:
        return False
    return True


def _size(configuration: Configuration) -> tuple[int, int, int]:
    return len(configuration.nodes), configuration.workers, max(configuration.batch_sizes)


def check_probed(plan: Plan, *, unprobed: bool) -> None:
    """Raise an error if the speed of a planned machine type is only extrapolated, unless ``unprobed`` allows it.

    Raises:
        BadInput: such a type is in the chosen cluster, and ``unprobed`` is False.
    """
    types = list(dict.fromkeys(group.instance_type for group in plan.chosen.groups if group.evidence == "extrapolated"))
    if types and not unprobed:
        step_time = plan.chosen.prediction.step_time_s
        raise BadInput(
            f"No step was ever measured on {', '.join(types)} or a relative: the step time is a guess "
            f"(× or ÷ {step_time.high / step_time.value:.2f} with 90 % probability), and with it the cost.",
            hint="measure there (`hetopt profile TASK --explore --on ec2 --probe-budget 0.50 "
            f"--types {','.join(types)}`, on a machine of your own with `hetopt profile TASK --type {types[0]}`, or "
            "import samples with `hetopt profile --from-samples FILE`) and plan again, or launch with `unprobed=True`",
        )
