"""IAM in front of a moto server: each call that arrives is checked against the printed policy.

Actions, tags and resources are read from the wire, and ownership from the tags of the resource.
"""

from __future__ import annotations

import json
import re
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from botocore import xform_name
from moto.core.parse import EC2QueryParser
from moto.core.utils import get_service_model
from werkzeug.datastructures import MultiDict

from benchmarks.box.authorizations import Place, authorizations, keys_of_headers
from benchmarks.box.iam import Asked, Policy, allows, concerns, several
from hetopt.backends.ec2.renter.ordering import Identity
from hetopt.backends.ec2.renter.request import Request

ALWAYS = frozenset({"sts:GetCallerIdentity"})
"""'No permissions are required to perform this operation' (STS API reference, GetCallerIdentity, read 2026-11-27)."""

_SCOPE = re.compile(r"Credential=([^/]+)/\d+/([^/]+)/([^/]+)/aws4_request")


@dataclass(frozen=True, kw_only=True)
class Call:
    """A signed API call as it arrived over HTTP.

    Attributes:
        key_id: of the credentials.
        service: as signatures name it, such as 'servicequotas'.
        action: as AWS spells it; of S3 the method of HTTP.
        keys: what policies may condition upon, by the headers that came with it.
    """

    key_id: str
    region: str
    service: str
    action: str
    request: Request
    keys: Mapping[str, str]

    @classmethod
    def read(cls, environment: Mapping[str, Any], body: bytes) -> Call | None:
        """Return the call in an HTTP request; None where nothing is signed."""
        scope = _SCOPE.search(str(environment.get("HTTP_AUTHORIZATION", "")))
        if scope is None:
            return None
        key_id, region, service = scope.groups()
        action, operation, parameters = _asked(service, environment, body)
        request = Request(step="", service=service, operation=operation, parameters=parameters, purpose="")
        headers = {name.removeprefix("HTTP_").replace("_", "-"): str(value) for name, value in environment.items()}
        keys = keys_of_headers(headers) if service == "s3" else {}
        return cls(key_id=key_id, region=region, service=service, action=action, request=request, keys=keys)


def _asked(service: str, environment: Mapping[str, Any], body: bytes) -> tuple[str, str, dict[str, Any]]:
    """Return the action, the operation as botocore names it, and the parameters of a signed request."""
    if service == "s3":
        return _asked_of_s3(environment)
    if service == "scheduler":
        return _asked_of_scheduler(environment, body)
    target = str(environment.get("HTTP_X_AMZ_TARGET", ""))
    if target:
        action = target.rpartition(".")[2]
        return action, xform_name(action), json.loads(body or b"{}")
    values = dict(urllib.parse.parse_qsl(body.decode("latin-1"), keep_blank_values=True))
    action = values.get("Action", "")
    if service != "ec2":
        return action, xform_name(action), values
    parser = EC2QueryParser(_ec2().operation_model(action))
    parsed: dict[str, Any] = parser.parse({"values": MultiDict(values)})  # type: ignore[typeddict-item]
    return action, xform_name(action), parsed


@cache
def _ec2() -> Any:
    return get_service_model("ec2")


_PARTS_OF_BUCKETS = {
    "policy": "bucket_policy",
    "versioning": "bucket_versioning",
    "lifecycle": "bucket_lifecycle_configuration",
    "object-lock": "object_lock_configuration",
}


def _asked_of_s3(environment: Mapping[str, Any]) -> tuple[str, str, dict[str, Any]]:
    """Return the method, the operation as botocore names it, and the parameters of a request to S3."""
    method = str(environment["REQUEST_METHOD"])
    bucket, _, key = str(environment.get("PATH_INFO", "")).lstrip("/").partition("/")
    query = dict(urllib.parse.parse_qsl(str(environment.get("QUERY_STRING", "")), keep_blank_values=True))
    if key:
        parts = {"POST": "put", "DELETE": "abort"} if {"uploads", "uploadId"} & set(query) else {}
        verb = parts.get(method, method.lower())
        return method, f"{verb}_object", {"Bucket": bucket, "Key": key}
    if method == "HEAD":
        return method, "head_bucket", {"Bucket": bucket}
    if "list-type" in query:
        return method, "list_objects_v2", {"Bucket": bucket, "Prefix": query.get("prefix", "")}
    about = next((name for part, name in _PARTS_OF_BUCKETS.items() if part in query), "bucket")
    return method, f"{method.lower()}_{about}", {"Bucket": bucket}


