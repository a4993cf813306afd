"""Dollars and interruptions: what machines cost by the second, and what spot losses add to a job's time on average."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hetopt.optimizer.billing import Billing

Array = NDArray[np.float64]

SECONDS_PER_HOUR = 3600.0

BOOT_S = 60.0
"""Request to a usable machine: 5 s to 80 s are reported, by image and volume (depot.dev 2024, martysweet 2023)."""

SETUP_S = 120.0
"""Fetching code and the first import of torch from a lazily loaded image: minutes (AWS ParallelCluster: up to 7)."""

STARTUP_LOG_SD = 0.5
"""Start-up of 180 s is 80 to 410 s with 90 % probability."""

DETECTION_S = 30.0
"""From the loss of a machine until the job notices and asks for another."""

VOLUME_GB = 100.0
"""Root volume of each machine: operating system, torch with CUDA, data and checkpoints."""

CHECKPOINT_BYTES_PER_S = 100e6
"""Writing a checkpoint to a gp3 volume, whose baseline is 125 MB/s."""

CHECKPOINT_COPIES = 4
"""Parameters, two moments of the optimizer and the compressor's residual, each as large as the gradient."""


@dataclass(frozen=True, kw_only=True)
class HazardComponent:
    """A Gamma prior of a pool's hazard: ``shape`` losses in ``rate_h`` instance-hours."""

    shape: float
    rate_h: float

    @property
    def mean_per_hour(self) -> float:
        """Expected losses of one instance in an hour."""
        return self.shape / self.rate_h


CALM = HazardComponent(shape=0.5, rate_h=1000.0)
"""A pool with capacity to spare: a loss in 2000 instance-hours."""

SCARCE = HazardComponent(shape=1.0, rate_h=2.0)
"""A pool that runs dry, as in public traces of V100 and large Intel machines (0.2 to 1.3 losses an hour)."""

SCARCE_WEIGHT = {"<5%": 0.03, "5-10%": 0.06, "10-15%": 0.10, "15-20%": 0.15, ">20%": 0.25}
SCARCE_WEIGHT_UNKNOWN = 0.10
"""Probability that a pool is scarce. The advisor's band moves only this: it is a share of a fleet a month, no rate."""

# Two-point Gauss-Laguerre rule: exact means over the exponential distribution that Gamma(1, r) is.
_LAGUERRE = ((2 - 2**0.5, (2 + 2**0.5) / 4), (2 + 2**0.5, (2 - 2**0.5) / 4))
_LARGEST_EXPONENT = 50.0


def scarce_probability(market: str, band: str | None) -> float:
    """Prior probability that a pool is a scarce one; machines on demand are not taken back."""
    if market == "on-demand":
        return 0.0
    return SCARCE_WEIGHT.get(band, SCARCE_WEIGHT_UNKNOWN) if band else SCARCE_WEIGHT_UNKNOWN


@dataclass(frozen=True, kw_only=True)
class Interruptions:
    """Time that losses add, over the prior of the hazard.

    Attributes:
        expected_factor: expected time of the job over its time without losses, checkpoints included.
        log_sd: spread of the log of that factor between calm and scarce pools.
        scarce_factor: the factor if one of the pools turns out to be scarce.
    """

    expected_factor: Array
    log_sd: Array
    scarce_factor: Array


def interruptions(
    work_s: ArrayLike,
    *,
    calm_per_hour: ArrayLike,
    scarce_per_hour: ArrayLike,
    scarce_chance: ArrayLike,
    checkpoint_s: float,
    restart_s: float,
) -> Interruptions:
    """Average Daly's restart model over the hazard prior.

    Any loss stops the whole job until the machine is replaced, so a job of n machines is lost n times as often. The
    scarce component is an exponential distribution of hazards; its mean alone would hide what its upper end costs.

    Args:
        work_s: time of the job without losses.
        calm_per_hour: losses of the whole cluster an hour when no pool is scarce.
        scarce_per_hour: mean losses an hour given that some pool is scarce.
        scarce_chance: probability of that.
        checkpoint_s: time to write a checkpoint.
        restart_s: from a loss to training again, without the work that is done again.
    """
    work, chance = np.asarray(work_s, dtype=np.float64), np.asarray(scarce_chance, dtype=np.float64)
    calm = restart_factor(work, np.asarray(calm_per_hour, dtype=np.float64), checkpoint_s, restart_s)
    scarce_rate = np.asarray(scarce_per_hour, dtype=np.float64)
    scarce = sum(
        (weight * restart_factor(work, node * scarce_rate, checkpoint_s, restart_s) for node, weight in _LAGUERRE),
        start=np.zeros(()),
    )
    expected = (1 - chance) * calm + chance * scarce
    variance = (1 - chance) * np.log(calm / expected) ** 2 + chance * np.log(scarce / expected) ** 2
    return Interruptions(expected_factor=expected, log_sd=np.sqrt(variance), scarce_factor=scarce)


