"""Nothing of a run on one machine listens where another could reach it, and nothing that is written there is run."""

from __future__ import annotations

import ast
import base64
import datetime
import gc
import os
import pickle
import socket
import struct
import threading
import time
import warnings
from contextlib import suppress
from pathlib import Path

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from benchmarks._ports import own_port
from hetopt.backends.processes import LocalLauncher
from hetopt.core.errors import BadInput, RunFailed
from hetopt.core.listening import LOOPBACK, SECRET_VARIABLE, checked_secret, collectives_on, new_secret
from hetopt.trainer.host import gate as gate_module
from hetopt.trainer.host.gate import (
    WrongSecret,
    group_store,
    is_same_user,
    listening_socket,
    open_door,
    open_gate,
    open_relay,
    open_store,
)
from tests.disturbance import PATIENCE_S
from tests.forks import Forked
from tests.launched import wait_for, worker_processes
from tests.listeners import Listeners, watched

from .test_local_launcher import has, kill_worker, spec

REPOSITORY = Path(__file__).resolve().parents[2]
NOBODY = 65534
PATIENCE = datetime.timedelta(seconds=PATIENCE_S)
SESSION = """
import time
import warnings
from pathlib import Path
import torch
from torch.utils.data import DataLoader, TensorDataset
from hetopt.trainer.session import session
model = torch.nn.Linear(3, 1)
with session(model, torch.optim.SGD(model.parameters(), lr=0.1)) as run:
    for inputs, in run.loader(DataLoader(TensorDataset(torch.randn(96, 3)), batch_size=32, num_workers=1)):
        Path(__file__).with_name("trains").touch()
        while not Path(__file__).with_name("was_seen").exists():
            time.sleep(0.05)
        model(inputs).mean().backward()
"""


STRANGER = """\
import datetime, os, sys, threading, time
from torch._C._distributed_c10d import TCPStore
def knock(address, port):
    TCPStore(address, port, is_master=False, timeout=datetime.timedelta(seconds=5)).add("knocked", 1)
    entered.append(f"{address} {port}")
entered = []
if os.fork() == 0:
    os.setuid(int(sys.argv[1]))  # now that all is imported: others cannot read where it lies
user = os.getuid()
for where in sys.argv[2:]:
    address, _, port = where.rpartition(":")
    threading.Thread(target=knock, args=(address, int(port)), daemon=True).start()
time.sleep(6)
sys.stdout.write("".join(f"{user} {where}\\n" for where in entered))
sys.stdout.flush()
if user != int(sys.argv[1]):
    os.wait()
os._exit(0)  # whoever knocks at what is no store waits for ever
"""


def test_the_walk_sees_what_listens_on_all_addresses() -> None:
    with watched(os.getpid()) as listeners, socket.create_server(("0.0.0.0", 0)) as everywhere:  # the point
        where = everywhere.getsockname()
        wait = threading.Event()
        while where not in listeners.seen:
            wait.wait(0.02)
    assert listeners.outside_of("127.")


def entered_by(places: list[str], program: Path) -> dict[int, set[str]]:
    """The stores that another user and this one can open among what listens."""
    program.write_text(STRANGER)
    with Forked([str(program), str(NOBODY), *places], os.environ) as process:
        out, said = process.communicate(PATIENCE_S)
    assert process.returncode == 0, said
    opened = [line.split(" ", 1) for line in out.splitlines()]
    return {user: {where for who, where in opened if int(who) == user} for user in (NOBODY, os.geteuid())}


def test_a_local_run_listens_on_loopback_alone_and_opens_no_store_to_another_user(tmp_path: Path) -> None:
    """Neither itself nor, by gate and relay, one on several machines; also once all have started again.

    One's own processes come in; the run's workers are not told its secret.
    """
    launcher = LocalLauncher()
    # Whatever network a person has chosen for other runs.
    environment = {"TOY_WAIT_S": "0.02", "GLOO_SOCKET_IFNAME": "eth0", SECRET_VARIABLE: new_secret()}
    wish = spec(max_restarts=1, stop={"max_steps": 1_000_000})
    with watched(os.getpid()) as listeners:
        store, gate, secret = gated("127.0.0.2")
        relay = open_relay("127.0.0.2", gate, secret, PATIENCE_S)
        handle = launcher.start(wish, tmp_path, environment)
        try:
            wait_for(lambda: has(tmp_path, "step"), tmp_path)
            workers = [process for rank in range(2) for process in worker_processes(tmp_path, rank)]
            told = [process for process in workers if SECRET_VARIABLE in process.environ()]
            listeners.look(os.getpid())
            if os.geteuid() == 0:  # only root can be another user
                entered = entered_by(
                    [f"{address}:{port}" for address, port in listeners.seen], tmp_path / "stranger.py"
                )
            kill_worker(tmp_path)
            wait_for(lambda: len(has(tmp_path, "training_started")) == 2, tmp_path)
            listeners.look(os.getpid())
        finally:
            launcher.stop(handle)
    assert has(tmp_path, "training_finished", reason="stopped")
    listeners.assert_all_on_loopback()
    assert workers
    assert not told
    if os.geteuid() == 0:
        assert not entered[NOBODY]
        opened_here = {f"{LOOPBACK} {store.port}", f"{LOOPBACK} {relay}"}
        assert opened_here < entered[0], "both, and the run's own, which no one else has"


