"""The process that hosts a machine's workers: torchrun's elastic agent, which ends with the process that launched it.

``python -m hetopt.trainer.host.agent RUN_DIR [PARENT_PID [NODE]]``, the last as JSON. With a parent named, the host
ends its workers and itself when the parent is gone. With a node named, it is one of several and starts the workers that
the spec puts there. When workers fail and no restart is left, it makes sure that the event log says why. Workers are
forks of one process that has imported what all of them need, once.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hetopt.core.errors import HetoptError, RunFailed
from hetopt.core.events.log import EVENTS_FILE, read_log, tell_failure
from hetopt.core.interruption import die_with_parent, openmp_environment
from hetopt.core.listening import LOOPBACK, SECRET_VARIABLE, checked_secret
from hetopt.core.run_folder import LOG_FOLDER, host_log_folder, read_living
from hetopt.core.run_spec import Node, RunSpec, first_rank, host_names
from hetopt.core.run_status import failure_reason, last_log_line
from hetopt.trainer.host.forks import WORKERS_NEED, ForkServer, NoFork, import_all

if TYPE_CHECKING:
    from subprocess import Popen

    from hetopt.trainer.host.rendezvous import Rendezvous


@contextmanager
def forked_workers() -> Iterator[None]:
    """Let torchrun's agent fork its workers inside; where no process can be forked, print why, and change nothing.

    Once in a process, before any thread runs and any store is open. Workers that are not forked import everything for
    themselves.
    """
    import torch

    try:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's gap
            raise NoFork("this process uses a GPU, which no fork of it could.")
        server = ForkServer.of_this_process()
    except NoFork as why:
        print(f"workers import everything for themselves: {why}", file=sys.stderr)
        yield
        return
    fork_from(server)
    try:
        yield
    finally:
        server.close()


def fork_from(server: ForkServer) -> None:
    """Make torchrun's agent in this process fork workers from a server from now on, or start them if that has ended."""
    from torch.distributed.elastic.multiprocessing import api
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    class ForkedWorker(SubprocessHandler):
        """The agent's handle of a worker that is forked instead of started by torchrun."""

        def _popen(self, args: tuple[Any, ...], env: dict[str, str]) -> Popen[bytes]:
            """Fork the worker that these arguments of Python would start; where none can be forked, start it."""
            try:
                words = args[1:]
                program = next(n for n, word in enumerate(words) if word == "-m" or not word.startswith("-"))
                forked = server.start(
                    words[program:],  # after Python and its options
                    environment=env,
                    stdin=0,
                    stdout=self._stdout or 1,
                    stderr=self._stderr or 2,
                )
            except NoFork:
                return super()._popen(args, env)
            return cast("Popen[bytes]", forked)  # the agent asks for its number, polls and waits

    setattr(api, "get_subprocess_handler", ForkedWorker)  # noqa: B010  # torch has no other place for it


HOST_PID_VARIABLE = "HETOPT_HOST_PID"
MEETING_VARIABLE = "HETOPT_MEETING"
"""Name of the variable, in the environment of workers that can go on when others are lost, that says where they meet
(``address:port``)."""
FIRST_RANK_VARIABLE = "HETOPT_FIRST_RANK"
"""Name of the variable, in the environment of workers whose torchrun knows of no other host, with the rank of the
host's first worker."""
_SHUTDOWN_TIMEOUT_S = 10
WHY_KILLED: Mapping[int, str] = {
    signal.SIGKILL: "; the kernel does this when memory runs out",
    signal.SIGABRT: "; gloo does this where workers call different collectives, or with other shapes",
}

_SAME_EVENT_S = 5


def torchrun_arguments(spec: RunSpec, run_dir: Path, node: Node | None = None) -> list[str]:
    """Return torchrun's arguments for a host's workers (``node`` None: all are here), but those of the rendezvous.

    Where workers go on without lost hosts they agree among themselves who takes part, and torchrun, which would end all
    of them, only starts those of its own host. A host whose workers end is started again by who conducts the run.

    Args:
        spec: spec of the run.
        run_dir: folder of the run.
        node: host of the run that this machine is; None: all workers are on this machine.

    Raises:
        BadInput: the host's name cannot be the name of a folder.
    """
    stands_alone = node is None or spec.is_elastic
    return [
        f"--nnodes={1 if stands_alone else len(host_names(spec))}",
        f"--nproc-per-node={_workers_here(spec, node)}",
        "--rdzv-id=run",
        f"--max-restarts={0 if node is not None and spec.is_elastic else spec.max_restarts}",
        f"--shutdown-timeout={_SHUTDOWN_TIMEOUT_S}",
        f"--log-dir={run_dir / LOG_FOLDER if node is None else host_log_folder(run_dir, node.host)}",
        "--redirects=3",
        "--module",
        "hetopt.trainer.worker" if spec.probe is None else "hetopt.profiler.worker",
        str(run_dir),
    ]


def _workers_here(spec: RunSpec, node: Node | None) -> int:
    return len(spec.workers) if node is None else sum(worker.host == node.host for worker in spec.workers)


