"""The pins are complete, torch is the one version that is supported, and these tests run on what is pinned."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

REQUIREMENTS = Path(__file__).resolve().parents[2] / "requirements"


def test_the_tests_run_on_the_pinned_versions() -> None:
    spec = importlib.util.spec_from_file_location("freeze", REQUIREMENTS / "freeze.py")
    assert spec is not None
    assert spec.loader is not None
    freeze = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(freeze)
    installed = freeze.closure(freeze.declared())
    pinned = pins()
    missing = sorted(set(installed) - set(pinned))
    # CUDA builds of torch bring libraries that torch itself pins.
    missing = [name for name in missing if not name.startswith(("nvidia-", "cuda-", "triton"))]
    assert not missing, f"not pinned: {missing}; run `make pins`"
    different = {
        name: (installed[name], pinned[name])
        for name in pinned.keys() & installed.keys()
        if Version(installed[name]).public != pinned[name]
    }
    assert not different, f"(installed, pinned) differ: {different}; run `make setup`"


def test_every_line_is_one_exact_version() -> None:
    assert pins()["torch"] == "2.13.0"


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="the pins were made for Python 3.11 to 3.13")
def test_no_pin_is_of_a_prerelease() -> None:
    assert not [name for name, version in pins().items() if Version(version).is_prerelease]


def pins() -> dict[str, str]:
    pinned: dict[str, str] = {}
    for line in (REQUIREMENTS / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        requirement = Requirement(line)
        (specifier,) = requirement.specifier
        assert specifier.operator == "==", line
        assert requirement.name not in pinned
        pinned[requirement.name] = specifier.version
    return pinned
