"""A moto server that is as unkind as EC2: ``python -m benchmarks.box.unkind ADDRESS PORT``. The API is moto's.

Beside it there is ``POST /unkind``, which is part of no API: a test says there how unkind the account is to be. Moods
hold together, until ``/moto-api/reset``; what is drawn among them is drawn by the seed that was said.

    {"lag_s": 5}                    what a call has just made is in no list, and known by no id, for so many seconds
    {"tag_lag_s": 5}                lists have it without its tags, and no filter finds it by them
    {"ending_s": 30}                groups of machines are in use for so long after the machines have ended
    {"short": {"c7i.large": 1}}     such a fleet gets so many machines and InsufficientInstanceCapacity beside them
    {"exhausted": ["c7g.xlarge"]}   such a fleet gets nothing
    {"pools": {"us-east-1a/c7i.large": [[0, 4, 0.05], ...]}}    from when on so many machines can run, and at what price
    {"clock_s": 1800000000}         the account's clock stands still there
    {"advance_s": 60}               the account's clock, for tests that do not really wait
    {"shut_down": ["i-1"]}          these end as machines do that shut themselves down, such as after a boot that failed
    {"quotas": {"L-3819A6DF": 8}}   what the account was granted of EC2's quotas; moto itself knows those of VPC alone
    {"user_id": "AROA:one"}         who calls, as GetCallerIdentity tells it, with {"arn": ...}
    {"refuses": {"RunInstances": ["UnauthorizedOperation", "text"]}}    what is answered to such calls, tried or made;
                                    of S3 by the method; a third entry is the status, and 200 puts it into the answer
    {"refuses_at": [["CreateFleet", "Unsupported", 100, 160]]}  the same between two moments
    {"seed": 1, "throttled": 0.1, "faulty": 0.05, "cut": 0.02}  of calls, so many are refused as too many; answered
                                    with a fault of the server, or not at all: half of both after they were carried out
    {"expired": [[100, 160]]}       when credentials do not hold
    {"policy": {...}}               what IAM allows whoever calls; {"forbidden": [...]} what the organisation denies
    {"lives": {...}}                machines boot, train, and come to grief; see `benchmarks.box.bodies`
    {"subnets": "none"}             the default network was deleted
    {"kinds": {"us-east-1b": "local-zone"}}     zones that are none of the region's own
    {"profile": "hetopt-node"}      there is an instance profile of that name, with its role
    {"end_role": true}              and the role in which the scheduler ends machines

``GET /unkind`` tells the account's clock, and every machine that there was.

Seconds of lag: the user guide, "eventual consistency in the EC2 API", gives no number; others report up to a minute.
Machines beside a refusal: osbuild/osbuild-composer#4507. (Read 2026-11-26.)
"""

from __future__ import annotations

import datetime
import io
import json
import math
import random
import re
import socket
import sys
import time
import urllib.parse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from typing import Any
from xml.etree import ElementTree

from moto import backends
from moto.core import responses
from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.core.responses import ActionResult
from moto.core.utils import utcnow as plain_now
from moto.ec2.models import ec2_backends, instances as moto_instances
from moto.ec2.models.fleets import Fleet
from moto.ec2.models.instances import Instance, StateReason
from moto.ec2.models.spot_requests import SpotFleetLaunchSpec
from moto.ec2.responses.availability_zones_and_regions import AvailabilityZonesAndRegions
from moto.ec2.responses.fleets import Fleets
from moto.ec2.responses.spot_instances import SpotInstances
from moto.ec2.responses.subnets import Subnets
from moto.iam.access_control import PermissionResult
from moto.iam.models import iam_backends
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from moto.s3 import models as moto_s3
from moto.scheduler.models import scheduler_backends
from moto.servicequotas.exceptions import NoSuchResource
from moto.servicequotas.responses import ServiceQuotasResponse
from moto.sts.responses import TokenResponse
from werkzeug.serving import run_simple

from benchmarks.box import gate, manners, schedules
from benchmarks.box.bodies import Bodies, Lives
from benchmarks.box.gate import Call, Gate
from hetopt.backends.ec2.renter import doctor
from hetopt.backends.ec2.renter.calls import END_ROLE, NAMED
from hetopt.backends.ec2.renter.order import PriceChange
from hetopt.backends.ec2.renter.ordering import Identity

Environment = dict[str, Any]
Start = Callable[..., Any]

