"""A real moto server in a process of its own, reached over HTTP on loopback, and a small plan to rent on it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

import pytest

from benchmarks._ports import own_port
from hetopt.backends.ec2.objects import S3Objects
from hetopt.backends.ec2.renter.launcher import BUNDLE_FILE, PLAN_OBJECT, Ec2Launcher, Loop
from hetopt.backends.ec2.renter.order import ORDER_FILE, ClusterState, Order
from hetopt.backends.ec2.renter.ordering import Orders
from hetopt.backends.ec2.renter.removal import Remover, TaggedResource
from hetopt.backends.ec2.renter.request import LEDGER_FILE, Answer, BotoEdge, Edge, LedgerEdge, Request, Retrying
from hetopt.backends.host.bundle import Bundle, make_bundle
from hetopt.backends.options import Ec2
from hetopt.core.profile import Profile
from hetopt.core.run_spec import Compression, RunSpec, StopRule, WorkerSpec
from hetopt.optimizer.cost.bill import Billing, load_billing
from hetopt.optimizer.market.catalog import Catalog, load_catalog
from hetopt.optimizer.plan import Candidate, Group, Plan, Prediction, Range
from tests.face.conftest import RECORDED, hetopt

__all__ = ["hetopt"]

REGION = "us-east-1"
ACCOUNT = "123456789012"
BUCKET = f"hetopt-{ACCOUNT}-{REGION}"


@pytest.fixture(scope="session", autouse=True)
def read_once() -> Iterator[None]:
    """What calls of AWS look like, and the archive of the same files, once for all tests: seconds of each command."""
    import botocore.loaders
    import botocore.session

    from hetopt.backends.host import bundle

    archive = bundle._archive
    packed = lru_cache(maxsize=8)(lambda files: archive(dict(files)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(botocore.session, "create_loader", lru_cache(botocore.loaders.create_loader))
        patch.setattr(bundle, "_archive", lambda files: packed(tuple(files.items())))
        yield


@pytest.fixture(scope="session")
def moto_url() -> Iterator[str]:
    address, port = own_port()
    server = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.box.unkind", address, str(port)],
        cwd=Path(__file__).resolve().parents[2],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # A thousand images with their disks are no test's business, and take seconds whenever it starts over.
        env={
            **os.environ,
            "MOTO_EC2_ENABLE_INSTANCE_TYPE_VALIDATION": "true",
            "MOTO_EC2_LOAD_DEFAULT_AMIS": "false",
        },
    )
    url = f"http://{address}:{port}"
    try:
        for _ in range(1200):  # it takes seconds of processor time, of which a busy machine has few
            try:
                urllib.request.urlopen(f"{url}/moto-api/data.json").close()
                break
            except (urllib.error.URLError, ConnectionError):
                assert server.poll() is None, "the moto server ended"
                time.sleep(0.1)
        yield url
    finally:
        server.kill()  # it keeps nothing, and on a busy machine it takes its time to end well
        server.wait(30)


@pytest.fixture(scope="session")
def door() -> BotoEdge:
    """One for all tests: to read what EC2's calls look like takes a fifth of a second for every client that is made."""
    return BotoEdge(REGION)


