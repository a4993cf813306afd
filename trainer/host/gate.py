"""Lets the hosts of one run, and nobody else, reach the store that workers meet in; on one machine, its own user alone.

The store itself listens on loopback only. On the host that holds it a gate listens on the host's address in the run's
network, and lets through whoever proves that it knows the run's secret; the gate proves the same in return. On every
other host a relay listens on loopback, and connects through the gate whatever connects to it:

    worker -> 127.0.0.1:relay -> [secret] -> ADDRESS:gate -> 127.0.0.1:store

Neither side sends the secret: each sends an HMAC of random bytes that the other has chosen. What follows is not
encrypted: it holds addresses and counters, no data of the user's.

The one place where a store is opened, too. torch's TCPStore listens on every interface, whatever address it is given,
and has no password; here it is handed a socket that is bound already.
"""

from __future__ import annotations

import asyncio
import datetime
import hmac
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from hetopt.core.errors import BadInput, RunFailed
from hetopt.core.listening import LOOPBACK, SECRET_VARIABLE, is_loopback

_GREETING = b"hetopt gate 1\n"
_RANDOM_BYTES = 32
_MAC_BYTES = 32
_PROVE_WITHIN_S = 10.0
_STRANGERS = 64
"""Connections that have not proved anything yet; more are turned away at once."""
_AGAIN_S = 0.2
_ENDING_S = 1.0
"""Who was being let in when the store ended has this long to learn it."""
_CHUNK = 1 << 16

_Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]
_Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class WrongSecret(RunFailed):
    """The error that the process which answered at the first host's address does not know this run's secret."""


def open_door(listener: socket.socket) -> socket.socket:
    """Return a socket for a store that this user alone reaches by ``listener``; without TCP signatures, the listener.

    A kernel that signs no segments (it has no TCP_MD5SIG) gives the listener itself, which every user of this machine
    can reach.
    """
    key, port = secrets.token_bytes(_RANDOM_BYTES), listener.getsockname()[1]
    behind = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    if not require_signatures(behind, key):
        behind.close()
        return listener
    # An address that nobody can have taken before. The port is that of the door: the store tells both as one.
    behind.bind((".".join(["127", *(str(1 + secrets.randbelow(254)) for _ in range(3))]), port))
    behind.listen(socket.SOMAXCONN)
    where = behind.getsockname()

    async def connection() -> _Ends:
        """Return the ends of a new signed connection to the store behind the door; OSError: it is gone."""
        store = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        store.setblocking(False)
        try:
            require_signatures(store, key)
            await asyncio.get_running_loop().sock_connect(store, where)
        except BaseException:
            store.close()
            raise
        return await asyncio.open_connection(sock=store)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _splice(reader, writer, *await connection())

    async def until_the_store_ends() -> None:
        """Return once the store behind the door has closed a connection, as it has ended."""
        reader, writer = await connection()
        await reader.read()  # it sends nothing that was not asked for
        writer.close()

    _serve(listener, serve, until=until_the_store_ends)
    return behind


