"""What a rehearsed cluster is made of: its hosts and links, and what happens to them while a run goes on; and the size
of what trains in the place of a job that this machine cannot train.
"""

from __future__ import annotations

from typing import Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from hetopt.core.artifact import Record

EVERY_HOST = "*"


class DeclaredTime(Record):
    """The computation time of a worker on the machine that it stands for: ``fixed_s + per_sample_s * samples``.

    The worker computes for real and then waits until that time is over.
    """

    fixed_s: NonNegativeFloat = 0.0
    per_sample_s: PositiveFloat


class EmulatedHost(Record):
    """One host: a network namespace with one link.

    ``speed`` is relative, in whatever unit the rehearsal was described in; changes are given in the same unit.
    """

    name: str = Field(pattern=r"^[a-z][a-z0-9]{0,7}$")
    workers: PositiveInt = 1
    speed: PositiveFloat = 1.0
    rate_bits_per_s: PositiveFloat | None = Field(default=None, description="both directions; absent: not limited")


class Change(Record):
    """A change of a host, or of every host ('*'), while the run goes on.

    It happens ``at_s`` seconds after training began, or as soon as ``at_step`` is seen; with neither, at once. A host
    that has died may return; one that has notice will die soon; one that is cut off reaches nobody until it heals.
    """

    host: str
    at_s: NonNegativeFloat | None = None
    at_step: NonNegativeInt | None = None
    speed: PositiveFloat | None = None
    rate_bits_per_s: PositiveFloat | None = None
    dies: bool = False
    returns: bool = False
    notice: bool = False
    cut: bool = False
    heals: bool = False

    @model_validator(mode="after")
    def _is_one_change(self) -> Self:
        if self.at_s is not None and self.at_step is not None:
            raise ValueError("a change happens at a time or at a step, not both")
        fates = self.dies + self.returns + self.notice + self.cut + self.heals
        if self.speed is None and self.rate_bits_per_s is None and not fates:
            raise ValueError("a change needs a speed, a rate or a death")
        if fates > 1:
            raise ValueError("a host dies, returns, has notice, is cut off or heals: one at a time")
        return self


class ScaledEmulation(Record):
    """A cluster in a box, in host order; workers are ranked host by host.

    ``time_factor`` says how many times slower links are than in the cluster that is rehearsed. Computation takes as
    many times as long, unless something with a smaller gradient stands in for the job.
    """

    hosts: tuple[EmulatedHost, ...] = Field(min_length=1)
    time_factor: PositiveFloat = 1.0
    changes: tuple[Change, ...] = ()


class Conditions(Record):
    """The present speeds of a scaled emulation. Written by its conductor, read by every worker between steps.

    Attributes:
        slowdown: the whole miniature runs so many times slower than was planned, because the real computation did not
            fit into the declared time.
        speed_factors: present speed over declared speed, by host; a host that is not named is as declared.
    """

    slowdown: PositiveFloat = Field(default=1.0, ge=1)
    speed_factors: dict[str, PositiveFloat] = Field(default_factory=dict)


STAND_IN = "stand-in"
"""The bundled task."""

PARAMETERS = 250_000
"""In single precision: a gradient of 1 MB. Links are scaled to it, so that a step exchanges as long as the job's would:
110 million parameters over 10 Gbit/s are as slow as 1 MB over 23 Mbit/s, which a network on a few cores carries."""

LAYERS = 10
"""Its parameters are so many vectors of one length: a real gradient does not come at once either."""

SHAPES = ((PARAMETERS // LAYERS,),) * LAYERS
GRADIENT_BYTES = 4 * PARAMETERS
