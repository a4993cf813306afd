"""The corpus of scripts as a law: of each, how far shares are from one machine, and what an audit finds of that.

Whether a script's shares equal one machine follows from the contract (weighted data parallelism), and is written down
in ``cases/verdicts.json`` as a recorded figure. Nothing that trains under DistributedDataParallel is refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.forks import all_end_well

from .cases import meetings, memories, strangers
from .cases.server import GROUPS

VERDICTS = Path(__file__).parent / "cases" / "verdicts.json"

JUDGED_STEPS = 3
"""Later ones differ by more than rounding, which training amplifies; the second is an audit where there is one."""

ROUNDING = 1e-5
"""Relative distance of gradients that are the same but for the order of float32 sums."""

FOUND_STEPS = 8
NOISY = 1e-4


def distance(plain: list[list[Tensor]], other: list[list[Tensor]]) -> float:
    """The largest relative distance of a step's gradients, of the first steps that both have."""
    pairs = [
        pair
        for one, two in zip(plain, other, strict=False)
        for pair in list(zip(one, two, strict=False))[:JUDGED_STEPS]
    ]
    return max((float((a - b).norm() / a.norm().clamp_min(1e-12)) for a, b in pairs), default=0.0)


def read(folder: Path, name: str, label: str) -> dict[str, Any]:
    path = folder / name / f"{label}.pt"
    assert path.exists(), f"{name} hung ({label})"
    told: dict[str, Any] = torch.load(path)
    return told


Ran = tuple[str, Path, list[str]]
"""A group, the folder of what became of its scripts, and their names."""


@pytest.fixture(scope="module", params=["scripts", "strangers", "meetings", "memories"])
def group(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Every fourth script of a group; all of them where verdicts are recorded, and with `--slow`."""
    folder = tmp_path_factory.mktemp(request.param)
    all_of_them = request.config.getoption("--slow") or request.config.getoption("--record")
    names = [case.__name__ for case in GROUPS[request.param]][:: 1 if all_of_them else 4]
    all_end_well(["-m", "tests.trainer.cases.server", str(folder), request.param, *names])
    return request.param, folder, names


def verdict(folder: Path, name: str) -> dict[str, Any]:
    plain, three = (read(folder, name, label) for label in ("plain", "three-0"))
    if three["said"]:
        return {"shares": "ended", "by": three["said"].strip().splitlines()[-1].split(":")[0][:60]}
    steps = [len(one) for one in plain["steps"]] == [len(one) for one in three["steps"]]
    apart = max([distance(plain["steps"], three["steps"]), *three["audits"]])
    told: dict[str, Any] = {"shares": "equal" if apart < ROUNDING else "differ", "by": float(f"{apart:.1g}")}
    if not steps and name != "loaded_on_one":  # whose first steps are those of worker 0 alone
        told["steps"] = "other"
    return told


def test_shares_are_as_far_from_one_machine_as_is_written_down(group: Ran, request: pytest.FixtureRequest) -> None:
    which, folder, names = group
    found = {name: verdict(folder, name) for name in names}
    written = json.loads(VERDICTS.read_text()) if VERDICTS.exists() else {}
    if request.config.getoption("--record"):
        written[which] = found
        VERDICTS.write_text(json.dumps(written, indent=1, sort_keys=True) + "\n")
    wrong = {
        name: (told, written[which][name]) for name, told in found.items() if not alike(told, written[which][name])
    }
    assert not wrong


def alike(told: dict[str, Any], written: dict[str, Any]) -> bool:
    """Whether a verdict is the recorded one; a distance within a factor of 3."""
    if told["shares"] != written["shares"]:
        return False
    if told["shares"] == "differ":
        return bool(1 / 3 < told["by"] / written["by"] < 3)
    return bool(told["shares"] == "equal" or told["by"] == written["by"])


def test_one_worker_trains_bit_for_bit_as_without_a_session(group: Ran) -> None:
    which, folder, names = group
    if which != "scripts":
        pytest.skip("of one group alone")
    for name in names:
        plain, alone = (read(folder, name, label) for label in ("plain", "alone"))
        if not plain["said"] and not alone["said"]:
            assert distance(plain["steps"], alone["steps"]) == 0.0, name


def test_workers_step_by_the_same_gradients(group: Ran) -> None:
    _, folder, names = group
    for name in names:
        first, *others = (read(folder, name, f"three-{rank}")["steps"] for rank in range(3))
        if name != "loaded_on_one":
            assert all(distance(first, other) == 0.0 for other in others), name


MUST_BE_FOUND = {
    "meetings": meetings.REFUSED,
    "memories": memories.REFUSED,
    "strangers": strangers.REMEDIES,
}
"""Scripts whose shares compute something else than one machine, in whatever way."""


def test_check_or_an_audit_finds_what_differs(group: Ran, request: pytest.FixtureRequest) -> None:
    which, folder, names = group
    if which not in MUST_BE_FOUND:
        pytest.skip("this group has none")
    missed = []
    for name in (case.__name__ for case in MUST_BE_FOUND[which] if case.__name__ in names):
        plain, three = (read(folder, name, label) for label in ("plain", "three-0"))
        by_check = distance(plain["steps"], three["steps"]) > NOISY
        if not (by_check or any(three["differs"][:FOUND_STEPS]) or three["said"]):
            missed.append(name)
    if request.config.getoption("--record"):
        written = json.loads(VERDICTS.read_text())
        written.setdefault("missed", {})[which] = missed
        VERDICTS.write_text(json.dumps(written, indent=1, sort_keys=True) + "\n")
    assert missed == [name for name in json.loads(VERDICTS.read_text())["missed"][which] if name in names]
