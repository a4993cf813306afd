"""Preemption rates and outages of spot pools: a prior for each pool, updated by losses that a file keeps between runs.

A pool is one instance type in one zone. Its machines are lost at a rate of lambda an hour, and lambda is not known:

    lambda ~ sum over components of weight * Gamma(shape, rate)         prior: calm or scarce
    k losses in H instance-hours: Gamma(shape + k, rate + H)            Poisson likelihood, conjugate
    evidence of a component: Gamma(shape + k) / (Gamma(shape) k!) (rate / (rate + H))^shape (H / (rate + H))^k

The prior of a band loses as large a share of machines in a month as AWS' Spot Instance Advisor says (`MONTH_LOST`).
How often a scarce pool has none, and for how long, is read off public recordings (`catalogs/aws/spot_pools.json`), and
so is how many pools of the advisor's last band are scarce.

After a loss a scarce pool has no machine for a time W (a pool with two states, Wu et al. 2024); a calm one has another:

    W ~ Gamma(OUTAGE_SHAPE, beta),   beta ~ Gamma(shape, hours)
    m outages of S hours together: Gamma(shape + OUTAGE_SHAPE m, hours + S)                     conjugate

The others train meanwhile, so that a cluster has the part 1 / (1 + lambda W) of its machines in the mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field, NonNegativeFloat, NonNegativeInt, model_validator

from hetopt import catalogs
from hetopt.core.artifact import Artifact, Record, update_artifact
from hetopt.core.paths import home
from hetopt.optimizer.plan import ObservedLosses

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class HazardComponent:
    """Gamma distribution of a pool's losses per machine-hour, as if ``shape`` losses were seen in ``rate_h`` hours."""

    shape: float
    rate_h: float

    @property
    def mean_per_hour(self) -> float:
        """Expected losses of one instance in an hour."""
        return self.shape / self.rate_h

    def after(self, losses: float, instance_hours: float) -> HazardComponent:
        """Return the distribution after observing ``losses`` lost machines in ``instance_hours`` machine-hours."""
        return HazardComponent(shape=self.shape + losses, rate_h=self.rate_h + instance_hours)

    def log_evidence(self, losses: float, instance_hours: float) -> float:
        """Return the log probability of ``losses`` lost machines in ``instance_hours`` machine-hours; 0 for 0 hours."""
        if instance_hours == 0:
            return 0.0
        total = self.rate_h + instance_hours
        return (
            math.lgamma(self.shape + losses)
            - math.lgamma(self.shape)
            - math.lgamma(losses + 1)
            + self.shape * math.log(self.rate_h / total)
            + losses * math.log(instance_hours / total)
        )


CALM_SHAPE = 0.5
"""Of the hazard of a pool with capacity to spare; its mean is what its band leaves."""

MONTH_LOST = {"<5%": 0.025, "5-10%": 0.075, "10-15%": 0.125, "15-20%": 0.175, ">20%": 0.96, None: 0.375}
"""Share of a fleet that is taken back in a month, by the advisor's band: its middle, and of the last band what is lost
in scarce pools and in calm ones, of which 43 % are. Of an unknown band it is the mean over the 14,962 types and regions
of the advisor's file of 2025-06, a third of which are in the last."""

LOST_TO_SCARCITY = {**dict.fromkeys(MONTH_LOST, 0.5), ">20%": 0.93 / 0.96, None: 0.336 / 0.375}
"""Of those, the part that is in pools that run dry; of the lower bands it is assumed. All 12 recorded pools of types in
the last band ran dry, so that 93 in 100 do (rule of succession; 92 by 11 of them). Recorded were types known for it: a
plan on such a pool is for the worse ones. With half of the loss, plans without a history of the pool were 14 to 23 %
short in the median and 71 % of their 90 % intervals held; now they are 9 % long to 1 % long and 88 to 91 % hold
(``benchmarks.spot_waiting``, by priors of the other recordings)."""

HOURS_PER_MONTH = 730.5

PAST_WEIGHT = 0.1
"""Weight of past observations of a pool, as it changes from day to day. Of simulated 90 % intervals after
two days of watching, 90 % hold with 0.05, 89 with 0.1, 87 with 0.2 and 79 with 1 (``benchmarks.spot_waiting``)."""


