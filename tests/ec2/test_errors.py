"""Every error of the table is one sentence of cause and a next command, and says whether trying again can help."""

from __future__ import annotations

import re
from pathlib import Path
from random import Random

import pytest

from hetopt.backends.ec2.renter.edge import FIRST_WAIT_S, LONGEST_WAIT_S, Retrying, wait_before
from hetopt.backends.ec2.renter.request import TABLE, UNKNOWN, Answer, ApiRefused, Request, meaning_of
from hetopt.core.errors import CloudRefused
from tests.ec2.conftest import Patience

CODES = [(row, code) for row in TABLE for code in row.codes]


def fleet(market: str = "spot", name: str = "g5.xlarge", **more: object) -> Request:
    parameters = {
        "LaunchTemplateConfigs": [{"Overrides": [{"InstanceType": name, "SubnetId": "s"}]}],
        "TargetCapacitySpecification": {"DefaultTargetCapacityType": market},
    }
    return Request(step="f", service="ec2", operation="create_fleet", parameters=parameters, purpose="", **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(("row", "code"), CODES, ids=[code for _, code in CODES])
def test_each_code_is_a_sentence_and_a_command(row: object, code: str) -> None:
    example = code.replace("*", "X").replace("?", "3")
    assert meaning_of(example) is row
    refused = ApiRefused(fleet(), example, "The API said so. ")
    assert refused.exit_code == CloudRefused.exit_code == 4
    assert refused.message.endswith(".")
    assert not refused.message.endswith("..")
    assert "{" not in refused.message + str(refused.hint)
    assert refused.hint
    assert "\n" not in refused.message


ELSEWHERE = {
    "BandwidthLimitExceeded": "CloudSearch",
    "LimitExceededException": "a limit of things, not of calls, in the services that are called here",
    "PriorRequestNotComplete": "Route 53",
    "ProvisionedThroughputExceededException": "DynamoDB",
    "TransactionInProgressException": "DynamoDB",
}


def test_whatever_botocore_takes_for_throttling_is_tried_again() -> None:
    """Renting calls are made once by botocore, and tried again here."""
    from botocore.retries.standard import ThrottledRetryableChecker

    known = set(ThrottledRetryableChecker._THROTTLED_ERROR_CODES)
    assert known >= set(ELSEWHERE)
    assert {code for code in known - set(ELSEWHERE) if meaning_of(code).reaction != "again"} == set()


def test_every_fault_of_login_region_or_configuration_has_its_row() -> None:
    """They are botocore's own, and come before anything has left this machine."""
    import botocore.exceptions

    about = re.compile(
        "Login|SSO|Credential|AuthToken|TokenProvider|MFA|Region|Endpoint|Retry|Config|Checksum|Capacity"
    )
    others = re.compile("BaseEndpointResolver|Waiter|Outpost|Unsupported.*S3|UnsupportedS3|BuiltInName|Discovery")
    found = {
        name
        for name, one in vars(botocore.exceptions).items()
        if isinstance(one, type)
        and issubclass(one, botocore.exceptions.BotoCoreError)
        and about.search(name)
        and not others.search(name)
    }
    assert len(found) > 30
    assert {name for name in found if meaning_of(name) is UNKNOWN} == set()


def test_an_unknown_code_says_what_the_api_said() -> None:
    assert meaning_of("SomethingNew") is UNKNOWN
    refused = ApiRefused(fleet(), "SomethingNew", "two\nlines.")
    assert refused.message == "ec2 refused ec2:CreateFleet: two lines (SomethingNew)."


class Refusing:
    """Refuses so often, then answers."""

    def __init__(self, code: str, times: int) -> None:
        self.code, self.times, self.asked = code, times, 0

    def __call__(self, request: Request) -> Answer:
        self.asked += 1
        if self.asked <= self.times:
            raise ApiRefused(request, self.code, "")
        return {"ok": True}


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.codes[0])
def test_only_what_can_help_is_tried_again(row: object, patience: Patience) -> None:
    code = row.codes[0].replace("*", "")  # type: ignore[attr-defined]
    edge = Refusing(code, times=2)
    retrying = Retrying(inner=edge, sleep=patience.sleep, random=Random(1))
    if row.reaction == "again":  # type: ignore[attr-defined]
        assert retrying(fleet()) == {"ok": True}
        assert edge.asked == 3
        assert 1.0 <= sum(patience.waits) <= 3.0
    else:
        with pytest.raises(ApiRefused):
            retrying(fleet())
        assert edge.asked == 1, "an exhausted pool, a quota or a refused credential is not asked again"
        assert not patience.waits


