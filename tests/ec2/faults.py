"""Every call of a run's life, and what can go wrong at each: refused with an error of the table, or a dead process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from hetopt.backends.ec2.renter import calls, removal
from hetopt.backends.ec2.renter.edge import Made, Retrying
from hetopt.backends.ec2.renter.launcher import BUNDLE_FILE, PLAN_OBJECT, Ec2Launcher, fleets_of
from hetopt.backends.ec2.renter.order import ORDER_FILE, Order
from hetopt.backends.ec2.renter.removal import Found, Remover
from hetopt.backends.ec2.renter.request import TABLE, Answer, ApiRefused, Edge, Request
from hetopt.optimizer.plan import Plan
from tests.ec2.conftest import ACCOUNT, REGION, Patience

MakeOrder = Callable[[Edge], Order]


class Killed(BaseException):
    """What kill -9 is from inside: nothing that comes after happens, and no handler runs to any effect."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing that goes wrong.

    Attributes:
        call: at which call of the run's life, from 0; how often it is tried does not count.
        kind: a code of the API, or the moment of the kill. ``lost``: it is carried out, and the answer never arrives.
    """

    call: int
    kind: str
    step: str = ""

    @property
    def is_kill(self) -> bool:
        return self.kind in ("killed before", "killed after")

    def __str__(self) -> str:
        return f"{self.call} {self.step}: {self.kind}"


@dataclass
class Faulty:
    """Passes calls on, but for one. The same request again is the same call: an error lasts."""

    inner: Edge
    fault: Fault | None
    steps: list[str] = field(default_factory=list)
    dead: bool = False
    _last: Request | None = None

    def __call__(self, request: Request) -> Answer:
        if self.dead:
            raise Killed
        if request != self._last:
            self._last = request
            self.steps.append(f"{request.api_name} {request.step}")
        fault = self.fault
        if fault is None or len(self.steps) - 1 != fault.call:
            return self.inner(request)
        match fault.kind:
            case "killed before":
                self.dead = True
                raise Killed
            case "killed after":
                self.dead = True
                with suppress(ApiRefused):  # whatever the answer was
                    self.inner(request)
                raise Killed
            case "lost":
                self.inner(request)
                raise ApiRefused(request, "ReadTimeoutError", "the answer was lost")
        raise ApiRefused(request, fault.kind, "as the test wants it")


def codes() -> list[str]:
    """One code of each row of the table, and all that mean that there is no capacity."""
    first = [row.codes[0].replace("*", "").replace("?", "0") for row in TABLE]
    return list(dict.fromkeys([*first, *TABLE[0].codes, "lost"]))


@dataclass(frozen=True, kw_only=True)
class Life:
    """A run from its order to its end, on a cloud that fails once."""

    cloud: Edge
    plan: Plan
    bundle: bytes
    folder: Path
    patience: Patience
    make_order: MakeOrder

    def live(self, edge: Edge) -> None:
        """Order, launch, look twice, stop."""
        order = self.make_order(edge)
        order.save(self.folder / ORDER_FILE)
        self.plan.save(self.folder / PLAN_OBJECT)
        (self.folder / BUNDLE_FILE).write_bytes(self.bundle)
        launcher = self.launcher(edge)
        handle = launcher.start(self.plan.run, self.folder, {})
        event = b'{"event": "training_started", "time_s": 1.0, "step": 0}\n'
        self.cloud(calls.put_object(order, "node", f"{order.prefix}/events/{0:015d}.jsonl", event, "by a machine"))
        for _ in range(2):
            self.patience.now_s += 60
            launcher.poll(handle)
        launcher.stop(handle)

    def launcher(self, edge: Edge) -> Ec2Launcher:
        retrying = Retrying(inner=edge, sleep=self.patience.sleep, random=Random(0))
        return Ec2Launcher(
            home=self.folder.parent,
            inner=retrying,
            clock=self.patience.clock,
            sleep=self.patience.sleep,
            patience_s=3.0,  # nobody is on moto's machines who would end them
        )

    def collect(self) -> int:
        """What `hetopt gc --on ec2 --remove` does once the machines' time is up; how many things it found."""
        runs = removal.local_runs([self.folder])
        removal.settle(runs, self.patience.now_s, self.patience.sleep)
        order = Order.load(self.folder / ORDER_FILE) if (self.folder / ORDER_FILE).exists() else None
        if order is not None:
            self.patience.now_s = max(self.patience.now_s, order.created_s + 10 * order.lifetime_s)
        remover = Remover(edge=self.cloud, sleep=self.patience.sleep, made=Made(ids=tuple(fleets_of(self.folder))))
        found = remover.find()
        now_s, place = self.patience.now_s, (self.cloud, REGION, ACCOUNT)
        mine = [one for one in found if _is_over(runs, one) or removal.why_leave(*place, [one], now_s) is None]
        for run_id in {one.run_id for one in mine}:
            remover.remove_run(run_id)
        return len(mine)


def _is_over(runs: Mapping[str, removal.LocalRun], found: Found) -> bool:
    return found.run_id in runs and runs[found.run_id].over
