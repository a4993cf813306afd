"""A moto server that is as unkind as EC2: ``python -m tests.ec2.unkind_cloud PORT``. The API is moto's.

Beside it there is ``POST /unkind``, which is part of no API: a test says there how unkind the account is to be.

    {"lag_s": 5}                    what a call has just made is in no list, and known by no id, for so many seconds
    {"short": {"c7i.large": 1}}     such a fleet gets so many machines and InsufficientInstanceCapacity beside them
    {"exhausted": ["c7g.xlarge"]}   such a fleet gets nothing
    {"advance_s": 60}               the account's clock, for tests that do not really wait
    {"shut_down": ["i-1"]}          these end as machines do that shut themselves down, such as after a boot that failed
    {"forget_fleets": true}         what EC2 does with instant fleets after about two days
    {"user_id": "AROA:one"}         who calls, as GetCallerIdentity tells it, with {"arn": ...}

Seconds of lag: the user guide, "eventual consistency in the EC2 API", gives no number; others report up to a minute.
Machines beside a refusal: osbuild/osbuild-composer#4507. Two days: runs-on/runs-on#217. (Read 2026-11-26.)
"""

from __future__ import annotations

import json
import re
import sys
import time
import urllib.parse
from collections.abc import Callable, Iterable
from typing import Any
from xml.etree import ElementTree

from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.core.responses import ActionResult
from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models import ec2_backends
from moto.ec2.models.fleets import Fleet
from moto.ec2.models.instances import StateReason
from moto.ec2.models.spot_requests import SpotFleetLaunchSpec
from moto.ec2.responses.fleets import Fleets
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from moto.sts.responses import TokenResponse
from werkzeug.serving import run_simple

from benchmarks.box import manners

Environment = dict[str, Any]
Start = Callable[..., Any]

SHORT = "InsufficientInstanceCapacity"
_IDS = re.compile(rb"\b((?:i|fleet|lt|sg)-[0-9a-f][0-9a-f-]{7,})\b")
_NAMES = ("instanceId", "fleetId", "launchTemplateId", "groupId", "resourceId")
_UNKNOWN = {
    "TerminateInstances": "InvalidInstanceID.NotFound",
    "DeleteLaunchTemplate": "InvalidLaunchTemplateId.NotFound",
    "DeleteSecurityGroup": "InvalidGroup.NotFound",
    "DescribeFleets": "InvalidFleetId.NotFound",
    "DescribeInstances": "InvalidInstanceID.NotFound",
}


class Temper:
    """How unkind the account is."""

    def __init__(self) -> None:
        self.born: dict[str, float] = {}
        self.ahead_s = 0.0
        self.forgotten: set[str] = set()
        self.calm()

    def calm(self) -> None:
        """As kind as moto, but for its manners."""
        self.lag_s = 0.0
        self.short: dict[str, int] = {}
        self.exhausted: set[str] = set()
        self.caller: dict[str, str] = {}

    def now_s(self) -> float:
        return time.time() + self.ahead_s

    def hear(self, told: dict[str, Any]) -> None:
        self.lag_s = told.get("lag_s", self.lag_s)
        self.short = told.get("short", self.short)
        self.exhausted = set(told.get("exhausted", self.exhausted))
        self.ahead_s += told.get("advance_s", 0.0)
        self.caller |= {key: told[key] for key in ("user_id", "arn") if key in told}
        self.shut_down(told.get("shut_down", []))
        if told.get("forget_fleets"):
            for backend in ec2_backends[DEFAULT_ACCOUNT_ID].values():
                self.forgotten |= set(backend.fleets)

    @staticmethod
    def shut_down(ids: list[str]) -> None:
        """As machines end that end themselves; moto knows only those that a call ends."""
        for backend in ec2_backends[DEFAULT_ACCOUNT_ID].values():
            for one in backend.all_instances():
                if one.id in ids:
                    one.terminate()
                    code = "Client.InstanceInitiatedShutdown"
                    one.state_reason = StateReason(f"{code}: Instance initiated shutdown", code)

    def is_young(self, id_: str) -> bool:
        return id_ in self.born and self.now_s() < self.born[id_] + self.lag_s