def died_of(exit_codes: Mapping[int, int], spec: RunSpec) -> str | None:
    """Return a sentence on the lowest-ranked worker that a signal killed, other than SIGTERM; None: none was.

    A killed worker takes its peers with it (they lose their connection and exit on their own), so the signal is the
    cause and the other exits are its consequence. SIGTERM is what the agent itself ends the survivors with.

    Args:
        exit_codes: exit codes by rank; -N: ended by signal N.
        spec: spec of the run, for the hosts' names.
    """
    for rank, code in sorted(exit_codes.items()):
        if code < 0 and -code != signal.SIGTERM:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
            return f"worker {rank} on {spec.workers[rank].host} was killed ({name}){WHY_KILLED.get(-code, '')}"
    return None


def _report_failure(exit_codes: Mapping[int, int], spec: RunSpec, run_dir: Path, node: Node | None) -> None:
    """Log why workers ended, unless a worker has; among several hosts, only a worker that a signal killed.

    ``node`` None: this host is the only one. Then something is logged in any case.
    """
    path = run_dir / EVENTS_FILE
    if failure_reason(read_log(path)) is not None:
        return
    reason = died_of(exit_codes, spec)
    if reason is None and node is None:
        reason = last_log_line(run_dir) or "the workers ended without saying why"
    if reason is not None:  # else they lost a peer: its own host knows why, and whoever conducts the hosts looks last
        tell_failure(path, reason)


def main(argv: list[str]) -> int:
    """Run this host's workers of the run in folder ``argv[0]``, by torchrun's agent; return hetopt's exit code.

    With ``argv[1]``, the number of a process, this one ends when that process does; ``argv[2]`` is the host of the run,
    as JSON (absent: all workers are here). A failure that no worker has logged is written to the run's log.

    Returns:
        0: all workers ended well; 128 + N: signal N ended this process; else the most specific exit code of a worker.

    Raises:
        BadInput: the run folder has no usable ``spec.json``, or the node is none of its hosts.
        RunFailed: nothing can listen at the address of the run, or the first host is not to be reached or does not know
            the secret.
    """
    run_dir = Path(argv[0])
    if len(argv) > 1:
        die_with_parent(int(argv[1]), signal.SIGTERM)
    spec = read_living(run_dir)
    node = Node.model_validate_json(argv[2]) if len(argv) > 2 else None

    # Read when torch is loaded, which takes seconds: only after the guard stands and the spec is known to be good.
    os.environ.update(openmp_environment(_workers_here(spec, node)))
    of_scripts = ["hetopt.trainer.session"] if spec.script else []
    import_all([*WORKERS_NEED, *(of_scripts if spec.probe is None else ["hetopt.profiler.probe.run"])])
    with forked_workers():
        # Workers, and the code that they run, do without it.
        secret_text = os.environ.pop(SECRET_VARIABLE, None)
        secret = None if node is None else checked_secret(secret_text)
        os.environ[HOST_PID_VARIABLE] = str(os.getpid())
        return _host(run_dir, spec, node, _meet(spec, node, secret))


def _host(run_dir: Path, spec: RunSpec, node: Node | None, meeting: Rendezvous) -> int:
    """Run torchrun's agent until its workers end, report a failure, and return the exit code.

    It is 0, 128 and the signal that ended the agent, or the smallest of the codes with which the first workers failed.
    ``node`` None: all workers of the run are here.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    agents, first = meeting, 0
    if spec.is_elastic:
        from hetopt.trainer.host.rendezvous import Rendezvous

        os.environ[MEETING_VARIABLE] = f"{LOOPBACK}:{meeting.port}"  # kept here: workers come and go
        if node is not None:
            agents, first = Rendezvous.alone(), first_rank(spec, node.host)
            os.environ[FIRST_RANK_VARIABLE] = str(first)
    try:
        agents.run_torchrun(torchrun_arguments(spec, run_dir, node))
    except ChildFailedError as failed:
        first_s = min(failure.timestamp for failure in failed.failures.values())
        exit_codes = {
            first + rank: failure.exitcode
            for rank, failure in failed.failures.items()
            if failure.timestamp < first_s + _SAME_EVENT_S  # survivors that the agent kills come seconds later
        }
        _report_failure(exit_codes, spec, run_dir, node)
        # Workers exit with hetopt's codes, of which the smallest is the most specific (2 bad input before 6 run
        # failed), or with that of their script.
        least = 0 if spec.script else 1
        return min((code for code in exit_codes.values() if code > least), default=RunFailed.exit_code)
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    return 0


def _meet(spec: RunSpec, node: Node | None, secret: bytes | None) -> Rendezvous:
    """Open the store of the run, or wait for that of its first host; ``node`` None: all workers are here.

    Raises:
        BadInput: the run does not have the node's host.
        RunFailed: nothing can listen at the address, or the first host does not answer (see `among_others`).
    """
    from hetopt.trainer.host.rendezvous import Rendezvous

    if node is None or secret is None:
        return Rendezvous.alone()
    names = host_names(spec)
    first_rank(spec, node.host)  # refuses a host that the run does not have
    address, _, port = node.meeting.rpartition(":")
    return Rendezvous.among_others(names.index(node.host), len(names), address, int(port), secret)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except HetoptError as error:
        print(error.message, file=sys.stderr)
        sys.exit(error.exit_code)
