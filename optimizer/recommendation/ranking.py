"""Clusters compared where nothing says how many steps the target takes: which is quicker and by how much, not how long.

The gradient noise scale says how batch sizes compare, and the step model how clusters do. Their product ranks clusters
by time and by dollars for the same progress; neither has a unit, so no budget and no deadline can be held against it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hetopt.core.profile import Profile
from hetopt.optimizer.convergence.convergence import RelativeSteps, relative_steps
from hetopt.optimizer.convergence.steps_law import Z90
from hetopt.optimizer.cost.billing import load_billing
from hetopt.optimizer.cost.cost import STARTUP_LOG_SD
from hetopt.optimizer.fit import fit
from hetopt.optimizer.market.catalog import Catalog
from hetopt.optimizer.plan import Goal
from hetopt.optimizer.recommendation.options import Options
from hetopt.optimizer.recommendation.recommend import space_of
from hetopt.optimizer.search.cluster_rows import Columns, tabulate_rows, uniform_rows
from hetopt.optimizer.search.forecast import JobModel, forecast
from hetopt.optimizer.search.objective import expected
from hetopt.optimizer.search.pareto import pareto_front, thin
from hetopt.optimizer.search.search_space import SearchSpace
from hetopt.optimizer.step_time.profiled import learned_shape, sampled_machines
from hetopt.optimizer.step_time.transfer import reference_host


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """One cluster of a single machine type.

    Attributes:
        time: expected for the same progress, relative to the quickest cluster of the list.
        cost: relative to the cheapest of the list, rent of its machines alone.
        spread: factor that ``time`` may be off by, with 90 % probability.
    """

    instance_type: str
    market: str
    machines: int
    global_batch_size: int
    compressor: str
    ratio: float
    step_time_s: float
    usd_per_hour: float
    time: float
    cost: float
    spread: float


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """Clusters of one machine type that none beats in time and cost at once, quickest first.

    Attributes:
        basis: what the comparison rests on, and what it does not say.
    """

    clusters: tuple[Ranked, ...]
    basis: str


def compare(profile: Profile, catalog: Catalog, options: Options, *, count: int = 12) -> Ranking:
    """Rank what the catalogue offers for a job whose steps to the target nobody knows.

    Raises:
        BadInput: not even the noise scale is known, or nothing can be predicted.
    """
    model = fit(profile)
    steps = relative_steps(model.convergence, profile.job.batch_size)
    sampled = sampled_machines(profile, catalog.instance_types)
    shape = learned_shape(model, sampled)
    host = reference_host(model, catalog.instance_types.values())
    space = space_of(model, shape, sampled, catalog, Goal(ends="target"), replace(options, sync=None), host)
    job = JobModel(
        steps=steps,
        evaluate_every_samples=1e18,
        shape=shape,
        startup_log_sd=STARTUP_LOG_SD,
        checkpoint_s=0.0,
        billing=load_billing(catalog.directory),
    )
    return Ranking(clusters=rank(space, job, steps, count), basis=steps.source)


def rank(space: SearchSpace, job: JobModel, steps: RelativeSteps, count: int) -> tuple[Ranked, ...]:
    """The clusters of one type that none beats in time and cost at once, quickest first; at most ``count``."""
    columns = Columns(space)
    rows, table = tabulate_rows(columns, uniform_rows(columns), job)
    if not len(rows):
        return ()
    told = forecast(table, job)
    spread = np.hypot(told.step_time_log_sd, steps.log_sd(table.batch, table.gain))
    median = steps.steps(table.batch, table.gain) * told.step_time_s
    relative = expected(median, median * np.exp(Z90 * spread))
    cost = relative * table.usd_per_hour
    kept: Sequence[int] = thin(pareto_front(relative, cost), relative, count).tolist()
    least_time, least_cost = float(relative.min()), float(cost.min())
    found = []
    for row in kept:
        option, machines = int(rows.option[row, 0]), int(rows.count[row, 0])
        batch, exchange = int(rows.batch[row]), int(rows.exchange[row])
        compression = space.exchanges[exchange].compression
        found.append(
            Ranked(
                instance_type=space.options[option].name,
                market=space.options[option].offer.price.market,
                machines=machines,
                global_batch_size=space.batch_sizes[batch],
                compressor=compression.name,
                ratio=compression.ratio,
                step_time_s=float(told.step_time_s[row]),
                usd_per_hour=float(table.usd_per_hour[row]),
                time=float(relative[row]) / least_time,
                cost=float(cost[row]) / least_cost,
                spread=float(np.exp(Z90 * spread[row])),
            )
        )
    return tuple(found)
