"""What the steps of a job have in common on whatever machines: learned from a profile, or the prior with its width.

The same parameters as `physics`, in natural units, for those who price many clusters at once (`hetopt.optimizer
.forecast`) or one run on known hosts. Each comes with the standard deviation of its logarithm (of its logit, where it
is a share), which is the prior's own where the profile says nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hetopt.core.comm.cost import UNDER_BACKWARD, last_bucket_share
from hetopt.optimizer.step_time.physics import FARTHEST_RATIO, SHARED
from hetopt.optimizer.step_time.posterior import Posterior
from hetopt.optimizer.step_time.step_time import NO_OVERLAP, Overlap


@dataclass(frozen=True, kw_only=True)
class Known:
    """A number and how well it is known: standard deviation of its log, or logit of a share, unless said otherwise."""

    value: float
    sd: float


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The parameters that a job's steps share on all machines.

    Attributes:
        straggling: relative standard deviation of a worker's single steps.
        contention: how much slower a worker of a full machine is than one alone.
        forward: share of the computation that is over before an exchange can begin.
        power: how well the rest hides the exchange; its ``sd`` is that of ln (power - 1).
        network_growth: what each doubling of workers adds to the bytes' time between machines.
        host_sharing: how far the workers of a machine share what is between them: a power of their number, whose ``sd``
            is its own.
        relief: bandwidth between three or more machines over that between two.
        gradient_bytes: of a dense exchange.
    """

    straggling: Known
    contention: Known
    forward: Known
    power: Known
    network_growth: Known
    host_sharing: Known
    relief: Known
    gradient_bytes: float

    @classmethod
    def of(cls, posterior: Posterior, gradient_bytes: float) -> Shape:
        """Return the shape from the parameters that were fitted to a profile or to samples."""
        mode: dict[str, float] = dict(zip(SHARED, posterior.mode[: len(SHARED)].tolist(), strict=True))

        def sd(name: str) -> float:
            index = SHARED.index(name)
            return math.sqrt(float(posterior.covariance[index, index]))

        def positive(name: str) -> Known:
            return Known(value=math.exp(mode[name]), sd=sd(name))

        ratio = min(0.0, max(FARTHEST_RATIO, mode["host_ratio"]))
        return cls(
            straggling=positive("straggling"),
            contention=positive("contention"),
            forward=Known(value=1 / (1 + math.exp(-mode["forward"])), sd=sd("forward")),
            power=Known(value=1 + math.exp(mode["overlap"]), sd=sd("overlap")),
            network_growth=positive("network_growth"),
            host_sharing=Known(value=mode["host_sharing"], sd=sd("host_sharing")),
            relief=Known(
                value=math.exp(-mode["rest"] - mode["relief"] * ratio),
                sd=math.hypot(sd("rest"), ratio * sd("relief")),
            ),
            gradient_bytes=gradient_bytes,
        )

    def crowded(self, workers: int) -> float:
        """Return a worker's compute time beside the others of its machine, relative to alone."""
        return 1 + self.contention.value * (1 - 1 / workers)

    def crowded_log_sd(self, workers: int) -> float:
        """Return the standard deviation of the log of `crowded`."""
        return self.contention.sd * (1 - 1 / self.crowded(workers))

    def overlap(self, compressor: str) -> Overlap:
        """Return the overlap of computing with an exchange through a compressor."""
        if compressor not in UNDER_BACKWARD:
            return NO_OVERLAP
        return Overlap(forward=self.forward.value, power=self.power.value, last=last_bucket_share(self.gradient_bytes))