def open_gate(address: str, port: int, store_port: int, secret: bytes) -> int:
    """Open a port for other hosts that know ``secret``, forwarded to this host's store in a thread; return the port.

    It is open for as long as this process lives.

    Args:
        address: address of this host in the run's network.
        port: port to listen at; 0: any that is free.
        store_port: port of the store on loopback.
        secret: secret of the run.

    Raises:
        RunFailed: nothing can listen there.
    """
    strangers = asyncio.Semaphore(_STRANGERS)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward a connection to the store once its other end has proved the secret; else let it be closed."""
        if strangers.locked():
            return
        async with strangers:
            proved = await asyncio.wait_for(_admit(reader, writer, secret), _PROVE_WITHIN_S)
        if proved:
            await _splice(reader, writer, *await asyncio.open_connection(LOOPBACK, store_port))

    return _serve(listening_socket(address, port), serve)


def open_relay(address: str, port: int, secret: bytes, patience_s: float) -> int:
    """Wait for another host's gate, and open a port on loopback that leads through it to a store; return the port.

    It is open for as long as this process lives.

    Args:
        address: address of the host that holds the store.
        port: port of that host's gate.
        secret: secret of the run.
        patience_s: seconds to wait at most until the gate is there.

    Raises:
        RunFailed: the gate does not answer within ``patience_s``, or does not accept this host's secret.
        WrongSecret: the process that answers does not know the secret (a RunFailed).
    """
    _await_gate(address, port, secret, patience_s)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward a connection to the gate once that has proved the secret; else let it be closed."""
        there = await asyncio.open_connection(address, port)
        try:
            if await asyncio.wait_for(_prove(*there, secret), _PROVE_WITHIN_S):
                await _splice(reader, writer, *there)
        finally:
            there[1].close()

    return _serve(listening_socket(LOOPBACK), serve)


def _await_gate(address: str, port: int, secret: bytes, patience_s: float) -> None:
    """Wait until the gate answers and knows the secret; errors as of `open_relay`.

    It tries again for ``patience_s`` seconds.
    """

    async def knock() -> bool:
        """Return whether the gate knows the secret; OSError, EOFError or TimeoutError: it does not let this host in."""
        reader, writer = await asyncio.open_connection(address, port)
        try:
            return await asyncio.wait_for(_prove(reader, writer, secret), _PROVE_WITHIN_S)
        finally:
            writer.close()

    deadline_s = time.monotonic() + patience_s
    while True:
        try:
            if asyncio.run(knock()):
                return
        except (OSError, EOFError, TimeoutError) as error:
            if time.monotonic() < deadline_s:
                time.sleep(_AGAIN_S)
                continue
            raise RunFailed(
                f"the first host of the run, at {address} port {port}, does not let this one in: "
                f"{error or type(error).__name__}.",
                hint=f"see that it runs, that the network lets this port through, and that {SECRET_VARIABLE} is alike",
            ) from None
        raise WrongSecret(
            f"whoever listens at {address} port {port} does not know the secret of this run.",
            hint=f"see that {SECRET_VARIABLE} is the same on all machines",
        )


def _mac(secret: bytes, side: bytes, gates: bytes, comers: bytes) -> bytes:
    return hmac.digest(secret, _GREETING + side + gates + comers, "sha256")


async def _admit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes) -> bool:
    """Return whether a newcomer knows the secret: the gate's part of the handshake; EOFError: it closed before."""
    nonce = secrets.token_bytes(_RANDOM_BYTES)
    writer.write(_GREETING + nonce)
    await writer.drain()
    answer = await reader.readexactly(_RANDOM_BYTES + _MAC_BYTES)
    theirs, mac = answer[:_RANDOM_BYTES], answer[_RANDOM_BYTES:]
    if not hmac.compare_digest(mac, _mac(secret, b"comer", nonce, theirs)):
        return False
    writer.write(_mac(secret, b"gate", nonce, theirs))
    await writer.drain()
    return True


async def _prove(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes) -> bool:
    """Return whether the gate knows the secret, and prove to know it: the relay's part of the handshake.

    A gate that does not accept this side's proof closes the connection, which gives False, too.
    """
    greeting = await reader.readexactly(len(_GREETING) + _RANDOM_BYTES)
    if greeting[: len(_GREETING)] != _GREETING:
        return False
    theirs, nonce = greeting[len(_GREETING) :], secrets.token_bytes(_RANDOM_BYTES)
    writer.write(nonce + _mac(secret, b"comer", theirs, nonce))
    await writer.drain()
    try:
        mac = await reader.readexactly(_MAC_BYTES)
    except EOFError:
        return False
    return hmac.compare_digest(mac, _mac(secret, b"gate", theirs, nonce))


