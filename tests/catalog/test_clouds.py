"""Clouds beside AWS: bundled prices and files in SkyPilot's columns, from the command to the plan."""

from __future__ import annotations

from pathlib import Path

import pytest

import hetopt
from hetopt.api.catalogs import import_cloud
from hetopt.backends.ec2.renter.ordering import region_of
from hetopt.core.errors import BadInput
from hetopt.optimizer.cost.bill import terms_of
from hetopt.optimizer.market.catalog import Catalog
from hetopt.optimizer.market.clouds import ANY_CLOUD, BUNDLED_CLOUDS, cloud_catalogs, clouds
from hetopt.optimizer.market.instance_type import pinned
from hetopt.reports.exports import skypilot_task

HEADER = "InstanceType,UpstreamCloudId,vCPUs,MemoryGiB,AcceleratorName,AcceleratorCount,GpuInfo,Region,Price,SpotPrice"
GPU = "\"{'Gpus': [{'MemoryInfo': {'SizeInMiB': %d}}]}\""
H100 = f"h100x8,x,208.0,1800.0,H100,8.0,{GPU % 81559},east,24.0,9.5"
RECORDED = Path(__file__).parents[1] / "recorded" / "resnet20-cifar10.json"
JOB = {"params": "7B", "samples": "50k", "tokens": 2048, "method": "lora", "budget_usd": 100}


@pytest.fixture
def nothing_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HETOPT_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "catalogs" / "clouds"


def test_bundled_clouds_have_machines_that_can_be_trained_on(catalog: Catalog, tmp_path: Path) -> None:
    names = set(clouds(tmp_path))
    assert {"lambda", "nebius", "oci", "hyperstack", "verda", "scaleway", "do"} <= names
    found = cloud_catalogs(ANY_CLOUD, catalog, tmp_path)
    assert {one.cloud for one in found} == names
    for one in found:
        assert one.region.startswith(f"{one.cloud}:")
        assert all(listing.instance_type.cuda_devices for listing in one.listings.values())
        assert one.sources.by_name[one.cloud].day.year >= 2026
        assert terms_of(one).public_ipv4_usd_per_hour.value == 0
    every = [listing.instance_type for one in found for listing in one.listings.values()]
    assert all(machine.accelerator is not None and machine.accelerator.model is not None for machine in every)
    objections = {machine.accelerator.name for machine in every if machine.accelerator and pinned().objection(machine)}
    assert objections <= {"V100", "P100", "RTX PRO 4500"}


def test_a_file_of_a_cloud_is_planned_with_and_exported_but_not_rented(nothing_imported: Path, tmp_path: Path) -> None:
    file = tmp_path / "vms.csv"
    lines = (
        HEADER,
        H100,
        H100.replace(",9.5", ",8.5"),  # another zone of the region
        "mi300,x,224,2048,MI300X,8,,east,48,",
        "gaudi,x,96,768,Gaudi,8,,east,13,",  # known, and no GPU that torch drives
        "cpu,x,4,16,,,,east,0.1,",
        ",x,,,T4,1,,east,0.35,",  # a GPU that is added to any machine
    )
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    facts = import_cloud(file, "mine")
    assert facts == {"cloud": "mine", "types": 1, "regions": 1, "unknown_gpus": ["MI300X", "Gaudi"]}
    assert (nothing_imported / "mine.csv").read_text(encoding="utf-8") == file.read_text(encoding="utf-8")

    [gpu] = hetopt.gpus(cloud="mine")
    assert (gpu.name, gpu.count, gpu.machine.instance_type.name) == ("H100", 8, "h100x8")
    plan = hetopt.recommend(RECORDED, cloud="mine", budget_usd=5, epochs=2)
    [group] = plan.chosen.groups
    assert (group.instance_type, group.region, group.price_usd_per_hour) == ("h100x8", "mine:east", 8.5)
    described = hetopt.estimate(params="110M", samples="3M", tokens=128, cloud="mine", budget_usd=200)
    assert described.plan.chosen.groups[0].instance_type == "h100x8"
    assert {term.name.partition(" ")[0] for term in plan.chosen.prediction.cost_terms} <= {"1", "start-up", "expected"}
    assert '"mine/east"' in skypilot_task(plan, "hetopt.whl", "secret")
    with pytest.raises(BadInput, match="machines of mine, which hetopt does not rent"):
        region_of(plan)


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ((HEADER.replace("Price,", "PriceEUR,"), H100), "lacks the column Price"),
        ((f"{HEADER},Currency", f"{H100},EUR"), "line 2: Currency must be 'USD', got 'EUR'"),
        ((HEADER, H100.replace(",24.0,", ",0,")), "line 2: Price must be greater than 0"),
        ((HEADER, H100.replace(",8.0,", ",many,")), "line 2: AcceleratorCount must be"),
        ((HEADER, H100.replace(",H100,", ",H900,")), "no machine with a GPU that hetopt knows (H900)"),
        ((HEADER, H100.replace("h100x8,x,", "h100x8,")), "has 9 cells where the header has 10"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_and_not_kept(
    lines: tuple[str, ...], told: str, tmp_path: Path, nothing_imported: Path
) -> None:
    file = tmp_path / "vms.csv"
    file.write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(BadInput) as error:
        import_cloud(file, "mine")
    assert told in error.value.message
    assert "catalog" not in str(error.value.hint).removeprefix("`hetopt gpus`")
    assert not nothing_imported.exists()


@pytest.mark.parametrize("name", ["aws", "any", "../up", "A B", ""])
def test_a_cloud_has_a_plain_name(name: str, nothing_imported: Path) -> None:
    with pytest.raises(BadInput, match="cloud"):
        import_cloud(BUNDLED_CLOUDS / "lambda.csv", name)


def test_all_clouds_are_compared(nothing_imported: Path) -> None:
    answer = hetopt.estimate(**JOB, cloud="any")
    assert any(":" in offer.region for offer in answer.plan.regions)
