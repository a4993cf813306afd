"""Real ssh servers for tests, and machines in networks of their own that they run on."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks._ssh_servers import SSHD, Servers
from hetopt.backends.emulation.namespaces import EmulatedNetwork, why_not
from hetopt.core.run_spec import EmulatedHost


@pytest.fixture
def two_machines() -> Iterator[EmulatedNetwork]:
    """A network of two machines, 100 and 25 Mbit/s."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    described = [EmulatedHost(name="h0", rate_bits_per_s=1e8), EmulatedHost(name="h1", rate_bits_per_s=25e6)]
    with EmulatedNetwork.create(described) as network:
        yield network


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Servers]:
    if SSHD is None:
        pytest.skip("no sshd is installed")
    with tempfile.TemporaryDirectory(prefix="hetopt-ssh-") as folder:
        made = Servers.made(Path(folder))
        monkeypatch.setenv("HETOPT_SSH", made.command)
        yield made
