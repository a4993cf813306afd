"""Runs on hosts that real ssh servers reach, each in a network of its own: the contract, loss and return, clean-up."""

from __future__ import annotations

import datetime
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

import hetopt
from benchmarks._ssh_servers import Servers
from hetopt.api.exploring import place_on_hosts
from hetopt.api.probes import own_probes
from hetopt.api.run import log_files
from hetopt.backends.conductor import Situation, next_move
from hetopt.backends.emulation.namespaces import EmulatedNetwork, pids_in
from hetopt.backends.ssh.checking import check_hosts
from hetopt.backends.ssh.conductor import MOST_SKEW_S, in_our_time
from hetopt.core.errors import BadInput, RunFailed
from hetopt.core.events.log import EVENTS_FILE
from hetopt.core.hosts import Host, read_hosts
from hetopt.core.interruption import Reporter
from hetopt.core.profile import Profile
from hetopt.core.run_folder import checkpoint_step
from hetopt.core.run_status import RunState
from hetopt.optimizer.market.catalog import load_catalog
from hetopt.optimizer.market.clouds import owned
from hetopt.optimizer.plan import Plan
from hetopt.optimizer.step_time.model import sampled_machines
from tests.api.test_backends import RECORDED, Stories, plan, until_step
from tests.face.conftest import until
from tests.strangers import SAID, put_strangers, script_among_strangers

__all__ = ["plan"]


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETOPT_HOME", str(tmp_path / "home"))


@pytest.fixture
def inventory(servers: Servers, two_machines: EmulatedNetwork) -> Iterator[Path]:
    """Two hosts; when the test ends nothing of a run is left on them."""
    tables = [f'python = "{sys.executable}"\nusd_per_hour = 0.1\n']
    for place in range(2):
        servers.host(f"box{place}", network=two_machines.namespace(place))
        # Each host has its own disk: of hosts that share one, the first to end cannot know that the folder is to go.
        folder = servers.folder / f"remote{place}"
        tables.append(f'[box{place}]\nprivate = "{two_machines.address(place)}"\nfolder = "{folder}"\n')
    path = servers.folder / "hosts.toml"
    path.write_text("".join(tables))
    yield path
    until(lambda: not what_is_left(servers, two_machines))


def what_is_left(servers: Servers, network: EmulatedNetwork) -> list[object]:
    """Files and processes of runs on the hosts."""
    processes = [pid for place in range(2) for pid in pids_in([network.namespace(place)])]
    return [*(found for place in range(2) for found in os.walk(servers.folder / f"remote{place}")), *processes]


def started_with(run: hetopt.Run) -> list[int]:
    """How many workers each start had."""
    path = run.folder / "events.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [len(event["workers"]) for event in events if event["event"] == "run_started"]


@pytest.mark.slow  # the test below tells most of each story in one
class TestSsh(Stories):
    @pytest.fixture(autouse=True)
    def on_these(self, inventory: Path) -> None:
        self.here = hetopt.Ssh(inventory=inventory)


def test_a_run_ends_and_nothing_of_it_is_left_on_the_hosts(plan: Plan, inventory: Path, tmp_path: Path) -> None:
    """Of a task in a file, which travels with the code; the others train without a host that cannot take part."""
    bad = '[bad]\naddress = "nobody.invalid"\nprivate = "10.255.255.1"\n'
    inventory.write_text(inventory.read_text() + bad)
    (tmp_path / "mine.py").write_text("from hetopt.trainer.tasks.digits import digits as task\n")
    mine = plan.run.model_copy(update={"task": f"{tmp_path / 'mine.py'}:task"})
    run = hetopt.launch(plan.model_copy(update={"run": mine}), on=hetopt.Ssh(inventory=inventory), steps=12)
    assert run.wait().state is RunState.FINISHED
    assert run.model is not None
    assert {worker.host for worker in run.report().workers} == {"box0", "box1"}
    assert run.launch is not None
    assert run.launch.prediction.cost_usd.value == pytest.approx(0.3 * run.launch.prediction.total_s.value / 3600)
    assert log_files(run.folder, 1)
    events = [json.loads(line) for line in (run.folder / EVENTS_FILE).read_text().splitlines()]
    [absent] = [event for event in events if event["event"] == "condition_changed"]
    assert absent["host"] == "bad"
    assert absent["reason"].startswith("bad cannot take part: is not reached")
    [started] = [event for event in events if event["event"] == "run_started"]
    assert sum(worker["local_batch_size"] for worker in started["workers"]) == plan.run.global_batch_size