@dataclass(frozen=True, kw_only=True)
class Outages:
    """Distribution of a scarce pool's mean outage, as if ``shape / OUTAGE_SHAPE`` outages took ``hours`` in total.

    A shape of 0.8 spreads somewhat wider than twelve recorded pools differ, whose mean outages take 0.3 to 6 h.
    """

    shape: float = 0.8
    hours: float

    def after(self, outages: float, hours: float) -> Outages:
        """Return the belief updated by ``outages`` that took ``hours`` hours in total."""
        return Outages(shape=self.shape + OUTAGE_SHAPE * outages, hours=self.hours + hours)

    @property
    def usual_h(self) -> float:
        """Harmonic mean of the expected length of an outage, hours; the arithmetic mean is infinite."""
        return OUTAGE_SHAPE * self.hours / self.shape

    def sample(self, draws: int, generator: np.random.Generator) -> Array:
        """Draw ``draws`` samples of the expected length of an outage, in hours, [draws]."""
        return np.asarray(OUTAGE_SHAPE * self.hours / generator.gamma(self.shape, size=draws))


OUTAGE_SHAPE = 0.2
"""Most outages last minutes, and few take most of the time: squared coefficients of variation of 2 to 24 in recorded
pools."""


@dataclass(frozen=True, kw_only=True)
class PreemptionRatePosterior:
    """Belief about one spot pool's preemption rate: the pool is calm with one probability, else scarce.

    Attributes:
        calm, scarce: distribution of losses per machine-hour in either case.
        scarce_chance: probability that the pool is scarce.
        outages: how long a scarce pool has no machine after a loss.
    """

    calm: HazardComponent
    scarce: HazardComponent
    scarce_chance: float
    outages: Outages = Outages(hours=0.0)

    @classmethod
    @cache
    def prior(cls, band: str | None) -> PreemptionRatePosterior:
        """Return the belief about an unobserved pool in AWS's interruption band, such as '<5%'; None: unknown."""
        lost = MONTH_LOST.get(band, MONTH_LOST[None])
        scarce_chance = LOST_TO_SCARCITY.get(band, LOST_TO_SCARCITY[None]) * lost
        kept = (1 - lost) / (1 - scarce_chance)  # of a month's machines in calm pools: (rate / (rate + month))^shape
        scarce, outages = scarce_prior(ObservedPreemptions.load(RECORDED).pools)
        return cls(
            calm=HazardComponent(shape=CALM_SHAPE, rate_h=HOURS_PER_MONTH / (kept ** (-1 / CALM_SHAPE) - 1)),
            scarce=scarce,
            scarce_chance=scarce_chance,
            outages=outages,
        )

    def after(
        self,
        losses: float,
        instance_hours: float,
        *,
        lost_together: float = 1.0,
        outages: float = 0.0,
        outage_hours: float = 0.0,
    ) -> PreemptionRatePosterior:
        """Return the belief updated by ``losses`` machines lost in ``instance_hours`` machine-hours, and by outages.

        Losses and hours count divided by ``lost_together``, as machines lost at once are one event.

        Args:
            losses: machines that the provider took back; machines that ended otherwise count by their hours alone.
            instance_hours: machine-hours of all machines together.
            lost_together: machines lost at a time, in the mean over the times that any were lost.
            outages: lost machines in whose place another came.
            outage_hours: hours from losses to the next machine, or to the end of a run that got none, added up.
        """
        events, hours = losses / lost_together, instance_hours / lost_together
        calm, scarce = (part.log_evidence(events, hours) for part in (self.calm, self.scarce))
        odds = self.scarce_chance * math.exp(min(max(scarce - calm, -600.0), 600.0))
        return PreemptionRatePosterior(
            calm=self.calm.after(events, hours),
            scarce=self.scarce.after(events, hours),
            scarce_chance=odds / (odds + 1 - self.scarce_chance),
            outages=self.outages.after(outages / lost_together, outage_hours / lost_together),
        )

    def seeing(self, watched: ObservedLosses | None, *, weight: float = PAST_WEIGHT) -> PreemptionRatePosterior:
        """Return the belief after ``watched``, each observation counted ``weight`` (0 to 1) times; None: unchanged."""
        if watched is None:
            return self
        return self.after(
            weight * watched.losses,
            weight * watched.instance_hours,
            lost_together=watched.lost_together,
            outages=weight * watched.outages,
            outage_hours=weight * watched.outage_hours,
        )

    @property
    def mean_per_hour(self) -> float:
        """Expected losses of one instance in an hour."""
        return (1 - self.scarce_chance) * self.calm.mean_per_hour + self.scarce_chance * self.scarce.mean_per_hour

    @property
    def missing(self) -> float:
        """Expected hours without a machine for each hour with it."""
        return self.scarce_chance * self.scarce.mean_per_hour * self.outages.usual_h

    def sample(self, draws: int, generator: np.random.Generator) -> tuple[Array, Array]:
        """Draw the pool's losses per machine-hour, and hours of an outage after a loss (0 if calm), each [draws]."""
        scarce = generator.random(draws) < self.scarce_chance
        calm_rates = generator.gamma(self.calm.shape, 1 / self.calm.rate_h, draws)
        scarce_rates = generator.gamma(self.scarce.shape, 1 / self.scarce.rate_h, draws)
        outages_h = self.outages.sample(draws, generator)
        return np.where(scarce, scarce_rates, calm_rates), np.where(scarce, outages_h, 0.0)