FIVE_AT_FIRST = ("L-34B43A08", "L-1216C47A")
"""Quotas of five vCPUs on a new account; of the others it has none."""

SHORT = "InsufficientInstanceCapacity"
FORGOTTEN_S = 3600.0
"""'Terminated instances remain visible for approximately one hour' (EC2 API reference, DescribeInstances)."""
REGION = "us-east-1"
_IDS = re.compile(rb"\b((?:i|fleet|lt|sg|vol)-[0-9a-f][0-9a-f-]{7,})\b")
_NAMES = ("instanceId", "fleetId", "launchTemplateId", "groupId", "resourceId", "volumeId")
_TAGGED = frozenset({"tag-key", "tag-value"})
_UNKNOWN = {
    "TerminateInstances": "InvalidInstanceID.NotFound",
    "DeleteLaunchTemplate": "InvalidLaunchTemplateId.NotFound",
    "DeleteSecurityGroup": "InvalidGroup.NotFound",
    "DescribeInstances": "InvalidInstanceID.NotFound",
}


class Temper:
    """The moods of the simulated account: lags, faults, capacities, refusals and its clock."""

    def __init__(self) -> None:
        self.born: dict[str, float] = {}
        self.ahead_s = 0.0
        self.ended_s: dict[str, float] = {}
        self.gate = Gate(tags_of=_tags_of, policy_of=_policy_of)
        self.calm()

    def calm(self) -> None:
        """Reset the account to moto's kindness, but for its manners; its clock is everybody's.

        What it remembers of moments, tokens and machines is forgotten, too; quotas are none.
        """
        self.ahead_s = 0.0
        self.born.clear()
        self.ended_s.clear()
        self.lag_s = self.tag_lag_s = self.ending_s = 0.0
        self.clock_s: float | None = None
        self.tokens: dict[str, tuple[bytes, bytes, list[Any]]] = {}
        self.pools: dict[str, list[tuple[float, int, float]]] = {}
        self.asked_usd: dict[str, float] = {}
        self.highest_usd: dict[str, float] = {}
        self.drawn = random.Random(0)
        self.throttled = self.faulty = self.cut = 0.0
        self.expired: list[tuple[float, float]] = []
        self.refuses_at: list[tuple[str, str, float, float]] = []
        self.bodies: Bodies | None = None
        self.gate.forget()
        self.short: dict[str, int] = {}
        self.exhausted: set[str] = set()
        self.caller: dict[str, str] = {}
        self.quotas: dict[str, float] = {}
        self.refuses: dict[str, list[Any]] = {}
        self.subnets = "public"
        self.kinds: dict[str, str] = {}

    def now_s(self) -> float:
        return (time.time() if self.clock_s is None else self.clock_s) + self.ahead_s

    @property
    def who(self) -> Identity:
        """The identity of whoever calls."""
        arn = self.caller.get("arn", f"arn:aws:sts::{DEFAULT_ACCOUNT_ID}:user/moto")
        return Identity(
            account_id=DEFAULT_ACCOUNT_ID, arn=arn, user_id=self.caller.get("user_id", "AKIAIOSFODNN7EXAMPLE")
        )

    def hear(self, moods: dict[str, Any]) -> None:
        """Set the moods that are named, and leave the others.

        Then advance the clock, end machines and make roles as asked.
        """
        self.exhausted = set(moods.get("exhausted", self.exhausted))
        for name in _PLAIN:
            setattr(self, name, moods.get(name, getattr(self, name)))
        if "clock_s" in moods:
            self.ahead_s, self.clock_s = 0.0, moods["clock_s"]
        if "seed" in moods:
            self.drawn = random.Random(moods["seed"])
        if "policy" in moods:
            self.gate.policies = [moods["policy"]]
        self.gate.forbidden = frozenset(moods.get("forbidden", self.gate.forbidden))
        if "lives" in moods:
            self.bodies = Bodies(
                lives=Lives(**moods["lives"]), capacity=self.capacity, is_outbid=self.is_outbid, region=REGION
            )
        if "advance_s" in moods:
            self.advance(moods["advance_s"])
        self.caller |= {key: moods[key] for key in ("user_id", "arn") if key in moods}
        self.shut_down(moods.get("shut_down", []))
        if moods.get("end_role"):
            make_end_role()
        if "profile" in moods:
            iam = iam_backends[DEFAULT_ACCOUNT_ID]["aws"]
            iam.create_role(moods["profile"], "{}", "/", None, "", [], "3600")
            iam.create_instance_profile(moods["profile"], "/", [moods["profile"]], [])

    def advance(self, seconds: float) -> None:
        """Advance the clock, and let machines and schedules act meanwhile.

        At the end the clock stands at exactly that many seconds later; what happens on the way sees its own moment.
        """
        if self.bodies is None:
            self.ahead_s += seconds
            schedules.carry_out(self.now_s())
            return
        until_s = self.now_s() + seconds
        while (left_s := until_s - self.now_s()) > 1e-6:
            self.ahead_s += min(left_s, self.bodies.TURN_S, max(0.01, self.bodies.due_s() - self.now_s()))
            schedules.carry_out(self.now_s())
            if not self.bodies.turn(self.now_s()):
                self.ahead_s += until_s - self.now_s()  # nobody is there for whom anything could happen

    def pool(self, zone: str, instance_type: str) -> tuple[int, float] | None:
        """Return the number of machines that a pool can have now, and its price; None where nobody said."""
        steps = self.pools.get(f"{zone}/{instance_type}")
        if steps is None:
            return None
        _, machines, usd = [step for step in steps if step[0] <= self.now_s()][-1]
        return machines, usd

    def capacity(self, zone: str, instance_type: str) -> int | None:
        """Return the number of machines of a type that can run in a zone now; None: any number."""
        pool = self.pool(zone, instance_type)
        return None if pool is None else pool[0]

    def is_outbid(self, machine: Instance) -> bool:
        """Return whether a spot machine's pool costs more now than the highest price that it was asked for with."""
        pool = self.pool(str(machine.placement.zone), machine.instance_type)
        return pool is not None and pool[1] > self.highest_usd.get(machine.id, math.inf)

    def prices_since(self, types: Sequence[str], from_s: float) -> list[PriceChange]:
        """Return the price changes of pools since a moment and up to now, beginning with the prices at that moment."""
        changes = []
        for pool, steps in self.pools.items():
            zone, _, name = pool.partition("/")
            before = [at for at, _, _ in steps if at <= from_s]
            changes += [
                PriceChange(zone=zone, instance_type=name, at_s=at, usd_per_hour=usd)
                for at, _, usd in steps
                if name in types and (not before or at >= before[-1]) and at <= self.now_s()
            ]
        return sorted(changes, key=lambda change: change.at_s)

    def allowed(self, zone: str, instance_type: str) -> int | None:
        """Return the number of further machines of a type that a fleet can have in a zone; None: any number."""
        most = self.capacity(zone, instance_type)
        mine = (
            machine
            for machine in _instances()
            if machine.instance_type == instance_type and str(machine.placement.zone) == zone
        )
        return None if most is None else max(0, most - sum(machine.state != "terminated" for machine in mine))

    @staticmethod
    def shut_down(ids: list[str]) -> None:
        """End the named machines as a shutdown of their own; moto would say that a call ended them.

        Ids that no region knows are ignored.
        """
        for backend in ec2_backends[DEFAULT_ACCOUNT_ID].values():
            for machine in backend.all_instances():
                if machine.id in ids:
                    machine.terminate()
                    code = "Client.InstanceInitiatedShutdown"
                    machine.state_reason = StateReason(f"{code}: Instance initiated shutdown", code)

    def is_young(self, id_: str) -> bool:
        return id_ in self.born and self.now_s() < self.born[id_] + self.lag_s

    def is_bare(self, id_: str) -> bool:
        """Return whether the tags of a resource are not seen yet."""
        return id_ in self.born and self.now_s() < self.born[id_] + self.tag_lag_s

    def is_forgotten(self, id_: str) -> bool:
        return self.now_s() > self.ended_s.get(id_, float("inf")) + FORGOTTEN_S

    def truth(self) -> dict[str, Any]:
        """Return the true state of the account, which its API calls do not show."""
        backend = ec2_backends[DEFAULT_ACCOUNT_ID][REGION]
        return {
            "now_s": self.now_s(),
            "allowed": {name: asdict(question) for name, question in sorted(self.gate.allowed.items())},
            "refused": [asdict(question) for question in self.gate.refused],
            "questions": self.gate.questions,
            "machines": [
                {
                    "id": machine.id,
                    "type": machine.instance_type,
                    "zone": str(machine.placement.zone),
                    "spot": machine.lifecycle == "spot",
                    "highest_usd": self.highest_usd.get(machine.id, math.inf),
                    "state": machine.state,
                    "reason": machine.state_reason.code,
                    "begun_s": ({} if self.bodies is None else self.bodies.begun_s).get(
                        machine.id, machine.launch_time.replace(tzinfo=datetime.UTC).timestamp()
                    ),
                    "ended_s": self.ended_s.get(machine.id),
                }
                for machine in _instances()
            ],
            "others": [
                *(id_ for id_ in backend.tags if id_.startswith(("sg-", "lt-")) and _is_there(backend, id_)),
                *(name for name in scheduler_backends[DEFAULT_ACCOUNT_ID][REGION].schedule_groups if name != "default"),
            ],
            "happened": [] if self.bodies is None else self.bodies.happened,
        }


