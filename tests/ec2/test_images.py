"""Machines boot images that are there: found by parameter, or by name, with the root device that is the image's own."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.box.manners import PARAMETERS, UBUNTU
from hetopt.backends.ec2.renter import account, calls
from hetopt.backends.ec2.renter.account import IMAGES
from hetopt.backends.ec2.renter.doctor import role_checks
from hetopt.backends.ec2.renter.edge import BotoEdge
from hetopt.backends.ec2.renter.errors import ApiRefused
from hetopt.backends.ec2.renter.order import Order
from hetopt.backends.ec2.renter.ordering import roles_of
from hetopt.backends.ec2.renter.request import Answer, Edge, Request
from hetopt.core.errors import BadInput, CloudRefused
from hetopt.core.profile import Profile
from hetopt.optimizer.market.catalog import Catalog
from tests.ec2.conftest import plan_of

KINDS = sorted(IMAGES)
GB = 100


@dataclass(frozen=True, kw_only=True)
class Without:
    """A region that lacks some parameters."""

    inner: Edge
    parameters: frozenset[str]
    images: bool = True

    def __call__(self, request: Request) -> Answer:
        if request.parameters.get("Name") in self.parameters:
            raise ApiRefused(request, "ParameterNotFound", "")
        if request.operation == "describe_images" and not self.images:
            return {"Images": []}
        return self.inner(request)


@pytest.mark.parametrize("kind", KINDS)
def test_the_newest_image_is_found_by_its_parameter(cloud: BotoEdge, kind: str) -> None:
    """The server knows parameters under the names that AWS has, and no other."""
    found = account.boot_image(cloud, kind, None, GB)
    assert found.ami == PARAMETERS[IMAGES[kind].parameter]
    assert found.root_device == "/dev/xvda"


@pytest.mark.parametrize("kind", KINDS)
def test_where_there_is_no_parameter_the_newest_of_that_name_is_taken(cloud: BotoEdge, kind: str) -> None:
    region = Without(inner=cloud, parameters=frozenset(PARAMETERS))
    assert account.boot_image(region, kind, None, GB).ami == PARAMETERS[IMAGES[kind].parameter]


@pytest.mark.parametrize("kind", KINDS)
def test_where_there_is_neither_both_names_are_told(cloud: BotoEdge, kind: str) -> None:
    region = Without(inner=cloud, parameters=frozenset(PARAMETERS), images=False)
    with pytest.raises(CloudRefused, match=re.escape(IMAGES[kind].parameter)) as refused:
        account.boot_image(region, kind, None, GB)
    assert IMAGES[kind].name in refused.value.message


def test_an_image_that_was_chosen_boots_by_its_own_root_device(
    cloud: BotoEdge, order_for: Callable[..., Order]
) -> None:
    order = order_for(images={"x86_64-cpu": UBUNTU})
    (template, *_) = calls.template_calls(order)
    (disk,) = template.parameters["LaunchTemplateData"]["BlockDeviceMappings"]
    assert disk["DeviceName"] == "/dev/sda1", "or it would get a second disk, and a root of 8 GB"


def test_an_image_that_does_not_fit_is_refused_before_anything_is_rented(cloud: BotoEdge) -> None:
    arm = PARAMETERS[IMAGES["arm64-cpu"].parameter]
    with pytest.raises(BadInput, match="is for arm64"):
        account.boot_image(cloud, "x86_64-cpu", arm, GB)
    with pytest.raises(BadInput, match="needs a disk of 75 GB, and machines get one of 50 GB"):
        account.boot_image(cloud, "x86_64-gpu", None, 50)
    with pytest.raises(CloudRefused, match="no such machine image"):
        account.boot_image(cloud, "x86_64-cpu", "ami-0123456789abcdef0", GB)


def test_an_image_whose_other_disks_outlive_their_machines_is_refused(cloud: BotoEdge) -> None:
    """Nobody would look for them, and they cost what they hold."""

    def image(*disks: tuple[str, bool]) -> Callable[[Request], Answer]:
        mappings = [{"DeviceName": name, "Ebs": {"VolumeSize": 8, "DeleteOnTermination": goes}} for name, goes in disks]
        told = {"ImageId": UBUNTU, "Architecture": "x86_64", "RootDeviceName": "/dev/sda1"}
        return lambda _: {"Images": [{**told, "BlockDeviceMappings": mappings}]}

    with pytest.raises(BadInput, match="brings /dev/sdb, which stays, and is paid for"):
        account.boot_image(image(("/dev/sda1", True), ("/dev/sdb", False)), "x86_64-cpu", UBUNTU, GB)
    # Of its root, the machine's own settings say that it goes.
    assert account.boot_image(image(("/dev/sda1", False), ("/dev/sdb", True)), "x86_64-cpu", UBUNTU, GB).ami == UBUNTU


def test_the_doctor_looks_each_image_of_a_plan_up(cloud: BotoEdge, profile: Profile, catalog: Catalog) -> None:
    plan = plan_of(profile, catalog, (("g5.xlarge", 2, "spot"), ("c7g.xlarge", 1, "on-demand")))
    roles = roles_of(plan, catalog)
    checks = {check.name: check for check in role_checks(cloud, catalog, roles, plan.chosen.disk_gb)}
    assert checks["image for x86_64-gpu"].verdict == checks["image for arm64-cpu"].verdict == "good"
    region = Without(inner=cloud, parameters=frozenset(PARAMETERS), images=False)
    checks = {check.name: check for check in role_checks(region, catalog, roles, plan.chosen.disk_gb)}
    assert checks["image for x86_64-gpu"].verdict == "bad"
    assert "`images={'x86_64-gpu': 'AMI'}`" in str(checks["image for x86_64-gpu"].hint)


def test_a_plan_for_gpus_is_rented(
    cloud: BotoEdge, hetopt: Callable[..., object], profile: Profile, catalog: Catalog, tmp_path: Path
) -> None:
    plan_of(profile, catalog, (("g5.xlarge", 2, "spot"), ("c7i.large", 1, "spot"))).save(tmp_path / "gpu.json")
    answer = hetopt("launch", tmp_path / "gpu.json", "--on", "ec2", "--dry-run", "--json")
    assert answer.code == 0, answer.err  # type: ignore[attr-defined]
    assert PARAMETERS[IMAGES["x86_64-gpu"].parameter] in answer.out  # type: ignore[attr-defined]
