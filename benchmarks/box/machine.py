"""One instance as a host of the rehearsed network: it boots by its own user data, and ends when EC2 says so."""

from __future__ import annotations

import base64
import binascii
import os
import subprocess
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.box import metadata
from hetopt.backends.emulation import iproute
from hetopt.backends.emulation.namespaces import LINK, EmulatedNetwork

CREDENTIALS = ("box", "box", "box")
"""Of the machines' role. moto takes any."""


@dataclass(frozen=True, kw_only=True)
class Instance:
    """What moto's record says of an instance.

    Attributes:
        begun_s: when it began, in seconds since the epoch.
        ended_s: when it ended; None while it runs.
    """

    id: str
    type: str
    spot: bool
    zone: str
    address: str | None
    user_data: str
    state: str
    reason: str | None
    begun_s: float
    ended_s: float | None

    @property
    def runs(self) -> bool:
        """Whether it is on the bill."""
        return self.state != "terminated"


@dataclass(kw_only=True)
class Machine:
    """A namespace that is an instance.

    Attributes:
        place: of its namespace in the network.
        folder: of everything that it writes.
    """

    instance: Instance
    network: EmulatedNetwork
    place: int
    folder: Path
    service: metadata.MetadataService = field(default_factory=metadata.MetadataService)
    _open: ExitStack = field(default_factory=ExitStack)

    @property
    def root(self) -> Path:
        """Where its boot script installs."""
        return self.folder / "root"

    @property
    def run_dir(self) -> Path:
        """The run's folder on it."""
        return self.root / "run"

    def boot(self, *, endpoint: str, programs: Path, rate_bits_per_s: float | None) -> subprocess.Popen[bytes]:
        """Give it its address, its metadata service and its link's rate, and run its user data as root's shell does."""
        self.folder.mkdir(parents=True)
        iproute.run_batch(
            "ip",
            [
                f"addr flush dev {LINK}",
                f"addr add {self.instance.address}/16 dev {LINK}",
                f"addr add {metadata.ADDRESS}/32 dev lo",
            ],
            namespace=self.network.namespace(self.place),
        )
        self.network.set_rates({self.place: rate_bits_per_s})
        self.service = self._open.enter_context(
            metadata.metadata_service(self._answers(), self.network.namespace(self.place))
        )
        script = self.folder / "user-data"
        script.write_text(decoded(self.instance.user_data), encoding="utf-8")
        environment = {
            "PATH": os.pathsep.join([str(programs), os.environ.get("PATH", os.defpath)]),
            "HOME": str(self.folder),
            "HETOPT_ROOT": str(self.root),
            "HETOPT_UNITS": str(self.folder / "units"),
            "BOX_FOLDER": str(self.folder),
            "BOX_INSTANCE": self.instance.id,
            # The one thing that a machine in the cloud need not be told.
            "AWS_ENDPOINT_URL": endpoint,
            # Many machines share few cores.
            "OMP_NUM_THREADS": "1",
        }
        with (self.folder / "console.log").open("wb") as console:
            return self.network.popen(
                self.place, ["bash", str(script)], env=environment, stdout=console, stderr=subprocess.STDOUT
            )

    def power_off(self) -> None:
        """End everything on it at once, as losing its power does, and cut its link."""
        self.network.take_down(self.place)
        self.network.kill(self.place)
        self._open.close()

    def _answers(self) -> dict[str, str]:
        one, data = self.instance, "/latest/meta-data"
        return {
            f"{data}/instance-id": one.id,
            f"{data}/instance-type": one.type,
            f"{data}/local-ipv4": one.address or "",
            f"{data}/placement/availability-zone": one.zone,
            "/latest/user-data": decoded(one.user_data),
            **metadata.role_answers(*CREDENTIALS),
        }


def decoded(user_data: str) -> str:
    """User data as text; launch templates hold it in base 64."""
    try:
        return base64.b64decode(user_data, validate=True).decode()
    except (binascii.Error, ValueError):
        return user_data
