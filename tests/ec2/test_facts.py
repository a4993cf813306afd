"""What is AWS's stands in one file, with its source and day; and whatever looks like it elsewhere fails here."""

from __future__ import annotations

import ast
import datetime
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetopt.backends.ec2 import facts
from hetopt.backends.ec2.renter import account, doctor
from hetopt.backends.ec2.renter.errors import TABLE
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

OURS = {
    "node/agent.py": "TURN_S STUCK_S PLACE_WITHIN_S REPLACED_WITHIN_S LAST_UPLOADS_S",
    "node/imds.py": "_RENEWED_EARLY_S _TIMEOUT_S",
    "node/unpack.py": "_PIECE_BYTES",
    "objects.py": "AT_A_TIME LARGEST_READ_BYTES PART_BYTES",
    "lifetime.py": "_SOONEST_S",
    "protocol.py": "_LAST_MOMENT_S",
    "renter/budget.py": "UNPLACED_S OVERRUN",
    "renter/bundle.py": "_LEVEL",
    "renter/calls.py": "LIVES",
    "renter/canary.py": "CANARY_USD TRAINS_S",
    "renter/edge.py": "_CONNECT_TIMEOUT_S _READ_TIMEOUT_S ATTEMPTS FIRST_WAIT_S LONGEST_WAIT_S LISTED_WITHIN_S "
    "PATIENCE_S",
    "renter/launcher.py": "FIRST_LOOK_S _SLOWER _STOP_PATIENCE_S",
    "renter/ledger.py": "SETTLES_S",
    "renter/loop.py": "_MOST_ROUNDS",
    "renter/order.py": "_LEAST_SPENT",
    "renter/ordering.py": "_PRICE_INCREASE",
    "renter/permissions.py": "KEPT_DAYS",
    "renter/plan_doctor.py": "LEAST_LOGIN_S",
    "renter/probing.py": "BOOT_S MOST_MACHINES",
    "renter/reconcile.py": "ASK_AGAIN_S GATHERED_WITHIN_S BOOTED_WITHIN_S PAUSE_PATIENCE_S LEASE_GROWS_S",
    "renter/removal.py": "INSTANCES_A_CALL _ENDING_S _ENDED_WITHIN_S _ROUNDS",
    "renter/renting.py": "ADDRESSES_WITHIN_S _LOOK_S _ATTEMPTS_AN_ASK",
    "renter/run_status.py": "_LINES _LINE_CHARACTERS _LOSSES_SHOW_S",
    "renter/scheduled_ends.py": "_TAIL",
    "renter/spot_pools.py": "PAIR_RESTS_S TOGETHER_S",
    "renter/user_code.py": "MOST_FILES MOST_BYTES",
    "spot_history.py": "PRICES_EVERY_S _WITHIN_S",
    "uploads.py": "LOG_TAIL_BYTES",
    "renter/watch.py": "_STRANGE_SHOWN LARGEST_EVENTS_BYTES UNLISTED_S",
}
"""Numbers that hetopt chose, and AWS did not: a new one is put here, or among the facts."""


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


def numbers(tree: ast.Module) -> Iterator[str]:
    """The names of a module's own numbers."""
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name) and is_number(node.value):
                yield target.id


def is_number(value: ast.expr) -> bool:
    if isinstance(value, ast.BinOp):
        return is_number(value.left) and is_number(value.right)
    return isinstance(value, ast.Constant) and isinstance(value.value, int | float)


def test_no_text_of_awss_stands_outside() -> None:
    found = [
        (name, text)
        for name, tree in sources()
        if name not in ("facts.py", "renter/errors.py")
        for text in literals(tree)
        if is_awss(text)
    ]
    assert not found, "put it into hetopt/backends/ec2/facts.py, with its source"


def test_no_number_of_awss_stands_outside() -> None:
    found = {name: set(numbers(tree)) for name, tree in sources() if name != "facts.py"}
    new = {name: sorted(there - set(OURS.get(name, "").split())) for name, there in found.items()}
    assert not {name: there for name, there in new.items() if there}, "is it AWS's, or ours?"
    gone = {name: sorted(set(listed.split()) - found.get(name, set())) for name, listed in OURS.items()}
    assert not {name: there for name, there in gone.items() if there}, "a line that names nothing"


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


def test_every_belief_has_its_source_and_day() -> None:
    beliefs = facts.all_facts()
    assert len(beliefs) > 60
    today = datetime.date.today()
    for name, belief in beliefs.items():
        assert belief.source.strip(), name
        assert belief.means.endswith("."), name
        assert (
            datetime.date(2026, 1, 1)
            <= datetime.date.fromisoformat(belief.read)
            <= max(today, datetime.date(2026, 11, 26))
        ), name
    for row in TABLE:
        assert row.source.strip(), row.codes


def test_images_are_looked_up_by_what_is_believed() -> None:
    assert set(account.IMAGES) == {"x86_64-cpu", "arm64-cpu", "x86_64-gpu", "arm64-gpu"}
    for kind, image in account.IMAGES.items():
        assert image.parameter.startswith("/aws/service/")
        assert account.architecture_of(kind) in image.parameter
    assert facts.LARGEST_SKEW_S.value > doctor.LARGEST_SKEW_S


def test_the_bill_and_the_machines_go_by_the_same_rules() -> None:
    bill = load_billing()
    assert bill.minimum_billed_s.value == facts.MINIMUM_BILLED_S.value
    assert bill.spot_free_if_interrupted_within_s.value == facts.FREE_IF_TAKEN_WITHIN_S.value
