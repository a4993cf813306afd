"""Claims of papers: each is answered from a committed result, or says why it is not."""

from __future__ import annotations

import pytest

from benchmarks._claims import CLAIMS, Claim
from benchmarks._outcome import RESULTS
from benchmarks.reproduction import figures_in, measured


@pytest.mark.parametrize("claim", CLAIMS, ids=[f"{claim.system}-{number}" for number, claim in enumerate(CLAIMS)])
def test_a_claim_is_answered_or_says_why_not(claim: Claim) -> None:
    if claim.benchmark is None:
        assert claim.how == "not measured"
        assert claim.note, "why"
        return
    assert claim.how != "not measured"
    assert "not in this form" not in measured(claim, figures_in(RESULTS))
    assert any("{" in words for words in (claim.theirs, claim.ours)), "figures, not opinions"


def test_what_counts_as_answered_has_a_figure_of_the_published_method() -> None:
    for claim in CLAIMS:
        assert claim.published, f"{claim.claim}: nothing published is no claim"
        assert claim.is_answered == (claim.benchmark is not None), f"{claim.claim}: its method did not run here"
    told = Claim(system="one", claim="that", published="2", benchmark="auto", theirs="not run", ours="{figure}")
    assert not told.is_answered


def test_all_nine_systems_are_there() -> None:
    assert len({claim.system for claim in CLAIMS}) >= 9
    assert len(CLAIMS) >= 20


def test_a_form_that_lacks_a_figure_says_so() -> None:
    [claim] = [one for one in CLAIMS if one.note == "reproduced, on digits"]
    assert measured(claim, {"sync": {"accuracy_one_label": 0.5}})[0] == "not in this form"
