"""Nothing is planned or booted that the pinned torch or the boot image cannot drive, by facts that a test holds."""

from __future__ import annotations

import json
import platform
import re
from importlib.metadata import version
from pathlib import Path

import pytest

from hetopt.backends.ec2.renter.ordering import image_kind
from hetopt.core.errors import BadInput
from hetopt.optimizer.market.catalog import Catalog, load_catalog
from hetopt.optimizer.market.instance_type import FACTS, pinned
from tests.face.conftest import RECORDED, hetopt

from ..face.test_recommend_options import Hetopt

__all__ = ["hetopt"]

PINS = (Path(__file__).resolve().parents[2] / "requirements" / "constraints.txt").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return load_catalog("us-east-1")


def test_the_facts_are_of_the_torch_that_is_pinned() -> None:
    assert f"torch=={pinned().torch}" in PINS.splitlines()
    facts = json.loads(FACTS.read_text(encoding="utf-8"))
    for told in (facts["torch"], *facts["images"].values()):
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", told["date"])
        assert told["source"]
        assert told["url"].startswith("https://")


def test_the_installed_torch_has_the_kernels_that_are_told_of() -> None:
    torch = pytest.importorskip("torch")
    if torch.version.cuda is None or version("torch").partition("+")[0] != pinned().torch:
        pytest.skip("the installed torch is no CUDA build of the pinned version")
    machine = {"x86_64": "x86_64", "aarch64": "arm64"}[platform.machine()]
    built = {f"{int(name[3:]) // 10}.{int(name[3:]) % 10}" for name in torch.cuda.get_arch_list() if name[3:].isdigit()}
    assert set(pinned().capabilities[machine]) <= built  # type: ignore[index]


def test_every_cuda_accelerator_has_its_capability(catalog: Catalog) -> None:
    cuda = [t for t in catalog.instance_types.values() if t.accelerator is not None and t.accelerator.is_cuda]
    assert len(cuda) > 50
    for found in cuda:
        assert found.accelerator is not None
        assert found.accelerator.model is not None
        assert found.accelerator.model.compute_capability is not None, found.name


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("g5g.xlarge", r"its T4G \(compute capability 7.5\) is not supported by torch [\d.]+ for aarch64"),
        ("p3dn.24xlarge", r"its V100 \(compute capability 7.0\) is not supported by torch [\d.]+ for x86-64"),
        ("g4ad.xlarge", "hetopt cannot train on"),
    ],
)
def test_what_cannot_be_driven_is_not_booted(catalog: Catalog, name: str, why: str) -> None:
    with pytest.raises(BadInput, match=why):
        image_kind(catalog.instance_type(name))


def test_all_other_gpus_are_booted(catalog: Catalog) -> None:
    booted = set()
    for found in catalog.instance_types.values():
        if found.cuda_devices and pinned().objection(found) is None:
            assert image_kind(found).endswith("-gpu")
            booted.add(found.family)
    assert booted == {"g4dn", "g5", "g6", "g6e", "g6f", "gr6", "gr6f", "g7", "g7e", "p4d", "p4de", "p5", "p5e", "p5en",
                      "p6-b200", "p6-b300"}  # fmt: skip


@pytest.mark.parametrize("gpu", ["T4G", "V100"])
def test_nothing_is_planned_that_torch_does_not_drive(hetopt: Hetopt, gpu: str) -> None:
    answer = hetopt("recommend", RECORDED / "digits.json", "--budget", 5, "--market", "any", "--gpus", gpu)
    assert answer.code == 2
    assert f"{gpu} (compute capability 7." in " ".join(answer.err.split())
