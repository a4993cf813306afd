"""What an exchange says that it sends is what crosses the links, counted by the kernel on hosts of a rehearsed network.

A collective of N workers moves more than one payload: a ring all-reduce 2 (N - 1) of them over all links together, one
of few bytes N (N - 1) as everyone sends to everyone, an all-gather N (N - 1), a broadcast N - 1, one of many bytes
(N - 1) (N + 1) / N as it is dealt out in parts that then go around.
"""

from __future__ import annotations

import json
import os

import pytest

from hetopt.backends.emulation.namespaces import EmulatedNetwork, why_not
from hetopt.core.comm.cost import deals, reduces_directly
from hetopt.core.run_spec import EmulatedHost
from tests.disturbance import PATIENCE_S
from tests.forks import server

from . import link_bytes_program as program

WORKERS = 3
FRAMING = 0.08
PAYLOADS = {
    "all_reduce": 2 * (WORKERS - 1),
    "all_gather": WORKERS * (WORKERS - 1),
    "broadcast": WORKERS - 1,
}


def payloads_moved(primitive, payload_bytes):
    if primitive == "all_reduce" and reduces_directly(payload_bytes, WORKERS):
        return PAYLOADS["all_gather"]
    if primitive == "broadcast" and deals(payload_bytes, WORKERS):
        return (WORKERS - 1) * (WORKERS + 1) / WORKERS
    return PAYLOADS[primitive]


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("links")
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    hosts = [EmulatedHost(name=f"h{rank}") for rank in range(WORKERS)]
    with EmulatedNetwork.create(hosts) as network:
        program_name = "tests.trainer_pieces.link_bytes_program"
        with open(os.devnull, "wb") as nothing:
            workers = [
                network.fork(
                    rank,
                    server(),
                    ["-m", program_name, str(rank), str(WORKERS), str(folder)],
                    env=environment,
                    output=nothing,
                )
                for rank in range(WORKERS)
            ]
        assert [worker.wait(timeout=PATIENCE_S) for worker in workers] == [0] * WORKERS
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(WORKERS)]


@pytest.mark.parametrize("way", [program.key(combination) for combination in program.ways()])
def test_bytes_on_the_links_are_those_of_the_messages(counted, way):
    messages = counted[0][way]["messages"]
    assert all(worker[way]["messages"] == messages for worker in counted)
    expected = sum(payloads_moved(*message) * message[1] for message in messages)
    crossed = sum(worker[way]["bytes"] for worker in counted)
    few = 12 * WORKERS * 100 * len(messages)  # gloo's own messages around each operation, of a hundred bytes or so
    assert expected <= crossed <= (1 + FRAMING) * expected + few