def test_throttling_ends_after_some_attempts_with_growing_waits(patience: Patience) -> None:
    edge = Refusing("RequestLimitExceeded", times=99)
    with pytest.raises(ApiRefused):
        Retrying(inner=edge, sleep=patience.sleep, random=Random(1), attempts=6)(fleet())
    assert edge.asked == 6
    for attempt, wait in enumerate(patience.waits):
        assert 0.5 * min(LONGEST_WAIT_S, FIRST_WAIT_S * 2**attempt) <= wait <= LONGEST_WAIT_S
    assert wait_before(60, Random(0)) <= LONGEST_WAIT_S


def test_what_passes_is_waited_for_where_it_is_known_to_pass(patience: Patience) -> None:
    edge = Refusing("DependencyViolation", times=8)
    request = fleet(passing=frozenset({"DependencyViolation"}))
    assert Retrying(inner=edge, sleep=patience.sleep, random=Random(1))(request) == {"ok": True}
    forever = Refusing("DependencyViolation", times=10**6)
    with pytest.raises(ApiRefused, match="still in use"):
        Retrying(inner=forever, sleep=patience.sleep, random=Random(1), patience_s=60)(request)


def test_what_is_so_already_is_no_error(patience: Patience) -> None:
    edge = Refusing("InvalidPermission.Duplicate", times=1)
    request = fleet(tolerates=frozenset({"InvalidPermission.Duplicate"}))
    assert Retrying(inner=edge, sleep=patience.sleep, random=Random(1))(request) == {}


def test_a_taken_name_is_looked_up_and_must_be_ours(patience: Patience) -> None:
    class Taken:
        def __init__(self, found: list[dict[str, str]]) -> None:
            self.found = found

        def __call__(self, request: Request) -> Answer:
            if request.operation == "describe_launch_templates":
                return {"LaunchTemplates": self.found}
            raise ApiRefused(request, "InvalidLaunchTemplateName.AlreadyExistsException", "")

    lookup = Request(
        step="l",
        service="ec2",
        operation="describe_launch_templates",
        parameters={},
        purpose="",
        result=("LaunchTemplates", 0),
    )
    request = Request(
        step="t",
        service="ec2",
        operation="create_launch_template",
        parameters={},
        purpose="",
        result=("LaunchTemplate",),
        if_exists=lookup,
    )
    retrying = Retrying(inner=Taken([{"LaunchTemplateId": "lt-1"}]), sleep=patience.sleep, random=Random(1))
    assert request.entity(retrying(request)) == {"LaunchTemplateId": "lt-1"}
    with pytest.raises(ApiRefused, match="does not belong to this run"):
        Retrying(inner=Taken([]), sleep=patience.sleep, random=Random(1))(request)


def test_botocore_does_not_hammer_an_exhausted_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that answers 503 InsufficientInstanceCapacity is asked once: botocore's own retries are off."""
    import http.server
    import threading

    from hetopt.backends.ec2.renter.edge import BotoEdge

    asked: list[bytes] = []

    class Exhausted(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(self.rfile.read(int(self.headers["Content-Length"])))
            body = (
                b"<Response><Errors><Error><Code>InsufficientInstanceCapacity</Code><Message>no</Message></Error>"
                b"</Errors></Response>"
            )
            self.send_response(503)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Exhausted)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        request = Request(
            step="f",
            service="ec2",
            operation="create_fleet",
            parameters={
                "LaunchTemplateConfigs": [{"Overrides": [{"InstanceType": "g5.xlarge"}]}],
                "TargetCapacitySpecification": {"TotalTargetCapacity": 1},
            },
            purpose="",
        )
        with pytest.raises(ApiRefused, match=r"no g5\.xlarge"):
            Retrying(inner=BotoEdge("us-east-1"), sleep=lambda _: None, random=Random(0))(request)
        assert len(asked) == 1
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
