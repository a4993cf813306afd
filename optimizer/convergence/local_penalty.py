"""What training locally costs in steps, learned from pilots where there are any, and which of it may be planned with.

    S(B, share, N) = S(B) (1 + c (1 - 1/N) sqrt(1/share - 1))

``share`` of the steps end in an average of parameters, so 1/share - 1 others lie between two of them. Gradients are
mostly noise: in so many steps a worker wanders off by the root of their number, and 1 - 1/N of that wandering is not
the average's. This is the law of what compression holds back (`hetopt.core.training_laws`) with the share in the
place of the gain; analyses of local SGD bound its cost by a term that grows like this (Khaled et al. 2020, 1909.04746).

``c`` depends on the task and on the policy. The ten published runs of SelSync and FedAvg that arrived (2307.07950,
table I: three models, 16 workers, shares of 0.001 to 0.28; the fourth model's counts contradict its speed-ups) give 0
to 0.6, whatever the share, 0.25 in the mean.
"""

from __future__ import annotations

from dataclasses import dataclass

from hetopt.core.errors import setting
from hetopt.core.synchronization import Synchronization, spell_sync
from hetopt.optimizer.convergence.compression_penalty import BesideDense, Penalty, distance

PRIOR = Penalty(coefficient=0.25, coefficient_sd=0.2)
"""``c`` of one policy before any such run was seen."""

MOST_TIMES_WORKERS = 4
"""A pilot speaks for clusters of so many times its workers: each then has so many times fewer samples of a batch."""


@dataclass(frozen=True, kw_only=True)
class LocalPilot(BesideDense):
    """A run towards the target whose workers averaged parameters now and then.

    Attributes:
        sync: how.
        share: of its steps that ended in an average, in (0, 1].
        workers: two at least.
    """

    sync: Synchronization
    share: float
    workers: int


@dataclass(frozen=True, kw_only=True)
class LocalGate:
    """Rules for which local training may be planned with, from the pilots of a profile.

    A pilot speaks for its policy alone, whatever the share: one that arrived for every larger share (for more frequent
    averages), one that failed for every smaller one. Where no pilot speaks, nothing is planned unasked.
    """

    pilots: tuple[LocalPilot, ...] = ()

    def penalty(self, sync: Synchronization) -> Penalty:
        """Return the penalty of a policy; the prior where none of its pilots reached the target."""
        return PRIOR.after((pilot, distance(pilot.share, pilot.workers)) for pilot in self._own(sync))

    def arrived(self) -> tuple[LocalPilot, ...]:
        """Return the pilot of each policy that reached the target with the fewest averages."""
        least: dict[Synchronization, LocalPilot] = {}
        for pilot in sorted(self.pilots, key=lambda pilot: pilot.share):
            if pilot.steps_to_target is not None:
                least.setdefault(family(pilot.sync), pilot)
        return tuple(least.values())

    def measured_share(self, sync: Synchronization) -> float | None:
        """Return the share of steps that ended in an average under this very policy, over its pilots, if any."""
        shares = [pilot.share for pilot in self.pilots if pilot.sync == sync]
        return sum(shares) / len(shares) if shares else None

    def most_workers(self, sync: Synchronization, share: float) -> int:
        """Return the most workers that a pilot speaks for; 0 where none does."""
        return max(
            (
                MOST_TIMES_WORKERS * pilot.workers
                for pilot in self._own(sync)
                if pilot.steps_to_target is not None and pilot.share <= share * (1 + 1e-9)
            ),
            default=0,
        )

    def objection(self, sync: Synchronization, share: float) -> str | None:
        """Return why this policy may not be planned with unasked, in one sentence; None: nothing speaks against it."""
        for pilot in self._own(sync):
            needed = self.penalty(pilot.sync).inflation(pilot.share, pilot.workers)
            if pilot.share >= share * (1 - 1e-9) and pilot.failed(needed):
                return (
                    f"{spell_sync(pilot.sync)} did not reach the target in {pilot.steps_trained:.0f} steps; summing "
                    f"gradients in every step needs {pilot.dense_steps:.0f}"
                )
        if self.most_workers(sync, share) == 0:
            policy = spell_sync(sync)
            return f"what {policy} costs in steps was not measured: profile with {setting('sync', policy)}"
        return None

    def _own(self, sync: Synchronization) -> list[LocalPilot]:
        return [pilot for pilot in self.pilots if family(pilot.sync) == family(sync)]


def steps_in_words(penalty: Penalty, share: float, workers: int, *, counts: bool) -> str:
    """Return a sentence on the steps that averaging in such a share of them costs, and how that is known.

    Args:
        penalty: of the policy.
        share: of the steps.
        workers: that are averaged.
        counts: whether it is paid in steps.
    """
    if not counts:
        return "The number of steps is that of summing gradients in every step; what is learned in them may be less."
    more = float(penalty.inflation(share, workers)) - 1
    basis = f"as {penalty.pilots} pilot{'s' * (penalty.pilots > 1)} measured"
    if not penalty.pilots:
        basis = "by what was published of other tasks; profile with `sync` to measure it"
    return f"A target should take about {100 * more:.0f} % more steps with it ({basis})."


def family(sync: Synchronization) -> Synchronization:
    """Return the policy whatever its share: pilots of one are taken for evidence about another of its family."""
    return sync.model_copy(update={"every_steps": 1, "synchronised_share": 0.5})
