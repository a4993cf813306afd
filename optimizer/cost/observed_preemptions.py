"""What was seen of spot pools: instance-hours and losses, in a file that a person or a launch may keep."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, model_validator

from hetopt.core.artifact import Artifact, Record, changed
from hetopt.core.paths import home
from hetopt.optimizer.cost.preemption_rate import PreemptionRatePosterior
from hetopt.optimizer.plan import Watched


class ObservedPool(Record):
    """Spot machines of one type in one zone (absent: somewhere in the region).

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
    outage_hours: NonNegativeFloat = Field(default=0, description="from their loss to the next machine, together")

    @model_validator(mode="after")
    def _possible(self) -> Self:
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
    """Observed instance-hours and preemptions of all pools that were watched."""

    KIND: ClassVar[str] = "observed-losses"
    VERSION: ClassVar[int] = 1
    MADE_BY: ClassVar[str] = "hetopt launch"

    until: str = Field(description="when the last of it was seen, ISO 8601")
    pools: tuple[ObservedPool, ...] = ()

    def watched(self, instance_type: str, region: str, *, zone: str | None = None) -> Watched | None:
        """Return the observed hours and losses of a type in a region, or (given) in one zone of it; absent: none."""
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
        return Watched(
            instance_hours=sum(pool.instance_hours for pool in pools),
            losses=losses,
            lost_together=losses / events if events else 1.0,
            outages=sum(pool.outages for pool in pools),
            outage_hours=sum(pool.outage_hours for pool in pools),
            until=self.until,
        )

    def adding(self, seen: ObservedPool, *, until: str) -> ObservedPreemptions:
        """Return the record with ``seen`` added to its pool."""

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


TOLD_BY_THE_PAST = 0.2
"""What was seen of a pool counts for so much of itself: on other days it is another. With 1, intervals of runs replayed
after two days of watching hold 76 % instead of 86 (``python -m benchmarks.spot_waiting``)."""


def pool_belief(band: str | None, watched: Watched | None) -> PreemptionRatePosterior:
    """Return the prior of an advisor's band, updated by what was seen of the pool, if anything was."""
    prior = PreemptionRatePosterior.prior(band)
    if watched is None:
        return prior
    return prior.after(
        TOLD_BY_THE_PAST * watched.losses,
        TOLD_BY_THE_PAST * watched.instance_hours,
        lost_together=watched.lost_together,
        outages=TOLD_BY_THE_PAST * watched.outages,
        outage_hours=TOLD_BY_THE_PAST * watched.outage_hours,
    )


def observed_file() -> Path:
    """Return the path of the observed preemptions: ``$HETOPT_HOME/observed-losses.json`` (``~/.hetopt``)."""
    return home() / "observed-losses.json"


def keep(path: Path, seen: Iterable[ObservedPool], *, until: str) -> ObservedPreemptions:
    """Add what a run has seen to the file, which need not exist (see `changed` for errors)."""

    def added(known: ObservedPreemptions | None) -> ObservedPreemptions:
        known = known or ObservedPreemptions(until=until)
        for pool in seen:
            known = known.adding(pool, until=until)
        return known

    return changed(ObservedPreemptions, path, added)
