"""What a rehearsed cluster listens with is on the addresses of its own hosts, inside their namespaces."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetopt.backends.emulation.backend import RehearsalLauncher
from hetopt.backends.emulation.namespaces import host_address
from tests.listeners import watched

from .test_runs import conductor_of, events, nothing_is_left, rehearsed, wait_for


@pytest.mark.parametrize("restarts", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_hosts_listen_on_their_own_addresses_alone(box: None, tmp_path: Path, restarts: int) -> None:
    """torchrun's hosts, whose store is behind a gate, and hosts that come and go, each with a store."""
    spec = rehearsed("speed=1,rate=1gbit x2").model_copy(update={"max_restarts": restarts})
    launcher = RehearsalLauncher()
    handle = launcher.start(spec, tmp_path, {})
    addresses = {host_address(place) for place in range(2)}
    try:
        with watched(conductor_of(tmp_path).pid) as listeners:
            wait_for(lambda: events(tmp_path, "step") and addresses <= listeners.addresses, tmp_path)
    finally:
        launcher.stop(handle)
    assert not listeners.outside_of("127.", *addresses)
    assert nothing_is_left(tmp_path)
