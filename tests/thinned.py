"""Long lists of cases of one law: the first few in the suite of every change, all of them with `--slow`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def running(config: pytest.Config, count: int, cases: Iterable[Any]) -> list[Any]:
    """The first so many cases, or all with `--slow`: what a fixture makes for those that `few` lets run."""
    return [*cases][: None if config.getoption("--slow") else count]


def few(count: int, cases: Iterable[Any]) -> list[Any]:
    """Values of one parameter for `pytest.mark.parametrize`, those behind the first so many marked ``slow``."""
    return [case if at < count else pytest.param(case, marks=pytest.mark.slow) for at, case in enumerate(cases)]