def _asked_of_scheduler(environment: Mapping[str, Any], body: bytes) -> tuple[str, str, dict[str, Any]]:
    """Return the action, the operation as botocore names it, and the parameters of a request to the scheduler."""
    method = str(environment["REQUEST_METHOD"])
    things, _, name = str(environment.get("PATH_INFO", "")).lstrip("/").partition("/")
    if method == "GET":
        if things == "tags":
            return "ListTagsForResource", "list_tags_for_resource", {"ResourceArn": name}
        operation = f"list_{things.replace('-', '_')}"
    else:
        verb = {"POST": "create", "PUT": "update", "DELETE": "delete"}[method]
        operation = f"{verb}_{things.replace('-', '_').removesuffix('s')}"
    parameters = {**json.loads(body or b"{}"), "Name": name}
    return "".join(word.capitalize() for word in operation.split("_")), operation, parameters


@dataclass(kw_only=True)
class Gate:
    """An authorization check of calls by policies, with a record of what was allowed and refused.

    Attributes:
        tags_of: returns the tags of an EC2 resource by its id; empty: there is no such resource.
        policy_of: returns the policy of a bucket by its name; None: it has none.
        policies: policies of the caller; None: calls are not checked.
        forbidden: actions that the organisation denies, whatever policies allow.
        role: name of the machines' role.
        allowed: one authorization of each action that was allowed, by the action in small letters.
        refused: authorizations that were denied, in order.
        questions: number of authorizations that were decided.
    """

    tags_of: Callable[[str], Mapping[str, str]]
    policy_of: Callable[[str], Policy | None]
    policies: list[Policy] | None = None
    forbidden: frozenset[str] = frozenset()
    role: str = "hetopt-node"
    allowed: dict[str, Asked] = field(default_factory=dict)
    refused: list[Asked] = field(default_factory=list)
    questions: int = 0

    def forget(self) -> None:
        """Reset the record, the policies and the forbidden actions."""
        self.policies, self.forbidden, self.questions = None, frozenset(), 0
        self.allowed.clear()
        self.refused.clear()

    def denied(self, call: Call, who: Identity) -> Asked | None:
        """Return the first authorization that is denied; None where the call is allowed.

        A denied authorization is recorded in ``refused``; without policies a bucket's own policy alone can deny.
        """
        place = Place(who=who, region=call.region, tags={}, role=self.role)
        for authorization in authorizations(call.request, place):
            question = self._with_tags(replace(authorization, context={**authorization.context, **call.keys}))
            if question is not None and call.service == "s3" and self.keeps_out(question):
                self.refused.append(question)
                return question
            if self.policies is None or question is None or question.action in ALWAYS:
                continue
            self.questions += 1
            if question.action in self.forbidden or not allows(self.policies, question):
                self.refused.append(question)
                return question
            self.allowed.setdefault(question.action.lower(), question)
        return None

    def keeps_out(self, asked: Asked) -> bool:
        """Return whether a bucket's own policy denies the request, whoever asks.

        A statement that cannot be decided denies.
        """
        policy = self.policy_of(asked.resource.removeprefix("arn:aws:s3:::").partition("/")[0]) or {"Statement": []}
        denials = [statement for statement in several(policy["Statement"]) if statement["Effect"] == "Deny"]
        return any(concerns(statement, asked) is not False for statement in denials)

    def _with_tags(self, asked: Asked) -> Asked | None:
        """Return the request with its resource's tags; None if that is missing, which EC2 says before it asks IAM."""
        name = asked.resource.rpartition("/")[2]
        owned = asked.action == "scheduler:DeleteScheduleGroup"
        if not owned and not re.fullmatch(r"(i|fleet|lt|sg|vol)-[0-9a-f-]{8,}", name):
            return asked
        tags = self.tags_of(name)
        if not tags:
            return None
        return replace(asked, context={**asked.context, **{f"aws:ResourceTag/{key}": tags[key] for key in tags}})


def denial(asked: Asked, who: Identity, *, denier: str | None) -> str:
    """Return the message of AWS for a denial by a kind of policy; None: no policy allows it."""
    because = (
        f"because no identity-based policy allows the {asked.action} action"
        if denier is None
        else f"with an explicit deny in a {denier} policy"
    )
    return (
        f"You are not authorized to perform this operation. User: {who.arn} is not authorized to perform: "
        f"{asked.action} on resource: {asked.resource} {because}. Encoded authorization failure message: 8sJ2k"
    )
