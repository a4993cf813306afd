"""Machines that SkyPilot rents: the contract of every backend over a client that answers as SkyPilot's does.

No cloud is asked: what SkyPilot does with a task, and how its machines end by themselves, is not seen here.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hetopt
from benchmarks._ssh_servers import Servers
from hetopt.backends.emulation.namespaces import EmulatedNetwork
from hetopt.core.errors import BadInput
from hetopt.core.events.log import EVENTS_FILE
from hetopt.core.run_status import RunState
from hetopt.optimizer.plan import Plan
from tests.api.test_backends import RECORDED, Stories, goes_on, until_step
from tests.face.conftest import until
from tests.ssh.test_backend import started_with

CLIENT = str(Path(__file__).parent / "client")


@pytest.fixture
def clouds(servers: Servers, two_machines: EmulatedNetwork, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Two machines that can be had; when the test ends none is rented, and nothing of a run is on them."""
    for place in range(2):
        servers.host(f"box{place}", network=two_machines.namespace(place), known=False)
        (servers.folder / f"box{place}").write_text(two_machines.address(place))
    entries = servers.folder / "client"
    entries.write_text(re.sub(r"(?m)^Host box(.)", r"Host box\1 hetopt-*-\1", entries.read_text()))
    monkeypatch.setenv("SKY_OF_TEST", str(servers.folder))
    monkeypatch.setenv("PYTHONPATH", CLIENT)
    monkeypatch.syspath_prepend(CLIENT)
    here = {"python": sys.executable, "folder": str(servers.folder / "machine")}
    monkeypatch.setattr("hetopt.integrations.sky.MACHINE", here)
    yield servers.folder
    sys.modules.pop("sky", None)
    until(lambda: not [*servers.folder.glob("machine/runs/*/*")] and len([*servers.folder.glob("box?")]) == 2)


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Two machines, for longer than any of these runs."""
    options = {"budget_usd": 50, "epochs": 2000, "batch_size": 256, "objective": "fastest", "max_workers": 2}
    return hetopt.recommend(RECORDED, types="c7i.large", trials=0, **options)


def test_a_machine_that_is_taken_is_rented_again_and_what_was_rented_counts(
    plan: Plan, clouds: Path, two_machines: EmulatedNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HETOPT_HOME", str(clouds / "home"))
    run = hetopt.launch(plan, on=hetopt.Sky(budget_usd=20), steps=100_000)
    until_step(run, 5)
    [second] = clouds.glob("hetopt-????????-1")
    second.rename(clouds / "box1")
    two_machines.kill(1)
    until(lambda: started_with(run) == [2, 1, 2], lambda: goes_on(run))
    assert run.stop().state is RunState.STOPPED
    assert (run.folder / EVENTS_FILE).read_text().count('"from": "memory"') == 2
    assert 0 < float((run.folder / "rented_s").read_text()) < 600
    asked = [json.loads(line) for line in (clouds / "tasks.jsonl").read_text().splitlines()]
    assert [task["resources"]["infra"] for task in asked] == [f"aws/{plan.chosen.groups[0].region}"] * 3
    assert all(task["run"].startswith("timeout ") and f"/[r]uns/{run.name}/" in task["run"] for task in asked)
    (run.folder / "rented_s").write_text("1e9")
    assert "the budget of the run is used up" in (hetopt.resume(run).wait().reason or "")
    monkeypatch.setitem(sys.modules, "sky", None)
    with pytest.raises(BadInput, match=r"needs it, and it is not installed"):
        hetopt.launch(plan, on="sky")


@pytest.mark.slow  # the test above tells most of each story
class TestSky(Stories):
    here = hetopt.Sky(budget_usd=20)

    @pytest.fixture(autouse=True)
    def rented(self, clouds: Path) -> None:
        """From these."""