async def _splice(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    other_reader: asyncio.StreamReader,
    other_writer: asyncio.StreamWriter,
) -> None:
    """Forward the bytes that either side sends, until one of them closes; then close the other.

    Errors of either connection count as its end. Cancelled, it drops what is still to be sent.
    """
    for end in (writer, other_writer):
        end.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        end.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    ways = [asyncio.ensure_future(_pump(reader, other_writer)), asyncio.ensure_future(_pump(other_reader, writer))]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:  # what is still to be sent nobody reads
        writer.transport.abort()
        other_writer.transport.abort()
        raise
    finally:
        for way in ways:
            way.cancel()
        other_writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Forward bytes until the reader's end; a connection that breaks counts as its end."""
    with suppress(OSError):
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()


def _serve(listener: socket.socket, serve: _Answer, until: Callable[[], Awaitable[None]] | None = None) -> int:
    """Answer every connection, in a new thread; on loopback only those of this user; return the port at once.

    Args:
        listener: socket that listens.
        serve: answers a connection, which is closed afterwards; connections that break are passed over.
        until: serving ends when it returns; None: with the process.
    """
    address, port = listener.getsockname()[:2]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer a connection if it may be of another host or is of this user, and close it."""
        try:
            with suppress(OSError, EOFError, TimeoutError, asyncio.CancelledError):
                if not is_loopback(address) or is_same_user(writer.get_extra_info("socket")):
                    await serve(reader, writer)
        finally:
            writer.close()

    async def run() -> None:
        """Serve until ``until`` returns or has an OSError (None: for ever), then finish or cancel open answers."""
        async with await asyncio.start_server(answer, sock=listener) as server:
            with suppress(OSError):
                await (server.serve_forever() if until is None else until())
            # A server that is closed loses whom it is just letting in, so that nobody would ever close that connection.
            asyncio.get_running_loop().remove_reader(listener)
            await _finish_others()

    threading.Thread(target=asyncio.run, args=(run(),), name=f"gate-{port}", daemon=True).start()
    return int(port)


async def _finish_others() -> None:
    """End this loop's other tasks: wait a moment for them, then cancel them."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_ENDING_S):
            while others := asyncio.all_tasks() - {asyncio.current_task()}:
                await asyncio.wait(others)
    for other in asyncio.all_tasks() - {asyncio.current_task()}:
        other.cancel()


_BACKLOG = 1024
_TCP_MD5SIG_EXT, _EVERY_PEER = 32, 1  # <linux/tcp.h>: a key for all peers whose first 0 bits are alike
_IPV4_IN_IPV6 = "0000000000000000FFFF0000"  # ::ffff:0:0/96 as /proc/net/tcp6 writes it


def listening_socket(address: str, port: int = 0) -> socket.socket:
    """Return a socket that listens on one address of this machine alone; port 0: any that is free.

    Args:
        address: address of this machine, as a number or a name.
        port: port to listen at; 0: any that is free.

    Raises:
        RunFailed: this machine does not have that address, or something else has the port.
    """
    try:
        family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(place, family=family, backlog=_BACKLOG)
    except socket.gaierror as error:
        raise RunFailed(
            f"the address must be an IP address, got {address!r}: {error.strerror}.", hint="for example 127.0.0.1"
        ) from None
    except OSError as error:
        raise RunFailed(
            f"nothing can listen on {address} port {port} of this machine: {os.strerror(error.errno or 0)}.",
            hint="give an address that this machine has, and a port that is free",
        ) from None


def is_same_user(connection: socket.socket) -> bool:
    """Return whether the process at the other end of an accepted loopback connection is of this process's user.

    The kernel's tables name the owner of every socket; one that its process has closed has no inode and no owner. While
    our end is connected, no other socket can have the addresses of the other end: they are asked for again after the
    tables were read, so that the row is that of the one who connected.
    """
    try:
        ends = connection.getpeername(), connection.getsockname()
        tables = [Path(f"/proc/thread-self/net/{name}").read_text() for name in ("tcp", "tcp6")]
        connection.getpeername()
    except OSError:
        return False
    peer, here = (_as_listed(connection.family, *end[:2]) for end in ends)
    for row in (line.split() for table in tables for line in table.splitlines()[1:]):
        if [end.removeprefix(_IPV4_IN_IPV6) for end in row[1:3]] == [peer, here]:
            return int(row[7]) == os.geteuid() and row[9] != "0"
    return False