_PLAIN = (
    *("lag_s", "tag_lag_s", "ending_s", "short", "pools", "quotas"),
    *("refuses", "refuses_at"),
    *("throttled", "faulty", "cut", "expired", "subnets", "kinds"),
)


def make_end_role() -> None:
    """Make the role that ends machines, as an administrator makes it by what `hetopt setup` prints."""
    iam, account_id = iam_backends[DEFAULT_ACCOUNT_ID]["aws"], DEFAULT_ACCOUNT_ID
    trust = json.dumps(doctor.policy("end_trust", account=account_id))
    iam.create_role(END_ROLE, trust, "/", None, "", [], "3600")
    iam.put_role_policy(END_ROLE, "hetopt", json.dumps(doctor.policy("end_policy", account=account_id)))


def _tags_of(id_: str) -> Mapping[str, str]:
    """Return the tags of a resource by its id; of a group of schedules by its name."""
    if not id_.startswith(NAMED):
        return ec2_backends[DEFAULT_ACCOUNT_ID][REGION].tags.get(id_, {})
    group = scheduler_backends[DEFAULT_ACCOUNT_ID][REGION].schedule_groups.get(id_)
    if group is None:
        return {}
    listed = scheduler_backends[DEFAULT_ACCOUNT_ID][REGION].list_tags_for_resource(group.arn)["Tags"]
    return {tag["Key"]: tag["Value"] for tag in listed}