def test_a_session_listens_on_loopback_alone(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SESSION)
    environment = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
    command = ["-m", "hetopt.trainer.torchrun", "--nproc-per-node=2", str(script)]
    deadline_s = time.monotonic() + PATIENCE_S
    with watched(os.getpid()) as listeners:
        process = Forked(command, environment)
        while not (tmp_path / "trains").exists() and process.poll() is None and time.monotonic() < deadline_s:
            time.sleep(0.05)
        listeners.look(os.getpid())
        (tmp_path / "was_seen").touch()
        told = process.communicate(PATIENCE_S)[1]
    assert process.returncode == 0, told
    listeners.assert_all_on_loopback()


class Intruder:
    """What whoever unpickles it does."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self._marker}",)


def write_pickles(port: int, pickled: bytes, written: list[int]) -> None:
    """Into a store, where one listens, under what torchrun's own rendezvous reads and all keys that are there."""
    with suppress(RuntimeError):
        store = TCPStore(LOOPBACK, port, is_master=False, timeout=datetime.timedelta(seconds=1))
        for key in (*store.list_keys(), "torch.rendezvous.run"):
            for value in (base64.b64encode(pickled), pickled, b"\xff" * 64):
                store.set(key, value)
        written.append(port)


def test_pickles_in_the_stores_of_a_run_are_never_run(tmp_path: Path) -> None:
    run_dir, marker = tmp_path / "run", tmp_path / "intruded"
    run_dir.mkdir()
    pickled = pickle.dumps(Intruder(marker))
    launcher = LocalLauncher()
    written: list[int] = []
    wish = spec(max_restarts=1, stop={"max_steps": 1_000_000})
    handle = launcher.start(wish, run_dir, {"TOY_WAIT_S": "0.02"})
    try:
        deadline_s = time.monotonic() + PATIENCE_S
        while not launcher.poll(handle).state.is_over and len(written) < 10 and time.monotonic() < deadline_s:
            listeners = Listeners()
            listeners.look(os.getpid())
            for port in {port for (_, port), who in listeners.seen.items() if "trainer.host" in who}:
                write_pickles(port, pickled, written)
            time.sleep(0.2)
        assert written, "no store was found to write into"
    finally:
        launcher.stop(handle)
    assert not marker.exists()


def test_a_store_of_rank_0_is_where_its_address_says() -> None:
    address, port = own_port()
    environment = {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
    with watched(os.getpid()) as listeners:
        first = group_store(environment, 0, PATIENCE)
        group_store(environment, 1, PATIENCE).set("key", "value")
        assert first.get("key") == b"value"
        again = group_store({**environment, "TORCHELASTIC_RESTART_COUNT": "1"}, 1, PATIENCE)
        assert not again.check(["key"]), "workers that start again see nothing of the last ones"
    assert (address, port) in listeners.seen
    listeners.assert_all_on_loopback()


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({}, "must say where rank 0 is"),
        ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "many"}, "must say where rank 0 is"),
        ({"MASTER_ADDR": "203.0.113.9", "MASTER_PORT": "29400"}, "nothing can listen on 203.0.113.9"),
        (
            {"MASTER_ADDR": "localhost", "MASTER_PORT": "29400", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"},
            "other machines cannot reach",
        ),
    ],
)
def test_an_address_that_cannot_be_is_refused(environment: dict[str, str], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        group_store(environment, 0)


def test_the_collectives_interface_is_that_of_the_address() -> None:
    assert collectives_on(LOOPBACK)["NCCL_SOCKET_IFNAME"] == "lo"
    assert collectives_on("127.0.0.2") == collectives_on(LOOPBACK)
    with pytest.raises(RunFailed, match="no network interface"):
        collectives_on("203.0.113.9")


def gated(address: str) -> tuple[TCPStore, int, bytes]:
    """Return a store, the port of a gate to it, and the secret that opens it."""
    secret, store = checked_secret(new_secret()), open_store()
    return store, open_gate(address, 0, store.port, secret), secret


def test_through_the_gate_comes_who_knows_the_secret() -> None:
    store, gate, secret = gated(LOOPBACK)
    relay = open_relay(LOOPBACK, gate, secret, PATIENCE_S)
    far = TCPStore(LOOPBACK, relay, is_master=False, timeout=PATIENCE)
    far.set("far", "x" * 1_000_000)
    store.set("near", "y")
    assert (store.get("far"), far.get("near")) == (b"x" * 1_000_000, b"y")
    others = [TCPStore(LOOPBACK, relay, is_master=False, timeout=PATIENCE) for _ in range(20)]
    assert [other.add("count", 1) for other in others] == list(range(1, 21))

    with pytest.raises(WrongSecret, match="does not know the secret"):
        open_relay(LOOPBACK, gate, checked_secret(new_secret()), PATIENCE_S)
    with pytest.raises(dist.DistError):
        TCPStore(LOOPBACK, gate, is_master=False, timeout=datetime.timedelta(seconds=2))
    for junk in (b"", b"\0" * 64, os.urandom(100_000), b"GET / HTTP/1.1\r\n\r\n"):
        with socket.create_connection((LOOPBACK, gate)) as stranger, suppress(OSError):
            stranger.sendall(junk)
    assert far.get("near") == b"y", "strangers do not disturb those who are in"
    TCPStore(LOOPBACK, relay, is_master=False, timeout=PATIENCE).set("after", "all")


@pytest.mark.parametrize("address", [LOOPBACK, "::1"])
@pytest.mark.parametrize("leaves", ["stays", "closes", "resets"])
def test_a_connection_is_this_users_while_its_other_end_is_there(address: str, leaves: str) -> None:
    family = socket.AF_INET6 if address == "::1" else socket.AF_INET
    with socket.create_server((address, 0), family=family) as server, socket.socket(family) as comer:
        comer.connect(server.getsockname()[:2])
        connection, _ = server.accept()
        with connection:
            assert is_same_user(connection)
            if leaves == "resets":
                comer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if leaves != "stays":
                comer.close()
            assert is_same_user(connection) == (leaves == "stays")


def test_many_who_say_nothing_do_not_keep_the_others_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_module, "_PROVE_WITHIN_S", 1.0)
    store, gate, secret = gated(LOOPBACK)
    idle = [socket.create_connection((LOOPBACK, gate)) for _ in range(100)]
    relay = open_relay(LOOPBACK, gate, secret, PATIENCE_S)  # they are turned away after a while
    TCPStore(LOOPBACK, relay, is_master=False, timeout=PATIENCE).set("key", "value")
    assert store.get("key") == b"value"
    for one in idle:
        one.close()