def test_no_stranger_of_a_host_or_beside_a_script_is_imported_for_ours(
    plan: Plan, inventory: Path, servers: Servers, tmp_path: Path
) -> None:
    """Neither those in the folder that the user begins in nor those that travel with the script."""
    (tmp_path / "user").mkdir()
    put_strangers(tmp_path / "user")
    for place in range(2):
        shell = servers.folder / f"box{place}.shell"
        shell.write_text(f"cd {tmp_path / 'user'}\n{shell.read_text()}")
    (tmp_path / "mine").mkdir()
    script = (
        str(script_among_strangers(tmp_path / "mine")),
        "--epochs",
        "2",
        "--batch-size",
        str(plan.run.global_batch_size),
    )
    of_script = plan.model_copy(update={"run": plan.run.model_copy(update={"script": script})})
    run = hetopt.launch(of_script, on=hetopt.Ssh(inventory=inventory))
    status = run.wait()
    said = "\n".join(log.read_text() for log in (run.folder / "log").rglob("*.log"))
    assert SAID not in said
    assert status.state is RunState.FINISHED, said
    assert [one.verdict for one in check_hosts(read_hosts(inventory))] != ["bad", "bad"]


LARGE = """
from torch import nn
from hetopt.trainer.task import Target
from hetopt.trainer.tasks.digits import digits_data
from hetopt.trainer.tasks.recipes import classification, sgd
task = classification(
    name="large",
    model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 20_000), nn.ReLU(), nn.Linear(20_000, 10)),
    data=digits_data, optimizer=sgd(0.01), target=Target(metric="accuracy", value=0.9), batch_size=64,
)
"""


@pytest.mark.slow  # half a minute of a slow line
def test_a_run_that_is_stopped_keeps_its_last_step_over_a_slow_line(
    plan: Plan, servers: Servers, tmp_path: Path
) -> None:
    """Its checkpoint, 12 MB, comes for longer than a run that does not hear is waited for."""
    servers.host("far", most_bytes_per_s=400_000)
    inventory = servers.folder / "hosts.toml"
    inventory.write_text(f'[far]\nprivate = "127.0.0.2"\npython = "{sys.executable}"\nfolder = "{tmp_path / "far"}"\n')
    (tmp_path / "large.py").write_text(LARGE)
    large = plan.run.model_copy(update={"task": f"{tmp_path / 'large.py'}:task", "checkpoint_every_s": 3600.0})
    run = hetopt.launch(plan.model_copy(update={"run": large}), on=hetopt.Ssh(inventory=inventory), steps=1_000_000)
    until_step(run, 5)
    assert run.stop().state is RunState.STOPPED
    assert checkpoint_step(run.folder) == run.record().progress.step
    assert run.model is not None


@pytest.mark.slow
def test_hosts_are_measured(inventory: Path) -> None:
    """Two probes, of one host and of both; the samples name them, and a plan for the inventory knows their speed."""
    profile = Profile.load(RECORDED)
    place = place_on_hosts(profile, inventory=inventory, tell=Reporter())
    layouts = [[node.type for node in probe.configuration.nodes] for probe in place.probes]
    assert layouts[0] == ["box0"]
    assert ["box0", "box1"] in layouts
    both = next(probe for probe in place.probes if len(probe.configuration.nodes) == 2)
    samples, paid_usd = zip(*(place.measure(probe, 1.0) for probe in (place.probes[0], both)), strict=True)
    assert [[node.type for node in sample.nodes] for sample in samples] == [["box0"], ["box0", "box1"]]
    assert all(0 < usd < 0.1 for usd in paid_usd)
    known = profile.model_copy(update={"samples": samples})
    mine, _ = owned(load_catalog(), planned(inventory), datetime.date.today())
    machines = sampled_machines(known, mine.instance_types)
    assert machines is not None
    assert machines.machine("box0").evidence == "measured"


