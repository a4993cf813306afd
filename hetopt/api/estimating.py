"""`hetopt.estimate`: what training would take and cost, by counting, before anything is measured."""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Literal, get_args

from hetopt.api.catalogs import in_regions
from hetopt.api.planning import Names, catalog_of, compared_regions, search_options, tell_price_ages
from hetopt.api.values import chosen, duration_s, positive
from hetopt.core.errors import BadInput, NoFeasiblePlan
from hetopt.core.formatting import bytes_
from hetopt.core.memory import TrainingMemory
from hetopt.core.reading import read_json
from hetopt.core.reporter import Reporter
from hetopt.optimizer.described_profile import described_profile, training_memory
from hetopt.optimizer.market.catalog import Catalog
from hetopt.optimizer.market.catalog_choice import ANY_REGION
from hetopt.optimizer.market.catalog_filter import AnyMarket
from hetopt.optimizer.market.gpus import rentable_gpus
from hetopt.optimizer.model_counts import ModelCount, of_config, of_flops, of_parameters
from hetopt.optimizer.plan import Goal, Objective, Plan
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

Computing = Literal["bf16", "fp16", "tf32", "fp32"]


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


def estimate(
    *,
    params: float | str | None = None,
    config: Path | str | None = None,
    flops: float | str | None = None,
    samples: float | str | None = None,
    tokens: int | None = None,
    batch_size: int | None = None,
    precision: Computing = "bf16",
    budget_usd: float | str | None = None,
    deadline: str | float | None = None,
    objective: Objective = "balanced",
    market: AnyMarket = "any",
    region: str = "us-east-1",
    types: Names = (),
    exclude: Names = (),
    gpus: Names = (),
    quotas: Sequence[str] = (),
    max_workers: int = 64,
    catalog: Path | str | None = None,
    reporter: Reporter | None = None,
) -> Estimate:
    """Say what training would take and cost, from what a model counts to. Nothing is measured, and torch is not needed.

    Clusters are searched, priced and compared as by `recommend`; the time of a step follows from its operations and
    what public measurements say of how well GPUs are used, with a wide interval.

    Args:
        params: parameters of a transformer, such as ``1.1e8`` or ``"110M"``.
        config: a Hugging Face ``config.json`` instead; it is read as numbers, and nothing in it is run.
        flops: of the whole training instead of ``samples``; alone, of a transformer that makes the best of them.
        samples: that are trained on, epochs included.
        tokens: of a sample. Absent: what the configuration has places for, at most 1,024.
        batch_size: samples of a step, of all workers. Absent: 256.
        precision: of matrix products: ``"bf16"``, ``"fp16"``, ``"tf32"`` or ``"fp32"``.
        budget_usd: a hard cap on the whole bill, USD. Without it and ``deadline``, nothing is held against limits.
        deadline: longest total time: ``"6h"``, ``"3d"``.
        objective: as of `recommend`, like all that follow.
        market: ``"spot"``, ``"on-demand"`` or ``"any"``.
        region: of AWS; ``"any"``: the best of all that have prices.
        types: names or patterns of instance types.
        exclude: names or patterns of those to leave out.
        gpus: only machines with these.
        quotas: vCPUs that may run at once.
        max_workers: of a cluster.
        catalog: folder of another catalogue.
        reporter: told what goes on.

    Raises:
        BadInput: a value cannot be, is missing, or the options exclude each other.
        NoFeasiblePlan: nothing fits; the hint says what would.
    """
    computing: Computing = chosen(precision, get_args(Computing), "precision") or "bf16"
    told = reporter or Reporter()
    assumed: list[str] = []
    model, wanted = _counted(
        params, config, positive(flops, "flops", "FLOPs"), samples, _whole(tokens, "tokens"), assumed
    )
    batch = min(_whole(batch_size, "batch_size") or BATCH_SIZE, wanted)
    if batch_size is None:
        assumed.append(f"{batch} samples a step (`batch_size`)")
    options = replace(
        search_options(
            objective=objective,
            market=market,
            types=types,
            exclude=exclude,
            gpus=gpus or "any",
            quotas=quotas,
            max_workers=max_workers,
            mixed_types=1,
            batch_size=batch,
            trials=0,
            accept_risk=True,
        ),
        worlds=False,
    )
    now = datetime.datetime.now(datetime.UTC)
    goal = Goal(
        budget_usd=positive(budget_usd, "budget_usd", "USD"),
        deadline_s=duration_s(deadline, "deadline"),
        ends="steps",
        amount=math.ceil(wanted / batch),
    )
    memory = training_memory(model, batch, computing)
    profile = described_profile(model, samples=wanted, batch_size=batch, precision=computing, now=now)

    def found(request: PlanRequest) -> Plan:
        return recommend(request, seed=0, now=now, tell=lambda text: told(text, None))

    if region == ANY_REGION:
        _refuse_what_no_gpu_holds(model, memory, in_regions(region, None if catalog is None else Path(catalog)))
        compared = compared_regions(profile, goal, options, quotas, catalog, 0, told)
        plan = compared.planned(PlanRequest(profile, compared.best[0].catalog, goal, options), found)
    else:
        in_use = catalog_of(region, catalog)
        _refuse_what_no_gpu_holds(model, memory, (in_use,))
        plan = found(PlanRequest(profile, in_use, goal, options))
        tell_price_ages(plan, in_use, told)
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


def _counted(
    params: float | str | None,
    config: Path | str | None,
    flops: float | None,
    samples: float | str | None,
    tokens: int | None,
    assumed: list[str],
) -> tuple[ModelCount, int]:
    """The model, and on how many samples it is trained; what had to be taken for granted is added to ``assumed``."""
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
        model = of_config(_config(Path(config)), tokens)
    else:
        if tokens is None:
            tokens = TOKENS
            assumed.append(f"{TOKENS:,} tokens a sample (`tokens`)")
        number = positive(params, "params", "parameters")
        if number is not None and number < LEAST_PARAMETERS:
            raise BadInput(
                f"`params` must be at least {LEAST_PARAMETERS:,}, got {params}: no transformer has fewer.",
                hint=f"with its unit: `params={number:g}M` or `params={number:g}B`",
            )
        if number is None:
            number = of_flops(flops or 0.0)
        model = of_parameters(max(1.0, number), tokens)
        if params is None:
            assumed.append(f"{model.name}, the best use of so many FLOPs (`params`)")
    if model.parameters > MOST_PARAMETERS:
        raise BadInput(
            f"the model has {model.parameters:.3g} parameters, and no more than {MOST_PARAMETERS:.0e} can be."
        )
    wanted = positive(samples, "samples", "samples")
    count = wanted if wanted is not None else (flops or 0.0) / (CONTRIBUTION * model.forward_flops)
    if count > MOST_SAMPLES:
        raise BadInput(f"the training has {count:.3g} samples, and no more than {MOST_SAMPLES:.0e} can be.")
    return model, max(1, math.ceil(count))


def _config(path: Path) -> dict[str, object]:
    found = read_json(path, most_bytes=CONFIG_BYTES, hint="name the config.json of a model")
    if not isinstance(found, dict):
        raise BadInput(f"{path} is no configuration: it holds no fields.", hint="name the config.json of a model")
    return found


def _whole(value: float | None, name: str) -> int | None:
    if value is None:
        return None
    if value != int(value) or not 1 <= value <= 10_000_000:
        raise BadInput(
            f"`{name}` must be a whole number from 1 to 10,000,000, got {value}.", hint=f"for example `{name}=128`"
        )
    return int(value)
