"""What published policies are told beyond their name: read, spelled again, checked, and what policies are made of."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from hetopt.core.errors import BadInput
from hetopt.core.run_rules import CONTROLLERS
from hetopt.core.run_spec import (
    BATCH_POLICIES,
    BATCH_SETTINGS,
    RATIO_SETTINGS,
    parse_policy,
    spell_policy,
)
from hetopt.trainer.policies.policy import AllocateMicroBatches, DynamicShares, ProportionalShares, choose_policy
from hetopt.trainer.policies.ratio.published import Accordion, Gravac, ScanRatio, ThresholdRatio
from hetopt.trainer.steps.adaptive_controller import choose_ratio_policy

from .ratio_periods import OPTIONS
from .runs import run_of

SAID = {
    "gravac": "gravac(window=50, eps=0.8, omega=0.05, floor=5, raises=geometric, smoothing=0.5)",
    "accordion": "accordion(gentle=0.1, threshold=0.5, smoothing=1, epochs=10, decay=true)",
    "threshold": "threshold(delta=0.1)",
    "scan": "scan(time=1, gain=0.5, sensitivity=0.2, least_gain=0)",
    "proportional": "proportional(every=period)",
    "dynamic": "dynamic(smoothing=0.2, dead_band=0.1, least=0.5, most=3, every=epoch)",
    "allocation": "allocation(micro=4, tolerance=0.1, every=period)",
}


def read(text):
    name = text.partition("(")[0]
    names, kinds = (CONTROLLERS, RATIO_SETTINGS) if name in CONTROLLERS else (BATCH_POLICIES, BATCH_SETTINGS)
    return parse_policy(text, names, kinds, "`policy`", "policy")


@pytest.mark.parametrize("name", SAID)
def test_what_is_said_is_spelled_again(name):
    found, settings = read(SAID[name])
    assert found == name
    kinds = {**RATIO_SETTINGS, **BATCH_SETTINGS}
    assert set(settings) == set(kinds[name].model_fields), "all of them can be said"
    assert read(spell_policy(name, settings)) == (name, settings)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("gravac(windw=50)", "There is no option of gravac called 'windw'"),
        ("gravac(window=0)", "window must be greater than 0, got '0'"),
        ("scan(time=much)", "time must be a valid number, got 'much'"),
        ("fixed(eps=1)", "There is no option of fixed called 'eps'"),
        ("gravvac(eps=1)", "There is no policy called 'gravvac'"),
        ("gravac(eps=0.7", "must be a name with its values in parentheses"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(text, told):
    with pytest.raises(BadInput, match="^.*" + told.replace("(", r"\(")):
        parse_policy(text, CONTROLLERS, RATIO_SETTINGS, "`ratio_policy`", "policy")


def test_a_run_refuses_settings_of_another_policy():
    with pytest.raises(ValidationError, match="fixed: eps is no field"):
        run_of(32, 32, ratio_settings={"eps": 0.5})
    with pytest.raises(ValidationError, match="allocation: micro must be"):
        run_of(32, 32, batch_policy="allocation", batch_settings={"micro": -1})


def test_policies_are_what_was_said():
    def ratio(name):
        return choose_ratio_policy(name, ratio=0.01, options=OPTIONS, settings=read(SAID[name])[1])

    assert ratio("gravac") == Gravac(
        floor=5, largest=100, window=50, eps=0.8, omega=0.05, raises="geometric", smoothing=0.5
    )
    assert ratio("accordion") == Accordion(gentle=0.1, strong=0.01, threshold=0.5, smoothing=1, epochs=10, decay=True)
    assert ratio("threshold") == ThresholdRatio(ratio=0.01, delta=0.1)
    assert ratio("scan") == ScanRatio(options=OPTIONS, time=1, gain=0.5, sensitivity=0.2, least_gain=0)

    def batch(name):
        return choose_policy(run_of(32, 32, batch_policy=name, batch_settings=read(SAID[name])[1]), minimum=1)

    assert batch("proportional") == ProportionalShares(every="period")
    assert batch("dynamic") == DynamicShares(smoothing=0.2, dead_band=0.1, least=0.5, most=3, every="epoch")
    assert batch("allocation") == AllocateMicroBatches(micro=4, tolerance=0.1, every="period")
