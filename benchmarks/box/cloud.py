"""moto's server with what it lacks for machines that live: pools that run dry, prices, why a machine ended, and when.

``python -m benchmarks.box.cloud PORT PRICES.json``. The API is moto's. Beside it there is ``/box``, which is
part of no API: what the box's machines and its director say and ask there, hypervisors know by themselves.

    GET  /box/machines   every instance with its type, zone, address, user data, state, beginning and end
    POST /box/end        {"id", "code", "message"}: it ends, for the reason that EC2 would give
    POST /box/capacity   {"exhausted": [type, ...]}: from now on these pools have nothing to give
"""

from __future__ import annotations

import datetime
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.core.responses import ActionResult
from moto.ec2.models import ec2_backends
from moto.ec2.models.fleets import Fleet
from moto.ec2.models.instances import Instance, StateReason
from moto.ec2.models.spot_requests import SpotFleetLaunchSpec
from moto.ec2.responses.fleets import Fleets
from moto.ec2.responses.spot_instances import SpotInstances
from moto.iam.access_control import PermissionResult
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from moto.s3.models import FakeBucket
from werkzeug.serving import run_simple

from benchmarks.box import manners, schedules
from hetopt.backends.ec2 import facts
from hetopt.backends.ec2.renter.policies import Asked, concerns, statements

Environment = dict[str, Any]
Start = Callable[..., Any]

NEUTRAL = PermissionResult.NEUTRAL
SHORT = "InsufficientInstanceCapacity"
_PRODUCT = "Linux/UNIX"


class Pools:
    """What each type costs on the spot market, which types nobody can have, and when each instance ended.

    Args:
        usd_per_hour: by type; the same in every zone.
    """

    def __init__(self, usd_per_hour: Mapping[str, float]) -> None:
        self.usd_per_hour = dict(usd_per_hour)
        self.exhausted: set[str] = set()
        self.ended_s: dict[str, float] = {}


def fill_gaps(pools: Pools) -> None:
    """Teach this process's moto what it leaves out."""

    def counts(self: Fleet, weight_to_add: float) -> tuple[dict[SpotFleetLaunchSpec, int], float]:
        """The cheapest override whose pool has something to give; where none has, nothing."""
        able = [spec for spec in self.launch_specs if spec.instance_type not in pools.exhausted]
        if not able:
            return {}, 0.0
        cheapest = min(able, key=lambda spec: pools.usd_per_hour.get(spec.instance_type, float("inf")))
        return {cheapest: int(weight_to_add)}, weight_to_add

    plain_answer, plain_end = Fleets.create_fleet, Instance.terminate

    def create_fleet(self: Fleets) -> ActionResult:
        told: dict[str, Any] = dict(plain_answer(self).result)  # type: ignore[call-overload]  # moto's gap
        if not told.get("Instances"):
            told["Errors"] = [{"ErrorCode": SHORT, "ErrorMessage": "the box's pool is exhausted"}]
        return ActionResult(told)

    def describe_spot_price_history(self: SpotInstances) -> ActionResult:
        offered = self.ec2_backend.describe_spot_price_history(self._get_param("InstanceTypes", []), {})
        return ActionResult({"SpotPriceHistory": [_price(pools, one) for one in offered]})

    def get_permission(self: FakeBucket, action: str, resource: str) -> Any:
        """Decide as the doctor does: for moto alone, the bucket's 'TLS only' would shut everybody out."""
        asked = Asked(action=action, resource=resource, context=facts.EVERY_CALL_OF_S3)
        told = statements(json.loads(self.policy)) if self.policy is not None else []
        denied = any(one["Effect"] == "Deny" and concerns(one, asked) is not False for one in told)
        return PermissionResult.DENIED if denied else NEUTRAL

    def terminate(self: Instance) -> Any:
        pools.ended_s.setdefault(self.id, time.time())
        reason = self.state_reason, self._reason
        before = plain_end(self)
        if before.name == "terminated":
            self.state_reason, self._reason = reason  # a machine ends once
        return before

    # moto takes no subclasses of its records from elsewhere.
    Fleet.get_launch_spec_counts = counts  # type: ignore[method-assign]  # on purpose, here and below
    Fleets.create_fleet = create_fleet  # type: ignore[method-assign]
    SpotInstances.describe_spot_price_history = describe_spot_price_history  # type: ignore[method-assign]
    Instance.terminate = terminate  # type: ignore[method-assign]
    FakeBucket.get_permission = get_permission  # type: ignore[method-assign]


