"""Step times of configurations that were never run, from a profile or step samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hetopt.api.catalogs import in_use
from hetopt.api.probes import BOOT_S, probe_usd
from hetopt.core.artifact import kind_in
from hetopt.core.errors import BadInput
from hetopt.core.plain_text import known
from hetopt.core.profile import Profile
from hetopt.core.step_samples import Configuration, StepSamples
from hetopt.optimizer.fit import fit
from hetopt.optimizer.market.catalog import Catalog, Market
from hetopt.optimizer.search.asked_steps import AskedSteps
from hetopt.optimizer.step_time.model import StepTime, StepTimeModel, observe_profile, profile_priors
from hetopt.optimizer.step_time.observed import Observed, observe
from hetopt.optimizer.step_time.priors import PRIORS, Normal

MARKETS: tuple[Market, ...] = ("spot", "on-demand")


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Predicted step times and suggested probes, from a profile or from step samples.

    The planner's steps answer where a plan could have the configuration, else the model of what was measured.

    Attributes:
        model: hetopt's model of what was measured.
        plans: the planner's own step times; None: there are step samples alone, from which no plan is made.
        catalog: catalog of instance types and prices.
        market: spot or on-demand, for the price of probes.
    """

    model: StepTimeModel
    plans: AskedSteps | None
    catalog: Catalog
    market: Market

    @classmethod
    def of(
        cls, profile: Path, *, market: str = "spot", region: str = "us-east-1", catalog: Path | None = None
    ) -> StepTimes:
        """Return the predictor fitted to a profile or to a file of step samples; nothing is run.

        Args:
            profile: file of a profile or of step samples.
            market: ``spot`` or ``on-demand``, for the price of probes.
            region: region of the prices.
            catalog: folder of another catalogue; None: the newest refreshed one, else the bundled one.

        Raises:
            BadInput: a file cannot be read, or there is no such market or region.
        """
        where = next(name for name in MARKETS if name == known(market, MARKETS, "market"))
        observed, priors, whole = _observed(profile)
        listed = in_use(region, catalog)
        plans = None if whole is None else AskedSteps.of(whole, listed)
        model = StepTimeModel.fit(observed, listed.instance_types, priors)
        return cls(model=model, plans=plans, catalog=listed, market=where)

    def predict(self, configurations: Sequence[Configuration]) -> list[StepTime | str]:
        """Return each configuration's predicted step time with its interval, or a sentence on why there is none.

        A sentence stands, for example, for a machine type that nothing is known of; the order is that of
        ``configurations``.
        """
        planned = [self.plans is not None and self.plans.answers(configuration) for configuration in configurations]
        try:
            others = [
                configuration
                for configuration, is_planned in zip(configurations, planned, strict=True)
                if not is_planned
            ]
            rest = iter(self.model.predict(others) if others else ())
            return [
                self.plans.step(configuration) if self.plans is not None and is_planned else next(rest)
                for configuration, is_planned in zip(configurations, planned, strict=True)
            ]
        except BadInput as error:
            if len(configurations) == 1:
                return [error.message]
            return [answer for configuration in configurations for answer in self.predict([configuration])]

    def probe_usd(self, configuration: Configuration, step_time_s: float) -> float | None:
        """Return the USD of renting a configuration for set-up and a probe's steps; None: a price is not known.

        Args:
            configuration: machines to rent.
            step_time_s: predicted seconds of a step.
        """
        types = [node.type for node in configuration.nodes]
        prices = [self.catalog.price(name, self.market) for name in types if name in self.catalog.instance_types]
        known = [price.usd_per_hour for price in prices if price is not None]
        return probe_usd(sum(known), BOOT_S, step_time_s) if len(known) == len(types) else None


def _observed(path: Path) -> tuple[Observed, Mapping[str, Normal], Profile | None]:
    """Return a file's observed steps, the priors, and the profile; None instead of that for a file of step samples.

    Raises:
        BadInput: the file cannot be read, or is neither.
    """
    if kind_in(path) == StepSamples.KIND:
        return observe(StepSamples.load(path).samples), PRIORS, None
    profile = Profile.load(path)
    if profile.samples:
        return observe(profile.samples), PRIORS, profile
    return observe_profile(profile), profile_priors(fit(profile).reference), profile