def _policy_of(bucket: str) -> Mapping[str, Any] | None:
    """Return the policy that a bucket's owner has set; None where there is none."""
    stored = moto_s3.s3_backends[DEFAULT_ACCOUNT_ID]["aws"].buckets.get(bucket)
    return None if stored is None or stored.policy is None else json.loads(stored.policy)


def _instances() -> list[Instance]:
    return list(ec2_backends[DEFAULT_ACCOUNT_ID][REGION].all_instances())


def _is_there(backend: Any, id_: str) -> bool:
    groups = (group for network in backend.groups.values() for group in network)
    return id_ in backend.launch_templates or id_ in groups


def teach(temper: Temper) -> None:
    """Patch this process's moto to grant fewer machines, and to tell who calls, as the test says."""
    plain_fleet = Fleets.create_fleet

    def counts(self: Fleet, weight_to_add: float) -> tuple[dict[SpotFleetLaunchSpec, int], float]:
        """Return what a fleet gets: nothing, as many as the type is short of, or all from the first that can be had."""
        able = [spec for spec in self.launch_specs if spec.instance_type not in temper.exhausted]
        if temper.pools:
            able = [spec for spec in able if fits(spec, weight_to_add)]
        if not able:
            return {}, 0.0
        granted = temper.short.get(able[0].instance_type)
        if granted is not None:
            return {able[0]: granted}, float(granted)
        # The first that can be had; moto itself would take whatever is named first.
        return {able[0]: int(weight_to_add)}, weight_to_add

    def fits(spec: SpotFleetLaunchSpec, machines: float) -> bool:
        """Return whether a pool can have all machines of a fleet.

        'If the minimum target capacity is not reached, no instances are launched' (API reference)."""
        zone = str(ec2_backends[DEFAULT_ACCOUNT_ID][REGION].get_subnet(str(spec.subnet_id)).availability_zone)
        allowed, (_, usd) = temper.allowed(zone, spec.instance_type), temper.pool(zone, spec.instance_type) or (0, 0.0)
        return usd <= temper.asked_usd.get(spec.instance_type, math.inf) and (allowed is None or allowed >= machines)

    def create_fleet(self: Fleets) -> ActionResult:
        """Create a fleet, remember its highest prices, and tell the error of missing machines beside those granted."""
        market = str(self._get_param("TargetCapacitySpecification").get("DefaultTargetCapacityType", "on-demand"))
        overrides = [each for config in self._get_param("LaunchTemplateConfigs") for each in config["Overrides"]]
        temper.asked_usd = {each["InstanceType"]: float(each.get("MaxPrice", math.inf)) for each in overrides}
        created: dict[str, Any] = dict(plain_fleet(self).result)  # type: ignore[call-overload]
        for group in created.get("Instances") or ():
            temper.highest_usd |= dict.fromkeys(group["InstanceIds"], temper.asked_usd[group["InstanceType"]])
        wanted = int(self._get_param("TargetCapacitySpecification")["TotalTargetCapacity"])
        if len(created.get("Instances") or ()) < wanted:
            created["Errors"] = [{"ErrorCode": SHORT, "ErrorMessage": "There is none for that.", "Lifecycle": market}]
        return ActionResult(created)

    def get_service_quota(self: ServiceQuotasResponse) -> str:
        """Answer with a quota of the moods.

        Raise `NoSuchResource` where none is set, as for one that was never raised.
        """
        code = json.loads(self.body)["QuotaCode"]
        if code not in temper.quotas:
            raise NoSuchResource
        return json.dumps({"Quota": {"ServiceCode": "ec2", "QuotaCode": code, "Value": temper.quotas[code]}})

    def get_aws_default_service_quota(self: ServiceQuotasResponse) -> str:
        code = json.loads(self.body)["QuotaCode"]
        return json.dumps({"Quota": {"QuotaCode": code, "Value": 5.0 if code in FIVE_AT_FIRST else 0.0}})

    ServiceQuotasResponse.get_service_quota = get_service_quota  # type: ignore[method-assign]
    ServiceQuotasResponse.get_aws_default_service_quota = get_aws_default_service_quota  # type: ignore[attr-defined]
    plain_caller = TokenResponse.get_caller_identity

    def get_caller_identity(self: TokenResponse) -> Any:
        """Answer with the caller of the moods, else as moto does."""
        plain = plain_caller(self)
        if not temper.caller:
            return plain
        identity = dict(plain.result)  # type: ignore[call-overload]  # moto's gap
        identity |= {
            name: temper.caller[key] for key, name in (("user_id", "UserId"), ("arn", "Arn")) if key in temper.caller
        }
        return ActionResult(identity)

    plain_end = Instance.terminate

    def terminate(self: Instance) -> Any:
        """End a machine and note when; one that has ended keeps its reason."""
        reason = self.state_reason, self._reason
        before = plain_end(self)
        if before.name == "terminated":
            self.state_reason, self._reason = reason  # a machine ends once
        else:
            temper.ended_s[self.id] = temper.now_s()
        return before

    def describe_spot_price_history(self: SpotInstances) -> ActionResult:
        """Answer with the prices of the pools; without pools as moto does."""
        if not temper.pools:
            return plain_prices(self)
        types, from_s = self._get_param("InstanceTypes", []), _moment(self._get_param("StartTime"))
        history = [
            {
                "AvailabilityZone": change.zone,
                "InstanceType": change.instance_type,
                "ProductDescription": "Linux/UNIX",
                "SpotPrice": f"{change.usd_per_hour:.6f}",
                "Timestamp": datetime.datetime.fromtimestamp(change.at_s, datetime.UTC).strftime(
                    "%Y-%m-%dT%H:%M:%S.000Z"
                ),
            }
            for change in temper.prices_since(types, from_s)
        ]
        return ActionResult({"SpotPriceHistory": history})

    plain_prices = SpotInstances.describe_spot_price_history

    def utcnow() -> datetime.datetime:
        """Return the time on the test's clock, or, where it has none, on the machine's; in UTC, without a time zone."""
        if temper.clock_s is None:
            return plain_now()
        return datetime.datetime.fromtimestamp(temper.now_s(), datetime.UTC).replace(tzinfo=None)

    moto_instances.utcnow = moto_s3.utcnow = utcnow  # type: ignore[attr-defined]
    Instance.terminate = terminate  # type: ignore[method-assign]
    SpotInstances.describe_spot_price_history = describe_spot_price_history  # type: ignore[method-assign]
    Fleet.get_launch_spec_counts = counts  # type: ignore[method-assign]
    Fleets.create_fleet = create_fleet  # type: ignore[method-assign]
    TokenResponse.get_caller_identity = get_caller_identity  # type: ignore[method-assign]


