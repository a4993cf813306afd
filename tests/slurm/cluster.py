"""A real Slurm on this machine: slurmctld and a slurmd a node, each in a network of its own, and their commands.

Nothing of the machine's is read or touched: munge has a key and a socket of its own, and Slurm a configuration.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from hetopt.backends.emulation.namespaces import EmulatedNetwork, why_not
from hetopt.core.run_spec import EmulatedHost
from tests.face.conftest import until

COMMANDS = ("sbatch", "scancel", "scontrol", "sinfo", "squeue", "srun")
SBIN = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"
CONFIGURATION = """
ClusterName=test
SlurmctldHost=ctl({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={here}/munge.socket
CredType=cred/munge
StateSaveLocation={here}/state
SlurmdSpoolDir={here}/spool-%n
SlurmctldPidFile={here}/ctld.pid
SlurmdPidFile={here}/slurmd-%n.pid
SlurmctldLogFile={here}/ctld.log
SlurmdLogFile={here}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerParameters=sched_interval=1,batch_sched_delay=1,sched_min_interval=100000,requeue_delay=1
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
SlurmdTimeout=30
KillWait=20
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
"""


def why_no_slurm() -> str | None:
    """Say why no cluster can be made here; None: it can."""
    lacks = [name for name in ("slurmctld", "slurmd", "munged", *COMMANDS) if shutil.which(name, path=SBIN) is None]
    return f"no {lacks[0]} is installed" if lacks else why_not()


@dataclass(kw_only=True)
class Cluster:
    """A cluster that runs.

    Attributes:
        folder: with the commands that ask it, in ``bin``.
    """

    folder: Path

    def ask(self, *command: str) -> str:
        """Run a command of Slurm; return what it prints."""
        words = [str(self.folder / "bin" / command[0]), *command[1:]]
        return subprocess.run(words, check=False, capture_output=True, text=True).stdout

    def jobs(self) -> list[str]:
        """Return the numbers of all jobs that have not ended."""
        return self.ask("squeue", "-h", "-o", "%i").split()


@contextmanager
def cluster(folder: Path, nodes: dict[str, str], partitions: Sequence[str]) -> Iterator[Cluster]:
    """Run a cluster.

    Args:
        folder: for its files.
        nodes: by name what its configuration says of each.
        partitions: lines of the configuration, without ``PartitionName=``.
    """
    described = [EmulatedHost(name=f"h{place}") for place in range(len(nodes) + 1)]
    with EmulatedNetwork.create(described) as network, ExitStack() as ends:
        control = network.namespace(len(nodes))
        (folder / "state").mkdir()
        (folder / "bin").mkdir()
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o400)
        lines = [CONFIGURATION.format(here=folder, address=network.address(len(nodes)))]
        lines += [
            f"NodeName={name} NodeHostname={name} NodeAddr={network.address(place)} {more} State=UNKNOWN"
            for place, (name, more) in enumerate(nodes.items())
        ]
        lines += [f"PartitionName={line}" for line in partitions]
        (folder / "slurm.conf").write_text("\n".join(lines) + "\n")
        for name in COMMANDS:
            path = folder / "bin" / name
            enter = f"exec nsenter --net=/run/netns/{control}"
            path.write_text(f'#!/bin/sh\nexport SLURM_CONF={folder}/slurm.conf\n{enter} {shutil.which(name)} "$@"\n')
            path.chmod(0o755)

        def daemon(namespace: str, name: str, *words: str) -> None:
            inside = f'hostname {name}; exec "$@"'
            process = subprocess.Popen(
                ["nsenter", f"--net=/run/netns/{namespace}", "unshare", "--uts", "sh", "-c", inside, "sh", *words],
                env={**os.environ, "SLURM_CONF": f"{folder}/slurm.conf", "PATH": SBIN},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            ends.callback(process.wait)
            ends.callback(process.kill)

        munge = [f"--{name}={folder}/munge.{name.split('-')[0]}" for name in ("key-file", "socket", "pid-file")]
        munge += [f"--log-file={folder}/munge.log", f"--seed-file={folder}/munge.seed"]
        daemon(control, "ctl", "munged", "-F", "--force", *munge)
        until((folder / "munge.socket").exists)
        daemon(control, "ctl", "slurmctld", "-D", "-i")
        for place, name in enumerate(nodes):
            daemon(network.namespace(place), name, "slurmd", "-D", "-N", name)
        here = Cluster(folder=folder)
        until(lambda: here.ask("sinfo", "-h", "-o", "%D %T").split()[1:] == ["idle"])
        yield here