def test_a_stranger_at_the_gates_address_is_found_out() -> None:
    with socket.create_server((LOOPBACK, 0)) as server:

        def pretend() -> None:
            with server.accept()[0] as connection:
                connection.sendall(b"hetopt gate 1\n" + b"\0" * 32)
                connection.recv(64)
                connection.sendall(b"\0" * 32)

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(WrongSecret):
            open_relay(LOOPBACK, server.getsockname()[1], checked_secret(new_secret()), PATIENCE_S)
        thread.join()
    with socket.socket() as nobody:
        nobody.bind((LOOPBACK, 0))
        with pytest.raises(RunFailed, match="does not let this one in"):
            open_relay(LOOPBACK, nobody.getsockname()[1], checked_secret(new_secret()), 0.5)


@pytest.mark.parametrize("secret", [None, "", "secret", "F" * 64, "0" * 63, "0" * 64 + "\n"])
def test_a_secret_that_is_none_is_refused(secret: str | None) -> None:
    with pytest.raises(BadInput, match=SECRET_VARIABLE):
        checked_secret(secret)


def test_stores_are_opened_in_one_place_and_groups_are_given_theirs() -> None:
    """Whoever opens a store elsewhere, or leaves it to torch, listens on every address."""
    wrong = []
    for package in ("trainer", "optimizer", "profiler", "hetopt", "benchmarks"):
        for path in sorted((REPOSITORY / package).rglob("*.py")):
            where = path.relative_to(REPOSITORY).as_posix()
            text = path.read_text(encoding="utf-8")
            if not any(word in text for word in ("TCPStore", "init_process_group", "rendezvous")):
                continue
            for call in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)):
                name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
                words = {keyword.arg: keyword.value for keyword in call.keywords}
                opens = name == "TCPStore" and getattr(words.get("is_master"), "value", None) is not False
                if opens and where != "trainer/host/gate.py":
                    wrong.append(f"{where}:{call.lineno} opens a store")
                if name == "init_process_group" and "store" not in words and "_spot_script" not in where:
                    wrong.append(f"{where}:{call.lineno} leaves the store to torch")
                if name == "rendezvous":
                    wrong.append(f"{where}:{call.lineno} uses torch's rendezvous")
    assert not wrong


def test_a_door_that_ends_leaves_no_connection_open() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for attempt in range(4):
            listener = listening_socket(LOOPBACK)
            port = listener.getsockname()[1]
            behind = open_door(listener)
            store, _ = behind.accept()
            comers: list[socket.socket] = []
            knocking = threading.Thread(target=_knock, args=(port, comers))
            knocking.start()
            time.sleep(2 * attempt / 1000)
            store.close()  # while some are at the door, some are let in, and some have been
            behind.close()
            knocking.join()
            for comer in comers:
                comer.close()
            for thread in threading.enumerate():
                if thread.name == f"gate-{port}":
                    thread.join()
        gc.collect()
    assert not [str(warning.message) for warning in seen]


def _knock(port: int, comers: list[socket.socket]) -> None:
    with suppress(OSError):
        for _ in range(20):
            comers.append(socket.create_connection((LOOPBACK, port)))
            comers[-1].sendall(bytes(100_000))