def _price(pools: Pools, offered: Mapping[str, str]) -> dict[str, str]:
    now = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime())
    return {
        "InstanceType": offered["InstanceType"],
        "ProductDescription": _PRODUCT,
        "SpotPrice": f"{pools.usd_per_hour[offered['InstanceType']]:.6f}",
        "AvailabilityZone": offered["Location"],
        "Timestamp": now,
    }


class BesideMoto:
    """A WSGI application: ``/box`` is answered here, everything else by moto."""

    def __init__(self, moto: Callable[[Environment, Start], Iterable[bytes]], pools: Pools, region: str) -> None:
        self._moto, self._pools, self._region = moto, pools, region

    def __call__(self, environment: Environment, start: Start) -> Iterable[bytes]:
        path = environment.get("PATH_INFO", "")
        if not path.startswith("/box/"):
            return self._moto(environment, start)
        length = int(environment.get("CONTENT_LENGTH") or 0)
        asked = json.loads(environment["wsgi.input"].read(length)) if length else {}
        status, told = self._answer(path, asked)
        start(status, [("Content-Type", "application/json")])
        return [json.dumps(told).encode()]

    def _answer(self, path: str, asked: Mapping[str, Any]) -> tuple[str, object]:
        match path:
            case "/box/machines":
                schedules.carry_out(time.time())
                return "200 OK", [_told(one, self._pools.ended_s) for one in self._instances()]
            case "/box/capacity":
                self._pools.exhausted = set(asked["exhausted"])
                return "200 OK", sorted(self._pools.exhausted)
            case "/box/end":
                return "200 OK", [self._end(one, asked) for one in self._instances() if one.id == asked["id"]]
        return "404 Not Found", None

    def _instances(self) -> list[Instance]:
        instances: list[Instance] = ec2_backends[DEFAULT_ACCOUNT_ID][self._region].all_instances()
        return instances

    def _end(self, instance: Instance, asked: Mapping[str, Any]) -> str:
        if instance._state.name != "terminated":
            instance.terminate()
            instance.state_reason = StateReason(f"{asked['code']}: {asked['message']}", asked["code"])
        return str(instance.id)


def _told(instance: Instance, ended_s: Mapping[str, float]) -> dict[str, object]:
    data = instance.user_data
    begun = instance.launch_time if instance.launch_time.tzinfo else instance.launch_time.replace(tzinfo=datetime.UTC)
    return {
        "id": instance.id,
        "type": instance.instance_type,
        "spot": instance.lifecycle == "spot",
        "zone": str(instance.placement.zone),
        "address": None if instance._state.name == "terminated" else instance.private_ip,
        "user_data": data if isinstance(data, str) else data.decode() if data is not None else "",
        "state": instance._state.name,
        "reason": instance.state_reason.code,
        "begun_s": begun.timestamp(),
        "ended_s": ended_s.get(instance.id),
    }


def main(arguments: list[str]) -> None:
    """Serve until killed."""
    port, prices = arguments
    told = json.loads(Path(prices).read_text(encoding="utf-8"))
    pools = Pools(told["usd_per_hour"])
    manners.teach()
    schedules.teach()
    fill_gaps(pools)
    moto = DomainDispatcherApplication(create_backend_app)
    application = BesideMoto(moto, pools, told["region"])
    run_simple("0.0.0.0", int(port), application, threaded=True, request_handler=MotoRequestHandler)


if __name__ == "__main__":
    main(sys.argv[1:])