@pytest.fixture
def cloud(moto_url: str, door: BotoEdge, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> BotoEdge:
    """The edge to an empty account that has a bucket; what is kept of it goes to a home of the test's own."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto_url)
    monkeypatch.setenv("HETOPT_HOME", str(tmp_path / "home"))
    start_over(door)
    return door


def start_over(edge: BotoEdge) -> None:
    """An empty account that has a bucket: moto keeps what has ended, and becomes slow by it."""
    reset = urllib.request.Request(f"{os.environ['AWS_ENDPOINT_URL']}/moto-api/reset", method="POST")
    urllib.request.urlopen(reset).close()
    edge(Request(step="b", service="s3", operation="create_bucket", parameters={"Bucket": BUCKET}, purpose=""))


def be_unkind(**how: object) -> None:
    """What the account does to us from now on, until the next test; see `benchmarks.box.unkind`."""
    asked = urllib.request.Request(
        f"{os.environ['AWS_ENDPOINT_URL']}/unkind", method="POST", data=json.dumps(how).encode()
    )
    urllib.request.urlopen(asked).close()


def account_truth() -> dict[str, Any]:
    """What nobody but the account itself knows."""
    with urllib.request.urlopen(f"{os.environ['AWS_ENDPOINT_URL']}/unkind") as answer:
        told: dict[str, Any] = json.loads(answer.read())
    return told


@dataclass
class Patience:
    """A clock that only moves when somebody waits."""

    now_s: float = 1_800_000_000.0
    waits: list[float] = field(default_factory=list)

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now_s += seconds

    def clock(self) -> float:
        return self.now_s


@pytest.fixture
def patience() -> Patience:
    return Patience()


@dataclass(frozen=True, kw_only=True)
class Recording:
    """Keeps every request that passes."""

    inner: Edge
    seen: list[Request] = field(default_factory=list)

    def __call__(self, request: Request) -> Answer:
        self.seen.append(request)
        return self.inner(request)

    @property
    def operations(self) -> list[str]:
        return [request.operation for request in self.seen]


def stack(inner: Edge, folder: Path, patience: Patience, **retries: Any) -> Edge:
    """The edge of a run as the product composes it, with a clock of the test's own."""
    retrying = Retrying(inner=inner, sleep=patience.sleep, random=Random(0), **retries)
    return LedgerEdge(inner=retrying, path=folder / LEDGER_FILE, region=REGION, clock=patience.clock)


def renter(edge: Edge, order: Order, folder: Path, patience: Patience) -> Loop:
    """Who rents, follows and ends the machines of a run in this folder."""
    return Loop(
        edge=stack(edge, folder, patience), order=order, run_dir=folder, clock=patience.clock, sleep=patience.sleep
    )


def rent(edge: Edge, order: Order, plan: Plan, bundle: Bundle, folder: Path, patience: Patience) -> ClusterState:
    """The machines of a plan, rented."""
    files = {"plan.json": plan.to_json().encode()}
    return renter(edge, order, folder, patience).begin(plan.run, files, bundle.data)


def leftovers(edge: Edge, run_id: str | None = None) -> list[TaggedResource]:
    """Everything with a tag of ours that is still there."""
    return list(Remover(edge=edge, sleep=lambda _: None).look(run_id).check())


@pytest.fixture(scope="session")
def catalog() -> Catalog:
    return load_catalog(REGION)


@pytest.fixture(scope="session")
def billing() -> Billing:
    return load_billing()


@pytest.fixture(scope="session")
def bundle() -> Bundle:
    return make_bundle("digits")


@pytest.fixture(scope="session")
def profile() -> Profile:
    return Profile.load(RECORDED / "digits.json")


GROUPS = (("c7i.large", 3, "spot"), ("c7g.xlarge", 1, "on-demand"))


@pytest.fixture(scope="session")
def plan(profile: Profile, catalog: Catalog) -> Plan:
    return plan_of(profile, catalog, GROUPS)


def plan_of(
    profile: Profile, catalog: Catalog, groups: tuple[tuple[str, int, Any], ...], budget_usd: float | None = 5.0
) -> Plan:
    """A plan of these groups: recommended plans for so small a job have one machine."""
    from hetopt.optimizer.market.catalog import offers
    from hetopt.optimizer.plan import Goal

    figures = {(offer.instance_type.name, offer.price.market): offer.price for offer in offers(catalog)}
    made = []
    for name, machines, market in groups:
        price = figures[name, market]
        made.append(
            Group(
                instance_type=name,
                machines=machines,
                market=market,
                region=REGION,
                price_usd_per_hour=price.usd_per_hour,
                price_date=str(price.date),
                price_source=price.source,
                price_is_estimate=price.is_estimate,
                interruption_band=None,
                local_batch_sizes=(16,) * machines,
                evidence="interpolated",
            )
        )
    workers = tuple(
        WorkerSpec(
            host=f"{group.instance_type}-{group.market}-{machine}", type=group.instance_type, local_batch_size=16
        )
        for group in made
        for machine in range(group.machines)
    )
    hour = Range(value=1200.0, low=900.0, high=1500.0)
    hourly = sum(group.machines * group.price_usd_per_hour for group in made)
    prediction = Prediction(
        step_time_s=Range(value=0.1, low=0.08, high=0.12),
        compute_s=0.08,
        communication_s=0.02,
        waiting_s=0.0,
        steps=Range(value=10_000, low=9_000, high=12_000),
        steps_source="as asked",
        training_s=hour,
        startup_s=180.0,
        total_s=hour,
        cost_usd=Range(value=hourly / 3, low=hourly / 4, high=hourly / 2),
        cost_terms=(),
    )
    chosen = Candidate(
        groups=tuple(made),
        global_batch_size=16 * len(workers),
        compression=Compression(name="identity"),
        collective="all_reduce",
        prediction=prediction,
    )
    return Plan(
        created="2026-11-20T00:00:00+00:00",
        hetopt_version="0.1.0",
        goal=Goal(budget_usd=budget_usd, ends="steps", amount=10_000),
        chosen=chosen,
        pareto=(chosen,),
        explanation=(),
        searched="by hand",
        run=RunSpec(task="digits", workers=workers, stop=StopRule(max_steps=10_000)),
        profile=profile,
    )


@pytest.fixture
def order_for(
    cloud: BotoEdge, plan: Plan, catalog: Catalog, billing: Billing, bundle: Bundle, patience: Patience
) -> Callable[..., Order]:
    """``order_for("run")``: the order of the plan under that name."""

    def make(run_id: str = "20261120-000000-digits-0001", chosen: Plan = plan, **options: Any) -> Order:
        orders = Orders(edge=cloud, catalog=catalog, billing=billing, options=Ec2(**options), version="0.1.0")
        return orders.of_plan(chosen, run_id=run_id, bundle_sha256=bundle.sha256, now_s=patience.now_s)

    return make


def ordered(folder: Path, order: Order, plan: Plan, bundle: Bundle) -> Path:
    """The folder of a run that was ordered and not launched."""
    folder.mkdir(parents=True)
    order.save(folder / ORDER_FILE)
    plan.save(folder / PLAN_OBJECT)
    (folder / BUNDLE_FILE).write_bytes(bundle.data)
    return folder


@pytest.fixture
def run_dir(tmp_path: Path, order_for: Callable[..., Order], plan: Plan, bundle: Bundle) -> Path:
    return ordered(tmp_path / "runs" / "a-run", order_for(), plan, bundle)


@pytest.fixture
def order(run_dir: Path) -> Order:
    """The order in that folder."""
    return Order.load(run_dir / ORDER_FILE)


@pytest.fixture
def launcher(cloud: BotoEdge, tmp_path: Path, patience: Patience) -> Ec2Launcher:
    return Ec2Launcher(home=tmp_path, inner=Recording(inner=cloud), clock=patience.clock, sleep=patience.sleep)


@pytest.fixture
def objects(cloud: BotoEdge) -> S3Objects:
    """The bucket as a machine of the run ``r`` has it."""
    return S3Objects.connect(region=REGION, bucket=BUCKET, prefix="runs/r", account_id=ACCOUNT)


@pytest.fixture
def home(cloud: BotoEdge, tmp_path: Path) -> Path:
    """The folder of all runs of whoever types commands."""
    return tmp_path / "home" / "runs"


@pytest.fixture
def plan_file(plan: Plan, tmp_path: Path) -> Path:
    plan.save(tmp_path / "plan.json")
    return tmp_path / "plan.json"
