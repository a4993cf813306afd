"""Which region to rent in: the best cluster of one type of each, with the data set's transfer; the best region wins."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from hetopt.core.errors import BadInput, NoFeasiblePlan
from hetopt.core.formatting import cluster as cluster_words
from hetopt.core.profile import Profile
from hetopt.optimizer.market.catalog import Catalog
from hetopt.optimizer.market.quota import Quotas
from hetopt.optimizer.plan import Goal, RegionOffer
from hetopt.optimizer.recommendation.options import Options, PlanRequest
from hetopt.optimizer.recommendation.recommend import search_problem
from hetopt.optimizer.search.search import Effort, search

SHOWN = 3
"""The winner and the next two."""


@dataclass(frozen=True, kw_only=True)
class Market:
    """A region, its prices, and what may run there."""

    catalog: Catalog
    quotas: Quotas


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Regions whose best cluster of one type keeps the limits, best first.

    Attributes:
        best: the catalogue and the quotas of the best of them.
        offers: the first few.
        regions: how many were compared.
    """

    best: Market
    offers: tuple[RegionOffer, ...]
    regions: int


def compare_regions(
    profile: Profile, markets: Iterable[Market], goal: Goal, options: Options, *, seed: int
) -> Compared:
    """Search the clusters of one type of each region; mixes of types are left to the search in the best.

    Args:
        profile: what was measured of the job.
        markets: the regions.
        goal: what the run is for, and its limits.
        options: what narrows the search; quotas are those of each region.
        seed: of the search.

    Raises:
        NoFeasiblePlan: nothing fits in any of them.
    """
    markets = tuple(markets)
    found = sorted(_offers(profile, markets, goal, options, seed), key=lambda one: (not one[1], one[0]))
    if not found:
        names = ", ".join(one.catalog.region for one in markets[:SHOWN])
        raise NoFeasiblePlan(
            f"Nothing fits in any of {len(markets)} regions with prices ({names}, ...).",
            hint="ask for one `region`, which says what would have to be allowed",
        )
    return Compared(best=found[0][3], offers=tuple(offer for _, _, offer, _ in found[:SHOWN]), regions=len(markets))


def _offers(
    profile: Profile, markets: Iterable[Market], goal: Goal, options: Options, seed: int
) -> Iterator[tuple[float, bool, RegionOffer, Market]]:
    """Score, whether it is safe, and the offer of each region that has one."""
    limits = options.limits(goal)
    for market in markets:
        try:
            problem = search_problem(PlanRequest(profile, market.catalog, goal, replace(options, quotas=market.quotas)))
        except BadInput:
            continue  # Nothing of what was asked for is sold there.
        found = search(problem.space, problem.job, limits, seed=seed, effort=Effort(types=1))
        if found.chosen is None:
            continue
        told, row = found.forecast, found.chosen
        machines = (
            (count, f"{problem.space.options[option].name} {problem.space.options[option].offer.price.market}")
            for option, count in found.cluster(row).machines
        )
        offer = RegionOffer(
            region=market.catalog.region,
            machines=cluster_words(machines),
            total_s=float(told.total_s[row]),
            cost_usd=float(told.cost_usd[row]),
            data_transfer_usd=problem.job.before_usd,
        )
        yield float(limits.expected_score(told)[row]), found.safe, offer, market
