"""Real ssh servers: `sshd -i` behind a ProxyCommand, so that nothing listens and no two of them share a port.

A host may be put into a network and a group of processors of its own. Nobody's configuration is read or touched: the
client is given its own by ``HETOPT_SSH``.
"""

from __future__ import annotations

import getpass
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from hetopt.core.hosts import Host

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")

SLOW = """
import os, time
while data := os.read(0, {piece}):
    while data:
        data = data[os.write(1, data):]
    time.sleep(0.1)
"""
"""Passes on ten pieces a second."""


@dataclass(kw_only=True)
class Servers:
    """The ssh servers of a test: a folder with keys, and both sides' configurations."""

    folder: Path
    names: list[str] = field(default_factory=list)

    @classmethod
    def made(cls, folder: Path) -> Servers:
        """Return servers with new keys and empty configurations."""
        if os.getuid() == 0:  # sshd wants the folder of its privilege separation
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        for key in ("host_key", "other_host_key", "user_key", "strangers_key"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", key, "-f", str(folder / key)]
            subprocess.run(command, check=True, capture_output=True)
        shutil.copy(folder / "user_key.pub", folder / "authorized_keys")
        (folder / "known_hosts").touch()
        (folder / "client").touch()
        return cls(folder=folder)

    @property
    def command(self) -> str:
        """The command that takes the place of `ssh`."""
        return f"ssh -F {self.folder / 'client'}"

    def host(
        self,
        name: str,
        *,
        known: bool = True,
        key: str = "user_key",
        host_key: str = "host_key",
        network: str | None = None,
        group: Path | None = None,
        own_processes: bool = False,
        shell_prints: str = "",
        passwords_only: bool = False,
        user: str | None = None,
        most_bytes_per_s: int | None = None,
        **more: object,
    ) -> Host:
        """Add a host that `ssh NAME` reaches, and return its record.

        With its own processes it sees no others of this machine. What it says can be held up, as on a slow line. It
        accepts one key; the client knows its host key unless ``known`` is False. None of ``network``, ``group``,
        ``user``, ``most_bytes_per_s``: this machine's network and processors, this user, no limit of speed.
        """
        server = self.folder / f"{name}.sshd"
        force = self.folder / f"{name}.shell"
        # What a login shell does: prints whatever its owner's files print, and runs the command. A host with a part of
        # the processors has one; it cannot read its quota, as `ip netns exec` hides where control groups are mounted.
        threads = "" if group is None else "export OMP_NUM_THREADS=1\n"
        force.write_text(f'{shell_prints}\n{threads}exec sh -c "$SSH_ORIGINAL_COMMAND"\n')
        server.write_text(
            f"HostKey {self.folder / host_key}\nAuthorizedKeysFile {self.folder / 'authorized_keys'}\n"
            f"UsePAM no\nStrictModes no\nPidFile none\nForceCommand sh {force}\nAcceptEnv HOME_OF_TEST\n"
            f"PasswordAuthentication {'yes' if passwords_only else 'no'}\n"
            f"PubkeyAuthentication {'no' if passwords_only else 'yes'}\nKbdInteractiveAuthentication no\n"
        )
        inside = "" if network is None else f"ip netns exec {network} "
        if own_processes:
            inside += "unshare --pid --fork --kill-child --mount-proc "
        if group is not None:  # whatever runs on the host has its part of the processors
            inside = f"sh -c 'echo $$ >{group}; exec \"$@\"' sh {inside}"
        if most_bytes_per_s is not None:
            slow = self.folder / f"{name}.slow.py"
            slow.write_text(SLOW.format(piece=most_bytes_per_s // 10))
            inside = f"sh -c '\"$@\" | exec {sys.executable} {slow}' sh {inside}"
        if known:
            public = (self.folder / "host_key.pub").read_text().split()
            with (self.folder / "known_hosts").open("a") as file:
                file.write(f"{name} {public[0]} {public[1]}\n")
        with (self.folder / "client").open("a") as file:
            file.write(
                f"Host {name}\n  ProxyCommand {inside}{SSHD} -i -f {server}\n  IdentityFile {self.folder / key}\n"
                f"  IdentitiesOnly yes\n  User {user or getpass.getuser()}\n"
                f"  UserKnownHostsFile {self.folder / 'known_hosts'}\n  GlobalKnownHostsFile /dev/null\n"
            )
        self.names.append(name)
        return Host(name=name, address=name, **more)
