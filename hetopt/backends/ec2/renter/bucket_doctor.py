"""What a bucket's own policy denies of a run: its statements evaluated over the calls that a launch makes.

Uploads name no encryption, so that keys for headers are absent; a call comes from a machine's network or the internet.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from hetopt.backends.ec2 import facts
from hetopt.backends.ec2.renter.policies import Asked, Statement, concerns

ACTIONS = ("s3:PutObject", "s3:GetObject")
"""What machines and renters do with a run's objects; without one of them no run goes on."""
NETWORK_KEY = "aws:sourcevpc"


class Denial(NamedTuple):
    """What one statement denies: the actions, and whether that is certain for every call."""

    actions: tuple[str, ...]
    is_certain: bool


def denial_of(statement: Statement, networks: Collection[str], objects: str = "*") -> Denial | None:
    """Return what a statement denies of a run's calls; None: nothing.

    Args:
        statement: of the bucket's policy.
        networks: ids of the machines' networks, one of which a call may come from.
        objects: the run's objects, as a resource of a policy.
    """

    def possible(key: str) -> tuple[str | None, ...]:
        if key == NETWORK_KEY:
            return None, *networks
        return (None,) if key.startswith(facts.OF_HEADERS) else ()

    if statement["Effect"] != "Deny":
        return None
    asked = [Asked(action=action, resource=objects, context=facts.EVERY_CALL_OF_S3) for action in ACTIONS]
    holds = {one.action: concerns(statement, one, possible) for one in asked}
    if certain := tuple(action for action, truth in holds.items() if truth):
        return Denial(certain, is_certain=True)
    unclear = tuple(action for action, truth in holds.items() if truth is None)
    return Denial(unclear, is_certain=False) if unclear else None