def teach_the_account(temper: Temper) -> None:
    """Patch this process's moto to have the account's networks and zones, as the test says."""
    plain_subnets = Subnets.describe_subnets
    plain_zones = AvailabilityZonesAndRegions.describe_availability_zones

    def describe_subnets(self: Subnets) -> ActionResult:
        return ActionResult({"Subnets": []}) if temper.subnets == "none" else plain_subnets(self)

    def describe_availability_zones(self: AvailabilityZonesAndRegions) -> ActionResult:
        """Return moto's zones, each of the kind that the test gave it, else an ordinary one."""
        zones = dict(plain_zones(self).result)["AvailabilityZones"]  # type: ignore[call-overload]
        described = [
            {
                "ZoneName": zone.name,
                "ZoneId": zone.zone_id,
                "ZoneType": temper.kinds.get(zone.name, "availability-zone"),
            }
            for zone in zones
        ]
        return ActionResult({"AvailabilityZones": described})

    # moto looks at no condition of a bucket's policy: the gate has decided by then.
    moto_s3.FakeBucket.get_permission = lambda *_: PermissionResult.NEUTRAL  # type: ignore[method-assign]
    Subnets.describe_subnets = describe_subnets  # type: ignore[method-assign]
    AvailabilityZonesAndRegions.describe_availability_zones = describe_availability_zones  # type: ignore[method-assign]


