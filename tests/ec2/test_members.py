"""Nothing is sent to AWS whose documentation nobody has read: what fits a model may be forbidden in its prose."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from hetopt.backends.ec2.renter import calls
from hetopt.backends.ec2.renter.edge import BotoEdge
from hetopt.backends.ec2.renter.errors import ApiRefused
from hetopt.backends.ec2.renter.order import Order
from hetopt.backends.ec2.renter.permissions import bucket_calls
from hetopt.optimizer.market import pricing
from tests.ec2.conftest import ACCOUNT, Recording
from tests.ec2.reviewed_members import ON_CONDITION, PLAIN, members, unread


def test_every_call_of_a_launch_has_been_read(cloud: BotoEdge, order_for: Callable[..., Order]) -> None:
    order = order_for()
    sent = [*calls.launch_calls(order, {}, b""), *bucket_calls("b-2", "eu-west-1", ACCOUNT)]
    sent += [calls.lease_call(order, 1.0, 1.0, over="tag"), calls.stop_call(order, 1.0), calls.get_object(order, "k")]
    assert not [name for one in sent for name in unread(one.api_name, one.parameters)]
    fleet = next(one for one in sent if one.operation == "create_fleet")
    target = {**fleet.parameters["TargetCapacitySpecification"], "TargetCapacityUnitType": "units"}
    worse = {**fleet.parameters, "TargetCapacitySpecification": target}
    assert unread(fleet.api_name, worse) == ["ec2:CreateFleet TargetCapacitySpecification.TargetCapacityUnitType"]


def test_every_call_of_a_refresh_has_been_read() -> None:
    for part in pricing.parts("us-east-1", datetime.datetime.now(datetime.UTC)):
        operation = "".join(word.capitalize() for word in part.method.split("_"))
        assert not unread(f"ec2:{operation}", part.parameters)


def test_the_lists_name_members_that_there_are() -> None:
    import botocore.session

    session = botocore.session.get_session()
    for call in {*PLAIN, *(call for call, _ in ON_CONDITION)}:
        service, _, operation = call.partition(":")
        model = session.get_service_model(service).operation_model(operation)
        for path in [*PLAIN.get(call, "").split(), *(name for named, name in ON_CONDITION if named == call)]:
            shape: Any = model.input_shape
            for name in path.split("."):
                shape = shape.member if shape.type_name == "list" else shape
                assert name in shape.members, (call, path)
                shape = shape.members[name]


def test_the_server_refuses_what_the_documentation_forbids(
    cloud: BotoEdge, order_for: Callable[..., Order], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a member of that kind is found by running, too."""
    order = order_for()
    seen = Recording(inner=cloud)
    results: dict[str, Any] = {}
    for request in (*calls.group_calls(order, order.zones[0]), *calls.template_calls(order)):
        resolved = request.resolved(results)
        results[request.step] = resolved.entity(seen(resolved))
    fleet = calls.fleet_call(order, order.roles[0], order.zones[0], attempt=0).resolved(results)
    target = {**fleet.parameters["TargetCapacitySpecification"], "TargetCapacityUnitType": "units"}
    monkeypatch.setattr("tests.ec2.reviewed_members.unread", lambda *_: [])
    with pytest.raises(ApiRefused, match="InstanceRequirements"):
        cloud(replace(fleet, parameters={**fleet.parameters, "TargetCapacitySpecification": target}))
    assert cloud(fleet)["Instances"]
    assert json.dumps(sorted(members({"a": [{"b": 1}, {"c": 2}]}))) == '["a", "a.b", "a.c"]'
