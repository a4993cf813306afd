"""Seconds from the request for a rented machine to its first step, and the size of the machine's disk.

    startup = boot (+ GPU image) (+ bare metal) + packages + data + job + joining
    packages = downloaded / min(download, network) + installed / unpacking          one after the other, as pip does
    data     = bytes / min(volume, network)
    disk     = image + downloaded + installed + checkpoints + data, a tenth more beside the image, and a reserve

The figures are dated facts with their sources (`catalogs/aws/provisioning.json`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from types import MappingProxyType

from hetopt import catalogs
from hetopt.optimizer.cost.bill import BYTES_PER_GB, CHECKPOINTS_KEPT, Term
from hetopt.optimizer.market.instance_type import InstanceType

FACTS = catalogs.AWS / "provisioning.json"

MORE = 1.1
"""Beside the image, a tenth more than is counted."""

KIND_LOG_SD, LAUNCH_LOG_SD = 0.4, 0.3
"""Of the log of what launches take over what is foretold: what all launches of a kind of image share, and the rest.
Together they are `cost.STARTUP_LOG_SD`."""

VOLUME_BYTES_PER_S = 125e6
"""Of a gp3 volume without more throughput than comes with it (EBS user guide)."""

USUAL_JOB_S = 10.0
"""Of a job whose profile does not say how long its processes take to their first step."""


@cache
def provisioning_facts() -> Mapping[str, Term]:
    """Return the bundled figures of machines' start-up and disk (boot, packages, ...) by name, with sources."""
    terms = json.loads(FACTS.read_text(encoding="utf-8"))["terms"]
    return MappingProxyType({name: Term.model_validate(term) for name, term in terms.items()})


@dataclass(frozen=True, kw_only=True)
class Payload:
    """Bytes that a run brings to each machine, and known or measured start-up times and disk sizes.

    Attributes:
        data_bytes: size of the data set that each machine reads before it trains; 0: none, or machines have it.
        checkpoint_bytes: size of one checkpoint.
        job_s: seconds from starting the job's processes to the first step, once data and packages are there.
        startup_s: given seconds from the request to the first step; None: predicted.
        disk_gb: given size of the disk; None: as large as the run needs.
        measured: measured over predicted time of launches, by kind of image (`image_kind`).
        started_s: measured seconds from the request to the first step, by machine type; goes before ``startup_s``.
    """

    data_bytes: float = 0.0
    checkpoint_bytes: float = 0.0
    job_s: float = USUAL_JOB_S
    startup_s: float | None = None
    disk_gb: int | None = None
    measured: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    started_s: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))


def image_kind(instance: InstanceType) -> str:
    """Return the kind of image a machine boots: 'cpu', or 'gpu', the one with NVIDIA's driver."""
    return "gpu" if instance.cuda_devices else "cpu"


def startup_s(instance: InstanceType, payload: Payload) -> float:
    """Return the seconds from requesting a machine to its first training step: as in ``payload``, else predicted.

    A prediction is multiplied by the measured factor of the machine's kind of image.
    """
    known_s = payload.started_s.get(instance.name, payload.startup_s)
    if known_s is not None:
        return known_s
    kind, network = image_kind(instance), instance.network_bytes_per_s
    facts = provisioning_facts()
    boot = (
        facts["boot_s"].value
        + (kind == "gpu") * facts["gpu_boot_s"].value
        + bool(instance.bare_metal) * facts["bare_metal_boot_s"].value
    )
    download = facts[f"{kind}_packages_gb"].value * BYTES_PER_GB / min(facts["download_mb_per_s"].value * 1e6, network)
    unpack = facts[f"{kind}_installed_gb"].value * BYTES_PER_GB / (facts["unpack_mb_per_s"].value * 1e6)
    data = payload.data_bytes / min(VOLUME_BYTES_PER_S, network)
    foretold = boot + download + unpack + data + facts["join_s"].value + payload.job_s
    return foretold * payload.measured.get(kind, 1.0)


def disk_gb(instance: InstanceType, payload: Payload) -> int:
    """Return the size of a machine's boot disk in whole GB: as given in ``payload``, else as large as the run needs."""
    if payload.disk_gb is not None:
        return payload.disk_gb
    kind, facts = image_kind(instance), provisioning_facts()
    # The one that is being written is beside those that are kept.
    job = (payload.data_bytes + (CHECKPOINTS_KEPT + 1) * payload.checkpoint_bytes) / BYTES_PER_GB
    more = facts[f"{kind}_packages_gb"].value + facts[f"{kind}_installed_gb"].value + job
    return math.ceil(facts[f"{kind}_image_gb"].value + MORE * more + facts["reserve_gb"].value)


def measured_factors(launches: Iterable[tuple[Sequence[InstanceType], float]], payload: Payload) -> dict[str, float]:
    """Return measured over predicted launch time by kind of image, shrunk towards 1 where launches are few.

    The log of the factor is normal: of a kind around 0 with `KIND_LOG_SD`, of a launch around its kind's with
    `LAUNCH_LOG_SD`. A launch counts for the kind of its machine that starts last.

    Args:
        launches: types of the machines, and seconds from the request to the first step, of each launch.
        payload: bytes that these launches brought to their machines; start-up times in it are ignored.
    """
    logs: dict[str, list[float]] = {}
    plain = replace(payload, startup_s=None, measured={}, started_s={})
    for types, took_s in launches:
        last = max(types, key=lambda instance: startup_s(instance, plain))
        logs.setdefault(image_kind(last), []).append(math.log(took_s / startup_s(last, plain)))
    shrunk = (LAUNCH_LOG_SD / KIND_LOG_SD) ** 2
    return {kind: math.exp(math.fsum(some) / (len(some) + shrunk)) for kind, some in logs.items()}
