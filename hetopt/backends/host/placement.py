"""Who is who: machines that EC2 gave become the hosts of the run, and the workers are ranked as torchrun will.

torchrun ranks nodes by the text of their addresses, and EC2 hands out addresses as it likes. So the run's workers are
put into the order that their addresses will have, and a rank means the same to everybody.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

from hetopt.backends.host.protocol import Place, Placements
from hetopt.core.errors import CloudRefused
from hetopt.core.run_spec import MEETING_PORT, RunSpec


def ranked_spec(spec: RunSpec, places: Iterable[Place]) -> RunSpec:
    """The run with its workers in the order of their machines' addresses, as torchrun will rank them."""
    address = {place.host: place.address for place in places}
    workers = sorted(spec.workers, key=lambda worker: address[worker.host])  # stable: a host's workers stay together
    return spec.model_copy(update={"workers": tuple(workers)})


def without(spec: RunSpec, lost: Collection[str]) -> RunSpec:
    """The run on the hosts that are left, with the same global batch: each local batch size grows in proportion.

    Raises:
        CloudRefused: nobody is left, or the workers that are left cannot hold the batch.
    """
    workers, batch = [worker for worker in spec.workers if worker.host not in lost], spec.global_batch_size
    if not workers:
        raise CloudRefused("all machines of the run are lost.", hint="launch the plan again")
    total = sum(worker.local_batch_size for worker in workers)
    exact = [batch * worker.local_batch_size / total for worker in workers]
    shares = [max(1, math.floor(share)) for share in exact]
    by_rest = sorted(range(len(workers)), key=lambda place: shares[place] - exact[place])
    for place in by_rest[: max(0, batch - sum(shares))]:
        shares[place] += 1
    while sum(shares) > batch and max(shares) > 1:
        shares[shares.index(max(shares))] -= 1
    for worker, share in zip(workers, shares, strict=True):
        # A task computes what does not fit at once in micro-batches.
        if spec.script and worker.max_local_batch_size is not None and share > worker.max_local_batch_size:
            raise CloudRefused(
                f"{worker.host} has memory for {worker.max_local_batch_size} samples at once, and would get {share} of "
                "the batch, as other machines are lost; a script has no micro-batches.",
                hint="launch the plan again",
            )
    sharing = (
        worker.model_copy(update={"local_batch_size": share}) for worker, share in zip(workers, shares, strict=True)
    )
    return spec.model_copy(update={"workers": tuple(sharing)})


def placement_json(
    spec: RunSpec,
    places: Mapping[str, Place],
    generation: int = 0,
    resume_from: str | None = None,
    *,
    pauses: bool = False,
) -> bytes:
    """What the machines read to find themselves and each other, and whether to save a checkpoint and wait."""
    placements = Placements(
        generation=generation,
        resume_from=resume_from,
        pauses=pauses,
        # A port of its own for each generation: what is left of the last must not be met.
        meeting=f"{min(place.address for place in places.values())}:{MEETING_PORT + generation}",
        hosts=dict(places),
        spec=spec,
    )
    return placements.model_dump_json(indent=2).encode()
