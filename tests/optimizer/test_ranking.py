"""Where no pilot reached the target, clusters are compared and nothing is promised."""

from __future__ import annotations

import pytest

from hetopt.core.errors import BadInput
from hetopt.optimizer.market.catalog import Catalog
from hetopt.optimizer.recommendation.options import Options
from hetopt.optimizer.recommendation.ranking import compare

from .profiles import make_profile

UNREACHED = make_profile(parameters=5_000_000, per_sample_s=0.02, reached=False)


def test_the_front_is_relative_and_ordered(catalog: Catalog) -> None:
    found = compare(UNREACHED, catalog, Options())
    times, costs = ([getattr(one, name) for one in found.clusters] for name in ("time", "cost"))
    assert times == sorted(times)
    assert costs == sorted(costs, reverse=True)
    assert (times[0], costs[-1]) == (1.0, 1.0)
    assert all(one.spread > 1 for one in found.clusters)
    assert "says nothing about how long" in found.basis


def test_the_number_of_steps_does_not_matter(catalog: Catalog) -> None:
    """Only the shape of the curve does: reached or not, clusters compare alike."""
    options = Options(only_types=("c7a.*",))
    assert compare(UNREACHED, catalog, options).clusters[0].machines >= 1


def test_without_noise_nothing_ranks(catalog: Catalog) -> None:
    with pytest.raises(BadInput, match="cannot even rank"):
        compare(make_profile(reached=False, noise_scale=None), catalog, Options())