NEVER_LOST = PreemptionRatePosterior(
    calm=HazardComponent(shape=0.0, rate_h=1.0), scarce=HazardComponent(shape=0.0, rate_h=1.0), scarce_chance=0.0
)
"""Of machines that nobody takes back."""


SHOCK_SHARE, SHOCK_REACH = 0.66, 0.35
"""Of a pool's losses, the part that comes with shocks, and the probability that a shock takes a certain machine. From
the sizes of losses in two pools of four V100 machines over 30 days (skypilot-org/spot-traces 221da1a, 2023-08): 140,
40, 14 and 2 times one, two, three and four machines went between two samples 5 minutes apart. The ratios of the last
three give the reach (0.34, 0.36), and what is left of the first the share; 48 % of the lost went with another."""


def effective_machines(machines: ArrayLike, *, share: float = SHOCK_SHARE, reach: float = SHOCK_REACH) -> Array:
    """Return the number of independently lost machines that would stop a job as often as ``machines`` of one pool.

    Some losses hit one machine, and shocks several at once (Marshall, Olkin 1967). Of a machine's hazard lambda the
    part ``(1 - share) lambda`` is its own. Shocks arrive at ``share lambda / reach`` for the whole pool, and each takes
    any machine with probability ``reach``, which adds up to lambda again. Events that stop a job of n machines arrive
    at ``lambda * effective_machines(n)``: n if losses are independent, less with shocks.
    """
    count = np.asarray(machines, dtype=np.float64)
    return (1 - share) * count + share / reach * (1 - (1 - reach) ** count)


class ObservedPool(Record):
    """Observed machine-hours, losses and outages of one machine type in a zone; zone None: somewhere in the region.

    ``losses`` counts machines that the provider took back, ``events`` how often it took any. Machines that ended by
    themselves are hours without a loss.
    """

    instance_type: str = Field(min_length=1)
    region: str = Field(min_length=1)
    zone: str | None = None
    instance_hours: NonNegativeFloat
    losses: NonNegativeInt
    events: NonNegativeInt | None = Field(default=None, description="absent: every loss was one of its own")
    outages: NonNegativeInt = Field(default=0, description="lost machines in whose place another came")
    outage_hours: NonNegativeFloat = Field(
        default=0, description="from losses to the next machine, or to the end of a run that got none, together"
    )
    source: str | None = Field(default=None, description="of a public recording, with the day of its beginning")

    @model_validator(mode="after")
    def _possible(self) -> Self:
        """Return the pool if its losses, events and hours are possible together; raise `ValueError` otherwise."""
        if self.losses and not self.instance_hours:
            raise ValueError("losses need instance_hours in which they happened")
        if self.events is not None and not (self.events <= self.losses and (self.events > 0) == (self.losses > 0)):
            raise ValueError("events must lie between 1 and losses, and be 0 without any")
        return self

    @property
    def times(self) -> int:
        """Number of preemption events, several machines lost at once counted as one."""
        return self.losses if self.events is None else self.events