def restart_factor(work_s: Array, losses_per_hour: Array, checkpoint_s: float, restart_s: float) -> Array:
    """Expected time over work, with checkpoints at Daly's interval, failures during restart included.

        E[T] = (W / t) Theta e^(R / Theta) (e^((t + C) / Theta) - 1)        (Daly 2006)

    A job shorter than the interval writes no checkpoint. 1 where nothing is ever lost.
    """
    rate = np.maximum(losses_per_hour, 1e-12) / SECONDS_PER_HOUR
    interval = daly_interval_s(1 / rate, checkpoint_s)
    single = work_s <= interval
    interval = np.where(single, np.maximum(work_s, 1e-9), interval)
    saved = np.where(single, 0.0, checkpoint_s)
    restart = np.exp(np.minimum(restart_s * rate, _LARGEST_EXPONENT))
    factor = restart * np.expm1(np.minimum((interval + saved) * rate, _LARGEST_EXPONENT)) / (interval * rate)
    return np.where(losses_per_hour > 0, factor, 1.0)


def daly_interval_s(mean_time_between_losses_s: ArrayLike, checkpoint_s: float) -> Array:
    """Work between checkpoints that minimises the expected time (Daly 2006): Young's sqrt(2 C Theta), refined."""
    theta = np.asarray(mean_time_between_losses_s, dtype=np.float64)
    ratio = np.minimum(checkpoint_s / (2 * theta), 1.0)
    refined = np.sqrt(2 * checkpoint_s * theta) * (1 + np.sqrt(ratio) / 3 + ratio / 9) - checkpoint_s
    return np.where(checkpoint_s < 2 * theta, np.maximum(refined, 1e-9), theta)


def checkpoint_time_s(gradient_bytes: int) -> float:
    """Time to write everything that a resumed run needs."""
    return gradient_bytes * CHECKPOINT_COPIES / CHECKPOINT_BYTES_PER_S


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a machine costs an hour beside its own price, and for how long it is billed at least."""

    volume_usd_per_hour: float
    volume_basis: str
    address_usd_per_hour: float
    address_basis: str
    minimum_billed_s: float

    @classmethod
    def of(cls, billing: Billing) -> Rates:
        """Rates of a machine with one volume and one public address; all in one zone, so no transfer is billed."""
        volume, address = billing.ebs_gp3_usd_per_gb_month, billing.public_ipv4_usd_per_hour
        return cls(
            volume_usd_per_hour=volume.value * VOLUME_GB / billing.hours_per_month.value,
            volume_basis=f"{VOLUME_GB:.0f} GB gp3 a machine at ${volume.value:g} a GB-month "
            f"({volume.source}, {volume.date})",
            address_usd_per_hour=address.value,
            address_basis=f"${address.value:g} an hour each ({address.source}, {address.date})",
            minimum_billed_s=billing.minimum_billed_s.value,
        )

    @property
    def per_machine_hour(self) -> float:
        """USD an hour of one machine beside its own price."""
        return self.volume_usd_per_hour + self.address_usd_per_hour

    def billed_hours(self, seconds: ArrayLike) -> Array:
        """Hours on the bill of a machine that was up for ``seconds``."""
        return np.maximum(np.asarray(seconds, dtype=np.float64), self.minimum_billed_s) / SECONDS_PER_HOUR
