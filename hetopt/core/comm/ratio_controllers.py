"""The controllers of a compression ratio by name, and the ratios that they can work with."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from hetopt.core.errors import BadInput
from hetopt.core.names import known

CONTROLLERS: Mapping[str, str] = MappingProxyType(
    {
        "auto": "whatever promises the least time to the target, of all compressors, collectives and ratios",
        "fixed": "one ratio",
        "warm_up": "ever less over four epochs, then the ratio (DGC)",
        "accordion": "ten times the ratio while the gradient's norm changes, the ratio while it does not",
        "gravac": "searches from 10x upwards while enough of the gradient is kept (GraVAC)",
        "threshold": "the ratio while little is lost, else everything (ScaDLES)",
        "scan": "weighs exchange time against gain (AR-Topk)",
    }
)


def check_ratio_controller(name: str, ratio: float) -> None:
    """Whether a run can have that controller.

    Args:
        name: of the controller.
        ratio: that the run was asked for, the part of the gradient that is sent.

    Raises:
        BadInput: there is no such controller, or the ratio leaves it nothing to decide.
    """
    known(name, CONTROLLERS, "ratio controller")
    if not 0 < ratio <= 1 or (ratio == 1 and name not in ("auto", "fixed", "scan")):
        raise BadInput(
            f"the ratio of {name} must be above 0 and below 1, got {ratio:g}.", hint="for example a ratio of 0.01"
        )
