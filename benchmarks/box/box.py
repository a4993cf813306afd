"""The box: a moto server and a rehearsed network in step. What runs there boots here, what ends there dies here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from benchmarks.box import programs
from benchmarks.box.machine import Instance, Machine
from benchmarks.box.sockets import Relay
from hetopt.backends.emulation import iproute
from hetopt.backends.emulation.namespaces import PREFIX, EmulatedNetwork
from hetopt.core.errors import RunFailed
from hetopt.core.scaled_emulation import EmulatedHost
from hetopt.optimizer.market.catalog import Catalog

_API_ADDRESS, _API_PORT = "172.31.255.254", 5000
"""Inside moto's default network, whose subnets hand out the machines' addresses from their beginnings."""
_BRIDGE = "switch"
_TURN_S = 0.2
_FREE_WITHIN_S = 3600.0
_READY_WITHIN_S = 120.0
TAKEN = ("Server.SpotInstanceTermination", "Instance terminated by the spot market")


@dataclass(frozen=True, kw_only=True)
class Happening:
    """Something that the box saw or did, at a moment in seconds since the epoch."""

    time_s: float
    what: str


@dataclass(kw_only=True)
class Box:
    """EC2 for the processes of this machine. A context manager; needs what rehearsals need.

    Attributes:
        folder: of everything that machines write.
        catalog: of the region: spot prices and links' rates come from it.
        places: how many machines there can ever be.
    """

    folder: Path
    catalog: Catalog
    places: int = 16
    machines: dict[str, Machine] = field(default_factory=dict)
    happenings: list[Happening] = field(default_factory=list)
    _open: ExitStack = field(default_factory=ExitStack)
    _closing: threading.Event = field(default_factory=threading.Event)
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _ends_s: dict[str, float] = field(default_factory=dict)
    _failed: str | None = None
    _url: str = ""

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            hosts = [EmulatedHost(name=f"h{place}") for place in range(self.places)]
            self._network = stack.enter_context(EmulatedNetwork.create(hosts, owner=str(self.folder)))
            switch = f"{PREFIX}{self._network.id}"
            iproute.run_batch(
                "ip", [f"addr add {_API_ADDRESS}/16 dev {_BRIDGE}", "link set dev lo up"], namespace=switch
            )
            self._programs = self.folder / "bin"
            programs.install(self._programs)
            self._start_cloud(stack, switch)
            relay = stack.enter_context(Relay(switch, ("127.0.0.1", _API_PORT)))
            self._url = f"http://127.0.0.1:{relay.port}"
            self._wait_until_ready()
            keeper = threading.Thread(target=self._keep, daemon=True)
            keeper.start()
            stack.callback(keeper.join)
            stack.callback(self._closing.set)
            self._open = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        with self._lock:
            for machine in self.machines.values():
                if machine.instance.runs:
                    machine.power_off()
        self._open.close()

    @property
    def environment(self) -> dict[str, str]:
        """For whoever rents: where the API is, and credentials that open nothing else."""
        return {
            "AWS_ENDPOINT_URL": self._url,
            "AWS_ACCESS_KEY_ID": "operator",
            "AWS_SECRET_ACCESS_KEY": "operator",
            "AWS_DEFAULT_REGION": self.catalog.region,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }

    def instances(self) -> list[Instance]:
        """The record, by moto, of every instance that there ever was."""
        return [Instance(**one) for one in self._ask("machines")]

    def living(self) -> list[Machine]:
        """The machines that are up, in the order of their addresses as text, which is how torchrun ranks them."""
        with self._lock:
            alive = [machine for machine in self.machines.values() if machine.instance.runs]
        return sorted(alive, key=lambda machine: str(machine.instance.address))

    def interrupt(self, machine: Machine, *, notice_s: float) -> None:
        """Take a machine back so long after telling it. EC2 gives two minutes."""
        self._tell(f"{self._name(machine)} is told that it will be taken in {notice_s:g} s")
        self._ends_s[machine.instance.id] = time.time() + notice_s
        machine.service.announce_end(time.time() + notice_s)

    def lose(self, machine: Machine) -> None:
        """Take a machine without a word."""
        self._tell(f"{self._name(machine)} is taken without notice")
        machine.network.take_down(machine.place)
        machine.network.kill(machine.place)
        self._end(machine.instance.id)

    def exhaust(self, types: Sequence[str]) -> None:
        """From now on nobody can have these types."""
        self._tell(f"there is no capacity for {', '.join(types) or 'nothing'} from now on")
        self._ask("capacity", {"exhausted": list(types)})

    def bill_usd(
        self, extras_usd_per_hour: float, ids: Collection[str] | None = None, *, least_s: float = 60.0
    ) -> float:
        """What moto's record comes to: instance-seconds times the price of each type's pool.

        What the spot market takes back within its first hour is free, but for disk and address.

        Args:
            extras_usd_per_hour: of each machine's disk, address and requests.
            ids: of the instances that count; absent: all.
            least_s: that each instance is billed for.
        """
        now_s, total = time.time(), 0.0
        for one in self.instances():
            if ids is not None and one.id not in ids:
                continue
            seconds = max((one.ended_s or now_s) - one.begun_s, least_s)
            free = one.reason == TAKEN[0] and seconds < _FREE_WITHIN_S
            total += seconds / 3600 * (extras_usd_per_hour + (0.0 if free else self._usd_per_hour(one)))
        return total

    def check(self) -> None:
        """Say if the box itself went wrong.

        Raises:
            RunFailed: it did.
        """
        if self._failed is not None:
            raise RunFailed(f"the box failed: {self._failed}", hint=f"look into {self.folder}")

    def _usd_per_hour(self, instance: Instance) -> float:
        price = self.catalog.price(instance.type, "spot" if instance.spot else "on-demand")
        assert price is not None
        return price.usd_per_hour

    def _start_cloud(self, stack: ExitStack, switch: str) -> None:
        prices = {
            name: price.usd_per_hour
            for name in self.catalog.instance_types
            if (price := self.catalog.price(name, "spot") or self.catalog.price(name, "on-demand")) is not None
        }
        told = self.folder / "prices.json"
        told.write_text(json.dumps({"region": self.catalog.region, "usd_per_hour": prices}), encoding="utf-8")
        program = [sys.executable, "-m", "benchmarks.box.cloud", str(_API_PORT), str(told)]
        inside = iproute.command("ip", ["netns", "exec", switch, *program])
        environment = {
            **os.environ,
            "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
            "MOTO_EC2_LOAD_DEFAULT_AMIS": "false",  # a thousand images that nobody boots
        }
        with (self.folder / "cloud.log").open("wb") as log:
            cloud = subprocess.Popen(
                inside, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment
            )
        stack.callback(cloud.wait)
        stack.callback(cloud.kill)
        self._cloud = cloud

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _READY_WITHIN_S
        while True:
            try:
                self._ask("machines")
                return
            except (urllib.error.URLError, OSError):
                if time.monotonic() > deadline or self._cloud.poll() is not None:
                    raise RunFailed("moto does not answer.", hint=f"read {self.folder / 'cloud.log'}") from None
                time.sleep(0.1)

    def _keep(self) -> None:
        """Bring machines in step with moto's record until the box closes."""
        while not self._closing.wait(_TURN_S):
            try:
                for one in self.instances():
                    self._follow(one)
            except (OSError, RunFailed) as error:
                if not self._closing.is_set():
                    self._failed = str(error)
                return

    def _follow(self, instance: Instance) -> None:
        with self._lock:
            known = self.machines.get(instance.id)
            if known is None and instance.runs:
                self._boot(instance)
            elif known is not None and known.instance.runs and not instance.runs:
                self._tell(f"{self._name(known)} has ended ({instance.reason})")
                known.instance = instance
                known.power_off()
            elif known is not None and known.instance.runs and time.time() >= self._ends_s.get(instance.id, 1e300):
                self._end(instance.id)

    def _boot(self, instance: Instance) -> None:
        place = len(self.machines)
        if place >= self.places:
            raise RunFailed(f"the box has room for {self.places} machines.", hint="make it larger")
        machine = Machine(instance=instance, network=self._network, place=place, folder=self.folder / instance.id)
        self.machines[instance.id] = machine
        rate = 8 * self.catalog.instance_type(instance.type).network_bytes_per_s
        machine.boot(endpoint=f"http://{_API_ADDRESS}:{_API_PORT}", programs=self._programs, rate_bits_per_s=rate)
        self._tell(f"{self._name(machine)} boots as {instance.address}")

    def _end(self, instance_id: str) -> None:
        code, message = TAKEN
        self._ask("end", {"id": instance_id, "code": code, "message": message})

    def _name(self, machine: Machine) -> str:
        return f"{machine.instance.id} ({machine.instance.type})"

    def _tell(self, what: str) -> None:
        self.happenings.append(Happening(time_s=time.time(), what=what))

    def _ask(self, what: str, body: Mapping[str, object] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(urllib.request.Request(f"{self._url}/box/{what}", data), timeout=30) as answer:
            return json.load(answer)
