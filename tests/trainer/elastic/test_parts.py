"""Small real parts of elastic training: bytes without pickle, broken connections, wardens."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, strategies as st

from hetopt.trainer.checkpoints.folder import pack, unpack
from hetopt.trainer.comm.channel import UNTIL_THE_GROUPS_TIMEOUT
from hetopt.trainer.elastic.worker_group import (
    DEAF_S,
    EVERY_S,
    Watch,
    break_all_but,
    connect,
    open_sockets,
    wait_while,
)
from hetopt.trainer.host import gate
from tests.disturbance import PATIENCE_S

PLAIN = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(max_size=8)
NESTED = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.integers() | st.text(max_size=5), inner, max_size=4)
    ),
)


@given(NESTED)
def test_plain_values_arrive_as_they_were(value: object) -> None:
    assert unpack(pack(value)) == value


@given(st.lists(st.integers(0, 4), max_size=3), st.sampled_from(["float32", "float64", "int64", "bool", "bfloat16"]))
def test_tensors_arrive_bit_for_bit(shape: list[int], dtype: str) -> None:
    tensor = torch.randint(0, 2, shape).to(getattr(torch, dtype))
    arrived = unpack(pack({"a": [tensor, 1], 2: tensor}))
    for one in (arrived["a"][0], arrived[2]):
        assert one.dtype == tensor.dtype
        assert one.shape == tensor.shape
        assert torch.equal(one, tensor)


@given(st.data())
def test_bytes_that_are_torn_or_made_up_are_refused(data: st.DataObject) -> None:
    packed = pack({"weight": torch.arange(6.0), "step": 3, "name": ("a", [None])})
    how = data.draw(st.sampled_from(["cut", "noise", "more"]))
    if how == "cut":
        spoilt = packed[: data.draw(st.integers(0, len(packed) - 1))]
    elif how == "more":
        spoilt = packed + bytes(3)
    else:
        spoilt = data.draw(st.binary(max_size=60))
    with pytest.raises(ValueError, match="not what was packed"):
        unpack(spoilt)


@pytest.mark.skipif(sys.platform != "linux", reason="connections are found by /proc")
def test_only_newer_connections_break_and_listeners_stay() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        old = socket.create_connection(server.getsockname())
        old_end, _ = server.accept()
        known = open_sockets()
        with socket.create_server(("127.0.0.1", 0)) as later:
            new = socket.create_connection(later.getsockname())
            new_end, _ = later.accept()
            received: list[bytes] = []
            waiting = threading.Thread(target=lambda: received.append(new.recv(1)))
            waiting.start()
            break_all_but(known)
            waiting.join(PATIENCE_S)
            assert received == [b""], "whoever waits in it goes on"
            another = socket.create_connection(later.getsockname())
            old.sendall(b"x")
            assert old_end.recv(1) == b"x"
        for one in (old, old_end, new, new_end, another):
            one.close()


def open_store() -> tuple[Any, str]:
    store = gate.open_store()
    return store, f"127.0.0.1:{store.port}"


def waits_in_vain(rank: int, folder: str) -> None:
    """The other worker comes to nothing, and breaks no connection: as where gloo overlooks that one broke."""
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    dist.barrier()
    store = dist.FileStore(f"{folder}/ends", 2)
    if rank:
        store.wait(["over"])
        return

    def check() -> None:
        raise RuntimeError("another generation")

    wait_while(check)
    received = torch.zeros(1)
    for work, timeout in ((dist.irecv(received, 1), [UNTIL_THE_GROUPS_TIMEOUT]), (dist.barrier(async_op=True), [])):
        with pytest.raises(RuntimeError, match="another generation"):
            work.wait(*timeout)
    store.set("over", "1")
    os._exit(0)


def test_no_wait_is_longer_than_the_group_holds(tmp_path: Path) -> None:
    torch.multiprocessing.start_processes(waits_in_vain, (str(tmp_path),), nprocs=2, start_method="fork")  # type: ignore[no-untyped-call]


def test_a_cut_off_store_is_given_up_in_seconds_not_in_minutes() -> None:
    """What the kernel was asked for; that a link which is cut ends an answer is shown in a rehearsal."""
    here, meeting = open_store()
    known = open_sockets()
    store = connect(meeting)
    options = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{descriptor}")
            if name in known or not name.startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(descriptor))) as connection:
                if connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE):
                    options.append(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
        except OSError:
            continue
    assert set(options) == {1000 * DEAF_S}, "of both ends, which are in this process"
    assert store.num_keys() == here.num_keys()


WARDEN = """
import os, signal, sys
from pathlib import Path
from typing import Any
from hetopt.trainer.worker import keep
lives = Path(sys.argv[1])
def work():
    with lives.open("a") as stream:
        stream.write(f"{os.getpid()}\\n")
    life = len(lives.read_text().split())
    if life < int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[3] == "wait":
        print("waits", flush=True)
        signal.pause()
    return 3
sys.exit(keep(work, replacements=2, tell=lambda *lost: print(*lost, flush=True)))
"""


def warden(folder: object, dies: int, then: str = "end") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WARDEN, f"{folder}/lives", str(dies), then]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("dies", "then", "lost", "code"),
    [
        (3, "end", ["9 2", "9 1"], 3),  # its successor ends as it likes
        (9, "end", ["9 2", "9 1"], -signal.SIGKILL),  # the signal came once too often
    ],
)
def test_a_killed_worker_is_replaced(tmp_path: Path, dies: int, then: str, lost: list[str], code: int) -> None:
    with warden(tmp_path, dies, then) as process:
        assert process.communicate(timeout=PATIENCE_S)[0].splitlines()[: len(lost)] == lost
    assert process.returncode == code


def test_who_asks_the_warden_to_end_asks_the_worker(tmp_path: object) -> None:
    with warden(tmp_path, dies=0, then="wait") as process:
        assert process.stdout.readline() == "waits\n"
        os.kill(process.pid, signal.SIGTERM)
        process.communicate(timeout=PATIENCE_S)
    assert process.returncode == -signal.SIGTERM


class _Quiet:
    """A store in which nobody wants another generation."""

    def text(self, key: str) -> str:
        return "3" if key == "generation" else ""

    def set(self, key: str, value: str) -> None:
        raise AssertionError

    def compare_set(self, key: str, expected: str, value: str) -> str:
        raise AssertionError


def test_a_host_that_is_known_to_be_lost_ends_the_waiting_while_connections_are_made() -> None:
    """Nobody wants another generation yet, because all are waiting for the one who has died."""
    broken, dead = threading.Event(), threading.Event()
    watch = Watch(_Quiet(), 3, broken.set, dead.is_set)
    try:
        assert not broken.wait(2 * EVERY_S)
        dead.set()
        assert broken.wait(PATIENCE_S)
        assert watch.has_fired
    finally:
        watch.stop()


HASTY = """
import os, signal, time
from hetopt.trainer.worker import _fork
signal.signal(signal.SIGTERM, lambda *_: None)
codes = set()
for _ in range(100):
    child = _fork(lambda: time.sleep(60) or 0)
    os.kill(child, signal.SIGTERM)
    codes.add(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(*codes)
"""


def test_a_worker_that_is_asked_to_end_as_it_begins_ends() -> None:
    """The signal is not for the listener of the process that it is a fork of."""
    done = subprocess.run([sys.executable, "-c", HASTY], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.stdout, done.stderr) == ("-15\n", "")
