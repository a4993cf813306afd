from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from hetopt.backends.emulation.namespaces import find_networks, is_in_use, why_not

OTHERS_S = 20.0


@pytest.fixture(scope="session")
def _possible() -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture
def box(_possible: None) -> Iterator[None]:
    """A machine on which clusters can be rehearsed; nothing of one may be left by the test."""
    before = set(find_networks())
    yield

    def left() -> list[str]:
        # Somebody else may rehearse on this machine at the same time: what is in use by another process is theirs.
        return [id_ for id_ in find_networks() if id_ not in before and not is_in_use(id_)]

    # And tests beside this one leave something on purpose, and remove it.
    until = time.monotonic() + OTHERS_S
    while left() and time.monotonic() < until:
        time.sleep(0.2)
    assert not left()
