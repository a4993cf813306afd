"""Real little networks: links carry what was said, nobody disturbs a neighbour, and nothing is left behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import psutil
import pytest

from hetopt.backends.emulation import namespaces as networks
from hetopt.backends.emulation.namespaces import (
    LINK,
    EmulatedNetwork,
    NetworkRefused,
    find_leftovers,
    find_networks,
    pids_in,
    remove,
)
from hetopt.core.comm.cost import Operation
from hetopt.core.errors import BadInput
from hetopt.core.interruption import Terminated
from hetopt.core.run_spec import EmulatedHost
from hetopt.trainer.host.forks import ForkServer
from tests.disturbance import PATIENCE_S

from .programs import SEND, least_s, receive, send
from .sharded_program import BYTES

HEADERS = 1514 / 1448  # bytes on the wire for each byte of payload
OWN = """
import sys, time
from hetopt.backends.emulation.namespaces import pids_in
from hetopt.backends.emulation.namespaces import EmulatedNetwork
from hetopt.core.run_spec import EmulatedHost
network = EmulatedNetwork.create([EmulatedHost(name="h0"), EmulatedHost(name="h1")])
network.popen(0, ["sleep", "600"])
while not pids_in([network.namespace(0)]):
    time.sleep(0.01)
print(network.id, pids_in([network.namespace(0)])[0], flush=True)
time.sleep(600)
"""
TELLS = """
import os, psutil
print(sorted(psutil.net_if_addrs()), os.stat("/proc/self/ns/net").st_ino, open("/proc/self/cgroup").read().split())
"""


def hosts(count: int, rate_bits_per_s: float | None = None) -> list[EmulatedHost]:
    return [EmulatedHost(name=f"h{n}", rate_bits_per_s=rate_bits_per_s) for n in range(count)]


@pytest.mark.timed
@pytest.mark.parametrize("mbit", [5, 50, 500])
def test_a_link_carries_what_was_said_in_both_directions(box: None, mbit: int) -> None:
    size = round(mbit * 1e6 / 8 * 0.5)
    with EmulatedNetwork.create(hosts(2, mbit * 1e6)) as network:
        receive(network, 0)
        receive(network, 1)

        def both_s(at_once: bool) -> list[float]:
            first = send(network, 0, 1, size)
            there_s = None if at_once else first.wait_s()
            second = send(network, 1, 0, size)
            return [first.wait_s() if there_s is None else there_s, second.wait_s()]

        for at_once, most in ((False, 1.1), (True, 1.3)):  # acknowledgements share the link with the data the other way

            def longer_s(at_once: bool = at_once) -> float:
                took_s = both_s(at_once)
                assert min(took_s) > 0.97 * 0.5 * HEADERS
                return max(took_s)

            assert least_s(longer_s, most * 0.5) < most * 0.5


@pytest.mark.timed
def test_counterparts_of_shards_share_the_link_of_their_machine(box: None, tmp_path: Path) -> None:
    """As plans price it (`cluster_rows._members`): as if one worker of each machine had the whole gradient."""
    rate = 40e6
    with EmulatedNetwork.create(hosts(2, rate), owner="a test") as network:
        program = [sys.executable, "-m", "tests.rehearsal.sharded_program"]
        devices = [
            network.popen(
                rank // 2, [*program, str(rank), str(tmp_path)], env=os.environ | {"GLOO_SOCKET_IFNAME": LINK}
            )
            for rank in range(4)
        ]
        assert [device.wait(PATIENCE_S) for device in devices] == [0] * 4
    took_s = max(float((tmp_path / f"took-{rank}").read_text()) for rank in range(4))
    by_machine, by_device = (
        Operation(primitive="all_reduce", payload_bytes=BYTES, members=members).terms().traffic_bytes * 8 / rate
        for members in (2, 4)
    )
    assert took_s == pytest.approx(HEADERS * by_machine, rel=0.2)
    assert by_device == 1.5 * by_machine


@pytest.mark.timed
def test_the_slower_end_limits_a_transfer_whichever_way_it_goes(box: None) -> None:
    fast, slow = EmulatedHost(name="fast"), EmulatedHost(name="slow", rate_bits_per_s=20e6)
    with EmulatedNetwork.create([fast, slow]) as network:
        receive(network, 0)
        receive(network, 1)
        for there, back in ((0, 1), (1, 0)):
            took_s = least_s(partial(seconds, network, there, back, 1_000_000), 0.44 * HEADERS)
            assert took_s == pytest.approx(0.4 * HEADERS, rel=0.1)


@pytest.mark.timed
def test_a_rate_changes_while_traffic_flows(box: None) -> None:
    with EmulatedNetwork.create(hosts(2, 20e6)) as network:
        receive(network, 1)

        def over_expected() -> float:
            network.set_rates({0: 20e6})
            transfer = send(network, 0, 1, round(20e6 / 8))  # one second at this rate
            begun_s = time.monotonic()
            time.sleep(0.5)
            network.set_rates({0: 5e6})
            changed_s = time.monotonic() - begun_s
            return transfer.wait_s() / (changed_s + (HEADERS - changed_s) * 4)

        assert least_s(over_expected, 1.15) == pytest.approx(1, rel=0.15)
        network.set_rates({0: None, 1: None})
        assert least_s(partial(seconds, network, 0, 1, round(20e6 / 8)), 0.3) < 0.3
        network.set_rates({0: None, 1: 1e9})


@pytest.mark.timed
def test_a_link_that_becomes_slower_is_not_stuck(box: None) -> None:
    """What a fast link has queued may not fit into a slow one's bucket at all, and would stay in everybody's way."""
    with EmulatedNetwork.create(hosts(2, 1e9)) as network:
        receive(network, 1)
        for _ in range(4):
            transfer = send(network, 0, 1, 30_000_000)  # a quarter of a second
            time.sleep(0.1)
            network.set_rates({0: 1e8, 1: 1e8})
            assert transfer.wait_s() < 6
            network.set_rates({0: 1e9, 1: 1e9})


def test_hosts_of_two_networks_have_the_same_addresses_and_do_not_meet(box: None) -> None:
    with (
        EmulatedNetwork.create(hosts(2)) as one,
        EmulatedNetwork.create(hosts(2)) as other,
    ):
        assert one.address(1) == other.address(1)
        receive(one, 1)
        send(one, 0, 1, 1000).wait_s()
        stranger = other.popen(
            0, [sys.executable, "-c", SEND, other.address(1), "1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        _, said = stranger.communicate(timeout=PATIENCE_S)
        assert b"ConnectionRefusedError" in said
        one.remove()
        receive(other, 1)
        send(other, 0, 1, 1000).wait_s()


def test_a_host_that_is_cut_off_hears_nothing(box: None) -> None:
    with EmulatedNetwork.create(hosts(3)) as network:
        receive(network, 1)
        receive(network, 2)
        network.take_down(1)
        network.kill(2)
        assert len(pids_in([network.namespace(1)])) == 1
        assert pids_in([network.namespace(2)]) == []
        cut_off = network.popen(
            0,
            [sys.executable, "-c", SEND.replace("timeout=10", "timeout=0.5"), network.address(1), "1"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        _, said = cut_off.communicate(timeout=PATIENCE_S)
        assert b"TimeoutError" in said or b"No route to host" in said


def test_leaving_kills_what_runs_and_removes_everything_once_or_twice(box: None) -> None:
    with EmulatedNetwork.create(hosts(8, 1e8)) as network:
        receive(network, 0)
        [pid] = pids_in([network.namespace(0)])
        names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
        assert sum(network.id in line for line in names.splitlines()) == 9
        # All of it is in namespaces of its own: this machine's has nothing more than before.
        assert "hetopt" not in subprocess.run(["ip", "link"], capture_output=True, text=True, check=True).stdout
    assert not _runs(pid)
    network.remove()
    remove(network.id)
    names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert network.id not in names


@pytest.mark.usefixtures("own_leftovers")
def test_what_a_killed_process_left_is_found_and_removed_and_the_living_stay(box: None) -> None:
    def own() -> tuple[subprocess.Popen[str], str, int]:
        owner = subprocess.Popen([sys.executable, "-c", OWN], stdout=subprocess.PIPE, text=True)
        with owner.stdout:
            network_id, pid = owner.stdout.readline().split()
        return owner, network_id, int(pid)

    (killed, left_id, left_pid), (living, living_id, living_pid) = own(), own()
    try:
        assert not set(find_leftovers()) & {left_id, living_id}
        killed.kill()
        killed.wait()
        found = find_leftovers()
        assert left_id in found
        assert living_id not in found
        remove(left_id)
        assert not _runs(left_pid)
        assert _runs(living_pid)
    finally:
        living.kill()
        living.wait()
        remove(left_id)
        remove(living_id)


@pytest.mark.usefixtures("own_leftovers")
def test_a_network_that_was_never_signed_is_a_leftover(box: None) -> None:
    networks.run("ip", ["netns", "add", "hetopt-0000"])
    try:
        assert "0000" in set(find_leftovers())
    finally:
        remove("0000")


def test_a_number_that_is_none_removes_nothing() -> None:
    for text in ("", "ab1", "*", "ab12-h0", "../x", "AB12"):
        with pytest.raises(BadInput, match="there is no rehearsal"):
            remove(text)


def test_what_fails_half_way_leaves_nothing(box: None) -> None:
    before = find_networks()
    with pytest.raises(NetworkRefused, match="File exists"):
        EmulatedNetwork.create([*hosts(3), EmulatedHost(name="h0")])
    assert find_networks() == before


@pytest.mark.parametrize("command", range(4))
def test_a_signal_while_a_network_is_made_leaves_nothing(
    box: None, monkeypatch: pytest.MonkeyPatch, command: int
) -> None:
    """In the command that makes its first namespace, of which nobody knows the name yet, and in each of the next."""
    ran, asked = networks.run, list[Sequence[str]]()

    def interrupted(tool: Literal["ip", "tc"], arguments: Sequence[str], **more: Any) -> str:
        told = ran(tool, arguments, **more)
        asked.append(arguments)
        if len(asked) == command + 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return told

    def ends(number: int, frame: FrameType | None) -> None:
        raise Terminated(number)

    monkeypatch.setattr(networks, "run", interrupted)
    before = signal.signal(signal.SIGTERM, ends)
    try:
        with pytest.raises(Terminated):
            EmulatedNetwork.create(hosts(1))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert list(asked[0][:2]) == ["netns", "add"]
    assert not [name for name in networks.namespaces() if name.startswith(asked[0][2])]


def test_somebody_without_rights_is_told_so_in_one_sentence(box: None) -> None:
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("only root can give its rights away, with setpriv")

    def without_rights(code: str) -> str:
        program = f"from hetopt.backends.emulation.namespaces import find_networks, why_not\n{code}"
        return subprocess.run(
            ["setpriv", "--bounding-set=-all", "--inh-caps=-all", sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()

    needs = "needs root or CAP_NET_ADMIN and CAP_SYS_ADMIN"
    assert without_rights("print(why_not())") == f"a rehearsal makes network namespaces, which {needs}"


def test_a_fork_is_where_a_process_of_its_own_would_be(box: None, tmp_path: Path) -> None:
    """In the host's network, and ended with the host."""
    (tmp_path / "tells.py").write_text(TELLS)
    (tmp_path / "waits.py").write_text("import time; time.sleep(600)")
    server = ForkServer.importing(("json",), os.environ)
    with EmulatedNetwork.create(hosts(2)) as network, (tmp_path / "out").open("w+b") as output:
        for place in range(2):
            fork = network.fork(place, server, [str(tmp_path / "tells.py")], env=os.environ, output=output)
            alone = network.popen(place, [sys.executable, str(tmp_path / "tells.py")], stdout=subprocess.PIPE)
            assert fork.wait(PATIENCE_S) == 0
            output.seek(0)
            assert output.read().splitlines()[-1:] == alone.communicate(timeout=PATIENCE_S)[0].splitlines()[-1:]
        waits = network.fork(1, server, [str(tmp_path / "waits.py")], env=os.environ, output=output)
        assert pids_in([network.namespace(1)]) == [waits.pid]
        network.kill(1)
        assert waits.poll() == -signal.SIGKILL
    server.close()


def seconds(network: EmulatedNetwork, place: int, to: int, size: int) -> float:
    """How long so many bytes take."""
    return send(network, place, to, size).wait_s()


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
