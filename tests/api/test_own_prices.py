"""Prices of one's own: reserved machines and contracts."""

from __future__ import annotations

import pytest

import hetopt
from hetopt.core.errors import BadInput


def test_a_price_of_ones_own_takes_the_place_of_the_list_price() -> None:
    job = {"params": "1B", "samples": "500k", "gpus": "A100", "types": ("p4d.24xlarge",), "market": "on-demand"}
    usual = hetopt.estimate(**job).plan
    own = hetopt.estimate(**job, prices=("p4d.24xlarge=9.5",)).plan
    group = own.chosen.groups[0]
    assert (group.price_usd_per_hour, group.price_source) == (9.5, "your own")
    assert own.chosen.prediction.cost_usd.value < 0.6 * usual.chosen.prediction.cost_usd.value


@pytest.mark.parametrize("given", ["p4d.24xlarge=0", "p4d.24xlarge=9,5", "p4d.24xlarge=nan", "=3", "x", "no.such=1"])
def test_what_is_no_price_is_refused(given: str) -> None:
    with pytest.raises(BadInput) as refused:
        hetopt.estimate(params="1B", samples="500k", prices=(given,))
    assert refused.value.hint
