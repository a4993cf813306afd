"""Machines that SkyPilot rents: the contract of every backend over a client that answers as SkyPilot's does.

No cloud is asked: what SkyPilot does with a task, and how its machines end by themselves, is not seen here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hetopt
from benchmarks._ssh_servers import Servers
from hetopt.backends.emulation.namespaces import EmulatedNetwork
from hetopt.core.run_status import RunState
from hetopt.optimizer.plan import Plan
from tests.api.test_backends import Stories, plan
from tests.face.conftest import until
from tests.ssh.test_backend import until_step

__all__ = ["plan"]


@pytest.fixture
def clouds(servers: Servers, two_machines: EmulatedNetwork, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Two machines that can be had; when the test ends none is rented, and nothing of a run is on them."""
    for place in range(2):
        servers.host(f"box{place}", network=two_machines.namespace(place), known=False)
        _, _, entry = (servers.folder / "client").read_text().partition(f"Host box{place}\n")
        box = {"name": f"box{place}", "address": two_machines.address(place), "entry": entry}
        (servers.folder / f"box{place}.free").write_text(json.dumps(box))
    client = str(Path(__file__).parent / "client")
    monkeypatch.setenv("SKY_OF_TEST", str(servers.folder))
    monkeypatch.setenv("PYTHONPATH", client)
    monkeypatch.syspath_prepend(client)
    here = {"python": sys.executable, "folder": str(servers.folder / "machine")}
    monkeypatch.setattr("hetopt.integrations.sky.MACHINE", here)
    yield servers.folder
    sys.modules.pop("sky", None)
    until(lambda: len(list(servers.folder.glob("*.free"))) == 2)
    until(lambda: not (servers.folder / "machine").exists())


def test_a_machine_that_is_taken_is_asked_for_again_and_what_was_rented_counts(plan: Plan, clouds: Path) -> None:
    run = hetopt.launch(plan, on=hetopt.Sky(budget_usd=2), steps=100_000)
    until_step(run, 5)
    second = run.folder.name
    assert run.stop().state is RunState.STOPPED
    assert 0 < float((run.folder / "rented_s").read_text()) < 600
    asked = [json.loads(line)["task"] for line in (clouds / "launched.jsonl").read_text().splitlines()]
    [group] = plan.chosen.groups
    assert {task["resources"]["infra"] for task in asked} == {f"aws/{group.region}"}
    assert all(f"/[r]uns/{second}/" in task["run"] and task["run"].startswith("timeout ") for task in asked)


class TestSky(Stories):
    here = hetopt.Sky(budget_usd=2)

    @pytest.fixture(autouse=True)
    def rented(self, clouds: Path) -> None:
        """From these."""
