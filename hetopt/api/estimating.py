"""`hetopt.estimate`: what training would take and cost, by counting, before anything is measured."""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from hetopt.api.catalogs import in_regions
from hetopt.api.options import Described
from hetopt.api.planning import compared_regions, search_options, tell_price_ages
from hetopt.core.errors import BadInput, NoFeasiblePlan
from hetopt.core.formatting import bytes_
from hetopt.core.interruption import Reporter
from hetopt.core.memory import TrainingMemory
from hetopt.core.option import takes
from hetopt.core.paths import read_json
from hetopt.optimizer.described_profile import described_profile, training_memory
from hetopt.optimizer.market.catalog import Catalog
from hetopt.optimizer.market.catalog_choice import ANY_REGION
from hetopt.optimizer.market.gpus import rentable_gpus
from hetopt.optimizer.model_counts import ModelCount, of_config, of_flops, of_parameters
from hetopt.optimizer.plan import Goal, Plan
from hetopt.optimizer.recommendation.options import PlanRequest
from hetopt.optimizer.recommendation.recommend import recommend
from hetopt.optimizer.step_time.device_memory import usable_on_gpu
from hetopt.optimizer.step_time.utilisation import CONTRIBUTION

TOKENS = 1024
"""Of a sample where nothing says it: GPT-2's."""

BATCH_SIZE = 256
"""Samples of a step where nothing says it: those of BERT (Devlin et al. 2019, appendix A.2) and of ResNet-50."""

CONFIG_BYTES = 1_000_000
"""A configuration is no larger; those of models have a few kilobytes."""

LEAST_PARAMETERS = 1000
"""Fewer is a slip, such as a 5 for 5B: a layer that is 16 wide has 3,000."""

MOST_PARAMETERS = 1e15
MOST_SAMPLES = 1e15
"""Beyond any that were ever trained (1e12 and 1e13): more is a slip, and integers of it would lose digits as floats."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """How many samples a GPU holds at once; any number where ``samples`` is absent."""

    gpu: str
    memory_gib: float
    samples: int | None


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What came out.

    Attributes:
        plan: the planner's answer. It can be rehearsed, with something that stands in for the job, and not be run.
        model: as it was counted.
        samples: that are trained on; ``batch_size``: in a step.
        flops: of the whole training.
        state_bytes: of weights, gradients and the optimizer, on every GPU; ``sample_bytes``: of a sample's activations.
        fits: what the GPUs of the ways to go hold.
        assumed: what was not given, in words.
    """

    plan: Plan
    model: ModelCount
    samples: int
    batch_size: int
    flops: float
    state_bytes: int
    sample_bytes: float
    fits: tuple[Fit, ...]
    assumed: tuple[str, ...]

    def __str__(self) -> str:
        """What was asked, the plan, and what was assumed."""
        return "\n".join([self._asked, str(self.plan), *self._assumed])

    def __repr__(self) -> str:
        return f"<Estimate of {self._asked}: {self.plan!r}>"

    def _repr_html_(self) -> str:
        """As notebooks show it."""
        return "".join(f"<p>{escape(one)}</p>" for one in (self._asked, *self._assumed)) + self.plan._repr_html_()

    @property
    def _asked(self) -> str:
        return f"{self.model.name}, {self.samples:,} samples, {self.flops:.2g} FLOPs"

    @property
    def _assumed(self) -> list[str]:
        return [f"Assumed: {', '.join(self.assumed)}."] if self.assumed else []


@takes(Described)
def estimate(*, reporter: Reporter | None = None, **options: Any) -> Estimate:
    """Say what training would take and cost, from what a model counts to. Nothing is measured, and torch is not needed.

    Clusters are searched, priced and compared as by `recommend`; the time of a step follows from its operations and
    what public measurements say of how well GPUs are used, with a wide interval. Without ``budget_usd`` and
    ``deadline``, nothing is held against limits.

    Args:
        reporter: told what goes on.
        **options: what is known of the job, and wanted.

    Raises:
        BadInput: a value cannot be, is missing, or the options exclude each other.
        NoFeasiblePlan: nothing fits; the hint says what would.
    """
    asked, told = Described(**options), reporter or Reporter()
    assumed: list[str] = []
    model, wanted = _counted(asked, assumed)
    batch = min(asked.batch_size or BATCH_SIZE, wanted)
    if asked.batch_size is None:
        assumed.append(f"{batch} samples a step (`batch_size`)")
    limits = search_options(
        asked,
        gpus=asked.gpus or ("any",),
        mixed_types=1,
        batch_size=batch,
        precision=None,
        trials=0,
        accept_risk=True,
    )
    now = datetime.datetime.now(datetime.UTC)
    goal = Goal(budget_usd=asked.budget_usd, deadline_s=asked.deadline, ends="steps", amount=math.ceil(wanted / batch))
    memory = training_memory(model, batch, asked.precision)
    profile = described_profile(model, samples=wanted, batch_size=batch, precision=asked.precision, now=now)

    def found(request: PlanRequest) -> Plan:
        return recommend(request, seed=0, now=now, tell=lambda text: told(text, None))

    catalogs = in_regions(asked.region, asked.catalog)
    _refuse_what_no_gpu_holds(model, memory, catalogs)
    if asked.region == ANY_REGION:
        compared = compared_regions(profile, goal, limits, asked, told)
        plan = compared.planned(PlanRequest(profile, compared.best[0].catalog, goal, limits), found)
    else:
        plan = found(PlanRequest(profile, catalogs[0], goal, limits))
        tell_price_ages(plan, catalogs[0], told)
    return Estimate(
        plan=plan,
        model=model,
        samples=wanted,
        batch_size=batch,
        flops=CONTRIBUTION * model.forward_flops * wanted,
        state_bytes=memory.kept_bytes,
        sample_bytes=memory.peak_bytes(2) - memory.peak_bytes(1),
        fits=tuple(_fits(plan, memory)),
        assumed=tuple(assumed),
    )


