"""A Slurm cluster: its nodes, a job for each node of a run, how a command runs inside a job, and the backend.

``python -m hetopt.backends.slurm.jobs RUN_DIR PARENT_PID`` asks for the jobs, conducts the run as on any hosts, and
gives the jobs back.

One job a node, so that the loss of one ends no other. A job's own program only holds the node: it ends a while after
the last process of the run there, so that nothing stays where nobody is left to give it back. What the launching
machine knows comes from `sinfo`, `squeue` and what `sbatch` and `srun` complain of; the parsing of each is pure.
"""

from __future__ import annotations

import json
import math
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from hetopt.backends.asked import ASK_AGAIN_S, LOOK_S, NOTICE_S, ORDER_FILE, AskedBackend, Source, holding_script
from hetopt.backends.on_this_machine import OnHosts
from hetopt.backends.options import Machines, Slurm
from hetopt.backends.ssh.checking import Inventory
from hetopt.core.errors import BadInput, HetoptError, RunFailed
from hetopt.core.formatting import duration, listed
from hetopt.core.hosts import CPU, Host, read_hosts
from hetopt.core.plain_text import one_line
from hetopt.optimizer.launch_record import Place
from hetopt.optimizer.market.catalog_filter import is_called
from hetopt.optimizer.market.instance_type import known_gpus
from hetopt.optimizer.plan import Plan

ANSWER_WITHIN_S = 60.0
JOB_PREFIX = "hetopt-"
RUNNING = "RUNNING"


