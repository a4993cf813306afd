"""Who is who: machines that EC2 gave become the hosts of the run, and the workers are ranked as torchrun will.

torchrun ranks nodes by the text of their addresses, and EC2 hands out addresses as it likes. So the run's workers are
put into the order that their addresses will have, and a rank means the same to everybody.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from hetopt.backends.host.protocol import Place, Placements
from hetopt.core.batch_partition import spec_of_living
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
    places = [place for place, worker in enumerate(spec.workers) if worker.host not in lost]
    if not places:
        raise CloudRefused("all machines of the run are lost.", hint="launch the plan again")
    left = spec_of_living(spec, places, {})
    for worker in left.workers if spec.script else ():  # a task computes what does not fit at once in micro-batches
        share, most = worker.local_batch_size, worker.max_local_batch_size
        if most is not None and share > most:
            raise CloudRefused(
                f"{worker.host} has memory for {most} samples at once, and would get {share} of the batch, as other "
                "machines are lost; a script has no micro-batches.",
                hint="launch the plan again",
            )
    return left


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