class ObservedPreemptions(Artifact):
    """Machine-hours, losses and outages observed on all spot pools, as kept in a file between runs."""

    KIND: ClassVar[str] = "observed-losses"
    VERSION: ClassVar[int] = 1
    MADE_BY: ClassVar[str] = "hetopt launch"

    until: str = Field(description="when the last of it was seen, ISO 8601")
    pools: tuple[ObservedPool, ...] = ()

    def watched(self, instance_type: str, region: str, *, zone: str | None = None) -> ObservedLosses | None:
        """Return the summed observations of a type in a region, or one ``zone`` of it; None: nothing observed."""
        pools = [
            pool
            for pool in self.pools
            if (pool.instance_type, pool.region) == (instance_type, region)
            and zone in (None, pool.zone)
            and pool.instance_hours > 0
        ]
        if not pools:
            return None
        losses = sum(pool.losses for pool in pools)
        events = sum(pool.times for pool in pools)
        return ObservedLosses(
            instance_hours=sum(pool.instance_hours for pool in pools),
            losses=losses,
            lost_together=losses / events if events else 1.0,
            outages=sum(pool.outages for pool in pools),
            outage_hours=sum(pool.outage_hours for pool in pools),
            until=self.until,
        )

    def adding(self, seen: ObservedPool, *, until: str) -> ObservedPreemptions:
        """Return the record with ``seen`` added to its pool, or as a new one; ``until``: last seen then, ISO 8601."""

        def key(pool: ObservedPool) -> tuple[str, str, str | None]:
            return pool.instance_type, pool.region, pool.zone

        before = {key(pool): pool for pool in self.pools}
        known = before.get(key(seen))
        if known is not None:
            seen = seen.model_copy(
                update={
                    "instance_hours": known.instance_hours + seen.instance_hours,
                    "losses": known.losses + seen.losses,
                    "events": known.times + seen.times,
                    "outages": known.outages + seen.outages,
                    "outage_hours": known.outage_hours + seen.outage_hours,
                }
            )
        return ObservedPreemptions(until=max(self.until, until), pools=tuple({**before, key(seen): seen}.values()))


RECORDED = catalogs.AWS / "spot_pools.json"
"""Totals of public recordings of pools that run dry, each with its source and the day of its beginning."""


def scarce_prior(pools: Sequence[ObservedPool]) -> tuple[HazardComponent, Outages]:
    """Return priors of a scarce pool's losses per machine-hour and outages, with the mean rates of recorded ``pools``.

    At least one pool is needed; each must have lost machines and got others.
    """
    lost_per_hour = sum(pool.losses / pool.instance_hours for pool in pools) / len(pools)
    back_per_hour = sum(pool.outages / pool.outage_hours for pool in pools) / len(pools)
    outages = Outages(hours=Outages.shape / (OUTAGE_SHAPE * back_per_hour))
    return HazardComponent(shape=1.0, rate_h=1 / lost_per_hour), outages


def observed_file() -> Path:
    """Return the path of the file of observed preemptions: ``$HETOPT_HOME/observed-losses.json`` (``~/.hetopt``).

    Raises:
        BadInput: the user's home folder is not known.
    """
    return home() / "observed-losses.json"


def keep(path: Path, seen: Iterable[ObservedPool], *, until: str) -> ObservedPreemptions:
    """Add observed pools to the file at ``path`` under a lock, and return its new content; a missing file is made.

    Args:
        path: path of the file.
        seen: observed pools; figures of a pool that the file has already are added to it.
        until: when the last of it was seen, ISO 8601.

    Raises:
        BadInput: the file cannot be read or written, or holds something else.
        OSError: the folder or the lock file cannot be made.
    """

    def added(known: ObservedPreemptions | None) -> ObservedPreemptions:
        """Return ``known`` observations (None: there are none) with those of ``seen`` added."""
        known = known or ObservedPreemptions(until=until)
        for pool in seen:
            known = known.adding(pool, until=until)
        return known

    return update_artifact(ObservedPreemptions, path, added)
