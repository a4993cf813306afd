"""When a host or a machine is given up: by the steps that its placements brought, not by whether it answers.

A host that crashes as soon as it takes part is there again each time, and would be placed for ever.
"""

from __future__ import annotations

MOST_IDLE = 3
"""Placements in a row that end with the host and without a completed step. Once is an accident; what lasts for minutes,
such as a package index or a line that is down, is over by the third."""


def is_given_up(idle: int) -> bool:
    """Return whether a host is placed no more.

    Args:
        idle: its placements since the last completed step that it took part in, each of which it has ended itself.
    """
    return idle >= MOST_IDLE


def back_off_s(first_s: float, idle: int) -> float:
    """Return how many seconds to wait before a host is placed again: twice as long each time.

    Args:
        first_s: after a placement that brought steps.
        idle: as for `is_given_up`.
    """
    return first_s * 2.0 ** min(idle, MOST_IDLE)
