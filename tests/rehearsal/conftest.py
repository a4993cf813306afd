from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from hetopt.backends.emulation.namespaces import find_networks, why_not


@pytest.fixture(scope="session")
def _possible() -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture
def box(_possible: None) -> Iterator[None]:
    """A machine on which clusters can be rehearsed; nothing of one may be left by the test."""
    before = {network.id for network in find_networks()}
    yield
    # Somebody else may rehearse on this machine at the same time: what is in use by another process is theirs.
    assert not [
        network
        for network in find_networks()
        if network.id not in before and not (network.owner and network.owner.lives and network.owner.pid != os.getpid())
    ]