def _as_listed(family: int, address: str, port: int) -> str:
    packed = socket.inet_pton(family, address)
    return "".join(f"{word:08X}" for (word,) in struct.iter_unpack("=I", packed)) + f":{port:04X}"


def require_signatures(endpoint: socket.socket, key: bytes) -> bool:
    """Make the kernel drop TCP segments to a socket that ``key`` has not signed (RFC 2385); return whether it can.

    Args:
        endpoint: an IPv4 socket that neither listens nor is connected yet; both ends of a connection need the same key.
        key: at most 80 bytes.
    """
    signature_option = struct.pack("@H126xBBHi80s", socket.AF_INET, _EVERY_PEER, 0, len(key), 0, key)
    try:
        endpoint.setsockopt(socket.IPPROTO_TCP, _TCP_MD5SIG_EXT, signature_option)
    except OSError:
        return False
    return True


_TIMEOUT = datetime.timedelta(seconds=300)


def open_store(address: str = LOOPBACK, port: int = 0, timeout: datetime.timedelta = _TIMEOUT) -> TCPStore:
    """Return a torch TCPStore that listens on one address alone (port 0: any free one) as long as the object lives.

    On loopback it is open to processes of the same user (see `open_door`). The process that holds it must not ask for
    `list_keys` or `queue_len`: torch keeps the interpreter locked meanwhile, so that the door cannot answer.

    Args:
        address: address of this machine to listen on.
        port: port to listen at; 0: any that is free.
        timeout: longest wait of the store's operations.

    Raises:
        RunFailed: nothing can listen there (see `listening_socket`).
    """
    listener = listening_socket(address, port)
    taken = listener.getsockname()[1]
    if is_loopback(address):
        listener = open_door(listener)
    return TCPStore(
        address, taken, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach()
    )


def group_store(environment: Mapping[str, str], rank: int, timeout: datetime.timedelta = _TIMEOUT) -> Store:
    """Return the store in which a run's workers meet, at MASTER_ADDR and MASTER_PORT; rank 0 opens it if no agent has.

    torchrun's agent holds it, or rank 0 opens it, on the address that the others know it by and on no other. Workers
    that were started again do not see what the last ones left.

    Args:
        environment: variables of this process, as torchrun sets them.
        rank: rank of this worker.
        timeout: longest wait of the store's operations.

    Raises:
        BadInput: the variables are missing, or MASTER_ADDR is no address that rank 0 can listen on and others can
            reach.
        DistNetworkError: nobody answers there within ``timeout``.
    """
    try:
        address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    except (KeyError, ValueError):
        raise BadInput(
            "MASTER_ADDR and MASTER_PORT must say where rank 0 is.", hint="start the script with torchrun"
        ) from None
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or rank != 0:
        store = TCPStore(address, port, is_master=False, timeout=timeout)
    else:
        if is_loopback(address) and environment.get("LOCAL_WORLD_SIZE") not in (
            None,
            environment.get("WORLD_SIZE", "1"),
        ):
            raise BadInput(
                f"MASTER_ADDR is {address}, which other machines cannot reach: here it means this machine alone.",
                hint="set MASTER_ADDR to the address, in the workers' network, of the machine that has rank 0",
            )
        try:
            store = open_store(address, port, timeout)
        except RunFailed as refused:
            raise BadInput(
                f"MASTER_ADDR is {address}, but {refused.message}",
                hint="set MASTER_ADDR to the address, in the workers' network, of the machine that has rank 0",
            ) from None
    return PrefixStore(f"attempt/{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