def slurm(*command: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a Slurm command and return its exit code and output; exit code 1 where it has not ended after 60 s.

    Args:
        command: its words.
        text: its standard input; None: empty.

    Raises:
        BadInput: Slurm is not installed here.
    """
    try:
        return subprocess.run(
            command, input=text or "", capture_output=True, errors="replace", timeout=ANSWER_WITHIN_S, check=False
        )
    except OSError:
        raise BadInput(f"there is no Slurm here: `{command[0]}` does not start.", hint=SlurmLink.MISSING) from None
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", "it does not answer")


class Node(NamedTuple):
    """A node as `sinfo` lists it.

    Attributes:
        name: name of the node.
        cpus: number of processors.
        memory_mib: memory in MiB.
        gres: what Slurm calls generic resources, such as GPUs.
        address: name or address of the node.
        trouble: its state, where no job can start there; None: one may.
    """

    name: str
    cpus: int
    memory_mib: int
    gres: str
    address: str
    trouble: str | None


NODE_FORMAT = "%N|%c|%m|%G|%o|%T|%E"


def read_nodes(text: str) -> dict[str, Node]:
    """Parse the output of `sinfo` in `NODE_FORMAT` into nodes by name; lines of another form are skipped.

    A node has a line for each of its partitions; the last one counts.
    """
    nodes = {}
    for line in (line for line in text.splitlines() if line.count("|") >= 6):
        name, cpus, memory, gres, address, state, reason = line.split("|", 6)
        shown = state if reason == "none" else f"{state}, {one_line(reason)}"
        trouble = shown if re.search(r"down|drain|fail|inval|unknown|\*$", state) else None
        nodes[name] = Node(name, int(cpus.rstrip("+")), int(memory.rstrip("+")), gres, address, trouble)
    return nodes


def ask_nodes(partition: str | None = None) -> dict[str, Node]:
    """Ask `sinfo` for the nodes of a partition, and return them by name, at least one.

    Args:
        partition: its name; None: the whole cluster.

    Raises:
        BadInput: Slurm is not installed here, or there is no such node.
        RunFailed: `sinfo` fails or does not answer.
    """
    only = [] if partition is None else [f"--partition={partition}"]
    done = slurm("sinfo", "--noheader", "--Node", f"--format={NODE_FORMAT}", *only)
    if done.returncode != 0:
        raise RunFailed(f"Slurm lists no nodes: {_last(done.stderr)}.", hint="see what `sinfo` says")
    nodes = read_nodes(done.stdout)
    if not nodes:
        where = "" if partition is None else f" in a partition {partition!r}"
        raise BadInput(f"Slurm has no node{where}.", hint="`sinfo` lists the partitions")
    return nodes


def device_of(kind: str) -> str | None:
    """Return the registry's name of the GPU that Slurm calls ``kind``, as ``tesla_v100-sxm2-32gb``; None: unknown."""
    words = re.split(r"[^A-Za-z0-9]+", kind)
    spans = [" ".join(words[start:end]) for start in range(len(words)) for end in range(start + 1, len(words) + 1)]
    matches = [(len(span), gpu.name) for gpu in known_gpus() for span in spans if is_called(gpu, span)]
    return max(matches)[1] if matches else None


def as_inventory(nodes: Iterable[Node]) -> str:
    """Return an inventory in TOML of the nodes as Slurm lists them: CPUs, GPUs, and memory in tenths of a GiB.

    GPUs whose kind is unknown become a comment, for a person to name.
    """
    lines = []
    for node in nodes:
        name, memory_gib = f'"{node.name}"' if "." in node.name else node.name, 10 * node.memory_mib // 1024 / 10
        lines += [f"\n[{name}]", f"cpus = {node.cpus}", f"memory_gib = {memory_gib}"]
        gpus = re.findall(r"\bgpu(?::([^:,()]+))??:(\d+)", node.gres)
        devices = [device_of(kind) for kind, count in gpus for _ in range(int(count))]
        if devices and all(devices):
            lines.append(f"devices = {json.dumps(devices)}")
        elif devices:
            lines.append(f"# devices = []  # Slurm says {node.gres}: name each as `nvidia-smi -L` does there")
    return "\n".join(lines).lstrip() + "\n"


class Job(NamedTuple):
    """A run's Slurm job as `squeue` lists it.

    Attributes:
        number: number of the job.
        state: such as ``RUNNING`` or ``PENDING``.
        reason: why it waits.
        left_s: seconds left to its time limit; inf: no limit.
    """

    number: str
    state: str
    reason: str
    left_s: float


JOB_FORMAT = "%i|%k|%T|%L|%r"


def read_jobs(text: str) -> dict[str, Job]:
    """Parse the output of `squeue` in `JOB_FORMAT` into a job by host name; a running job goes before a waiting one."""
    jobs: dict[str, Job] = {}
    for number, host, state, left, reason in (line.split("|", 4) for line in text.splitlines() if line.count("|") >= 4):
        if host not in jobs or state == RUNNING:
            jobs[host] = Job(number, state, one_line(reason), left_of(left))
    return jobs


def left_of(text: str) -> float:
    """Return the seconds of a time such as ``1-02:03:04``, as Slurm writes it; infinity for other text (no limit)."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)??(?:(\d+):)?(\d+)", text)
    if match is None:
        return math.inf
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return 86_400.0 * days + 3600 * hours + 60 * minutes + seconds


_ADVICE = (
    ("account|qos", "`sacctmgr show assoc user=$USER` lists yours: `account` and `qos`"),
    ("partition", "`sinfo` lists the partitions: `slurm_partition`"),
    ("feature", "`sinfo -o '%N %f'` lists the nodes' features: `constraint`"),
    ("time limit", "`sinfo` lists the partitions' limits: `time_limit`"),
    (
        "configuration",
        "see `slurm_partition`, and that the inventory says no more CPUs, memory and GPUs than `hetopt hosts slurm`",
    ),
)
"""What to do, by what `sbatch` says (Slurm, `slurm_errno.c`); the first that fits."""


def _advice(refusal: str) -> str:
    fits = (advice for pattern, advice in _ADVICE if re.search(pattern, refusal, re.IGNORECASE))
    return next(fits, "see what `sbatch` takes")


def _last(complaint: str) -> str:
    """Return what the last line of a complaint says, without who says it."""
    line = one_line((complaint.strip().splitlines() or ["it does not say why"])[-1])
    return line.rpartition(": ")[2].rstrip(".")[:200]


_NEVER_RAN = re.compile(
    r"^srun: error: ((?:Unable to|Job allocation|Task launch|Application launch|Invalid job|slurm_).*)$", re.MULTILINE
)
_ENDED = re.compile(r"\*\*\* (?:STEP|JOB) \S+ ON \S+ CANCELLED AT \S+(?: DUE TO ([A-Z ]+?))? \*\*\*")
_WHY_ENDED = {
    "PREEMPTION": "Slurm gave its node to another job",
    "TIME LIMIT": "its job reached its time limit",
    "NODE FAILURE": "Slurm says that its node failed",
}


@dataclass(kw_only=True)
class SlurmLink(Source):
    """The way to run commands on a node: as steps of the run's job there, which is submitted if there is none.

    Attributes:
        run: name of the run, which its jobs have, too.
        options: options of the launch.
        clock: returns seconds of a monotonic clock.
    """

    RETURN_WITHIN_S: ClassVar[float] = math.inf
    MISSING: ClassVar[str] = "launch from a machine where `sinfo` lists the cluster's nodes"

    run: str
    options: Slurm
    clock: Callable[[], float] = time.monotonic
    _jobs: dict[str, Job] = field(default_factory=dict)
    _looked_s: float = -math.inf
    _is_silent: bool = False
    _asked: dict[str, tuple[float, str | None]] = field(default_factory=dict)
    _addresses: dict[str, str] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def sbatch_command(self, host: Host) -> list[str]:
        """Return the `sbatch` command line that submits a host's job; none of its words is a secret."""
        asked = {
            "job-name": f"{JOB_PREFIX}{self.run}", "comment": host.name, "nodelist": host.address,
            "nodes": 1, "ntasks": 1, "cpus-per-task": host.cpus,
            "mem": host.memory_gib and f"{math.floor(1024 * host.memory_gib)}M",
            "gres": None if CPU in host.devices else f"gpu:{len(host.devices)}",
            "partition": self.options.slurm_partition, "account": self.options.account,
            "qos": self.options.qos, "constraint": self.options.constraint,
            "time": self.options.time_limit and math.ceil(self.options.time_limit / 60),
            "output": "/dev/null", "chdir": "/",
        }  # fmt: skip
        alone = [] if host.cpus is not None else ["--exclusive"]
        given = [f"--{name}={value}" for name, value in asked.items() if value is not None]
        return ["sbatch", "--parsable", "--requeue", *alone, *given]

    def refusal(self, host: Host, *, ask: bool) -> str | None:
        """Submit a host's job, or only test whether Slurm would take it; return why it does not, or None.

        Args:
            host: host to get a job on.
            ask: True: submit it; False: test.

        Raises:
            BadInput: Slurm is not installed here.
        """
        test = [] if ask else ["--test-only"]
        sbatch, *words = self.sbatch_command(host)
        done = slurm(sbatch, *test, *words, text=f"#!/bin/sh\n{holding_script(self.run, host.name)}")
        return None if done.returncode == 0 else _last(done.stderr)

    def check(self, hosts: Sequence[Host], nodes: Mapping[str, Node]) -> None:
        """Refuse hosts on which Slurm would take no job now; submit none.

        Hosts that are down are passed over, as long as one is up.

        Args:
            hosts: hosts of the run.
            nodes: nodes of the cluster, by name.

        Raises:
            BadInput: a host is no node, all hosts are down, or Slurm would refuse a job on one that is up.
        """
        lacks = [host.name for host in hosts if host.address not in nodes]
        if lacks:
            raise BadInput(f"Slurm knows no node {', '.join(lacks)}.", hint="`hetopt hosts slurm` lists those it knows")
        troubles = {host.name: nodes[host.address].trouble for host in hosts}
        if all(troubles.values()):
            listed = "; ".join(f"{name} is {trouble}" for name, trouble in troubles.items())
            raise BadInput(f"no node can be had: {listed}.", hint="`sinfo --list-reasons` says since when")
        for host in (host for host in hosts if troubles[host.name] is None):
            refusal = self.refusal(host, ask=False)
            if refusal is not None:
                raise BadInput(f"Slurm takes no job on {host.name}: {refusal}.", hint=_advice(refusal))

    def job(self, host: Host) -> Job | None:
        """Return a host's job, from `squeue` every 5 s at most; None: it has none.

        While Slurm does not answer, the job is as it was seen last.

        Raises:
            BadInput: Slurm is not installed here.
        """
        with self._lock:
            if self.clock() - self._looked_s >= LOOK_S:
                asked = slurm("squeue", "--noheader", f"--name={JOB_PREFIX}{self.run}", f"--format={JOB_FORMAT}")
                self._is_silent, self._looked_s = asked.returncode != 0, self.clock()
                self._jobs = self._jobs if self._is_silent else read_jobs(asked.stdout)
            return self._jobs.get(host.name)

    def bring(self, host: Host) -> Job:
        """Return the running job of a host; where there is no job, submit one, every 30 s at most.

        Raises:
            RunFailed: the job waits in the queue, or Slurm takes none.
        """
        job, (asked_s, refusal) = self.job(host), self._asked.get(host.name, (-math.inf, None))
        if job is None and not self._is_silent and self.clock() - asked_s >= ASK_AGAIN_S:
            refusal = self.refusal(host, ask=True)
            self._asked[host.name] = (self.clock(), refusal)
        if job is None and refusal is not None:
            raise RunFailed(f"Slurm takes no job on {host.name}: {refusal}.", hint=_advice(refusal))
        if job is None or job.state != RUNNING:
            where = "" if job is None else f" ({job.number}, {job.state.lower()}: {job.reason})"
            raise RunFailed(f"{host.name} waits for its job in Slurm's queue{where}.", hint="see `squeue --start`")
        return job

    def is_awaited(self, host: Host) -> bool:
        """Return whether a host has a job, running or not."""
        return self.job(host) is not None

    def address(self, host: Host) -> str | None:
        """Return a node's IP address, by the inventory or by Slurm, which is asked once; None: it cannot be found."""
        if host.name not in self._addresses:
            with suppress(OSError, HetoptError, KeyError):
                self._addresses[host.name] = host.private or socket.gethostbyname(ask_nodes()[host.address].address)
        return self._addresses.get(host.name)

    def give_back(self) -> None:
        """Cancel all Slurm jobs of the run; do not report a refusal.

        Raises:
            BadInput: Slurm is not installed here.
        """
        give_back(self.run)

    def argv(self, host: Host, command: str) -> list[str]:
        """Return the `srun` command line that runs a shell command on a host, inside its job; start nothing.

        A host without a job gets one.

        Raises:
            RunFailed: no job of the host runs yet.
        """
        cpus = [] if host.cpus is None else [f"--cpus-per-task={host.cpus}"]
        return [
            "srun", "--quiet", f"--jobid={self.bring(host).number}", "--overlap", "--nodes=1", "--ntasks=1", *cpus,
            f"--nodelist={host.address}", "--unbuffered", "--mpi=none", "--chdir=/", "sh", "-c", command,
        ]  # fmt: skip

    def why_unreached(self, host: Host, code: int, complaint: str) -> RunFailed | None:
        """Return the error if a command never ran on a host, by what `srun` complains of; None: it ran.

        Args:
            host: host of the command.
            code: exit code of `srun`; not used.
            complaint: what `srun` wrote to its standard error.
        """
        never = _NEVER_RAN.search(complaint)
        lost = self.why_lost(host, complaint)
        if never is None and lost is None:
            return None
        reason = lost or one_line(never[1] if never else "")[:200].rstrip(".")
        return RunFailed(f"{host.name} is not reached: {reason}.", hint="see what `squeue` and `sinfo` say")

    def host_lines(self, complaint: str) -> list[str]:
        """Return the lines of an error output (``complaint``) that are the program's on the host, not `srun`'s."""
        lines = (line for line in super().host_lines(complaint) if not line.startswith("srun: "))
        return [re.sub(r"^slurmstepd\S*: error: ", "", line) for line in lines]

    def why_lost(self, host: Host, complaint: str) -> str | None:
        """Return why Slurm ended the job under a connection, by its error output; None: it does not tell."""
        ended = _ENDED.search(complaint)
        return None if ended is None else _WHY_ENDED.get(ended[1] or "", "its job was cancelled")

    def may_be_used(self, host: Host) -> bool:
        """Return whether a host's job has more than 90 s left before its time limit; True also if none runs yet."""
        job = self.job(host)
        return job is None or job.state != RUNNING or job.left_s > NOTICE_S


def give_back(run: str) -> None:
    """Cancel all Slurm jobs of the run named ``run``; do not report a refusal."""
    slurm("scancel", f"--name={JOB_PREFIX}{run}")


def runs_with_jobs() -> list[str]:
    """Return the sorted names of the runs that this user has Slurm jobs of, waiting or running; empty: none.

    Raises:
        BadInput: Slurm is not installed here.
        RunFailed: `squeue` fails or does not answer.
    """
    done = slurm("squeue", "--me", "--noheader", "--format=%j")
    if done.returncode != 0:
        raise RunFailed(f"Slurm lists no jobs: {_last(done.stderr)}.", hint="see what `squeue --me` says")
    names = set(done.stdout.split())
    return sorted(name.removeprefix(JOB_PREFIX) for name in names if name.startswith(JOB_PREFIX))


@dataclass(frozen=True, kw_only=True)
class SlurmBackend(AskedBackend):
    """The backend of an inventory's nodes in a Slurm cluster, reached inside a job of the run on each.

    Attributes:
        name: name of the backend.
    """

    OPTIONS: ClassVar[type[Machines]] = Slurm

    name: Place = Slurm.PLACE

    def source(self, run_dir: Path, options: Slurm) -> SlurmLink:
        """Return the way to the jobs of the run in a folder; submit none."""
        return SlurmLink(run=run_dir.name, options=options)

    def hosts_of(self, options: Slurm) -> tuple[Host, ...]:
        """Return the hosts of the inventory file that launch options name.

        Raises:
            BadInput: the options name no inventory, or it cannot be read.
        """
        if options.inventory is None:
            raise BadInput(
                "a launch on Slurm needs to know which nodes: `inventory`.",
                hint="`hetopt hosts slurm -o nodes.toml` writes it",
            )
        return read_hosts(options.inventory)

    def prepare(self, made: Plan, wanted: Plan, options: Slurm) -> OnHosts:
        """Map the plan ``wanted`` onto the inventory's nodes and predict it; Slurm is not asked yet.

        Args:
            made: the plan as it was made, for the record.
            wanted: the plan as it is to be run.
            options: launch options, with an inventory.

        Raises:
            BadInput: as of `SshBackend.prepare`, or the jobs' time limit is shorter than a run that saves no checkpoint
                may take.
        """
        prepared = super().prepare(made, wanted, options)
        takes_s, limit_s = prepared.launch.prediction.total_s.high, options.time_limit
        if limit_s is not None and limit_s < takes_s and not prepared.launch.spec.resumes:
            raise BadInput(
                f"the run may take {duration(takes_s)}, and a job {duration(limit_s)} at most; "
                "it saves no checkpoint to go on from.",
                hint="give a longer `time_limit`",
            )
        return prepared

    def told(self, inventory: Inventory) -> tuple[str, ...]:
        """Return a sentence on the jobs that a launch on an inventory's nodes asks for."""
        return (f"Asks Slurm for a job on each of {listed([host.name for host in inventory.hosts])}.",)

    def check_ready(self, prepared: Any) -> None:
        """Refuse a launch whose jobs Slurm would not take now; submit none.

        Raises:
            BadInput: Slurm would refuse a job or has no usable node, or there is no Slurm here.
            RunFailed: Slurm does not answer.
        """
        options = Slurm(**json.loads(prepared.files[ORDER_FILE]))
        SlurmLink(run="new", options=options).check(prepared.inventory.hosts, ask_nodes())


if __name__ == "__main__":
    # Inside a job of somebody's own, its variables would be taken for what is asked for here.
    for name in [name for name in os.environ if name.startswith("SLURM_") and not name.startswith("SLURM_CONF")]:
        del os.environ[name]
    sys.exit(SlurmBackend().lead(sys.argv))
