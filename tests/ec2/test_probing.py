"""Probes on rented machines: which there may be, that each is rented, measured, paid for and given back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hetopt.backends.ec2.renter import calls
from hetopt.backends.ec2.renter.backend import (
    BOOT_S,
    Prober,
    probe_price_usd,
    rented_probes,
    roles_for,
)
from hetopt.backends.ec2.renter.launcher import Ec2Launcher
from hetopt.backends.ec2.renter.order import ORDER_FILE, SEEN_FILE, ClusterState, Order
from hetopt.backends.ec2.renter.request import BotoEdge, Request
from hetopt.backends.host.bundle import Bundle
from hetopt.backends.options import Ec2
from hetopt.core.errors import BadInput, BudgetStop, RunFailed
from hetopt.core.profile import Profile
from hetopt.optimizer.cost.bill import Billing
from hetopt.optimizer.market.catalog import Catalog
from hetopt.optimizer.step_time.prediction import PROBE_STEPS
from tests.ec2.conftest import Patience, leftovers
from tests.ec2.test_command import refused
from tests.face.conftest import Answer
from tests.logs import fields

TYPES = ("c7i.large", "c7i.xlarge", "c7g.large")
HOURLY = {"c7i.large": 0.03, "c7i.xlarge": 0.07, "c7g.large": 0.03}


def test_layouts_are_one_and_two_machines_and_mixes_of_one_image(profile: Profile, catalog: Catalog) -> None:
    probes = rented_probes(profile, catalog, TYPES)
    layouts = {probe.configuration.layout for probe in probes}
    assert len(layouts) == len(probes) == 7
    assert (("c7i.large", 1), ("c7i.xlarge", 1)) in layouts
    assert not any({name for name, _ in layout} == {"c7i.large", "c7g.large"} for layout in layouts)
    for probe in probes:
        assert probe.spec.global_batch_size <= profile.job.batch_size
        assert [worker.type for worker in probe.spec.workers] == [node.type for node in probe.configuration.nodes]
        roles = roles_for(probe, catalog)
        assert sum(role.machines for role in roles) == len(probe.configuration.nodes)
        assert {role.market for role in roles} == {"spot"}
        one = probe_price_usd(HOURLY, probe.configuration, None)
        assert one == pytest.approx(sum(HOURLY[node.type] for node in probe.configuration.nodes) * BOOT_S / 3600)
        assert probe_price_usd(HOURLY, probe.configuration, 1.0) == pytest.approx(one * (1 + PROBE_STEPS / BOOT_S))
    with pytest.raises(BadInput, match="no machine type"):
        rented_probes(profile, catalog, ())
    with pytest.raises(BadInput, match="no instance type called 'c99"):
        rented_probes(profile, catalog, ("c99.large",))


def a_machine_that(events: list[dict[str, object]], cloud: BotoEdge, folder: Path) -> Callable[[], None]:
    """What the machines of a probe write, and that they then shut down."""

    def work() -> None:
        order = Order.load(folder / ORDER_FILE)
        text = "".join(json.dumps({"time_s": 1.0, **event}) + "\n" for event in events)
        cloud(calls.put_object(order, "node", f"{order.prefix}/events/{0:015d}.jsonl", text.encode(), "by a machine"))
        ids = [machine.id for machine in ClusterState.load(folder / SEEN_FILE).machines]
        end = {"InstanceIds": ids}
        cloud(Request(step="t", service="ec2", operation="terminate_instances", parameters=end, purpose="they end"))

    return work


@pytest.fixture
def prober(
    cloud: BotoEdge,
    catalog: Catalog,
    billing: Billing,
    bundle: Bundle,
    profile: Profile,
    patience: Patience,
    tmp_path: Path,
) -> Callable[[Callable[[], None]], Prober]:
    def make(work: Callable[[], None]) -> Prober:
        import time

        patience.now_s = time.time()  # moto's machines are of now
        worked: list[bool] = []

        def sleep(seconds: float) -> None:
            polls = seconds == 1.0
            patience.sleep(20.0 if polls else seconds)
            if polls and not worked:
                worked.append(True)
                work()

        launcher = Ec2Launcher(home=tmp_path, inner=cloud, clock=patience.clock, sleep=sleep)
        return Prober(
            edge=cloud,
            launcher=launcher,
            catalog=catalog,
            billing=billing,
            options=Ec2(),
            bundle=bundle,
            data=None,
            version="0.1.0",
            gradient_bytes=profile.job.gradient_bytes,
        )

    return make


Make = Callable[[Callable[[], None]], Prober]


def test_a_probe_is_rented_measured_and_given_back(
    cloud: BotoEdge, prober: Make, profile: Profile, catalog: Catalog, tmp_path: Path
) -> None:
    folder = tmp_path / "runs" / "20261120-000000-probe-0001"
    folder.mkdir(parents=True)
    probe = rented_probes(profile, catalog, TYPES)[1]
    steps = [
        fields("step", step=step, step_time_s=0.02, compute_s=[0.015, 0.016]) for step in range(5, PROBE_STEPS + 1, 5)
    ]
    events = [fields("training_started"), *steps, fields("training_finished", reason="steps")]
    sample, usd = prober(a_machine_that(events, cloud, folder)).measure(probe, folder, 0.5)
    assert sample.step_time_s == 0.02
    assert sample.sync_time_s == pytest.approx(0.004)
    assert sample.layout == (("c7i.large", 1), ("c7i.large", 1))
    assert Order.load(folder / ORDER_FILE).budget_usd == 0.5
    assert 0 < usd < 0.5
    assert leftovers(cloud) == []


def test_a_probe_that_fails_or_cannot_be_paid_for_leaves_nothing(
    cloud: BotoEdge, prober: Make, profile: Profile, catalog: Catalog, tmp_path: Path
) -> None:
    probe = rented_probes(profile, catalog, TYPES)[0]
    folder = tmp_path / "runs" / "20261120-000000-probe-0002"
    folder.mkdir(parents=True)
    failed = a_machine_that([fields("run_failed", reason="no memory.")], cloud, folder)
    with pytest.raises(RunFailed, match="a probe failed: no memory"):
        prober(failed).measure(probe, folder, 0.5)
    other = tmp_path / "runs" / "20261120-000000-probe-0003"
    other.mkdir()
    with pytest.raises(BudgetStop, match="minutes of this cluster"):
        prober(failed).measure(probe, other, 0.001)
    assert leftovers(cloud) == []


def test_what_cannot_be_explored_on_ec2(cloud: BotoEdge, hetopt: Callable[..., Answer], tmp_path: Path) -> None:
    budget = ("--explore", "--probe-budget", "0.5", "-o", tmp_path / "p.json")
    rented = (*budget, "--on", "ec2", "--types", "c7i.large")
    refused(hetopt("profile", "digits", *rented), 2, "nobody is there to say yes")
    refused(hetopt("profile", "digits", *rented, "--data", tmp_path), 2, "rented machines cannot read")
    assert not (tmp_path / "p.json").exists()
