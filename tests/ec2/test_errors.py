"""Every error of the table is one sentence of cause and a next command, and says whether trying again can help.

What is AWS's stands in one file, with its source and day; and whatever looks like it elsewhere fails here.
"""

from __future__ import annotations

import ast
import datetime
import re
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from hetopt.backends.ec2 import facts
from hetopt.backends.ec2.renter.request import (
    FIRST_WAIT_S,
    LONGEST_WAIT_S,
    TABLE,
    UNKNOWN,
    Answer,
    ApiRefused,
    Request,
    Retrying,
    meaning_of,
    wait_before,
)
from hetopt.core.errors import CloudRefused
from hetopt.optimizer.cost.bill import load_billing
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


def test_botocore_does_not_hammer_an_exhausted_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that answers 503 InsufficientInstanceCapacity is asked once: botocore's own retries are off."""
    import http.server
    import threading

    from hetopt.backends.ec2.renter.request import BotoEdge

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


HERE = Path(__file__).resolve().parents[2] / "hetopt"
EC2 = HERE / "backends" / "ec2"

AWS_WRITES = re.compile(
    r"/aws/service/|169\.254\.|/latest/(api|meta-data)|X-aws-|\.amazonaws\.com|/dev/(xvd|sd|nvme)|Linux/UNIX"
    r"|default-for-az|2012-10-17|\b(Client|Server)\.[A-Z]|^DryRunOperation$|^ParameterNotFound$"
    r"|^(NoSuch|Invalid)[A-Z]\w*(\.\w+)?$|^shutting-down$|^terminated$|al2023|^us-east-1$"
)
"""What a literal that is AWS's looks like: names of parameters, services, devices, states and refusals."""

TOLD_TO_PEOPLE = re.compile(r"\s")
"""Sentences with an example in them are no constants; nor is an error's words."""


def sources() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(EC2.rglob("*.py")):
        yield path.relative_to(EC2).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def literals(tree: ast.Module) -> Iterator[str]:
    """Texts that the code uses; not what documents it."""
    documents = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documents:
            yield node.value


WHOLE_CODES = {code for row in TABLE for code in row.codes if not set("*?") & set(code)}


def is_awss(text: str) -> bool:
    return text in WHOLE_CODES or (bool(AWS_WRITES.search(text)) and not TOLD_TO_PEOPLE.search(text))


def test_no_text_of_awss_stands_outside() -> None:
    found = [(name, text) for name, tree in sources() for text in literals(tree) if is_awss(text)]
    assert not found, "put it into hetopt/backends/ec2/facts.toml, with its source"


def test_every_belief_has_its_source_and_day_and_a_reader() -> None:
    sources = (path for folder in ("hetopt", "tests", "benchmarks") for path in (HERE.parent / folder).rglob("*.py"))
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    assert set(re.findall(r"facts\.([A-Z][A-Z_0-9]+)", text)) - {"BELIEFS", "NAME"} | {"PYTHON"} == set(facts.BELIEFS)
    for name, belief in facts.BELIEFS.items():
        assert belief["source"].strip(), name
        assert belief["means"].endswith("."), name
        assert datetime.date.fromisoformat(belief["read"]) >= datetime.date(2026, 1, 1), name
    for row in TABLE:
        assert row.source.strip(), row.codes


def test_the_bill_and_the_machines_go_by_the_same_rules() -> None:
    bill = load_billing()
    assert bill.minimum_billed_s.value == facts.MINIMUM_BILLED_S
    assert bill.spot_free_if_interrupted_within_s.value == facts.FREE_IF_TAKEN_WITHIN_S