def _moment(moment: Any) -> float:
    """Return a moment of a request as seconds since the epoch, in UTC where it names no zone; None: 0."""
    if moment is None:
        return 0.0
    at = moment if isinstance(moment, datetime.datetime) else datetime.datetime.fromisoformat(str(moment))
    return at.replace(tzinfo=at.tzinfo or datetime.UTC).timestamp()


class Unkind:
    """A WSGI application: moto's, behind an account's moods."""

    def __init__(self, moto: Callable[[Environment, Start], Iterable[bytes]], temper: Temper) -> None:
        self._moto, self._temper = moto, temper

    def __call__(self, environment: Environment, start: Start) -> Iterable[bytes]:
        """Answer a request: by `/unkind` the moods, else as moto does, unless it is refused or a mishap befalls it.

        In half of the mishaps the call is carried out, and only its answer is lost.

        Raises:
            ConnectionResetError: a mishap cuts the connection.
        """
        path = environment.get("PATH_INFO", "")
        if "HTTP_TRANSFER_ENCODING" in environment:
            return self._moto(environment, start)  # large objects, in pieces
        body = environment["wsgi.input"].read(int(environment.get("CONTENT_LENGTH") or 0))
        if path == "/unkind":
            if environment["REQUEST_METHOD"] == "GET":
                answer = json.dumps(self._temper.truth()).encode()
            else:
                self._temper.hear(json.loads(body))
                answer = json.dumps(self._temper.now_s()).encode()
            start("200 OK", [("Content-Length", str(len(answer)))])
            return [answer]
        if path == "/moto-api/reset":
            self._temper.calm()
        environment["wsgi.input"] = io.BytesIO(body)
        call = Call.read(environment, body)
        if call is None:
            return self._moto(environment, start)
        if (refusal := self._refusal(call)) is not None:
            return refused(start, call, *refusal)
        mishap = self._mishap(call)
        if mishap is None:
            return self._carried_out(call, environment, body, start)
        if self._temper.drawn.random() < 0.5:  # the answer is what is lost
            b"".join(self._carried_out(call, environment, body, lambda *_: lambda data: None))
        if mishap == "cut":
            # Nobody answers: the connection ends.
            environment["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            raise ConnectionResetError
        return refused(start, call, "InternalError", "An internal error has occurred", 500)

    def _refusal(self, call: Call) -> tuple[Any, ...] | None:
        """Return code, text and status of a refusal before anything is done; None where the call is not refused."""
        temper, now_s = self._temper, self._temper.now_s()
        if call.action in temper.refuses:
            return tuple(temper.refuses[call.action])
        for action, code, from_s, until_s in temper.refuses_at:
            if action == call.action and from_s <= now_s < until_s:
                inside = action == "CreateFleet" and code in _INSIDE
                return code, "as the story has it", 200 if inside else 503 if code in _THROTTLES else 400
        if any(from_s <= now_s < until_s for from_s, until_s in temper.expired):
            return ("RequestExpired" if call.service == "ec2" else "ExpiredToken"), "The token has expired", 400
        if temper.throttled and temper.drawn.random() < temper.throttled:
            return (
                ("SlowDown", "Reduce your rate", 503)
                if call.service == "s3"
                else (
                    "RequestLimitExceeded",
                    "Request limit exceeded.",
                    503,
                )
            )
        denied = temper.gate.denied(call, temper.who)
        if denied is None:
            return None
        code = "UnauthorizedOperation" if call.service == "ec2" else "AccessDenied"
        by_bucket = "resource-based" if call.service == "s3" and temper.gate.keeps_out(denied) else None
        denier = "service control" if denied.action in temper.gate.forbidden else by_bucket
        return code, gate.denial(denied, temper.who, denier=denier), 403

    def _mishap(self, call: Call) -> str | None:
        """Return the kind of mishap drawn for a call, ``faulty`` or ``cut``; None for none."""
        temper = self._temper
        if not temper.faulty + temper.cut:
            return None
        at = temper.drawn.random()
        return "faulty" if at < temper.faulty else "cut" if at < temper.faulty + temper.cut else None

    def _carried_out(self, call: Call, environment: Environment, body: bytes, start: Start) -> Iterable[bytes]:
        return (
            self._ec2(call.action, environment, body, start)
            if call.service == "ec2"
            else self._moto(environment, start)
        )

    def _ec2(self, action: str, environment: Environment, body: bytes, start: Start) -> Iterable[bytes]:
        """Answer a call of EC2 as EC2 does where moto is kinder.

        Young and forgotten resources are unknown, a group outlives its machines for a while, a client token answers as
        at the first time, and listings lag.
        """
        temper = self._temper
        asked = urllib.parse.parse_qs(body.decode("latin-1"))
        named = [value[0] for key, value in asked.items() if re.match(r"(InstanceId|GroupId|LaunchTemplateId)", key)]
        young = [id_ for id_ in named if temper.is_young(id_)]
        if young and action in _UNKNOWN:
            return _refused(start, _UNKNOWN[action], f"The ID '{young[0]}' does not exist")
        gone = [id_ for id_ in named if temper.is_forgotten(id_)]
        if gone and action in _UNKNOWN:
            return _refused(start, _UNKNOWN[action], f"The ID '{gone[0]}' does not exist")
        last_s = max(temper.ended_s.values(), default=-temper.ending_s)
        if action == "DeleteSecurityGroup" and temper.now_s() < last_s + temper.ending_s:
            return _refused(start, "DependencyViolation", f"resource {named[0]} has a dependent object")
        heard: list[Any] = []

        def hear(status: str, headers: list[tuple[str, str]], _: Any = None) -> Any:
            heard[:] = [status, headers]
            return lambda data: None

        token = asked.get("ClientToken", [""])[0]
        if (known := temper.tokens.get(f"{action} {token}")) is not None:
            if known[0] != body:
                return _refused(start, "IdempotentParameterMismatch", "The token was used with other parameters")
            answer, heard = known[1], list(known[2])
        else:
            answer = b"".join(self._moto(environment, hear))
            if token and heard[0].startswith("200"):
                temper.tokens[f"{action} {token}"] = (body, answer, heard)
        if action.startswith("Create"):
            for id_ in _IDS.findall(answer):
                temper.born.setdefault(id_.decode(), temper.now_s())
        if action.startswith("Describe") and (temper.lag_s or temper.tag_lag_s or temper.ended_s):
            answer = self._as_listed(answer, by_tag=_by_tag(asked))
        status, headers = heard
        start(
            status,
            [(k, v) for k, v in headers if k.lower() != "content-length"] + [("Content-Length", str(len(answer)))],
        )
        return [answer]

    def _as_listed(self, answer: bytes, *, by_tag: bool) -> bytes:
        """Return a listing without resources that are too new or too old, and without tags that are not seen yet."""
        temper = self._temper
        root = ElementTree.fromstring(answer)
        for parent in list(root.iter()):
            for item in list(parent):
                ids = [child.text or "" for child in item if child.tag.rpartition("}")[2] in _NAMES]
                bare = any(map(temper.is_bare, ids))
                if (bare and by_tag) or any(temper.is_young(id_) or temper.is_forgotten(id_) for id_ in ids):
                    parent.remove(item)
                for tags in [child for child in item if child.tag.rpartition("}")[2] == "tagSet"] if bare else ():
                    item.remove(tags)
        return ElementTree.tostring(root)


_THROTTLES = ("RequestLimitExceeded", "Throttling", "ServiceUnavailable", "Unavailable")
_INSIDE = (
    *(SHORT, "InsufficientHostCapacity", "InsufficientReservedInstanceCapacity", "InsufficientCapacity"),
    *("MaxSpotInstanceCountExceeded", "VcpuLimitExceeded", "UnfulfillableCapacity", "InvalidFleetConfig"),
    *("SpotMaxPriceTooLow", "InsufficientInstanceCapacityInAvailabilityZone", "InstanceLimitExceeded"),
)
"""What fleets are refused with inside an answer that is none itself."""


def _by_tag(asked: Mapping[str, list[str]]) -> bool:
    """Return whether a listing is asked for by tags, as DescribeTags always is."""
    names = [value[0] for key, value in asked.items() if re.fullmatch(r"Filter\.\d+\.Name", key)]
    tags = any(name in _TAGGED or name.startswith("tag:") for name in names)
    return tags or asked.get("Action") == ["DescribeTags"]


_EC2 = "<Response><Errors><Error><Code>{code}</Code><Message>{text}</Message></Error></Errors></Response>"
_QUERY = "<ErrorResponse><Error><Type>Sender</Type><Code>{code}</Code><Message>{text}</Message></Error></ErrorResponse>"
_S3 = "<Error><Code>{code}</Code><Message>{text}</Message></Error>"
FLEET_REFUSED = (
    '<CreateFleetResponse xmlns="http://ec2.amazonaws.com/doc/2016-11-15/"><fleetId>fleet-00000000-0000-4000-8000-000000000000</fleetId>'
    "<errorSet><item><errorCode>{code}</errorCode><errorMessage>{text}</errorMessage><lifecycle>spot</lifecycle>"
    "</item></errorSet></CreateFleetResponse>"
)


def refused(start: Start, call: Call, code: str, text: str = "as the test wants it", status: int = 400) -> list[bytes]:
    """Return a refusal as the service writes it; of fleets with the status of success, inside an answer."""
    headers = [("Content-Type", "text/xml")]
    match call.service:
        case "ec2":
            form = FLEET_REFUSED if status == 200 else _EC2
        case "s3":
            # S3 names the bucket's region with whatever it refuses.
            form, headers = _S3, [*headers, ("x-amz-bucket-region", "eu-west-1")]
        case "sts" | "iam":
            form = _QUERY
        case _:
            form, headers = (
                '{{"__type": "{code}", "message": "{text}"}}',
                [("Content-Type", "application/x-amz-json-1.1")],
            )
    content = form.format(code=code, text=text).encode()
    start(f"{status} Refused", [*headers, ("Content-Length", str(len(content)))])
    return [] if call.action == "HEAD" else [content]


def _refused(start: Start, code: str, message: str) -> list[bytes]:
    """Return a refusal of EC2's with status 400."""
    content = _EC2.format(code=code, text=message).encode()
    start("400 Bad Request", [("Content-Type", "text/xml"), ("Content-Length", str(len(content)))])
    return [content]


def main(address: str, port: str) -> None:
    """Serve until killed."""
    temper = Temper()
    # Which moto looks up for every call: its folders, and what a service can do.
    modules = tuple(backends.list_of_moto_modules())
    backends.list_of_moto_modules = lambda: modules
    names = cache(responses.method_names_from_class)  # type: ignore[attr-defined]  # imported there
    responses.method_names_from_class = names  # type: ignore[attr-defined]  # likewise
    manners.teach()
    schedules.teach()
    teach(temper)
    teach_the_account(temper)
    moto = DomainDispatcherApplication(create_backend_app)
    run_simple(address, int(port), Unkind(moto, temper), threaded=True, request_handler=MotoRequestHandler)


if __name__ == "__main__":
    main(*sys.argv[1:])
