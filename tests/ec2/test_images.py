"""Machines boot images that are there: found by parameter, or by name, with the root device that is the image's own."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.box.manners import PARAMETERS, UBUNTU
from hetopt.backends.ec2.renter import calls, ordering
from hetopt.backends.ec2.renter.edge import BotoEdge
from hetopt.backends.ec2.renter.order import Order
from hetopt.backends.ec2.renter.ordering import IMAGES
from hetopt.backends.ec2.renter.request import Answer, Request
from hetopt.core.errors import BadInput

KINDS = sorted(IMAGES)


@pytest.mark.parametrize("kind", KINDS)
def test_the_newest_image_is_found_by_its_parameter(cloud: BotoEdge, kind: str) -> None:
    """The server knows parameters under the names that AWS has, and no other."""
    found = ordering.boot_image(cloud, kind, None)
    assert found.ami == PARAMETERS[IMAGES[kind]]
    assert found.root_device == "/dev/xvda"


def test_an_image_that_was_chosen_boots_by_its_own_root_device(
    cloud: BotoEdge, order_for: Callable[..., Order]
) -> None:
    order = order_for(images={"x86_64-cpu": UBUNTU})
    (template, *_) = calls.template_calls(order)
    (disk,) = template.parameters["LaunchTemplateData"]["BlockDeviceMappings"]
    assert disk["DeviceName"] == "/dev/sda1", "or it would get a second disk, and a root of 8 GB"


def test_an_image_whose_other_disks_outlive_their_machines_is_refused(cloud: BotoEdge) -> None:
    """Nobody would look for them, and they cost what they hold."""

    def image(*disks: tuple[str, bool]) -> Callable[[Request], Answer]:
        mappings = [{"DeviceName": name, "Ebs": {"VolumeSize": 8, "DeleteOnTermination": goes}} for name, goes in disks]
        told = {"ImageId": UBUNTU, "Architecture": "x86_64", "RootDeviceName": "/dev/sda1"}
        return lambda _: {"Images": [{**told, "BlockDeviceMappings": mappings}]}

    with pytest.raises(BadInput, match="brings /dev/sdb, which stays, and is paid for"):
        ordering.boot_image(image(("/dev/sda1", True), ("/dev/sdb", False)), "x86_64-cpu", UBUNTU)
    # Of its root, the machine's own settings say that it goes.
    assert ordering.boot_image(image(("/dev/sda1", False), ("/dev/sdb", True)), "x86_64-cpu", UBUNTU).ami == UBUNTU
