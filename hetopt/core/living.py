"""The run as it is for the workers that are left: the same training, its global batch shared by fewer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hetopt.core.batch_partition import largest_remainder
from hetopt.core.run_spec import RunSpec


def spec_of_living(spec: RunSpec, places: Sequence[int], shares: Mapping[int, int]) -> RunSpec:
    """The spec of a generation.

    The shares were balanced when they were last in use, so everyone takes over the same part of what the lost ones
    leave. A worker that comes back was planned with a share beside those of the others: it begins with as much more
    than that as they have more than theirs. The batch policy goes on from there.

    Args:
        spec: of the run, with all of its workers.
        places: of the workers that are there, in rank order.
        shares: last local batch sizes by place, as far as they are known.
    """
    if len(places) == len(spec.workers) and not shares:
        return spec
    planned = {place: spec.workers[place].local_batch_size for place in places}
    known = {place: share for place, share in shares.items() if place in planned}
    growth = sum(known.values()) / sum(planned[place] for place in known) if known else 1.0
    weights = [float(known.get(place, growth * planned[place])) for place in places]
    batch = spec.global_batch_size
    local = largest_remainder(weights, batch, minimum=[1] * len(places), maximum=[None] * len(places))
    workers = tuple(
        spec.workers[place].model_copy(update={"local_batch_size": size})
        for place, size in zip(places, local, strict=True)
    )
    return spec.model_copy(update={"workers": workers})
