"""Whether a compression can be what it says: names, memory and collective, ratio, and options that mean something.

Standard library and the facts only, so that whoever asks for it can be told before anything starts.
"""

from __future__ import annotations

from hetopt.core.comm.composition import CODINGS, CORRECTION, DENSE, GATHER, NONE, Combination, combine
from hetopt.core.errors import BadInput
from hetopt.core.names import known
from hetopt.core.run_spec import Compression

OPTIONS = ("bits", "levels", "rank", "floor_ratio", "least_gain", "coding", "momentum", "clip_norm")
"""Fields of a `Compression` that only some compressors have a use for."""

_OF_CORRECTION = ("momentum", "clip_norm")


def checked(compression: Compression) -> Combination:
    """The combination that ``compression`` means.

    Raises:
        BadInput: an unknown name, or things that do not go together.
    """
    chosen = combine(compression.name, memory=compression.memory, collective=compression.collective)
    method = chosen.method
    if not method.by_ratio and compression.ratio != 1.0:
        raise BadInput(
            f"the ratio of {chosen.name} must be 1, as it sends something of every element, got {compression.ratio:g}.",
            hint="use topk, or a ratio of 1",
        )
    given = [option for option in OPTIONS if getattr(compression, option) is not None]
    strange = [option for option in given if option not in method.options]
    if chosen.memory != CORRECTION:
        strange += [option for option in given if option in _OF_CORRECTION and option not in strange]
    if strange:
        raise BadInput(
            f"{chosen.name} with {chosen.memory} has no option {strange[0]}.", hint=f"leave {strange[0]} out"
        )
    if compression.coding is not None:
        known(compression.coding, CODINGS, "coding")
    if compression.least_gain is not None or (compression.floor_ratio is not None and chosen.collective == DENSE):
        _check_levels(chosen)
    return chosen


def _check_levels(chosen: Combination) -> None:
    """Whether a step can choose between a selection, its floor and everything; or elements of a random choice."""
    if chosen.collective not in (GATHER, DENSE):
        raise BadInput(
            f"least_gain goes with {GATHER}, as every worker has to know what its own selection keeps, got "
            f"{chosen.collective}.",
            hint=f"leave the collective out, or say {GATHER}",
        )
    if chosen.memory == NONE:
        raise BadInput(
            "Selections in levels count on what they leave out to come later, and nothing is held back without a "
            "memory.",
            hint="leave the memory out, or say error_feedback",
        )