def _refuse_what_no_gpu_holds(model: ModelCount, memory: TrainingMemory, catalogs: Sequence[Catalog]) -> None:
    """Every GPU keeps the whole model: data parallelism shares samples, not weights.

    Raises:
        NoFeasiblePlan: no GPU has the memory for one sample.
    """
    needed = memory.peak_bytes(1)
    gpus = rentable_gpus(catalogs[0], sort="memory", reverse=True, elsewhere=catalogs[1:])
    if gpus and needed > usable_on_gpu(gpus[0].memory_gib * 2**30):
        where = catalogs[0].region if len(catalogs) == 1 else "any region"
        raise NoFeasiblePlan(
            f"Training {model.name} with Adam takes {bytes_(needed)} on every GPU, and {gpus[0].name}, the largest in "
            f"{where}, has {gpus[0].memory_gib:.0f} GiB: hetopt shares samples among GPUs, not weights.",
            hint="choose a smaller model, or shorten the samples with `tokens`",
        )


def _fits(plan: Plan, memory: TrainingMemory) -> Iterator[Fit]:
    """Of each GPU among the ways to go, once."""
    groups = (group for way in plan.choices if way.candidate is not None for group in way.candidate.groups)
    hardware = [group.hardware for group in groups if group.hardware is not None]
    for name, gib in dict.fromkeys((one.gpu, one.gpu_memory_gib) for one in hardware):
        if name is not None and gib is not None:
            yield Fit(gpu=name, memory_gib=gib, samples=memory.largest_micro_batch(usable_on_gpu(gib * 2**30)))


def _counted(asked: Described, assumed: list[str]) -> tuple[ModelCount, int]:
    """Return the model, and on how many samples it is trained; what is taken for granted is added to ``assumed``."""
    params, config, flops, samples = asked.params, asked.config, asked.flops, asked.samples
    tokens = asked.tokens
    if params is not None and config is not None:
        raise BadInput("`params` and `config` exclude each other.", hint="keep the one that describes your model")
    if (samples is None) == (flops is None):
        raise BadInput(
            "give `samples` or `flops`: how long the training is."
            if samples is None
            else "`samples` and `flops` exclude each other.",
            hint="for example `samples=3e6`",
        )
    if params is None and config is None and flops is None:
        raise BadInput("give `params` or `config`: what the model is.", hint="for example `params=1.1e8`")
    if config is not None:
        model = of_config(_config(config), tokens)
    else:
        if tokens is None:
            tokens = TOKENS
            assumed.append(f"{TOKENS:,} tokens a sample (`tokens`)")
        if params is not None and params < LEAST_PARAMETERS:
            raise BadInput(
                f"`params` must be at least {LEAST_PARAMETERS:,}, got {params:g}: no transformer has fewer.",
                hint=f"with its unit: `params={params:g}M` or `params={params:g}B`",
            )
        model = of_parameters(max(1.0, of_flops(flops or 0.0) if params is None else params), tokens)
        if params is None:
            assumed.append(f"{model.name}, the best use of so many FLOPs (`params`)")
    if model.parameters > MOST_PARAMETERS:
        raise BadInput(
            f"the model has {model.parameters:.3g} parameters, and no more than {MOST_PARAMETERS:.0e} can be."
        )
    count = samples if samples is not None else (flops or 0.0) / (CONTRIBUTION * model.forward_flops)
    if count > MOST_SAMPLES:
        raise BadInput(f"the training has {count:.3g} samples, and no more than {MOST_SAMPLES:.0e} can be.")
    return model, max(1, math.ceil(count))


def _config(path: Path) -> dict[str, object]:
    found = read_json(path, most_bytes=CONFIG_BYTES, hint="name the config.json of a model")
    if not isinstance(found, dict):
        raise BadInput(f"{path} is no configuration: it holds no fields.", hint="name the config.json of a model")
    return found