def planned(inventory: Path) -> list[Host]:
    """The hosts with what a plan needs to know."""
    return [host.model_copy(update={"cpus": 2, "network_mbit": 100.0}) for host in read_hosts(inventory)]


def test_each_host_is_probed_alone_and_more_and_more_together() -> None:
    hosts = [Host(name=f"box{place}", address="x", devices=("T4",) * (1 + place)) for place in range(4)]
    probes = own_probes(Profile.load(RECORDED), hosts)
    layouts = {tuple(node.type for node in probe.configuration.nodes) for probe in probes}
    alone = {(host.name,) for host in hosts}
    assert layouts == alone | {tuple(host.name for host in hosts[:count]) for count in (2, 3, 4)}
    for probe in probes:
        assert len(probe.spec.workers) == sum(node.workers for node in probe.configuration.nodes)


def test_a_launch_is_refused_where_no_host_can_take_part(plan: Plan, servers: Servers, tmp_path: Path) -> None:
    servers.host("stranger", known=False)
    with pytest.raises(RunFailed, match=r"stranger cannot take part: is not reached: No \S+ host key is known"):
        hetopt.launch(plan, on=hetopt.Ssh(hosts="stranger"))
    with pytest.raises(BadInput, match="needs to know which"):
        hetopt.launch(plan, on="ssh")
    assert not (tmp_path / "home").exists()


@given(
    events=st.lists(st.tuples(st.floats(0, 2e9), st.sampled_from(["step", "evaluated", "no event"]))),
    ahead_s=st.floats(-1e5, 1e5),
)
def test_events_of_a_host_whose_clock_is_off_are_told_in_our_time(
    events: list[tuple[float, str]], ahead_s: float
) -> None:
    """All of them, by as much, and nothing else of them changes."""
    written = [json.dumps({"event": name, "time_s": round(time_s, 6), "loss": 0.5}) for time_s, name in events]
    lines = "".join(f"{line}\n" for line in [*written, "no event", '{"event": "x"}']).encode()
    *told, _, _ = in_our_time(lines, ahead_s).decode().splitlines()
    by_s = ahead_s if abs(ahead_s) > MOST_SKEW_S else 0.0
    for line, (time_s, name) in zip(told, events, strict=True):
        assert json.loads(line) == {"event": name, "time_s": pytest.approx(time_s - by_s, abs=1e-5), "loss": 0.5}
    assert in_our_time(lines, ahead_s).endswith(b'no event\n{"event": "x"}\n')


NAMES = st.sets(st.sampled_from("abcd"))


@given(
    members=NAMES.filter(bool),
    there=NAMES,
    allowed=NAMES,
    fresh=NAMES,
    ended=st.dictionaries(st.sampled_from("abcd"), st.sampled_from([0, 6, 137])),
    pauses=st.booleans(),
    stopping=st.booleans(),
    resumes=st.booleans(),
    reduced=st.booleans(),
)
def test_moves_are_lawful(
    members: set[str],
    there: set[str],
    allowed: set[str],
    fresh: set[str],
    ended: dict[str, int],
    pauses: bool,
    stopping: bool,
    resumes: bool,
    reduced: bool,
) -> None:
    now = Situation(
        members=members,
        there=there,
        allowed=allowed,
        fresh=fresh & there,
        ended={name: code for name, code in ended.items() if name in members},
        pauses=pauses,
        stopping=stopping,
        resumes=resumes,
        reduced=reduced,
    )
    move = next_move(now)
    assert next_move(replace(now, over=True)) == "end"
    if move == "place":
        assert there & allowed, "somebody can be placed"
    if move == "pause":
        assert resumes, "what saves nothing is not interrupted"
        assert not pauses, "once is enough"
    if stopping:
        assert move in ("end", "go on"), "nobody is placed in a run that is to end"
    if members <= there - fresh and members == there & allowed and not now.ended and not stopping:
        assert move == "go on", "nothing has happened"
    if not members <= there - fresh and not stopping:
        assert move in ("place", "wait"), "a loss is answered at once"
    if reduced and any(now.ended.values()) and not stopping:
        assert move in ("place", "wait"), "where those that went on from memory fail, all start again"
