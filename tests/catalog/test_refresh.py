"""`hetopt catalog refresh` with an account: against a moto server process, page by page; refusals."""

from __future__ import annotations

import datetime
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.stub import ANY, Stubber

from benchmarks._ports import own_port
from hetopt.core.errors import CloudRefused
from hetopt.optimizer.market import pricing
from hetopt.optimizer.market.answer_store import AnswerStore
from hetopt.optimizer.market.catalog import BUNDLED, load_catalog
from hetopt.optimizer.market.catalog_folder import write_catalog
from hetopt.optimizer.market.catalog_refresh import PublicPrices, refreshed
from hetopt.optimizer.market.zone_prices import ZonePrice, read_zone_prices
from tests.catalog.price_server import TYPES, Feeds, price_list, row, serving, usd_of
from tests.disturbance import PATIENCE_S

KNOWN = {"g5.xlarge": 1.006, "c7i.xlarge": 0.1785, "p4d.24xlarge": 21.9576}
NOW = datetime.datetime(2026, 11, 20, 12, tzinfo=datetime.UTC)


@pytest.fixture(scope="module")
def feeds() -> Iterator[Feeds]:
    with serving() as feeds:
        feeds.fill(regions=("us-east-1",))
        # Prices that stand beside moto's: it knows types, and gives every spot price as 0.00001.
        rows = (row(name, usd) for name, usd in {**{name: usd_of(name) for name in TYPES}, **KNOWN}.items())
        feeds.files[feeds.list_path] = price_list(cells | {"Region Code": "us-east-1"} for cells in rows)
        yield feeds


@pytest.fixture(scope="module")
def moto_server() -> Iterator[str]:
    """A real moto server, in a process of its own."""
    pytest.importorskip("moto.server", reason="needs moto[server]")
    address, port = own_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", address, "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "MOTO_EC2_LOAD_DEFAULT_AMIS": "false"},
    )
    try:
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                socket.create_connection((address, port), timeout=0.5).close()
                break
            except OSError:
                assert process.poll() is None, "the moto server has ended"
                assert time.monotonic() < until, "the moto server does not answer"
                time.sleep(0.1)
        yield f"http://{address}:{port}"
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


def test_an_account_adds_zones_to_what_aws_publishes(moto_server: str, feeds: Feeds, tmp_path: Path) -> None:
    there = {"AWS_ENDPOINT_URL_EC2": moto_server, "HETOPT_PRICE_MIRROR": feeds.url, "HETOPT_HOME": str(tmp_path)}
    done = hetopt("catalog", "refresh", "--region", "us-east-1", "--json", **there)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["types"] > 500
    assert (told["on_demand_prices"], told["spot_prices"]) == (len(TYPES), 0)
    # moto's spot prices are all 0.00001: no price of a machine that costs a dollar on demand.
    assert any("g5.xlarge" in sentence and "cannot be" in sentence for sentence in told["left_out"])
    folder = Path(told["folder"])
    assert folder == tmp_path / "catalogs" / "aws" / "us-east-1" / told["date"]
    assert not (folder.parent / "reading").exists()

    new, old = load_catalog("us-east-1", folder), load_catalog("us-east-1")
    on_demand = new.price("p4d.24xlarge", "on-demand")
    assert on_demand is not None
    assert (on_demand.usd_per_hour, on_demand.date.isoformat()) == (21.9576, told["date"])
    assert "price list" in on_demand.source
    assert new.listing("p4d.24xlarge").zones
    same, before = new.instance_type("p4d.24xlarge"), old.instance_type("p4d.24xlarge")
    assert same.accelerator == before.accelerator
    assert (same.vcpus, same.memory_gib, same.network_baseline_gbps) == (
        before.vcpus,
        before.memory_gib,
        before.network_baseline_gbps,
    )
    assert same.coremark_iterations_per_s == before.coremark_iterations_per_s
    assert new.in_region("eu-west-2").listings.keys() == old.in_region("eu-west-2").listings.keys()

    shown = hetopt("catalog", "show", "p4d.24xlarge", "--json", HETOPT_HOME=str(tmp_path))
    assert "21.9576" in shown.stdout


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}, ""),
        ({}, "Without prices of zones: AWS cannot"),
    ],
)
def test_without_an_account_that_works_prices_are_those_that_aws_publishes(
    environment: dict[str, str], says: str, feeds: Feeds, tmp_path: Path
) -> None:
    there = {"HETOPT_PRICE_MIRROR": feeds.url, "HETOPT_HOME": str(tmp_path), **environment}
    done = hetopt("catalog", "refresh", "--region", "us-east-1", "--json", **there)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["on_demand_prices"] == len(TYPES)
    assert told["spot_prices"] > 0.99 * len(TYPES)  # those of the types in KNOWN have other prices beside them
    assert ("Without" in done.stderr) == bool(says)
    assert says in done.stderr


def test_where_nobody_answers_it_is_said_what_stays_in_use_and_how_old_it_is(tmp_path: Path) -> None:
    done = hetopt("catalog", "refresh", "--region", "us-east-1", HETOPT_HOME=str(tmp_path))
    assert done.returncode == 4, done.stderr
    assert "127.0.0.1 cannot be reached" in done.stderr
    assert "In use stays the bundled catalogue: on demand" in done.stderr
    assert "days old (2026-07-20)" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unknown_region_and_profile_are_refused(feeds: Feeds, tmp_path: Path) -> None:
    there = {"HETOPT_PRICE_MIRROR": feeds.url, "HETOPT_HOME": str(tmp_path)}
    done = hetopt("catalog", "refresh", "--region", "us-esat-1", **there)
    assert done.returncode == 2
    assert "us-east-1" in done.stderr
    done = hetopt("catalog", "refresh", "--profile", "nobody", **there)
    assert done.returncode == 4
    assert "nobody" in done.stderr


class Scripted:
    """A session whose clients give the answers that they were told, through botocore's own checks and parsers."""

    def __init__(self) -> None:
        options = {"region_name": "us-east-1", "aws_access_key_id": "x", "aws_secret_access_key": "y"}
        self.ec2 = boto3.client("ec2", **options)
        self.stub = Stubber(self.ec2)
        self.stub.activate()

    def client(self, service_name: str, **options: Any) -> Any:
        assert service_name == "ec2"
        return self.ec2

    def get_credentials(self) -> str:
        return "some"

    def answer(self, method: str, answer: dict[str, Any], *, token: str | None = None) -> None:
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
        }[method]
        self.stub.add_response(method, answer, {**expected, **({"NextToken": token} if token else {})})

    def refuse(self, method: str, code: str) -> None:
        self.stub.add_client_error(method, code)

    def all_asked(self) -> None:
        self.stub.assert_no_pending_responses()


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

    public = PublicPrices(on_demand={"c7i.xlarge": 0.1785}, published="2026-11-19", spot={"c7i.xlarge": 0.09})
    made = refreshed(public, answers, "us-east-1", NOW.date(), BUNDLED)
    folder = write_catalog(tmp_path, "us-east-1", "2026-11-20", made.files)
    loaded = load_catalog("us-east-1", folder)
    spot = loaded.price("c7i.xlarge", "spot")
    assert spot is not None
    assert (spot.usd_per_hour, spot.is_estimate, spot.date) == (0.07, False, NOW.date())
    assert read_zone_prices(folder, "us-east-1") == {
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
