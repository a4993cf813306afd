"""`hetopt catalog refresh`: against a moto server process and a price list on this machine, page by page; refusals."""

from __future__ import annotations

import datetime
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import boto3
import pytest
from botocore.stub import ANY, Stubber

from hetopt.core.errors import CloudRefused
from hetopt.optimizer.market import pricing
from hetopt.optimizer.market.answer_store import AnswerStore
from hetopt.optimizer.market.catalog import BUNDLED, load_catalog
from hetopt.optimizer.market.catalog_folder import write_catalog
from hetopt.optimizer.market.catalog_refresh import refreshed
from hetopt.optimizer.market.zone_prices import ZonePrice, read_zone_prices
from tests.disturbance import PATIENCE_S

NOW = datetime.datetime(2026, 11, 20, 12, tzinfo=datetime.UTC)


def price(name: str, usd: float, region: str = "us-east-1") -> str:
    """An item of the price list, cut down to the fields that matter and two that must be skipped."""
    return json.dumps(
        {
            "product": {
                "attributes": {"instanceType": name, "regionCode": region, "operatingSystem": "Linux"},
                "sku": f"SKU{name}",
            },
            "terms": {
                "OnDemand": {
                    "T1": {
                        "priceDimensions": {
                            "D1": {"unit": "Hrs", "pricePerUnit": {"USD": f"{usd:.10f}"}},
                            "D2": {"unit": "Quantity", "pricePerUnit": {"USD": "99.0"}},
                        }
                    },
                    "T2": {"priceDimensions": {"D3": {"unit": "Hrs", "pricePerUnit": {"USD": "0.0000000000"}}}},
                },
                "Reserved": {"R1": {"priceDimensions": {"D4": {"unit": "Hrs", "pricePerUnit": {"USD": "0.01"}}}}},
            },
        }
    )


class PriceList(BaseHTTPRequestHandler):
    """Answers GetProducts in two pages, as the real service does; moto has no answer to it."""

    seen: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append(asked)
        page = [price("g5.xlarge", 1.006), price("c7i.xlarge", 0.1785)]
        answer: dict[str, Any] = {"FormatVersion": "aws_v1", "PriceList": page, "NextToken": "second"}
        if asked.get("NextToken") == "second":
            answer = {"FormatVersion": "aws_v1", "PriceList": [price("p4d.24xlarge", 21.9576)]}
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/x-amz-json-1.1")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture(scope="module")
def price_list() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), PriceList)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def moto_server() -> Iterator[str]:
    """A real moto server, in a process of its own."""
    pytest.importorskip("moto.server", reason="needs moto[server]")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "MOTO_EC2_LOAD_DEFAULT_AMIS": "false"},
    )
    try:
        until = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=0.5).close()
                break
            except OSError:
                assert process.poll() is None, "the moto server has ended"
                assert time.monotonic() < until, "the moto server does not answer"
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(timeout=PATIENCE_S)