def teach(temper: Temper) -> None:
    """Make this process's moto grant too few, and tell who calls as the test says."""
    plain_fleet, plain_counts = Fleets.create_fleet, Fleet.get_launch_spec_counts
    plain_look, plain_delete = Fleets.describe_fleets, Fleets.delete_fleets

    def counts(self: Fleet, weight_to_add: float) -> tuple[dict[SpotFleetLaunchSpec, int], float]:
        able = [spec for spec in self.launch_specs if spec.instance_type not in temper.exhausted]
        if not able:
            return {}, 0.0
        granted = temper.short.get(able[0].instance_type)
        return plain_counts(self, weight_to_add) if granted is None else ({able[0]: granted}, float(granted))

    def create_fleet(self: Fleets) -> ActionResult:
        told: dict[str, Any] = dict(plain_fleet(self).result)  # type: ignore[call-overload]
        wanted = int(self._get_param("TargetCapacitySpecification")["TotalTargetCapacity"])
        if len(told.get("Instances") or ()) < wanted:
            told["Errors"] = [
                {"ErrorCode": SHORT, "ErrorMessage": "There is no capacity for that.", "Lifecycle": "spot"}
            ]
        return ActionResult(told)

    plain_caller = TokenResponse.get_caller_identity

    def get_caller_identity(self: TokenResponse) -> Any:
        plain = plain_caller(self)
        if not temper.caller:
            return plain
        told = dict(plain.result)
        told |= {
            name: temper.caller[key] for key, name in (("user_id", "UserId"), ("arn", "Arn")) if key in temper.caller
        }
        return ActionResult(told)

    def describe_fleets(self: Fleets) -> ActionResult:
        asked = self._get_param("FleetIds", [])
        if gone := [id_ for id_ in asked if id_ in temper.forgotten]:
            raise EC2ClientError("InvalidFleetId.NotFound", f"The fleet ID '{gone[0]}' does not exist")
        return plain_look(self)

    def delete_fleets(self: Fleets) -> ActionResult:
        asked = self._get_param("FleetIds", [])
        if gone := [id_ for id_ in asked if id_ in temper.forgotten]:
            error = {"Code": "fleetIdDoesNotExist", "Message": f"The fleet {gone[0]} does not exist."}
            return ActionResult({"UnsuccessfulFleetDeletions": [{"FleetId": id_, "Error": error} for id_ in asked]})
        return plain_delete(self)

    Fleets.describe_fleets = describe_fleets  # type: ignore[method-assign]
    Fleets.delete_fleets = delete_fleets  # type: ignore[method-assign]
    Fleet.get_launch_spec_counts = counts  # type: ignore[method-assign]
    Fleets.create_fleet = create_fleet  # type: ignore[method-assign]
    TokenResponse.get_caller_identity = get_caller_identity  # type: ignore[method-assign]


class Unkind:
    """A WSGI application: moto's, in which what is new is not seen for a while."""

    def __init__(self, moto: Callable[[Environment, Start], Iterable[bytes]], temper: Temper) -> None:
        self._moto, self._temper = moto, temper

    def __call__(self, environment: Environment, start: Start) -> Iterable[bytes]:
        path = environment.get("PATH_INFO", "")
        if path == "/unkind":
            length = int(environment.get("CONTENT_LENGTH") or 0)
            self._temper.hear(json.loads(environment["wsgi.input"].read(length)))
            start("200 OK", [("Content-Length", "2")])
            return [b"ok"]
        if path == "/moto-api/reset":
            self._temper.calm()
        if "/ec2/aws4_request" not in environment.get("HTTP_AUTHORIZATION", ""):
            return self._moto(environment, start)
        return self._ec2(environment, start)

    def _ec2(self, environment: Environment, start: Start) -> Iterable[bytes]:
        import io

        body = environment["wsgi.input"].read(int(environment.get("CONTENT_LENGTH") or 0))
        environment["wsgi.input"] = io.BytesIO(body)
        asked = urllib.parse.parse_qs(body.decode("latin-1"))
        action = asked.get("Action", [""])[0]
        named = [
            value[0] for key, value in asked.items() if re.match(r"(InstanceId|FleetId|GroupId|LaunchTemplateId)", key)
        ]
        young = [id_ for id_ in named if self._temper.is_young(id_)]
        if young and action in _UNKNOWN:
            return _refused(start, _UNKNOWN[action], f"The ID '{young[0]}' does not exist")
        if young and action == "DeleteFleets":
            return _refused(start, "InvalidFleetId.NotFound", f"The ID '{young[0]}' does not exist")
        heard: list[Any] = []

        def hear(status: str, headers: list[tuple[str, str]], _: Any = None) -> Any:
            heard[:] = [status, headers]
            return lambda data: None

        answer = b"".join(self._moto(environment, hear))
        if action.startswith("Create"):
            for id_ in _IDS.findall(answer):
                self._temper.born.setdefault(id_.decode(), self._temper.now_s())
        if action.startswith("Describe") and self._temper.lag_s:
            answer = self._without_the_young(answer)
        status, headers = heard
        start(
            status,
            [(k, v) for k, v in headers if k.lower() != "content-length"] + [("Content-Length", str(len(answer)))],
        )
        return [answer]

    def _without_the_young(self, answer: bytes) -> bytes:
        root = ElementTree.fromstring(answer)
        for parent in list(root.iter()):
            for item in list(parent):
                ids = [child.text or "" for child in item if child.tag.rpartition("}")[2] in _NAMES]
                if any(self._temper.is_young(id_) for id_ in ids):
                    parent.remove(item)
        return ElementTree.tostring(root)


def _refused(start: Start, code: str, message: str) -> list[bytes]:
    text = f"<Response><Errors><Error><Code>{code}</Code><Message>{message}</Message></Error></Errors></Response>"
    start("400 Bad Request", [("Content-Type", "text/xml"), ("Content-Length", str(len(text)))])
    return [text.encode()]


def main(port: str) -> None:
    """Serve until killed."""
    temper = Temper()
    manners.teach()
    teach(temper)
    moto = DomainDispatcherApplication(create_backend_app)
    run_simple("127.0.0.1", int(port), Unkind(moto, temper), threaded=True, request_handler=MotoRequestHandler)


if __name__ == "__main__":
    main(sys.argv[1])
