"""A moto server that is as unkind as EC2: ``python -m tests.ec2.unkind_cloud PORT``. The API is moto's.

Beside it there is ``POST /unkind``, which is part of no API: a test says there how unkind the account is to be.

    {"lag_s": 5}                    what a call has just made is in no list, and known by no id, for so many seconds
    {"short": {"c7i.large": 1}}     such a fleet gets so many machines and InsufficientInstanceCapacity beside them
    {"exhausted": ["c7g.xlarge"]}   such a fleet gets nothing
    {"advance_s": 60}               the account's clock, for tests that do not really wait
    {"shut_down": ["i-1"]}          these end as machines do that shut themselves down, such as after a boot that failed
    {"forget_fleets": true}         what EC2 does with instant fleets after about two days
    {"quotas": {"L-3819A6DF": 8}}   what the account was granted of EC2's quotas; moto itself knows those of VPC alone
    {"user_id": "AROA:one"}         who calls, as GetCallerIdentity tells it, with {"arn": ...}
    {"refuses": {"RunInstances": ["UnauthorizedOperation", "text"]}}    what EC2 answers to such calls, tried or made
    {"subnets": "none"}             the default network was deleted; "private": its machines get no public address
    {"routes": false}               no subnet has a way out; or the routes that each has
    {"gateways": "block-ingress"}   what the account blocks
    {"disk_key": "arn:aws:kms:..."} the default key of disks; {"grants": [...]}: who may use it
    {"no_roles": ["AWSServiceRoleForEC2Spot"]}  of EC2's own roles
    {"profile": "hetopt-node"}      there is an instance profile of that name
    {"denied": ["s3:PutObject"]}    what IAM says of such calls where it is to simulate them

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
from moto.ec2.responses.route_tables import RouteTables
from moto.ec2.responses.settings import Settings
from moto.ec2.responses.subnets import Subnets
from moto.iam.models import iam_backends
from moto.iam.responses import IamResponse
from moto.kms.responses import KmsResponse
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from moto.servicequotas.exceptions import NoSuchResource
from moto.servicequotas.responses import ServiceQuotasResponse
from moto.sts.responses import TokenResponse
from werkzeug.serving import run_simple

from benchmarks.box import manners, schedules

Environment = dict[str, Any]
Start = Callable[..., Any]

FIVE_AT_FIRST = ("L-34B43A08", "L-1216C47A")
"""Quotas of five vCPUs on a new account; of the others it has none."""

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
        self.quotas: dict[str, float] = {}
        self.refuses: dict[str, list[str]] = {}
        self.subnets = "public"
        self.routes: bool | list[dict[str, str]] = True
        self.gateways = "off"
        self.disk_key = "alias/aws/ebs"
        self.grants: list[str] = []
        self.no_roles: list[str] = []
        self.denied: list[str] = []

    def now_s(self) -> float:
        return time.time() + self.ahead_s

    def hear(self, told: dict[str, Any]) -> None:
        self.lag_s = told.get("lag_s", self.lag_s)
        self.short = told.get("short", self.short)
        self.exhausted = set(told.get("exhausted", self.exhausted))
        self.quotas = told.get("quotas", self.quotas)
        self.ahead_s += told.get("advance_s", 0.0)
        schedules.carry_out(self.now_s())
        for name in ("refuses", "subnets", "routes", "gateways", "disk_key", "grants", "no_roles", "denied"):
            setattr(self, name, told.get(name, getattr(self, name)))
        self.caller |= {key: told[key] for key in ("user_id", "arn") if key in told}
        self.shut_down(told.get("shut_down", []))
        if "profile" in told:
            iam_backends[DEFAULT_ACCOUNT_ID]["aws"].create_instance_profile(told["profile"], "/", [], [])
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

    def get_service_quota(self: ServiceQuotasResponse) -> str:
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


def teach_the_account(temper: Temper) -> None:
    """Networks, keys and rights of the account, as the test says; moto has neither keys' defaults nor simulations."""
    plain_subnets, plain_routes = Subnets.describe_subnets, RouteTables.describe_route_tables
    plain_role = IamResponse.get_role

    def describe_subnets(self: Subnets) -> ActionResult:
        found = dict(plain_subnets(self).result)  # type: ignore[call-overload]
        for one in found["Subnets"]:
            one.map_public_ip_on_launch = temper.subnets == "public"
        return ActionResult({"Subnets": [] if temper.subnets == "none" else found["Subnets"]})

    def describe_route_tables(self: RouteTables) -> ActionResult:
        """A default network has a gateway, which moto's has not."""
        out = [{"DestinationCidrBlock": "0.0.0.0/0", "GatewayId": "igw-0123456789abcdef0", "State": "active"}]
        tables = dict(plain_routes(self).result)["RouteTables"]  # type: ignore[call-overload]
        told = [{"VpcId": one.vpc_id, "Associations": [{"Main": True}]} for one in tables]
        return ActionResult(
            {
                "RouteTables": [
                    {
                        **one,
                        "Routes": temper.routes if isinstance(temper.routes, list) else out if temper.routes else [],
                    }
                    for one in told
                ]
            }
        )

    def get_ebs_default_kms_key_id(self: Settings) -> ActionResult:
        return ActionResult({"KmsKeyId": temper.disk_key})

    def describe_vpc_block_public_access_options(self: Settings) -> ActionResult:
        return ActionResult({"VpcBlockPublicAccessOptions": {"InternetGatewayBlockMode": temper.gateways}})

    def list_grants(self: KmsResponse) -> str:
        return json.dumps({"Grants": [{"GranteePrincipal": one} for one in temper.grants], "Truncated": False})

    def get_role(self: IamResponse) -> Any:
        name = self._get_param("RoleName")
        if not name.startswith("AWSServiceRoleFor") or name in temper.no_roles:
            return plain_role(self)
        arn = f"arn:aws:iam::{DEFAULT_ACCOUNT_ID}:role/aws-service-role/x/{name}"
        told = {"Path": "/", "RoleName": name, "RoleId": "AROA0123456789EXAMPLE", "Arn": arn}
        return ActionResult({"Role": {**told, "CreateDate": "2026-01-01T00:00:00Z"}})

    def simulate_principal_policy(self: IamResponse) -> Any:
        decided = [
            {"EvalActionName": one, "EvalDecision": "implicitDeny" if one in temper.denied else "allowed"}
            for one in self._get_param("ActionNames", [])
        ]
        return ActionResult({"EvaluationResults": decided, "IsTruncated": False})

    Subnets.describe_subnets = describe_subnets  # type: ignore[method-assign]
    RouteTables.describe_route_tables = describe_route_tables  # type: ignore[method-assign]
    Settings.get_ebs_default_kms_key_id = get_ebs_default_kms_key_id  # type: ignore[attr-defined]
    Settings.describe_vpc_block_public_access_options = (  # type: ignore[attr-defined]
        describe_vpc_block_public_access_options
    )
    KmsResponse.list_grants = list_grants  # type: ignore[method-assign]
    IamResponse.get_role = get_role  # type: ignore[method-assign]
    IamResponse.simulate_principal_policy = simulate_principal_policy  # type: ignore[attr-defined]


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
        if action in self._temper.refuses:
            return _refused(start, *self._temper.refuses[action])
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


def main(address: str, port: str) -> None:
    """Serve until killed."""
    temper = Temper()
    manners.teach()
    schedules.teach()
    teach(temper)
    teach_the_account(temper)
    moto = DomainDispatcherApplication(create_backend_app)
    run_simple(address, int(port), Unkind(moto, temper), threaded=True, request_handler=MotoRequestHandler)


if __name__ == "__main__":
    main(*sys.argv[1:])
