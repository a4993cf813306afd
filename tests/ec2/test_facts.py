"""What is AWS's stands in one file, with its source and day; and whatever looks like it elsewhere fails here."""

from __future__ import annotations

import ast
import datetime
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetopt.backends.ec2 import facts
from hetopt.backends.ec2.renter import doctor, ordering
from hetopt.backends.ec2.renter.request import TABLE
from hetopt.optimizer.cost.billing import load_billing
from hetopt.optimizer.market.quota import QUOTAS_SEEN

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


CODES = {code for row in TABLE for code in row.codes if not set("*?") & set(code)}


def is_awss(text: str) -> bool:
    return text in CODES or (bool(AWS_WRITES.search(text)) and not TOLD_TO_PEOPLE.search(text))


def test_no_text_of_awss_stands_outside() -> None:
    found = [(name, text) for name, tree in sources() for text in literals(tree) if is_awss(text)]
    assert not found, "put it into hetopt/backends/ec2/facts.toml, with its source"


@pytest.mark.parametrize(
    ("text", "there"),
    [
        ("/aws/service/x", True),
        ("InvalidVolume.NotFound", True),
        ("Server.SpotInstanceTermination", True),
        ("spot.amazonaws.com", True),
        ("look at InvalidVolume.NotFound first", False),
        ("PreconditionFailed", True),
        ("describe_volumes", False),
        ("InvalidOf", True),
        ("hetopt:run-id", False),
    ],
)
def test_what_is_awss_is_seen(text: str, there: bool) -> None:
    assert is_awss(text) is there


def test_codes_of_quotas_stand_in_one_file() -> None:
    code = re.compile(r"\bL-[0-9A-F]{8}\b")
    found = {
        path.relative_to(HERE).as_posix()
        for folder in (HERE, *(HERE / part for part in ("optimizer", "profiler", "trainer")))
        for path in folder.rglob("*.py")
        if code.search(path.read_text(encoding="utf-8"))
    }
    assert found == {"optimizer/market/quota.py"}
    assert re.search(r"\b20\d\d-\d\d-\d\d$", QUOTAS_SEEN)


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


def test_images_are_looked_up_by_what_is_believed() -> None:
    assert set(ordering.IMAGES) == {"x86_64-cpu", "arm64-cpu", "x86_64-gpu", "arm64-gpu"}
    for kind, parameter in ordering.IMAGES.items():
        assert parameter.startswith("/aws/service/")
        assert kind.partition("-")[0] in parameter
    assert facts.LARGEST_SKEW_S > doctor.LARGEST_SKEW_S


def test_the_bill_and_the_machines_go_by_the_same_rules() -> None:
    bill = load_billing()
    assert bill.minimum_billed_s.value == facts.MINIMUM_BILLED_S
    assert bill.spot_free_if_interrupted_within_s.value == facts.FREE_IF_TAKEN_WITHIN_S