def hetopt(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own. Whatever is not redirected goes to a port where nobody answers."""
    nowhere = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_MAX_ATTEMPTS": "1"}
    return subprocess.run(
        [sys.executable, "-c", "from hetopt.cli.main import main; main()", *arguments],
        env={**os.environ, **nowhere, **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def test_a_region_is_refreshed_and_used_from_then_on(moto_server: str, price_list: str, tmp_path: Path) -> None:
    PriceList.seen.clear()
    there = {"AWS_ENDPOINT_URL_EC2": moto_server, "AWS_ENDPOINT_URL_PRICING": price_list, "HETOPT_HOME": str(tmp_path)}
    done = hetopt("catalog", "refresh", "--region", "us-east-1", "--json", **there)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["types"] > 500
    assert (told["on_demand_prices"], told["spot_prices"]) == (3, 0)
    # moto's spot prices are all 0.00001: no price of a machine that costs a dollar on demand.
    assert any("g5.xlarge" in sentence and "cannot be" in sentence for sentence in told["left_out"])
    folder = Path(told["folder"])
    assert folder == tmp_path / "catalogs" / "aws" / "us-east-1" / told["date"]
    assert not (folder.parent / "reading").exists()
    fields = {entry["Field"]: entry["Value"] for entry in PriceList.seen[0]["Filters"]}
    assert fields["regionCode"] == "us-east-1"
    assert fields["tenancy"] == "Shared"
    assert [asked.get("NextToken") for asked in PriceList.seen] == [None, "second"]

    new, old = load_catalog("us-east-1", folder), load_catalog("us-east-1")
    on_demand = new.price("p4d.24xlarge", "on-demand")
    assert on_demand is not None
    assert (on_demand.usd_per_hour, on_demand.date.isoformat()) == (21.9576, told["date"])
    assert "price list" in on_demand.source
    same, before = new.instance_type("p4d.24xlarge"), old.instance_type("p4d.24xlarge")
    assert same.accelerator == before.accelerator
    assert (same.vcpus, same.memory_gib, same.network_baseline_gbps) == (
        before.vcpus,
        before.memory_gib,
        before.network_baseline_gbps,
    )
    assert same.coremark_iterations_per_s == before.coremark_iterations_per_s
    assert new.band("g5.xlarge") == old.band("g5.xlarge")
    assert new.in_region("eu-west-2").listings.keys() == old.in_region("eu-west-2").listings.keys()

    shown = hetopt("catalog", "show", "p4d.24xlarge", "--json", HETOPT_HOME=str(tmp_path))
    assert "21.9576" in shown.stdout


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}, "no AWS credentials"),
        ({}, "cannot be reached"),
    ],
)
def test_a_refusal_says_what_stays_in_use_and_how_old_it_is(
    environment: dict[str, str], says: str, tmp_path: Path
) -> None:
    done = hetopt("catalog", "refresh", "--region", "us-east-1", HETOPT_HOME=str(tmp_path), **environment)
    assert done.returncode == 4, done.stderr
    assert says in done.stderr
    assert "bundled catalogue" in done.stderr
    assert "days old" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unknown_region_and_profile_are_refused(tmp_path: Path) -> None:
    done = hetopt("catalog", "refresh", "--region", "us-esat-1", HETOPT_HOME=str(tmp_path))
    assert done.returncode == 2
    assert "us-east-1" in done.stderr
    done = hetopt("catalog", "refresh", "--profile", "nobody", HETOPT_HOME=str(tmp_path))
    assert done.returncode == 4
    assert "nobody" in done.stderr


class Scripted:
    """A session whose clients give the answers that they were told, through botocore's own checks and parsers."""

    def __init__(self) -> None:
        options = {"region_name": "us-east-1", "aws_access_key_id": "x", "aws_secret_access_key": "y"}
        self.clients = {name: boto3.client(name, **options) for name in ("ec2", "pricing")}
        self.stubs = {name: Stubber(client) for name, client in self.clients.items()}
        for stub in self.stubs.values():
            stub.activate()

    def client(self, service_name: str, **options: Any) -> Any:
        return self.clients[service_name]

    def answer(self, method: str, answer: dict[str, Any], *, token: str | None = None, service: str = "ec2") -> None:
        expected: dict[str, Any] = {
            "describe_instance_types": {"MaxResults": 100},
            "describe_instance_type_offerings": {"LocationType": "availability-zone-id", "MaxResults": 1000},
            "describe_availability_zones": {},
            "describe_spot_price_history": {
                "ProductDescriptions": ["Linux/UNIX"],
                "StartTime": ANY,
                "EndTime": ANY,
                "MaxResults": 1000,
            },
            "get_products": {"ServiceCode": "AmazonEC2", "FormatVersion": "aws_v1", "MaxResults": 100, "Filters": ANY},
        }[method]
        self.stubs[service].add_response(method, answer, {**expected, **({"NextToken": token} if token else {})})

    def refuse(self, method: str, code: str, service: str = "ec2") -> None:
        self.stubs[service].add_client_error(method, code)

    def all_asked(self) -> None:
        for stub in self.stubs.values():
            stub.assert_no_pending_responses()


def small(name: str) -> dict[str, Any]:
    return {
        "InstanceType": name,
        "SupportedUsageClasses": ["on-demand", "spot"],
        "ProcessorInfo": {"SupportedArchitectures": ["x86_64"], "Manufacturer": "Intel"},
        "VCpuInfo": {"DefaultVCpus": 4, "DefaultCores": 2},
        "MemoryInfo": {"SizeInMiB": 8192},
        "NetworkInfo": {
            "NetworkPerformance": "Up to 12.5 Gigabit",
            "NetworkCards": [{"BaselineBandwidthInGbps": 1.562, "PeakBandwidthInGbps": 12.5}],
        },
    }


def rest(script: Scripted) -> None:
    """The parts after the instance types, a page each."""
    script.answer(
        "describe_instance_type_offerings",
        {"InstanceTypeOfferings": [{"InstanceType": "c7i.xlarge", "Location": "use1-az1"}]},
    )
    script.answer(
        "describe_availability_zones", {"AvailabilityZones": [{"ZoneName": "us-east-1a", "ZoneId": "use1-az1"}]}
    )
    script.answer(
        "describe_spot_price_history",
        {
            "SpotPriceHistory": [
                {
                    "AvailabilityZone": "us-east-1a",
                    "InstanceType": "c7i.xlarge",
                    "ProductDescription": "Linux/UNIX",
                    "SpotPrice": "0.070000",
                    "Timestamp": NOW,
                }
            ]
        },
    )
    script.answer("get_products", {"PriceList": [price("c7i.xlarge", 0.1785)]}, service="pricing")


def test_pages_are_read_at_a_gentle_rate(tmp_path: Path) -> None:
    script, pauses = Scripted(), []
    script.answer("describe_instance_types", {"InstanceTypes": [small("c7i.xlarge")], "NextToken": "2"})
    script.answer("describe_instance_types", {"InstanceTypes": [small("c7i.2xlarge")], "NextToken": "3"}, token="2")
    script.answer("describe_instance_types", {"InstanceTypes": [small("c7i.4xlarge")]}, token="3")
    rest(script)
    told: list[tuple[str, int]] = []
    answers = pricing.read_region(
        "us-east-1",
        AnswerStore.open(tmp_path / "reading", NOW),
        script,
        told=lambda part, items: told.append((part, items)),
        sleep=pauses.append,
    )
    script.all_asked()
    assert [answer["InstanceType"] for answer in answers.instance_types] == ["c7i.xlarge", "c7i.2xlarge", "c7i.4xlarge"]
    assert told[:3] == [("describe-instance-types", 1), ("describe-instance-types", 2), ("describe-instance-types", 3)]
    assert pauses == [pricing.PAUSE_S] * 2

    made = refreshed(answers, "us-east-1", NOW.date(), BUNDLED)
    loaded = load_catalog("us-east-1", write_catalog(tmp_path / "2026-11-20", made.files, "us-east-1"))
    spot = loaded.price("c7i.xlarge", "spot")
    assert spot is not None
    assert (spot.usd_per_hour, spot.is_estimate, spot.date) == (0.07, False, NOW.date())
    assert read_zone_prices(tmp_path / "2026-11-20", "us-east-1") == {
        "c7i.xlarge": {"use1-az1": ZonePrice(usd_per_hour=0.07, log_sd=0.0)}
    }
    assert read_zone_prices(BUNDLED, "us-east-1") == {}


def test_an_interrupted_reading_goes_on_where_it_stopped(tmp_path: Path) -> None:
    first = Scripted()
    first.answer("describe_instance_types", {"InstanceTypes": [small("c7i.xlarge")], "NextToken": "2"})
    first.refuse("describe_instance_types", "RequestLimitExceeded")
    with pytest.raises(CloudRefused, match="rate") as refused:
        pricing.read_region("us-east-1", AnswerStore.open(tmp_path, NOW), first, sleep=lambda s: None)
    assert "goes on where it stopped" in str(refused.value.hint)
    with (tmp_path / "describe-instance-types.jsonl").open("a") as stream:
        stream.write('{"items": [{"Insta')  # a kill in the middle of a page

    later = NOW + datetime.timedelta(hours=1)
    second = Scripted()
    second.answer("describe_instance_types", {"InstanceTypes": [small("c7i.2xlarge")]}, token="2")
    rest(second)
    answers = pricing.read_region("us-east-1", AnswerStore.open(tmp_path, later), second, sleep=lambda s: None)
    second.all_asked()
    assert AnswerStore.open(tmp_path, later).begun == NOW
    assert [answer["InstanceType"] for answer in answers.instance_types] == ["c7i.xlarge", "c7i.2xlarge"]
    again = pricing.read_region("us-east-1", AnswerStore.open(tmp_path, later), Scripted(), sleep=lambda s: None)
    assert list(again.instance_types) == list(answers.instance_types)


def test_a_token_that_has_died_begins_its_part_again(tmp_path: Path) -> None:
    store = AnswerStore.open(tmp_path, NOW)
    store.add("describe-instance-types", [small("old.large")], "dead")
    script = Scripted()
    script.refuse("describe_instance_types", "InvalidNextToken")
    script.answer("describe_instance_types", {"InstanceTypes": [small("c7i.xlarge")]})
    rest(script)
    answers = pricing.read_region("us-east-1", store, script, sleep=lambda s: None)
    assert [answer["InstanceType"] for answer in answers.instance_types] == ["c7i.xlarge"]


def test_a_reading_of_this_morning_is_not_gone_on_with(tmp_path: Path) -> None:
    AnswerStore.open(tmp_path / "reading", NOW).add("describe-instance-types", [small("c7i.xlarge")], None)
    late = AnswerStore.open(tmp_path / "reading", NOW + datetime.timedelta(hours=7))
    assert late.progress("describe-instance-types").items == ()


@pytest.mark.parametrize(
    ("code", "says", "hint"),
    [
        ("UnauthorizedOperation", "DescribeInstanceTypes", "ec2:DescribeInstanceTypes"),
        ("ExpiredToken", "credentials", "sign in"),
        ("AuthFailure", "us-east-1", "enable the region"),
        ("InternalError", "InternalError", "health"),
    ],
)
def test_refusals_are_a_sentence_and_a_next_step(code: str, says: str, hint: str, tmp_path: Path) -> None:
    script = Scripted()
    script.refuse("describe_instance_types", code)
    with pytest.raises(CloudRefused, match=says) as refused:
        pricing.read_region("us-east-1", AnswerStore.open(tmp_path, NOW), script, sleep=lambda s: None)
    assert hint in str(refused.value.hint)
